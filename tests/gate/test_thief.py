"""The thief takes time, says how much, and leaves nothing behind.

How much it takes is not tested: that follows the clock.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from waiting import HANG_S, wait_until

ROOT = Path(__file__).parents[2]
THIEF = [sys.executable, "-m", "tests.gate.thief"]
GENTLE = ["--leave", "0.5", "--longest-stall", "0.02"]  # other tests run beside these


def is_permitted() -> bool:
    before = os.sched_getscheduler(0)
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    except OSError:
        return False
    os.sched_setscheduler(0, before, os.sched_param(0))
    return True


needs_real_time = pytest.mark.skipif(not is_permitted(), reason="real-time priority is not permitted here")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*THIEF, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=HANG_S)


@needs_real_time
@pytest.mark.parametrize(("end", "status"), [("exit 0", 0), ("exit 7", 7), ("kill -9 $$", 128 + 9)])
def test_the_exit_status_is_the_commands(end: str, status: int) -> None:
    done = run(*GENTLE, "--seed", "3", "--", "sh", "-c", f"echo out; sleep 0.3; {end}")
    assert (done.returncode, done.stderr) == (status, "")
    said, report = done.stdout.splitlines()
    assert said == "out"
    found = re.fullmatch(
        r"thief: took (\d+\.\d)% of (\d+) cores in \d+\.\d s \(wanted 50%\), the longest stall (\d\.\d\d) s, seed 3",
        report,
    )
    assert found is not None, report
    assert float(found[1]) > 0
    assert int(found[2]) == len(os.sched_getaffinity(0))


@needs_real_time
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_behind(signum: int) -> None:
    thief = subprocess.Popen([*THIEF, *GENTLE, "--", "sleep", "600"], cwd=ROOT, stdout=subprocess.DEVNULL)
    parent = psutil.Process(thief.pid)
    family: list[psutil.Process] = []
    try:
        wait_until(lambda: any(child.name() == "sleep" for child in parent.children()), "the command runs")
        family = parent.children()
        assert len(family) == len(os.sched_getaffinity(0)) + 1
        thief.send_signal(signum)
        status = thief.wait(HANG_S)
        assert status == (128 + signal.SIGTERM if signum == signal.SIGTERM else -signal.SIGKILL)
        wait_until(lambda: not any(child.is_running() for child in family), "all its children have ended")
    finally:
        for child in [*family, parent]:
            if child.is_running():
                child.kill()
        thief.wait()


def lose_permission() -> None:
    drop_from_bounding_set, sys_nice = 24, 23
    ctypes.CDLL(None).prctl(drop_from_bounding_set, sys_nice)


def test_it_says_what_is_missing() -> None:
    done = subprocess.run(
        [*THIEF, *GENTLE, "--", "echo", "out"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        preexec_fn=lose_permission,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert "SCHED_FIFO" in done.stderr
    assert "needs root" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--leave", "0.1", "--", "true"), "--leave is 0.1, and not 0.2 to 0.5"),
        (("--leave", "0.5", "--longest-stall", "0", "--", "true"), "--longest-stall is not positive"),
        (("--leave", "0.5"), "no command"),
    ],
)
def test_wrong_usage(arguments: tuple[str, ...], said: str) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert said in done.stderr


@needs_real_time
def test_a_command_that_does_not_exist() -> None:
    done = run(*GENTLE, "--", "/no/such/command")
    assert (done.returncode, "No such file" in done.stderr) == (127, True)
