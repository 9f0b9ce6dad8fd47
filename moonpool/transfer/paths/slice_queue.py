"""Which slice of which batch moves next, to or from which peer; and the threads that move it.

SliceOrder decides, purely: it chooses the priority (see PriorityOrder) and the peer; the peer's queue chooses the batch
and, where there are several paths, the path. SliceQueue is the lock, the clock, the threads and the timer around it.

Every priority has its own bound, so a full queue of one keeps no other out. At most `threads_per_peer` threads work for
a peer with one path at a time, and one per lane for a peer with several; others take what waits for other peers, so a
slow peer delays no other.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Generic

from moonpool.base.clock import Clock, Deadline, SystemClock
from moonpool.base.errors import MoonpoolError, Overloaded, PeerLost
from moonpool.transfer.paths.peer_paths import PeerPaths
from moonpool.transfer.paths.peer_queue import Ended, PeerQueue, Slice, SliceOutcome, SliceRun, W, count_slices
from moonpool.transfer.paths.priority import DEFAULT_PROMOTE_AFTER_S, Priority, PriorityOrder
from moonpool.transfer.pending import ThreadPool, attempt

_MAX_RUNS = 64  # under way at a time, whatever the number of peers
_MAX_OTHER_THREADS = 32  # the timer, probes, and paths that are being opened
_LONGEST_WAIT_S = 1.0


class SliceOrder(Generic[W]):
    """Not thread-safe. Every run that take() returns must come back by finished()."""

    def __init__(
        self,
        max_slices: int,
        promote_after_s: float = DEFAULT_PROMOTE_AFTER_S,
        *,
        threads_per_peer: int,
    ) -> None:
        """Holds `max_slices` of each priority."""
        self.max_runs = max(_MAX_RUNS, threads_per_peer)
        self._max_slices = max_slices
        self._threads_per_peer = threads_per_peer
        self._priorities = PriorityOrder(promote_after_s)
        self._peers: dict[Hashable, PeerQueue[W]] = {}  # those that have work, waiting or under way
        self.paths: set[PeerPaths[W]] = set()  # of these, peers with several paths
        self._num_runs = 0

    def has_room(self, work: W) -> bool:
        """Whether add() keeps to the bound. A batch larger than the bound is taken when nothing else is there."""
        held = sum(queue.num_slices[work.priority] for queue in self._peers.values())
        if not held:
            return True
        own = sum(count_slices(slices, work.run_nbytes) for slices in work.slices_of_peers.values())
        return held + own <= self._max_slices

    def add(self, work: W, now_s: float) -> None:
        for peer, slices in work.slices_of_peers.items():
            queue = self._peers.get(peer)
            if queue is None:
                if isinstance(peer, PeerPaths):
                    queue = peer
                    self.paths.add(peer)
                else:
                    queue = PeerQueue(self._threads_per_peer)
                self._peers[peer] = queue
            queue.add(work, slices, now_s)

    def take(self, now_s: float) -> SliceRun[W] | None:
        """Return the next run; None when nothing may start. Within a priority the peer goes first whose next batch has
        waited longest.
        """
        if self._num_runs == self.max_runs:
            return None
        declined: set[tuple[int, Hashable]] = set()  # a priority of a peer of which nothing can start now
        while True:
            heads = self._heads(declined)
            if not any(heads):
                return None
            since_s = [None if head is None else head[0] for head in heads]
            order = self._priorities.order(since_s, now_s)
            head = heads[order[0]]
            assert head is not None
            run = self._peers[head[1]].take(head[1], order[0], now_s)
            if run is not None:
                self._priorities.served(order[0], since_s, now_s)
                self._num_runs += 1
                return run
            declined.add((order[0], head[1]))

    def finished(self, run: SliceRun[W], outcomes: Sequence[SliceOutcome], now_s: float) -> list[Ended[W]]:
        """The run is over. Return the slices that ended with it; those that another path may move wait again."""
        self._num_runs -= 1
        ended = self._peers[run.peer].finished(run, outcomes, now_s)
        self._forget_if_idle(run.peer)
        return ended

    def withdraw(self, work: W) -> list[Slice]:
        """Remove a batch and return its slices that wait."""
        left: list[Slice] = []
        for peer in work.slices_of_peers:
            if peer in self._peers:
                left += self._peers[peer].withdraw(work)
                self._forget_if_idle(peer)
        return left

    def withdraw_all(self, error: MoonpoolError) -> list[Ended[W]]:
        """Remove every batch and return its slices that wait, to be settled with the error."""
        works = {work: None for queue in self._peers.values() for batches in queue.waiting for work in batches}
        return [Ended(work, self.withdraw(work), error) for work in works]

    # what peers with several paths need from time to time

    def expire(self, now_s: float) -> list[Ended[W]]:
        """End what waits for paths past its deadline."""
        ended: list[Ended[W]] = []
        for paths in list(self.paths):
            ended += paths.expire(now_s)
            self._forget_if_idle(paths)
        return ended

    def probes_due(self, now_s: float) -> list[tuple[PeerPaths[W], int]]:
        """Return the paths to probe now; every probe must come back by probed()."""
        return [(paths, path) for paths in self.paths for path in paths.probes_due(now_s)]

    def probed(self, paths: PeerPaths[W], path: int, error: MoonpoolError | None, now_s: float) -> list[Ended[W]]:
        """Record the result of a probe; return the slices that ended because no path is left."""
        ended = paths.probed(path, error, now_s)
        self._forget_if_idle(paths)
        return ended

    def wake_s(self) -> float:
        """Return when to call expire() and probes_due() again without an event; inf: not before the next event."""
        return min((paths.wake_s() for paths in self.paths), default=math.inf)

    def check_integrity(self) -> None:
        """Raise AssertionError when the counters do not match what is queued."""
        for queue in self._peers.values():
            queue.check_integrity()
        assert self._num_runs == sum(queue.num_runs for queue in self._peers.values())

    def _heads(self, declined: set[tuple[int, Hashable]]) -> list[tuple[float, Hashable] | None]:
        """Return for each priority since when the batch waits that may start next, and its peer."""
        heads: list[tuple[float, Hashable] | None] = [None] * len(Priority)
        for peer, queue in self._peers.items():
            if not queue.can_start():
                continue
            for priority, batches in enumerate(queue.waiting):
                if batches and (priority, peer) not in declined:
                    since_s, head = next(iter(batches.values()))[0].since_s, heads[priority]
                    if head is None or since_s < head[0]:
                        heads[priority] = since_s, peer
        return heads

    def _forget_if_idle(self, peer: Hashable) -> None:
        queue = self._peers.get(peer)
        if queue is not None and queue.is_idle:
            del self._peers[peer]
            self.paths.discard(peer)


class SliceQueue(Generic[W]):
    """Thread-safe. Owns its threads, which start when there is work and end when there is none for a while. Handles may
    use `threads` to open their paths.
    """

    def __init__(self, order: SliceOrder[W], clock: Clock | None = None) -> None:
        self.threads = ThreadPool("transfer-slices", order.max_runs + _MAX_OTHER_THREADS)
        self._order = order
        self._clock: Clock = clock or SystemClock()
        self._lock = threading.Lock()
        self._room = threading.Condition(self._lock)
        self._ready: deque[SliceRun[W]] = deque()  # taken from the order; the next thread moves them
        self._num_starting = 0  # threads that will look there
        self._timer_changed = threading.Condition(self._lock)  # something is due before `_timer_until_s`
        self._timer_until_s: float | None = None  # None: no timer runs
        self._closed = False

    def put(self, work: W, room_timeout_s: float | None, *, carry: bool = False) -> None:
        """Queue the batch. Wait `room_timeout_s` for room (None: queue it although the queue is full). Raise Overloaded
        when there is no room in time, PeerLost after close(). With `carry` this thread moves slices of the batch, too,
        as long as one may start.
        """
        run = self._change(partial(self._add, work, room_timeout_s), lambda run: carry and run.work is work)
        while run is not None:
            run = self._move(run, lambda run: run.work is work)

    def withdraw(self, work: W) -> Sequence[Slice]:
        """Remove a batch and return its slices that were not handed out, and will not be."""
        with self._lock:
            self._room.notify_all()
            return self._order.withdraw(work)

    def path_failed(self, paths: PeerPaths[W], path: int, error: MoonpoolError) -> None:
        """Report a failure of a path that was found by other means than a transfer."""
        self._change(partial(self._order.probed, paths, path, error), _keep_none)

    def close(self) -> None:
        """Idempotent. Slices that have not begun end with PeerLost; those under way end by themselves."""
        with self._lock:
            self._closed = True
            self._timer_changed.notify_all()
        self._change(_no_event, _keep_none)
        self.threads.close()

    def join(self, timeout_s: float) -> None:
        """Wait for the threads to end, after close()."""
        self.threads.join(timeout_s)

    def _add(self, work: W, room_timeout_s: float | None, now_s: float) -> Sequence[Ended[W]]:
        if room_timeout_s is not None:
            deadline = Deadline(room_timeout_s, self._clock)
            while not self._closed and not self._order.has_room(work):
                if not self._room.wait(deadline.remaining_s()):
                    raise Overloaded(f"too many transfers are waiting ({work.priority.name.lower()})")
        if self._closed:
            raise PeerLost("the transfer engine is closed")
        self._order.add(work, self._clock.now_s())
        return ()

    def _change(
        self, event: Callable[[float], Sequence[Ended[W]]], keep: Callable[[SliceRun[W]], bool]
    ) -> SliceRun[W] | None:
        """Let the event change the order, settle what ended, and see to it that threads move what may start. Return a
        run for the calling thread, if there is one that it may keep.
        """
        order, ready = self._order, self._ready
        with self._lock:
            ended = [*event(self._clock.now_s())]
            now_s = self._clock.now_s()
            if self._closed:
                ended += self._end_all(now_s)
            if order.paths:
                ended += order.expire(now_s)
            while not self._closed and (run := order.take(now_s)) is not None:
                ready.append(run)
            if order.paths:
                self._look_after_paths(now_s)
            kept = next(filter(keep, ready), None)
            if kept is not None:
                ready.remove(kept)
            num_new = max(0, len(ready) - self._num_starting)
            self._num_starting += num_new
            self._room.notify_all()
        for work, slices, error in ended:
            work.settle(slices, error)
        for _ in range(num_new):
            self.threads.run(self._work)
        return kept

    def _end_all(self, now_s: float) -> list[Ended[W]]:
        """Return everything that has not begun, as ended because the queue was closed."""
        error, ended = PeerLost("the transfer engine was closed"), list[Ended[W]]()
        while self._ready:
            run = self._ready.popleft()
            ended += self._order.finished(run, [SliceOutcome(run.slices, error)], now_s)
        return ended + self._order.withdraw_all(error)

    def _work(self) -> None:
        with self._lock:
            self._num_starting -= 1
            run = self._ready.popleft() if self._ready else None
        while run is not None:
            run = self._move(run, _keep_any)

    def _move(self, run: SliceRun[W], keep: Callable[[SliceRun[W]], bool]) -> SliceRun[W] | None:
        """Move the run, report it, and return the next one for this thread."""
        return self._change(partial(self._order.finished, run, run.work.run(run)), keep)

    def _look_after_paths(self, now_s: float) -> None:
        """Start the probes that are due, and see to it that a timer starts the next ones."""
        for paths, path in self._order.probes_due(now_s):
            self.threads.run(partial(self._probe, paths, path))
        wake_s = self._order.wake_s()
        if self._timer_until_s is None:
            self._timer_until_s = wake_s
            self.threads.run(self._run_timer)
        elif wake_s < self._timer_until_s:
            self._timer_changed.notify_all()

    def _probe(self, paths: PeerPaths[W], path: int) -> None:
        def probe() -> None:
            prober = next(iter(paths.probers), None)
            if prober is None:
                raise PeerLost("no handle is open")
            prober.probe(path, paths.config.slice_timeout_s)

        run = self._change(partial(self._order.probed, paths, path, attempt(probe)), _keep_any)
        while run is not None:
            run = self._move(run, _keep_any)

    def _run_timer(self) -> None:
        """Look after deadlines and probes for as long as a peer with several paths has work."""
        while True:
            with self._lock:
                self._timer_until_s = self._order.wake_s()
                pause_s = max(self._timer_until_s - self._clock.now_s(), 0.0)
                if not self._closed:
                    self._timer_changed.wait(min(pause_s, _LONGEST_WAIT_S))
                if self._closed or not self._order.paths:  # not sooner: small transfers would start a timer each
                    self._timer_until_s = None
                    return
            self._change(_no_event, _keep_none)


def _no_event(now_s: float) -> tuple[()]:
    return ()


def _keep_any(run: object) -> bool:
    return True


def _keep_none(run: object) -> bool:
    return False
