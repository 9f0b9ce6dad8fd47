"""Lets a signal make a worker's engine sleep: SIGUSR1 for SLOW_S, SIGUSR2 for good. Python loads this at the start of
every process that has this folder on PYTHONPATH; processes without an engine ignore the signals."""

from __future__ import annotations

import signal
import sys
import threading
import time

SLOW_S = 1.0


def _sleep_at_engine(seconds: float) -> None:
    def oversleep() -> None:
        print("a test lets the engine sleep", file=sys.stderr, flush=True)
        time.sleep(seconds)

    for thread in threading.enumerate():
        if thread.name == "engine":
            thread._target.__self__.post(oversleep)  # type: ignore[attr-defined]


def _is_slow(number: int, frame: object) -> None:
    _sleep_at_engine(SLOW_S)


def _hangs(number: int, frame: object) -> None:
    _sleep_at_engine(3600.0)


signal.signal(signal.SIGUSR1, _is_slow)
signal.signal(signal.SIGUSR2, _hangs)
