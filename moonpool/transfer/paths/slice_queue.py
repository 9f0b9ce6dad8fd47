"""What waits for the engine's threads: batches, handed out in runs of slices, by priority.

Every priority has its own bound, so a full queue of one keeps no other out. SliceOrder decides, purely; SliceQueue is
the lock, the clock and the waiting around it.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

from moonpool.base.clock import Clock, Deadline, SystemClock
from moonpool.base.errors import Overloaded, PeerLost
from moonpool.transfer.paths.plan import Slice, take_run
from moonpool.transfer.paths.priority import DEFAULT_PROMOTE_AFTER_S, Priority, PriorityOrder


class QueuedBatch(Protocol):
    """`slices` are handed out here. `num_slices` may be more: those that wait elsewhere count against the same bound
    until release() is called for them.
    """

    @property
    def priority(self) -> Priority: ...
    @property
    def slices(self) -> Sequence[Slice]: ...
    @property
    def num_slices(self) -> int: ...


W = TypeVar("W", bound=QueuedBatch)


class SliceRun(NamedTuple, Generic[W]):
    """Slices of one batch for one thread, to be moved together."""

    work: W
    slices: Sequence[Slice]


class _Waiting:
    __slots__ = ("next_slice", "since_s")

    def __init__(self, since_s: float) -> None:
        self.since_s = since_s
        self.next_slice = 0


class SliceOrder(Generic[W]):
    """Not thread-safe. Serves by priority, see priority.Turns, and within one in order of arrival."""

    def __init__(self, max_slices: int, run_nbytes: int, promote_after_s: float = DEFAULT_PROMOTE_AFTER_S) -> None:
        """Holds `max_slices` of each priority; a run has at most `run_nbytes`, or one slice."""
        self._max_slices = max_slices
        self._run_nbytes = run_nbytes
        self._turns = PriorityOrder(promote_after_s)
        self._waiting: list[OrderedDict[W, _Waiting]] = [OrderedDict() for _ in Priority]
        self._num_slices = [0] * len(Priority)

    def has_room(self, work: W) -> bool:
        """A batch larger than the bound is taken when nothing else is there."""
        held = self._num_slices[work.priority]
        return held == 0 or held + work.num_slices <= self._max_slices

    def add(self, work: W, now_s: float) -> None:
        self._num_slices[work.priority] += work.num_slices
        if work.slices:
            self._waiting[work.priority][work] = _Waiting(now_s)

    def take(self, now_s: float) -> SliceRun[W] | None:
        """The next run; None when nothing waits."""
        since_s = [next(iter(line.values())).since_s if line else None for line in self._waiting]
        order = self._turns.order(since_s, now_s)
        if not order:
            return None
        self._turns.served(order[0], since_s, now_s)
        return self._take_from(order[0])

    def withdraw(self, work: W) -> Sequence[Slice]:
        """Takes out a batch; what was not handed out of it."""
        waiting = self._waiting[work.priority].pop(work, None)
        if waiting is None:
            return []
        left = work.slices[waiting.next_slice :]
        self.release(work.priority, len(left))
        return left

    def withdraw_all(self) -> list[SliceRun[W]]:
        return [SliceRun(work, self.withdraw(work)) for line in self._waiting for work in list(line)]

    def release(self, priority: Priority, num_slices: int) -> None:
        """So many slices that waited elsewhere have ended."""
        self._num_slices[priority] -= num_slices

    def check_integrity(self) -> None:
        """AssertionError when the books do not balance."""
        for priority, line in enumerate(self._waiting):
            here = sum(len(work.slices) - waiting.next_slice for work, waiting in line.items())
            assert 0 <= here <= self._num_slices[priority]
            assert all(waiting.next_slice < len(work.slices) for work, waiting in line.items())

    def _take_from(self, priority: Priority) -> SliceRun[W]:
        line = self._waiting[priority]
        work, waiting = next(iter(line.items()))
        start, end = waiting.next_slice, take_run(work.slices, waiting.next_slice, self._run_nbytes)
        waiting.next_slice = end
        if end == len(work.slices):
            del line[work]
        self.release(priority, end - start)
        return SliceRun(work, work.slices[start:end])


class SliceQueue(Generic[W]):
    """Thread-safe."""

    def __init__(self, order: SliceOrder[W], clock: Clock | None = None) -> None:
        self._order = order
        self._clock: Clock = clock or SystemClock()
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._room = threading.Condition(self._lock)
        self._closed = False

    def put(self, work: W, timeout_s: float) -> None:
        """Waits for room; Overloaded when there is none in time."""
        deadline = Deadline(timeout_s, self._clock)
        with self._lock:
            while not self._closed and not self._order.has_room(work):
                if not self._room.wait(deadline.remaining_s()):
                    raise Overloaded(f"too many transfers are waiting ({work.priority.name.lower()})")
            if self._closed:
                raise PeerLost("the transfer engine is closed")
            self._order.add(work, self._clock.now_s())
            self._work.notify(len(work.slices))

    def take(self) -> SliceRun[W] | None:
        """The next run; waits for one. None when the queue is closed."""
        with self._lock:
            while not self._closed:
                run = self._order.take(self._clock.now_s())
                if run is not None:
                    self._room.notify_all()
                    return run
                self._work.wait()
            return None

    def withdraw(self, work: W) -> Sequence[Slice]:
        """What was not handed out, and will not be."""
        with self._lock:
            self._room.notify_all()
            return self._order.withdraw(work)

    def release(self, priority: Priority, num_slices: int) -> None:
        """So many slices that waited elsewhere have ended."""
        with self._lock:
            self._order.release(priority, num_slices)
            self._room.notify_all()

    def close(self) -> list[SliceRun[W]]:
        """Idempotent; what was not handed out."""
        with self._lock:
            self._closed = True
            self._work.notify_all()
            self._room.notify_all()
            return self._order.withdraw_all()
