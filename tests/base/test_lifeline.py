"""Children and the death of their parent, with real processes. An inherited pipe tells when a process is gone."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator

import pytest
from waiting import HANG_S

from moonpool.base.errors import ConfigError
from moonpool.base.process import LIFELINE_FD, watch_inherited

PARENT = """
import os, subprocess, sys, time
from moonpool.base.process import Lifeline
lifeline = Lifeline()
alive_fd = int(sys.argv[2])
child = subprocess.Popen(
    [sys.executable, "-c", sys.argv[1]], pass_fds=(lifeline.fd, alive_fd), env={**os.environ, **lifeline.environment}
)
os.close(alive_fd)  # only the child keeps it: its end of file is the child's end
time.sleep(600)
"""
OBEDIENT = """
import time
from moonpool.base.process import watch_inherited
assert watch_inherited()
print("up", flush=True)
time.sleep(600)
"""
STUCK = """
import signal
from moonpool.base.process import watch_inherited
signal.signal(signal.SIGTERM, lambda *_: None)  # asked to end, it does not
assert watch_inherited(grace_s=0.5)
print("up", flush=True)
while True:
    signal.pause()
"""


@contextlib.contextmanager
def family(child: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A parent with one child that said "up"; and a descriptor that ends with the child."""
    read_fd, write_fd = os.pipe()
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, textwrap.dedent(child), str(write_fd)],
        pass_fds=(write_fd,),
        stdout=subprocess.PIPE,
        text=True,
    )
    os.close(write_fd)
    try:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "up\n"
        yield parent, read_fd
    finally:
        parent.kill()
        parent.communicate()
        os.close(read_fd)


def gone_within(fd: int, timeout_s: float) -> bool:
    readable, _, _ = select.select([fd], [], [], timeout_s)
    return bool(readable) and os.read(fd, 1) == b""


@pytest.mark.parametrize("child", [OBEDIENT, STUCK])
def test_a_child_ends_when_its_parent_is_killed(child: str) -> None:
    with family(child) as (parent, alive_fd):
        assert not gone_within(alive_fd, 0.1)
        parent.send_signal(signal.SIGKILL)
        assert gone_within(alive_fd, HANG_S / 2)


def test_it_is_for_the_child_alone() -> None:
    """Neither the variable nor the descriptor reaches a grandchild, even one that inherits all descriptors."""
    grandchild = f"import os; print(os.environ.get({LIFELINE_FD!r}), sorted(map(int, os.listdir('/proc/self/fd'))))"
    child = f"""
import os, subprocess, sys
from moonpool.base.process import watch_inherited
fd = int(os.environ[{LIFELINE_FD!r}])
assert watch_inherited()
seen = subprocess.run([sys.executable, "-c", {grandchild!r}], close_fds=False, capture_output=True, text=True).stdout
print(fd, seen, flush=True)
"""
    read_fd, write_fd = os.pipe()
    try:
        ran = subprocess.run(
            [sys.executable, "-c", child],
            pass_fds=(read_fd,),
            env={**os.environ, LIFELINE_FD: str(read_fd)},
            capture_output=True,
            text=True,
            check=True,
        )
    finally:
        os.close(write_fd)
        os.close(read_fd)
    fd, variable, descriptors = ran.stdout.split(maxsplit=2)
    assert variable == "None"
    assert int(fd) not in eval(descriptors)


def test_without_a_parent_there_is_nothing_to_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(LIFELINE_FD, raising=False)
    assert not watch_inherited()


@pytest.mark.parametrize("text", ["nonsense", "9999"])
def test_a_wrong_descriptor_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(LIFELINE_FD, text)
    with pytest.raises(ConfigError, match="not an open descriptor"):
        watch_inherited()


def test_the_parent_closing_its_end_ends_the_child_too() -> None:
    begin_s = time.monotonic()
    with family(OBEDIENT) as (parent, alive_fd):
        parent.terminate()
        assert gone_within(alive_fd, HANG_S / 2)
    assert time.monotonic() - begin_s < HANG_S
