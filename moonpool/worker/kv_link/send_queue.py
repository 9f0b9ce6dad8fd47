"""The threads that send KV: hand-offs to each decode worker on one, what goes to the pool on another.

A client waits for a hand-off, so a pool task begins only while no hand-off is queued, running or on the wire. A task
that has begun never delays a hand-off, however slow the pool is: it has its own thread. Nor does a decode worker that
does not answer delay the hand-offs to others. A call to a decode worker carries no KV and is waited for without a
thread (put_answered), so neither other hand-offs nor the pool wait for its answer.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from enum import IntEnum
from typing import Any

from moonpool.transfer import Pending

_LOG = logging.getLogger(__name__)


class Urgency(IntEnum):
    HANDOFF = 0
    POOL = 1


Task = Callable[[], None]
_POOL = "\0pool"  # the lane of pool tasks; no address looks like it


class SendQueue:
    """Runs the tasks of one lane in order, one at a time; a lane has a thread while it has tasks, and for `idle_s`
    after. Tasks handle their own errors."""

    def __init__(self, name: str = "send", idle_s: float = 60.0) -> None:
        self._name, self._idle_s = name, idle_s
        self._lanes: dict[str, deque[Task]] = {}  # by lane; each has a thread
        self._num_handoffs = 0  # queued, running or on the wire
        self._num_calls = 0  # to decode workers, not answered yet
        self._closing = False
        self._changed = threading.Condition()
        self.threads: dict[str, threading.Thread] = {}  # by lane
        with self._changed:
            self._tasks(_POOL)

    def put(self, urgency: Urgency, task: Task, lane: str = "") -> None:
        """Queue a task. Hand-offs of one `lane`, a decode worker, run in order; those of others beside them."""
        with self._changed:
            self._num_handoffs += urgency is Urgency.HANDOFF
            self._append(lane if urgency is Urgency.HANDOFF else _POOL, task)

    def put_after(self, transfer: Pending[None], task: Task, lane: str = "") -> None:
        """Queue a hand-off task that begins once the transfer is done; pool tasks wait from now on."""
        with self._changed:
            self._num_handoffs += 1

        def append(_: object) -> None:
            with self._changed:
                self._append(lane, task)

        transfer.add_done_callback(append)

    def put_answered(self, call: Future[Any], task: Task, lane: str = "") -> None:
        """Queue a hand-off task that begins once a call is answered or has failed. Only close() waits for that."""
        with self._changed:
            self._num_calls += 1

        def append(_: object) -> None:
            with self._changed:
                self._num_calls -= 1
                self._num_handoffs += 1
                self._append(lane, task)

        call.add_done_callback(append)

    def track(self, transfer: Pending[None]) -> None:
        """Let pool tasks wait until this transfer of a hand-off is done."""
        with self._changed:
            self._num_handoffs += 1
        transfer.add_done_callback(lambda _: self._end_handoff())

    def __len__(self) -> int:
        """Return the number of pool tasks that have not begun, and of tasks, transfers and calls of hand-offs that have
        not ended."""
        with self._changed:
            return len(self._lanes.get(_POOL, ())) + self._num_handoffs + self._num_calls

    def close(self, timeout_s: float = 2.0) -> None:
        """Run what is queued, wait for answers, then end the threads; give up after `timeout_s`. Idempotent."""
        deadline_s = time.monotonic() + timeout_s
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            threads = list(self.threads.values())
        for thread in threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))

    def _append(self, lane: str, task: Task) -> None:
        self._tasks(lane).append(task)
        self._changed.notify_all()

    def _tasks(self, lane: str) -> deque[Task]:
        """Return the lane's tasks; start its thread if it has none."""
        if lane not in self._lanes:
            self._lanes[lane] = deque()
            kind = Urgency.POOL if lane == _POOL else Urgency.HANDOFF
            self.threads[lane] = threading.Thread(
                target=self._run, args=[lane], name=f"{self._name}-{kind.name.lower()}", daemon=True
            )
            self.threads[lane].start()
        return self._lanes[lane]

    def _end_handoff(self) -> None:
        with self._changed:
            self._num_handoffs -= 1
            self._changed.notify_all()

    @property
    def _is_over(self) -> bool:
        """Whether no hand-off task will be queued any more."""
        return self._closing and not self._num_handoffs and not self._num_calls

    def _run(self, lane: str) -> None:
        while (task := self._next(lane)) is not None:
            try:
                task()
            except Exception:  # noqa: BLE001 - the thread outlives a bug; its request ends by its deadline
                _LOG.exception("bug in an outgoing transfer")
            if lane != _POOL:
                self._end_handoff()
            task = None  # the thread must not keep buffers alive while it waits

    def _next(self, lane: str) -> Task | None:
        """Return the lane's next task; None, and forget the lane, when the queue is closed and no task can come, or
        when a hand-off lane was idle for long."""
        tasks = self._lanes[lane]
        with self._changed:
            if lane == _POOL:
                self._changed.wait_for(lambda: not self._num_handoffs and (tasks or self._is_over))
            else:
                self._changed.wait_for(lambda: tasks or self._is_over, self._idle_s)
            if tasks:
                return tasks.popleft()
            del self._lanes[lane], self.threads[lane]
            return None
