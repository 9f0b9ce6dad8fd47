"""One thread that sends. Hand-offs go before everything else, because a client waits for them."""

from __future__ import annotations

import itertools
import logging
import queue
import threading
from collections.abc import Callable
from enum import IntEnum

_LOG = logging.getLogger(__name__)


class Urgency(IntEnum):
    HANDOFF = 0
    POOL = 1
    STOP = 9


Task = Callable[[], None]


class SendQueue:
    """Runs tasks in order of urgency, first come first served within one. Tasks handle their own errors."""

    def __init__(self, name: str = "outbox") -> None:
        self._queue: queue.PriorityQueue[tuple[int, int, Task | None]] = queue.PriorityQueue()
        self._order = itertools.count()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, urgency: Urgency, task: Task) -> None:
        self._queue.put((urgency, next(self._order), task))

    def __len__(self) -> int:
        return self._queue.qsize()

    def close(self, timeout_s: float = 2.0) -> None:
        """Runs what is queued, then ends the thread; gives up after `timeout_s`. Idempotent."""
        self._queue.put((Urgency.STOP, next(self._order), None))
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while True:
            _, _, task = self._queue.get()
            if task is None:
                return
            try:
                task()
            except Exception:  # noqa: BLE001 - the thread outlives a bug; its request ends by its deadline
                _LOG.exception("bug in an outgoing transfer")
