"""The queue of slices for peers with one path, and the threads that move them: by priority, each peer within its share.

Every priority has its own bound, so a full queue of one keeps no other out. At most `threads_per_peer` threads work for
one peer at a time; others take what waits for other peers, so a slow peer delays no other. SliceOrder decides,
purely; SliceQueue is the lock, the clock and the threads around it.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

from moonpool.base.clock import Clock, Deadline, SystemClock
from moonpool.base.errors import Overloaded, PeerLost
from moonpool.transfer.paths.plan import Slice, take_run
from moonpool.transfer.paths.priority import DEFAULT_PROMOTE_AFTER_S, Priority, PriorityOrder
from moonpool.transfer.pending import ThreadPool

_MAX_THREADS = 32  # of one queue, whatever the number of peers


class QueuedBatch(Protocol):
    """`slices_of_peers` are handed out here. `num_slices` may be more: slices that wait elsewhere count against the
    same bound until release() is called for them.
    """

    @property
    def priority(self) -> Priority: ...
    @property
    def slices_of_peers(self) -> Mapping[Hashable, Sequence[Slice]]: ...
    @property
    def num_slices(self) -> int: ...

    def run(self, parts: Sequence[Slice]) -> None:
        """Move these slices. Must not raise."""
        ...

    def abandon(self, parts: Sequence[Slice]) -> None:
        """The queue was closed: these slices will not be moved."""
        ...


W = TypeVar("W", bound=QueuedBatch)


class SliceRun(NamedTuple, Generic[W]):
    """Slices of one batch for one peer, to be moved together by one thread."""

    work: W
    slices: Sequence[Slice]
    peer: Hashable = None


class _Waiting:
    __slots__ = ("next_slice", "since_s", "slices")

    def __init__(self, slices: Sequence[Slice], since_s: float) -> None:
        self.slices = slices
        self.since_s = since_s
        self.next_slice = 0


class SliceOrder(Generic[W]):
    """Not thread-safe. Serves by priority, see PriorityOrder, and within one in order of arrival."""

    def __init__(
        self,
        max_slices: int,
        run_nbytes: int,
        promote_after_s: float = DEFAULT_PROMOTE_AFTER_S,
        *,
        threads_per_peer: int,
    ) -> None:
        """Holds `max_slices` of each priority; a run has at most `run_nbytes`, or one slice."""
        self.threads_per_peer = threads_per_peer
        self._max_slices = max_slices
        self._run_nbytes = run_nbytes
        self._priorities = PriorityOrder(promote_after_s)
        self._waiting: list[dict[Hashable, OrderedDict[W, _Waiting]]] = [{} for _ in Priority]
        self._busy: dict[Hashable, int] = {}  # runs handed out and not finished, of each peer that has any
        self._num_slices = [0] * len(Priority)

    def has_room(self, work: W) -> bool:
        """Whether add() keeps to the bound. A batch larger than the bound is taken when nothing else is there."""
        held = self._num_slices[work.priority]
        return held == 0 or held + work.num_slices <= self._max_slices

    def add(self, work: W, now_s: float) -> None:
        self._num_slices[work.priority] += work.num_slices
        waiting = self._waiting[work.priority]
        for peer, slices in work.slices_of_peers.items():
            waiting.setdefault(peer, OrderedDict())[work] = _Waiting(slices, now_s)

    def take(self, now_s: float) -> SliceRun[W] | None:
        """Return the next run of a peer that has a thread left; None when nothing may start. Report its end by
        finished().
        """
        heads = [self._head(waiting) for waiting in self._waiting]
        since_s = [None if head is None else head[0] for head in heads]
        order = self._priorities.order(since_s, now_s)
        if not order:
            return None
        self._priorities.served(order[0], since_s, now_s)
        head = heads[order[0]]
        assert head is not None
        return self._take_from(order[0], head[1])

    def finished(self, run: SliceRun[W]) -> None:
        """The thread that took the run is free again."""
        left = self._busy[run.peer] - 1
        if left:
            self._busy[run.peer] = left
        else:
            del self._busy[run.peer]

    def num_startable(self) -> int:
        """Return how many further threads would find a run, at most."""
        found = 0
        free: dict[Hashable, int] = {}  # threads that a peer may still have
        for waiting in self._waiting:
            for peer, batches in waiting.items():
                left = free.get(peer, self.threads_per_peer - self._busy.get(peer, 0))
                num_runs = 0
                for each in batches.values():
                    if num_runs >= left:
                        break
                    is_one = take_run(each.slices, each.next_slice, self._run_nbytes) == len(each.slices)
                    num_runs += 1 if is_one else left
                free[peer] = left - min(num_runs, left)
                found += min(num_runs, left)
        return found

    def withdraw(self, work: W) -> Sequence[Slice]:
        """Remove a batch and return its slices that were not handed out."""
        left: list[Slice] = []
        waiting = self._waiting[work.priority]
        for peer in work.slices_of_peers:
            found = waiting[peer].pop(work, None) if peer in waiting else None
            if found is not None:
                left += found.slices[found.next_slice :]
                if not waiting[peer]:
                    del waiting[peer]
        self.release(work.priority, len(left))
        return left

    def withdraw_all(self) -> list[SliceRun[W]]:
        batches = {work: None for waiting in self._waiting for queued in waiting.values() for work in queued}
        return [SliceRun(work, self.withdraw(work)) for work in batches]

    def release(self, priority: Priority, num_slices: int) -> None:
        """`num_slices` slices that waited elsewhere have ended."""
        self._num_slices[priority] -= num_slices

    def check_integrity(self) -> None:
        """Raise AssertionError when the counters do not match what is queued."""
        for priority, waiting in enumerate(self._waiting):
            queued = [each for batches in waiting.values() for each in batches.values()]
            assert 0 <= sum(len(each.slices) - each.next_slice for each in queued) <= self._num_slices[priority]
            assert all(each.next_slice < len(each.slices) for each in queued)
            assert all(waiting.values())
        assert all(0 < busy <= self.threads_per_peer for busy in self._busy.values())

    def _head(self, waiting: dict[Hashable, OrderedDict[W, _Waiting]]) -> tuple[float, Hashable] | None:
        """Return since when the oldest batch waits that may start now, and its peer."""
        head: tuple[float, Hashable] | None = None
        for peer, batches in waiting.items():
            if self._busy.get(peer, 0) < self.threads_per_peer:
                since_s = next(iter(batches.values())).since_s
                if head is None or since_s < head[0]:
                    head = since_s, peer
        return head

    def _take_from(self, priority: Priority, peer: Hashable) -> SliceRun[W]:
        batches = self._waiting[priority][peer]
        work, waiting = next(iter(batches.items()))
        start, end = waiting.next_slice, take_run(waiting.slices, waiting.next_slice, self._run_nbytes)
        waiting.next_slice = end
        if end == len(waiting.slices):
            del batches[work]
            if not batches:
                del self._waiting[priority][peer]
        self.release(priority, end - start)
        self._busy[peer] = self._busy.get(peer, 0) + 1
        return SliceRun(work, waiting.slices[start:end], peer)


class SliceQueue(Generic[W]):
    """Thread-safe. Owns its threads, which start when there is work and end when there is none for a while."""

    def __init__(self, order: SliceOrder[W], clock: Clock | None = None) -> None:
        self._order = order
        self._clock: Clock = clock or SystemClock()
        self._lock = threading.Lock()
        self._room = threading.Condition(self._lock)
        self._threads = ThreadPool("transfer-slices", max(_MAX_THREADS, order.threads_per_peer))
        self._num_workers = 0  # threads that look for runs or move one
        self._num_busy = 0  # of these, threads that move one
        self._closed = False

    def put(self, work: W, timeout_s: float) -> None:
        """Queue the batch, waiting for room; Overloaded when there is none in time, PeerLost after close()."""
        deadline = Deadline(timeout_s, self._clock)
        with self._lock:
            while not self._closed and not self._order.has_room(work):
                if not self._room.wait(deadline.remaining_s()):
                    raise Overloaded(f"too many transfers are waiting ({work.priority.name.lower()})")
            if self._closed:
                raise PeerLost("the transfer engine is closed")
            self._order.add(work, self._clock.now_s())
            num_new = self._count_new_workers()
        self._start_workers(num_new)

    def withdraw(self, work: W) -> Sequence[Slice]:
        """Remove a batch and return its slices that were not handed out, and will not be."""
        with self._lock:
            self._room.notify_all()
            return self._order.withdraw(work)

    def release(self, priority: Priority, num_slices: int) -> None:
        """`num_slices` slices that waited elsewhere have ended."""
        with self._lock:
            self._order.release(priority, num_slices)
            self._room.notify_all()

    def close(self) -> None:
        """Idempotent. Slices that have not begun are abandoned; those under way end by themselves."""
        with self._lock:
            self._closed = True
            self._room.notify_all()
            left = self._order.withdraw_all()
        for run in left:
            run.work.abandon(run.slices)
        self._threads.close()

    def join(self, timeout_s: float) -> None:
        """Wait for the threads to end, after close()."""
        self._threads.join(timeout_s)

    def _count_new_workers(self) -> int:
        """Return how many threads to start, counting them as workers. Idle workers will find runs by themselves."""
        num_idle = self._num_workers - self._num_busy
        num_new = max(0, self._order.num_startable() - num_idle)
        self._num_workers += num_new
        return num_new

    def _start_workers(self, num_new: int) -> None:
        for _ in range(num_new):
            self._threads.run(self._work)

    def _work(self) -> None:
        run = self._next(None)
        while run is not None:
            run.work.run(run.slices)
            run = self._next(run)

    def _next(self, done: SliceRun[W] | None) -> SliceRun[W] | None:
        """Return the next run for this thread; None when it has to end."""
        with self._lock:
            if done is not None:
                self._order.finished(done)
                self._num_busy -= 1
            run = self._order.take(self._clock.now_s())
            if run is None:
                self._num_workers -= 1
                return None
            self._num_busy += 1
            self._room.notify_all()
            # This thread may have left a peer for a more urgent one: another has to take what waits there.
            num_new = self._count_new_workers() if done is not None and done.peer != run.peer else 0
        self._start_workers(num_new)
        return run
