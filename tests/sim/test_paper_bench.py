"""benchmarks/paper.py: every published number has a row, and every row that is off says why."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moonpool.base.errors import Internal
from moonpool.bench.report import BenchReport

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import _paper_published
import paper
from _paper_lab import Lab
from _paper_rows import Row

# What figures are drawn over, and targets: no results.
AXES = {
    "WORKLOADS", "TBT_TARGETS_S", "EFFECTIVE_TTFT_S", "TBT_PERCENTILES", "BEST_BASELINE", "HIT_RATE_TOKENS",
    "REPLICA_RANKS", "SPLITS", "SPLIT_TARGETS", "BLOCK_CAPACITIES", "ARXIV_TTFT_TIMES", "ARXIV_TBT_TIMES",
}  # fmt: skip


@pytest.fixture(scope="module")
def rows() -> dict[str, list[Row]]:
    lab = Lab(quick=True)
    return {name: list(case(lab)) for name, case in paper.CASES.items()}


def numbers(value: Any) -> Iterator[float]:
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, tuple):
        for each in value:
            yield from numbers(each)
    elif isinstance(value, (int, float)):
        yield float(value)


def test_every_published_number_has_a_row(rows: dict[str, list[Row]]) -> None:
    shown = {row.theirs for case in rows.values() for row in case}
    names = [name for name in vars(_paper_published) if name.isupper() and name not in AXES]
    assert len(names) > 25
    missing = {name: each for name in names for each in numbers(getattr(_paper_published, name)) if each not in shown}
    assert missing == {}


def test_every_row_that_is_off_says_why(rows: dict[str, list[Row]]) -> None:
    """By its reason: the quick run's own numbers are all off."""
    for row in (row for name, case in rows.items() if name != "arxiv_rejection" for row in case):
        if row.theirs is not None and "fitted to this figure" not in row.note and not row.is_near:
            assert row.comment, row.case


def test_cases_have_names_of_their_own(rows: dict[str, list[Row]]) -> None:
    names = [row.case for case in rows.values() for row in case]
    assert len(names) == len(set(names))


def test_no_trace_is_passed_off_as_the_papers(rows: dict[str, list[Row]]) -> None:
    simulated = [row for name in ("fig6", "fig7", "fig13", "fig15", "arxiv_capacity") for row in rows[name]]
    assert simulated
    assert all("generated" in row.note for row in simulated)


def test_a_rows_figures() -> None:
    row = Row("a", 1.5, "s", 1.0, "note", "why")
    assert (row.difference, row.ratio, row.is_near, row.comment) == (0.5, 1.5, False, "note; why")
    near = Row("a", 1.2, "s", 1.0, "note", "why")
    assert (near.is_near, near.comment) == (True, "note")
    assert Row("a", 0.03, "share", 0.0).is_near
    assert not Row("a", 0.05, "share", 0.0).is_near
    assert Row("a", 0.05, "share", 0.0).ratio is None
    unknown = Row("a", None, "s", 1.0, "", "why")
    assert (unknown.difference, unknown.is_near, unknown.comment) == (None, None, "why")


def test_a_row_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    row = Row("a", 1.23456, "s", 1.0, "note", "why")
    row.add_to(BenchReport("paper", as_json=True), 2.0)
    assert json.loads(capsys.readouterr().out) == {
        "bench": "paper", "case": "a", "value": 1.23456, "unit": "s", "baseline": 1.0, "ratio": 1.23456,
        "difference": 0.2346, "near": True, "note": "note", "run_s": 2.0,
    }  # fmt: skip
    for each in (row, Row("a", None, "s", 1.0), Row("a", 1.0, "s", None)):
        each.add_to(BenchReport("paper", as_json=False), 1.0)
        assert capsys.readouterr().out.count("\n") == 1


def test_the_command_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["paper.py", "--json", "--only", "eq2", "--quick"])
    assert paper.main() == 0
    out, err = capsys.readouterr()
    assert [json.loads(line)["baseline"] for line in out.splitlines()] == [6.0, 19.0]
    assert err.count("assumed: ") == len(paper.ASSUMPTIONS)
    monkeypatch.setattr(sys, "argv", ["paper.py", "--only", "fig99"])
    with pytest.raises(SystemExit):
        paper.main()


def test_a_case_that_fails_leaves_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(lab: Lab) -> Iterator[Row]:
        yield Row("first", 1.0, "s", 1.0)
        raise Internal("broken")

    monkeypatch.setitem(paper.CASES, "table2", fails)
    monkeypatch.setattr(sys, "argv", ["paper.py", "--json", "--only", "table2", "--only", "eq2", "--quick"])
    assert paper.main() == 1
    out, err = capsys.readouterr()
    assert len(out.splitlines()) == 3
    assert "table2 FAILED: broken" in err
