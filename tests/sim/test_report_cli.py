"""`moonpool replay` as a user types it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec import structs
from waiting import HANG_S
from world_cases import chat

from moonpool import __version__
from moonpool.base.errors import InvalidInput
from moonpool.cli.main import main
from moonpool.cli.replay import _groups, show_table
from moonpool.sim.fleet import make_fleet
from moonpool.sim.outcome import replay
from moonpool.sim.systems import Goals, system
from moonpool.traces.mooncake_jsonl import read_jsonl, write_jsonl


def replay_command(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "moonpool", "replay", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=HANG_S)


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("traces") / "talks.jsonl"
    write_jsonl(chat(40, seed=6), path)
    return path


def test_systems_beside_each_other(trace: Path) -> None:
    ran = replay_command(trace, "--nodes", 4, "--system", "moonpool", "--system", "vllm", "--without", "pool")
    assert ran.returncode == 0, ran.stderr
    heads = next(line for line in ran.stdout.splitlines() if "vllm" in line)
    assert heads.split() == ["moonpool", "vllm", "moonpool", "without", "pool"]
    for said in (
        "done within TTFT 30 s, TBT 100 ms",
        "goodput",
        "TBT p99",
        "prefill time saved by reuse, s",
        "Fig 14",
        "network, sent",
    ):
        assert said in ran.stdout
    first, *_, last, _, command, version, seed = ran.stdout.strip().splitlines()
    assert re.match(r"4 nodes are (not )?enough: \S.* serves \d+\.\d% of the requests in time, next ", first)
    assert re.match(r"\S.* serves \d+\.\d% of 40 requests within TTFT 30 s and TBT 100 ms", last), "a conclusion"
    assert command == f"command: moonpool replay {trace} --system moonpool --system vllm --without pool --nodes 4"
    assert (version, seed) == (f"version: moonpool {__version__}", "seed: 0")


def test_json_and_report_are_the_same_every_time(trace: Path, tmp_path: Path) -> None:
    outputs, pages = [], []
    for name in ("one.html", "two.html"):
        path = tmp_path / name
        ran = replay_command(
            trace, "--nodes", 4, "--json", "--slice", "0:15", "--load", 1.5, "--system", "moonpool", "--report", path
        )
        assert ran.returncode == 0, ran.stderr
        outputs.append(ran.stdout)
        pages.append(path.read_bytes())
    assert outputs[0] == outputs[1]
    assert pages[0] == pages[1]
    html = pages[0].decode()
    assert f"<td>moonpool replay {trace} --system moonpool --load 1.5 --slice 0:15 --nodes 4</td>" in html
    assert '<p class="headline">moonpool serves ' in html
    for said in ("<td>TTFT p90, s</td>", "<td>DRAM per node</td><td>1 TB</td>", "<td>network</td><td>86 GB/s</td>"):
        assert said in html
    assert "nbytes" not in html
    (line,) = outputs[0].splitlines()
    told = json.loads(line)
    assert told["system"] == "moonpool"
    assert told["load"] == 1.5
    assert told["numbers"]["num_requests"] < 40
    assert told["over_time"]["time_s"][-1] > 0


def test_a_report_is_not_overwritten_unasked(trace: Path, tmp_path: Path) -> None:
    path = tmp_path / "mine.html"
    path.write_text("precious")
    ran = replay_command(trace, "--report", path)
    assert (ran.returncode, path.read_text()) == (1, "precious")
    assert "--force" in ran.stderr


def test_many_systems_are_shown_in_groups(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ["moonpool", "paper", "no-pool", "local-affinity", "vllm", "vllm-prefix", "vllm-chunked"]
    outcomes = [replay(system(name), read_jsonl(trace), make_fleet(num_nodes=2), Goals()) for name in names[:2]]
    groups = list(_groups([structs.replace(outcomes[0], system=name) for name in names], 80))
    assert [each.system for group in groups for each in group] == names
    assert [len(group) for group in groups] == [3, 3, 1]
    assert [len(group) for group in _groups(outcomes, 10)] == [1, 1], "never none"
    show_table(outcomes, {"seed": "0"})
    *lines, conclusion, _, _ = capsys.readouterr().out.splitlines()
    assert max(len(line.rstrip()) for line in lines) < 120
    assert " serves " in conclusion


def test_requests_without_output_and_too_long_ones(tmp_path: Path) -> None:
    path = tmp_path / "odd.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 600, "output_length": 0, "hash_ids": [0, 1]}\n')
    for name in ("moonpool", "vllm"):
        figures = replay(system(name), read_jsonl(path), make_fleet(num_nodes=2), Goals()).numbers
        assert figures["num_done"] == 1
    long = {"timestamp": 0, "input_length": 2_000_000, "output_length": 1, "hash_ids": list(range(3907))}
    path.write_text(json.dumps(long))
    with pytest.raises(InvalidInput, match="a request of 2000001 tokens does not fit"):
        replay(system("vllm"), read_jsonl(path), make_fleet(num_nodes=2), Goals())


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("none.jsonl",), "cannot read none.jsonl"),
        (("TRACE", "--system", "sglang"), "no system 'sglang'; there are moonpool"),
        (["TRACE", "--without", "speed"], "is not a feature"),
        (("TRACE", "--without", "ssd"), "no SSD to be without"),
        (("TRACE", "--slice", "5"), "--slice takes BEGIN:END"),
        (("TRACE", "--slice", "9000:"), "no requests are left"),
        (("TRACE", "--load", "0"), "cannot be scaled by 0"),
        (("TRACE", "--ttft", "-1"), "--ttft must be a number of seconds above 0"),
        (("TRACE", "--tbt", "nan"), "--tbt must be a number of seconds above 0"),
        (("TRACE", "--model", "gpt-9"), "no model 'gpt-9'"),
        (("TRACE", "--gpus", "1"), "does not fit into 1 x a800"),
        (("TRACE", "--prefill", "16"), "some have to decode"),
        (("TRACE", "--dram", "much"), "is not a size"),
        (("TRACE", "--slice", ":2", "--report", "/nowhere/at/all.html"), "cannot write /nowhere/at/all.html"),
    ],
)
def test_errors_are_one_line(
    trace: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], complaint: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["replay", *(str(trace) if text == "TRACE" else text for text in arguments)])
    told = capsys.readouterr()
    assert ended.value.code == 1
    assert complaint in told.err
    assert told.err.count("\n") == 1
    assert told.out == ""
