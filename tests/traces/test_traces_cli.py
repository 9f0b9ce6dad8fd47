"""`moonpool trace` as a user types it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from forked_cli import Command, forked_cli
from waiting import HANG_S

from moonpool.traces.mooncake_jsonl import read_jsonl


@pytest.fixture(scope="module")
def trace_command() -> Iterator[Command]:
    with forked_cli("trace") as moonpool:
        yield partial(moonpool, "trace")


@pytest.fixture(scope="module")
def chat(trace_command: Command, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("traces") / "chat.jsonl"
    ran = trace_command("generate", "chat", "--requests", 600, "--rate", 5, "--seed", 1, "-o", path)
    assert (ran.returncode, ran.stdout) == (0, ""), ran.stderr
    assert ran.stderr.startswith("wrote 600 requests in 120 s")
    return path


def test_describe_shows_a_table_and_a_picture(trace_command: Command, chat: Path) -> None:
    ran = trace_command("describe", chat)
    assert ran.returncode == 0, ran.stderr
    assert "600 in 120 s: 5.01 per second" in ran.stdout
    assert "█" in ran.stdout
    assert "no limit" in ran.stdout


def test_a_terminal_without_blocks_gets_plain_characters(chat: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")  # Python reads it where it starts, so this is a new process
    command = [sys.executable, "-m", "moonpool", "trace", "describe", str(chat)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S)
    assert ran.returncode == 0, ran.stderr
    assert "####" in ran.stdout


def test_describe_for_programs(trace_command: Command, chat: Path) -> None:
    found = json.loads(trace_command("describe", chat, "--json").stdout)
    assert (found["name"], found["num_requests"]) == ("chat", 600)
    assert found["lru_hit_tokens"]["100000000"] == pytest.approx(found["hit_tokens"])


def test_nothing_is_overwritten_unasked(trace_command: Command, chat: Path) -> None:
    before = chat.read_bytes()
    ran = trace_command("generate", "chat", "--requests", 10, "-o", chat)
    assert ran.returncode == 1
    assert "exists already" in ran.stderr
    assert "--force" in ran.stderr
    assert chat.read_bytes() == before


def test_force_replaces(trace_command: Command, chat: Path, tmp_path: Path) -> None:
    path = tmp_path / "copy.jsonl.gz"
    path.write_text("old")
    ran = trace_command("change", chat, "--requests", "0:100", "-o", path, "--force")
    assert ran.returncode == 0, ran.stderr
    assert len(read_jsonl(path)) == 100


def test_changes_are_made_one_after_the_other(trace_command: Command, chat: Path, tmp_path: Path) -> None:
    path = tmp_path / "changed.jsonl"
    options = ("--merge", chat, "--slice", ":60", "--scale", 2, "--cut-blocks", 256, "--relabel", "--tenant", 4)
    ran = trace_command("change", chat, *options, "-o", path)
    assert ran.returncode == 0, ran.stderr
    original, changed = read_jsonl(chat), read_jsonl(path, block_tokens=256)
    assert len(changed) == 2 * int((original.arrival_s < 60).sum())
    assert changed.duration_s < 30
    assert changed.tenant is not None
    assert set(changed.tenant.tolist()) == {4}


def test_new_arrivals(trace_command: Command, chat: Path, tmp_path: Path) -> None:
    path = tmp_path / "even.jsonl"
    assert trace_command("change", chat, "--rate", 2, "--cv", 0, "-o", path).returncode == 0
    assert read_jsonl(path).arrival_s[:3].tolist() == [0.0, 0.5, 1.0]


def test_like_another(trace_command: Command, chat: Path, tmp_path: Path) -> None:
    path = tmp_path / "like.jsonl"
    ran = trace_command("generate", "like", "--like", chat, "--requests", 700, "-o", path)
    assert ran.returncode == 0, ran.stderr
    assert len(read_jsonl(path)) == 700


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("generate", "poetry", "-o", "OUT"), "there are chat, documents"),
        (("generate", "like", "-o", "OUT"), "--like FILE is required"),
        (("generate", "chat", "--rate", "0", "-o", "OUT"), "cannot arrive at 0"),
        (("describe", "none.jsonl"), "cannot read none.jsonl: No such file"),
        (("change", "CHAT", "--slice", "5", "-o", "OUT"), "--slice takes BEGIN:END"),
        (("change", "CHAT", "--slice", "nan:5", "-o", "OUT"), "no time from nan"),
        (("change", "CHAT", "--requests", "0:inf", "-o", "OUT"), "--requests takes BEGIN:END"),
        (("change", "CHAT", "--slice", "9000:", "-o", "OUT"), "no request is left"),
        (("change", "CHAT", "--cv", "2", "-o", "OUT"), "of --rate"),
        (("change", "CHAT", "--scale", "0", "-o", "OUT"), "cannot be scaled by 0"),
    ],
)
def test_errors_are_one_line(
    trace_command: Command, chat: Path, tmp_path: Path, arguments: tuple[str, ...], complaint: str
) -> None:
    places = {"OUT": str(tmp_path / "out.jsonl"), "CHAT": str(chat)}
    ran = trace_command(*(places.get(text, text) for text in arguments))
    assert ran.returncode == 1
    assert complaint in ran.stderr
    assert ran.stderr.count("\n") == 1
    assert not (tmp_path / "out.jsonl").exists()


def test_a_wrong_line_is_named(trace_command: Command, tmp_path: Path) -> None:
    path = tmp_path / "wrong.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [0]}\nnonsense\n')
    ran = trace_command("describe", path)
    assert ran.returncode == 1
    assert "wrong.jsonl, line 2: is not JSON" in ran.stderr
