"""The threads that send KV: hand-offs on one, what goes to the pool on another.

A client waits for a hand-off, so a pool task begins only while no hand-off is queued, running or on the wire. A task
that has begun never delays a hand-off, however slow the pool is: it has its own thread.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from enum import IntEnum

from moonpool.transfer import Pending

_LOG = logging.getLogger(__name__)


class Urgency(IntEnum):
    HANDOFF = 0
    POOL = 1


Task = Callable[[], None]


class SendQueue:
    """Runs the tasks of one urgency in order, one at a time. Tasks handle their own errors."""

    def __init__(self, name: str = "send") -> None:
        self._tasks: dict[Urgency, deque[Task]] = {urgency: deque() for urgency in Urgency}
        self._num_handoffs = 0  # queued, running or on the wire
        self._closing = False
        self._changed = threading.Condition()
        self.threads = {
            urgency: threading.Thread(
                target=self._run, args=[urgency], name=f"{name}-{urgency.name.lower()}", daemon=True
            )
            for urgency in Urgency
        }
        for thread in self.threads.values():
            thread.start()

    def put(self, urgency: Urgency, task: Task) -> None:
        with self._changed:
            self._num_handoffs += urgency is Urgency.HANDOFF
            self._tasks[urgency].append(task)
            self._changed.notify_all()

    def put_after(self, transfer: Pending[None], task: Task) -> None:
        """Queue a hand-off task that begins once the transfer is done; pool tasks wait from now on."""
        with self._changed:
            self._num_handoffs += 1
        transfer.add_done_callback(lambda _: self._append(task))

    def track(self, transfer: Pending[None]) -> None:
        """Let pool tasks wait until this transfer of a hand-off is done."""
        with self._changed:
            self._num_handoffs += 1
        transfer.add_done_callback(lambda _: self._end_handoff())

    def __len__(self) -> int:
        """Return the number of tasks that have not begun."""
        return sum(map(len, self._tasks.values()))

    def close(self, timeout_s: float = 2.0) -> None:
        """Run what is queued, then end the threads; give up after `timeout_s`. Idempotent."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        for thread in self.threads.values():
            thread.join(timeout_s)

    def _append(self, task: Task) -> None:
        with self._changed:
            self._tasks[Urgency.HANDOFF].append(task)
            self._changed.notify_all()

    def _end_handoff(self) -> None:
        with self._changed:
            self._num_handoffs -= 1
            self._changed.notify_all()

    def _run(self, urgency: Urgency) -> None:
        while (task := self._next(urgency)) is not None:
            try:
                task()
            except Exception:  # noqa: BLE001 - the thread outlives a bug; its request ends by its deadline
                _LOG.exception("bug in an outgoing transfer")
            if urgency is Urgency.HANDOFF:
                self._end_handoff()
            task = None  # the thread must not keep buffers alive while it waits

    def _next(self, urgency: Urgency) -> Task | None:
        """Return the next task; None when the queue is closed and nothing is left to run."""
        tasks = self._tasks[urgency]
        with self._changed:
            if urgency is Urgency.HANDOFF:
                self._changed.wait_for(lambda: tasks or (self._closing and not self._num_handoffs))
            else:
                self._changed.wait_for(lambda: not self._num_handoffs and (tasks or self._closing))
            return tasks.popleft() if tasks else None
