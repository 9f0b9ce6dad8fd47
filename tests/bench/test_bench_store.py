"""`moonpool bench store --json --quick`: every line is one object of the promised shape, and nothing is left behind."""

from __future__ import annotations

import shutil
from typing import Any

import msgspec
import pytest

from moonpool.bench.report import BenchReport
from moonpool.bench.store_case import ClaimReport, StoreCase
from moonpool.bench.store_redis import missing
from moonpool.cli.main import main

FIELDS = {"bench", "case", "value", "unit", "baseline", "ratio"}


def bench(capfd: pytest.CaptureFixture[str], *cases: str, code: int = 0) -> tuple[list[dict[str, Any]], str]:
    """The lines behind the one about the machine, and what was said beside them."""
    chosen = [word for case in cases for word in ("--case", case)]
    with pytest.raises(SystemExit) as end:
        main(["bench", "store", "--json", "--quick", *chosen])
    printed = capfd.readouterr()
    assert end.value.code == code, printed.err
    lines = [msgspec.json.decode(line) for line in printed.out.splitlines()]
    assert all(set(line) == FIELDS and line["bench"] == "store" and line["value"] >= 0 for line in lines)
    return lines[1:], printed.err


def test_copies_views_and_small_objects(capfd: pytest.CaptureFixture[str]) -> None:
    lines, _ = bench(capfd, "copy", "view", "small")
    assert len(lines) == 4 + 3 + 4
    alone = ("verified", "not viewed", "one client")  # nothing stands beside them
    compared = [line for line in lines if not any(word in line["case"] for word in alone)]
    assert all(line["ratio"] > 0 for line in compared)


def test_calls_and_a_master_that_grows(capfd: pytest.CaptureFixture[str]) -> None:
    lines, said = bench(capfd, "calls", "grow")
    assert [line["unit"] for line in lines[:3]] == ["calls/s", "keys/s", "objects/s"]
    assert "no snapshot was due" in said
    cases = " ".join(line["case"] for line in lines)
    assert "while growing" in cases
    assert "while evicting" in cases
    assert cases.count("at 10,000 objects (beside") == 3


def test_what_is_not_installed_is_left_out_with_a_word(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    lines, said = bench(capfd, "tcp", "redis", "ssd")
    beside_iperf3, beside_sockets = lines[::2], lines[1::2]
    assert [line["baseline"] for line in beside_iperf3] == [None, None]
    assert [line["ratio"] > 0 for line in beside_sockets] == [True, True]
    assert all(f"{name} is not installed" in said for name in ("iperf3", "redis-server", "fio"))


@pytest.mark.skipif(missing() is not None, reason="needs redis-server and its Python client")
def test_beside_redis(capfd: pytest.CaptureFixture[str]) -> None:
    lines, _ = bench(capfd, "redis")
    assert len(lines) == 4
    assert all(line["ratio"] > 0 for line in lines)


@pytest.mark.skipif(shutil.which("fio") is None, reason="needs fio")
def test_beside_fio(capfd: pytest.CaptureFixture[str]) -> None:
    lines, _ = bench(capfd, "ssd")
    assert [line["ratio"] > 0 for line in lines] == [True, True]


def test_a_case_that_there_is_not(capfd: pytest.CaptureFixture[str]) -> None:
    _, said = bench(capfd, "copies", code=1)
    assert "there is no case copies; the cases are copy," in said


def test_missed_claims_are_remembered() -> None:
    report = ClaimReport(BenchReport("store", as_json=True))
    report.measure(StoreCase("fast", "GB/s", lambda: 2.0, lambda: 1.0, 0.9), rounds=1)
    report.measure(StoreCase("slow", "GB/s", lambda: 0.5, lambda: 1.0, 0.9), rounds=1)
    report.add_figure("short", 10.0, "ms", at_most=50.0)
    report.add_figure("long", 60.0, "ms", at_most=50.0)
    report.add_figure("nothing beside", 1.0, "ms")
    assert report.missed == ["slow: 0.5 instead of 0.9", "long: 1.2 instead of 1.0"]
