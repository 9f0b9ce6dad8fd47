"""A process with a real watchdog, whose engine's thread does what the argument says; for test_watchdog.py."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time

from moonpool.base.clock import SystemClock
from moonpool.base.process import EXIT_HANGS
from moonpool.worker.watchdog import EngineProgress, EngineTask, TaskLimits, Watchdog

LIMIT_S = 2.0
_told = threading.Event()


class LateSoon(TaskLimits):
    """What is overdue soon and never hangs."""

    def due_s(self, task: EngineTask) -> float:
        return LIMIT_S / 2


def hangs(progress: EngineProgress) -> None:
    threading.Event().wait()


def hangs_with_the_log(progress: EngineProgress) -> None:
    logging.getLogger().handlers[0].acquire()
    hangs(progress)


def stops_itself(progress: EngineProgress) -> None:
    """Stop between two looks of the watchdog, which see the same task, and go on until it has looked once more: after a
    look that finds a hang there is no other."""
    until_looked(progress)
    os.kill(os.getpid(), signal.SIGSTOP)
    until_looked(progress)
    until_looked(progress)


def until_looked(progress: EngineProgress) -> None:
    before = progress.watched
    while progress.watched is before:
        time.sleep(0.01)


def is_late(progress: EngineProgress) -> None:
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
        KINDS[what](progress)
        progress.rest()
        ended.set()

    threading.Thread(target=engine, daemon=True).start()
    for _ in sys.stdin if what == "is_late" else ():
        _told.set()
    ended.wait()  # as an event loop that stands: only the watchdog can end this process


if __name__ == "__main__":
    main(sys.argv[1])
