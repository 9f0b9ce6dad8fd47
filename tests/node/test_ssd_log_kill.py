"""kill -9 of a process that writes the log, after a random number of its words, over and over in one folder: what it
said it had done is done.
"""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from severe import LostObject, WrongBytes
from ssd_world import is_object, parts_of, read_object
from ssd_writer import CONFIG, sizes_of

from moonpool.node.ssd import SsdLog


class Knowledge:
    """For each key, the generations (None: not there) that the log may show. Several where the writer had begun
    something and not said that it was done.
    """

    def __init__(self) -> None:
        self.may_be: dict[bytes, set[int | None]] = {}

    def hear(self, lines: list[str]) -> None:
        for line in lines:
            words = line.split()
            key, generation = words[-2].encode(), int(words[-1])
            result = generation if words[-3] == "append" else None
            if words[0] == "start":
                self.may_be.setdefault(key, {None}).add(result)
            else:
                self.may_be[key] = {result}

    def check(self, log: SsdLog) -> None:
        found = {stored.key: stored.generation for stored in log.items()}
        for key, expected in self.may_be.items():
            if found.get(key) not in expected:
                raise LostObject(f"{key!r} is {found.get(key)}, not {expected}")
        for key, generation in found.items():
            if not is_object(read_object(log, key, generation), parts_of(key, generation, sizes_of(generation))):
                raise WrongBytes(f"generation {generation} of {key!r}")
        self.may_be = {key: {found.get(key)} for key in self.may_be}


def run_and_kill(folder: Path, seed: int, num_lines: int, pause_s: float) -> list[str]:
    """What the writer said of what it does. It is killed that pause after it has said so many lines; with none, it may
    still recover what the last one left.
    """
    command = [sys.executable, str(Path(__file__).with_name("ssd_writer.py")), str(folder), str(seed)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as writer:
        try:
            assert writer.stdout is not None
            assert writer.stderr is not None
            said = [writer.stdout.readline() for _ in range(1 + num_lines)]  # the first is "opening"
            time.sleep(pause_s)
        finally:
            ended_itself = writer.poll()
            writer.send_signal(signal.SIGKILL)
        said += writer.stdout.readlines()
        assert ended_itself is None, writer.stderr.read().decode()
    return [line.decode() for line in said[1:]]


@pytest.mark.parametrize("rounds", [20, pytest.param(200, marks=[pytest.mark.soak, pytest.mark.timeout(3600)])])
def test_what_was_done_stays_done(tmp_path: Path, rounds: int) -> None:
    rng = random.Random(9)
    known = Knowledge()
    num_lines = 0
    for seed in range(1, rounds + 1):
        if seed % 4:
            lines = run_and_kill(tmp_path / "log", seed, rng.randint(1, 100), 0.0)
        else:
            lines = run_and_kill(tmp_path / "log", seed, 0, rng.uniform(0.0, 0.1))
        num_lines += len(lines)
        known.hear(lines)
        if seed % 3:  # mostly the next writer finds the folder as the last one left it
            continue
        with SsdLog.open(tmp_path / "log", CONFIG) as log:
            log.check_integrity()
            known.check(log)
    assert num_lines > 10 * rounds
