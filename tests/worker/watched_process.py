"""A process with a real watchdog, whose engine's thread does what the argument says; for test_watchdog.py."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading

from moonpool.base.clock import SystemClock
from moonpool.base.process import EXIT_HANGS
from moonpool.worker.watchdog import EngineProgress, Task, TaskLimits, Watchdog

LIMIT_S = 1.0
_told = threading.Event()


class LateSoon(TaskLimits):
    """What is overdue soon and never hangs."""

    def due_s(self, task: Task) -> float:
        return LIMIT_S


def hangs() -> None:
    threading.Event().wait()


def hangs_with_the_log() -> None:
    logging.getLogger().handlers[0].acquire()
    hangs()


def stops_itself() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def is_late() -> None:
    _told.wait()


KINDS = {each.__name__: each for each in (hangs, hangs_with_the_log, stops_itself, is_late)}


def main(what: str) -> None:
    logging.basicConfig(level=logging.INFO)
    progress, ended = EngineProgress(SystemClock(), launches=False), threading.Event()
    limits = TaskLimits(LIMIT_S, LIMIT_S) if what != "is_late" else LateSoon(1000 * LIMIT_S, LIMIT_S)
    Watchdog(progress, limits, lambda: os._exit(EXIT_HANGS)).start()

    def engine() -> None:
        progress.thread_id = threading.get_ident()
        progress.begin("what a test does")
        print("began", flush=True)
        KINDS[what]()
        progress.rest()
        ended.set()

    threading.Thread(target=engine, daemon=True).start()
    for _ in sys.stdin if what == "is_late" else ():
        _told.set()
    ended.wait()  # as an event loop that stands: only the watchdog can end this process


if __name__ == "__main__":
    main(sys.argv[1])
