"""Lets a signal make a worker's engine stand: SIGUSR1 for SLOW_S, SIGUSR2 for good, SPIN by a kernel on the GPU that
does not end. Python loads this at the start of every process that has this folder on PYTHONPATH; processes without an
engine ignore the signals."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

SLOW_S, LONG_S = 1.0, 3600.0
LONG_CYCLES = 10**13
SPIN = signal.SIGRTMIN + 1


def _sleep(seconds: float) -> Callable[[Any], None]:
    def oversleep(engine: Any) -> None:
        print("a test lets the engine sleep", file=sys.stderr, flush=True)
        time.sleep(seconds)

    return oversleep


def _spin(engine: Any) -> None:
    """The steps after this wait for the kernel."""
    import torch

    print("a test lets a kernel spin", file=sys.stderr, flush=True)
    with torch.cuda.stream(engine._runner.kv.stream):
        torch.cuda._sleep(LONG_CYCLES)  # type: ignore[no-untyped-call]


def _at_engine(function: Callable[[Any], None]) -> Callable[[int, object], None]:
    def on_signal(number: int, frame: object) -> None:
        for thread in threading.enumerate():
            if thread.name == "engine":
                loop = thread._target.__self__  # type: ignore[attr-defined]
                loop.post(partial(function, loop._engine))

    return on_signal


signal.signal(signal.SIGUSR1, _at_engine(_sleep(SLOW_S)))
signal.signal(signal.SIGUSR2, _at_engine(_sleep(LONG_S)))
signal.signal(SPIN, _at_engine(_spin))
