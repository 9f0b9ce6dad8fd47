"""`moonpool bench`: every line is one object of the promised shape, recorded figures are compared, and all benchmarks
have the options for it.
"""

from __future__ import annotations

import json
import platform
import subprocess
from pathlib import Path

import msgspec
import pytest

from moonpool import __version__
from moonpool.bench import report
from moonpool.bench.report import HISTORY, BenchReport, RunFacts, bench_parser, read_history
from moonpool.cli.main import main

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_bench_transfer_prints_one_object_per_case(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    history = str(tmp_path / "new" / "history.jsonl")
    monkeypatch.setattr(report, "run_facts", lambda: FACTS)
    monkeypatch.setenv("PATH", "")  # no iperf3: its cases have no baseline then; no openssl: TLS is left out
    with pytest.raises(SystemExit) as end:
        main(["bench", "transfer", "--json", "--rounds", "1", "--seconds", "0", "--record", "--history", history])
    assert end.value.code == 0
    printed = capfd.readouterr()
    lines = [msgspec.json.decode(line) for line in printed.out.splitlines()]
    assert len(lines) == 23
    assert "no openssl" in printed.err
    assert all(set(line) == {"bench", "case", "value", "unit", "baseline", "ratio"} for line in lines)
    assert all(line["bench"] == "transfer" and line["value"] >= 0 for line in lines)
    assert all(line["baseline"] is None for line in lines if "iperf3" in line["case"])
    assert all(line["ratio"] > 0 for line in lines if "memcpy" in line["case"] or "fenced" in line["case"])
    recorded = read_history(Path(history))
    assert [(line.case, line.value, line.unit) for line in recorded] == [
        (line["case"], line["value"], line["unit"]) for line in lines
    ]
    assert {(line.commit, line.cpu, line.cores, line.speed, line.bench) for line in recorded} == {(*FACTS, "transfer")}
    assert recorded[0].better is None  # the load of the machine
    assert all(line.better == ("smaller" if line.unit == "us" else "larger") for line in recorded[1:])


FACTS = RunFacts("a" * 12, "x86_64 Some CPU", 2, 10.0)


def compare(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """Return the exit status and what was printed, errors included."""
    with pytest.raises(SystemExit) as end:
        main(["bench", "compare", *arguments])
    printed = capsys.readouterr()
    assert isinstance(end.value.code, int)
    return end.value.code, printed.out + printed.err


def test_compare_names_what_lost_a_fifth_since_the_last_commit(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    code, said = compare(capsys)
    assert code == 1
    assert "run a benchmark with --record" in said
    for commit, reads, writes in (("aaa", 78_000.0, 60_000.0), ("bbb", 15_700.0, 61_000.0)):
        monkeypatch.setattr(report, "run_facts", lambda commit=commit: FACTS._replace(commit=commit))
        figures = BenchReport("transfer", as_json=True, history=HISTORY)
        figures.add("small reads", reads, "transfers/s")
        figures.add("small writes", writes, "transfers/s")
        figures.add("not measured", None, "transfers/s")
        figures.add("never", float("inf"), "s")
        printed = [json.loads(line)["value"] for line in capsys.readouterr().out.splitlines()]
        assert printed == [reads, writes, None, None]
        if commit == "aaa":
            assert compare(capsys) == (0, "0 of 0 cases lost 20% or more at aaa; 2 have no earlier figure\n")
    code, said = compare(capsys)
    assert code == 1
    assert said.splitlines() == [
        "transfer: small reads: 15,700 transfers/s instead of 78,000, 0.20 of the speed at 1 commits",
        "1 of 2 cases lost 20% or more at bbb; 0 have no earlier figure",
    ]
    code, said = compare(capsys, "--json", "--history", str(HISTORY))
    assert code == 1
    assert [(line["case"], line["lost"]) for line in map(json.loads, said.splitlines())] == [
        ("small reads", True),
        ("small writes", False),
    ]
    HISTORY.write_text("[]\n")
    assert "is not a history of benchmarks" in compare(capsys)[1]


def test_nothing_is_measured_when_nothing_can_be_recorded(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    unwritable = ["--record", "--history", str(tmp_path / "file" / "history")]
    for arguments, reason in (
        (["transfer", *unwritable], "cannot write the history"),
        (["store", "--quick", "--record"], "--quick mean nothing"),
    ):
        with pytest.raises(SystemExit) as end:
            main(["bench", *arguments])
        assert end.value.code == 1
        printed = capsys.readouterr()
        assert reason in printed.err
        assert not printed.out
    options = bench_parser("").parse_args(unwritable)
    with pytest.raises(SystemExit, match="cannot write the history"):
        BenchReport.from_options("b", options)


def test_the_commit_tells_of_changes_that_are_not_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*arguments: str) -> None:
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments], cwd=tmp_path, check=True)

    monkeypatch.setattr(report, "_CHECKOUT", tmp_path)
    assert report.run_facts().commit == __version__
    (tmp_path / "file").write_text("one")
    git("init", "-q")
    git("add", "file")
    git("commit", "-q", "-m", "first")
    clean = report.run_facts()
    assert len(clean.commit) == 12
    (tmp_path / "file").write_text("two")
    assert report.run_facts().commit.startswith(f"{clean.commit}+")
    assert clean.cores > 0
    assert clean.speed > 0
    assert platform.machine() in clean.cpu


def test_all_benchmarks_have_the_same_options_and_one_report() -> None:
    files = sorted(BENCHMARKS.glob("[a-z]*.py"))
    assert len(files) > 25
    for file in files:
        text = file.read_text()
        assert "bench_parser(" in text, file.name
        assert f'BenchReport.from_options("{file.stem}", ' in text, file.name
        assert '"--json"' not in text, file.name
        assert "ArgumentParser(" not in text, file.name
