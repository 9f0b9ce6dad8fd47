"""Owners that are forks of one process, so that each costs milliseconds: both sides of it, and the killing.

For every line a nursery reads it forks an owner, which says how it is reached and serves until it is killed. Those that
still live end with the nursery, and it ends with its standard input.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

import msgspec
from waiting import HANG_S

T = TypeVar("T")


def fork_owners(own: Callable[[], None]) -> None:
    """`own` never returns."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel buries the dead
    owners: list[int] = []
    for _ in sys.stdin:
        pid = os.fork()
        if pid == 0:
            os.close(sys.stdin.fileno())
            own()
        owners.append(pid)
    for pid in owners:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


class Nursery(Generic[T]):
    """Runs `script` of this folder; `born` is what its owners say of themselves."""

    def __init__(self, script: str, *arguments: object, born: type[T]) -> None:
        self._born = born
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name(script)), *map(str, arguments)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def bear(self) -> T:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("one more\n")
        self._process.stdin.flush()
        return msgspec.json.decode(self._process.stdout.readline(), type=self._born)

    def close(self) -> None:
        self._process.communicate(timeout=10)


def kill_under(moves: Sequence[Callable[[], None]], pid: int) -> tuple[list[type[BaseException]], float]:
    """Repeats each move on a thread of its own, kills the owner when one has succeeded, and returns what ended them and
    the seconds until the last one ended.
    """
    ended: list[tuple[type[BaseException], float]] = []
    moving = threading.Semaphore(0)

    def repeat(move: Callable[[], None]) -> None:
        try:
            while True:
                move()
                moving.release()
        except Exception as error:  # noqa: BLE001 - the test asks which one it was
            ended.append((type(error), time.monotonic()))

    callers = [threading.Thread(target=repeat, args=(move,)) for move in moves]
    for caller in callers:
        caller.start()
    assert moving.acquire(timeout=HANG_S)
    os.kill(pid, signal.SIGKILL)
    killed_at = time.monotonic()
    for caller in callers:
        caller.join(HANG_S)
    return [kind for kind, _ in ended], max(at for _, at in ended) - killed_at
