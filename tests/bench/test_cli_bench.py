"""`moonpool bench transfer --json`: every line is one object of the promised shape."""

from __future__ import annotations

import msgspec
import pytest

from moonpool.cli.main import main


def test_bench_transfer_prints_one_object_per_case(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")  # no iperf3: its cases have no baseline then; no openssl: TLS is left out
    with pytest.raises(SystemExit) as end:
        main(["bench", "transfer", "--json", "--rounds", "1", "--seconds", "0"])
    assert end.value.code == 0
    printed = capfd.readouterr()
    lines = [msgspec.json.decode(line) for line in printed.out.splitlines()]
    assert len(lines) == 23
    assert "no openssl" in printed.err
    assert all(set(line) == {"bench", "case", "value", "unit", "baseline", "ratio"} for line in lines)
    assert all(line["bench"] == "transfer" and line["value"] >= 0 for line in lines)
    assert all(line["baseline"] is None for line in lines if "iperf3" in line["case"])
    assert all(line["ratio"] > 0 for line in lines if "memcpy" in line["case"] or "fenced" in line["case"])
