"""What waits for one peer, and the runs that are cut from it; here for a peer with one path. Pure.

A batch waits as a list of slices for each of its peers. A run is what one thread moves at once: small slices together,
or a part of a large one. Each byte is handed out once, or returned by withdraw(). A request that has failed is not
moved any further: its waiting slices end with the same error.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from moonpool.base.errors import MoonpoolError
from moonpool.transfer.paths.priority import Priority

# Measured over two lanes of loopback tcp: 256 KiB slices move 0.4 GB/s, 1 MiB ones 0.8 to 1.7, 4 MiB ones 1.1 to 1.7.
# The smallest of the good sizes shares a batch most evenly over the lanes.
DEFAULT_SLICE_NBYTES = 1024 * 1024
MAX_RUN_SLICES = 512  # tiny slices take about 10 us each: a run ends in some milliseconds, and others are served


class Slice(NamedTuple):
    """Bytes start .. start + nbytes of one request of the batch."""

    request: int
    start: int
    nbytes: int


class SliceOutcome(NamedTuple):
    """How slices of a run ended; None: their bytes were acknowledged."""

    slices: Sequence[Slice]
    error: MoonpoolError | None


class QueuedBatch(Protocol):
    @property
    def priority(self) -> Priority: ...
    @property
    def slices_of_peers(self) -> Mapping[Hashable, list[Slice]]:
        """The slices for each peer, those of one request side by side. The order takes the lists over."""
        ...

    @property
    def run_nbytes(self) -> int:
        """The most bytes of one run to a peer with one path; larger slices are cut."""
        ...

    @property
    def deadline_s(self) -> float:
        """When to give up slices that no path can move."""
        ...

    @property
    def wants_retry(self) -> bool:
        """Whether slices that a path lost are to be moved by another; False once the batch is cancelled."""
        ...

    def run(self, run: SliceRun[Any], /) -> Sequence[SliceOutcome]:
        """Move these slices and return the outcome of each. Must not raise."""
        ...

    def settle(self, slices: Sequence[Slice], error: MoonpoolError | None, /) -> None:
        """Record that these slices have ended. Nothing touches their buffers any more."""
        ...


W = TypeVar("W", bound=QueuedBatch)


class SliceRun(NamedTuple, Generic[W]):
    """Slices of one batch for one peer, to be moved together by one thread, within `timeout_s`. `path` is None for a
    peer with one path; what follows is for PeerPaths.
    """

    work: W
    slices: Sequence[Slice]
    peer: Hashable
    path: int | None = None
    timeout_s: float = math.inf
    nbytes: int = 0
    since_s: float = 0.0
    failed_on: frozenset[int] = frozenset()
    attempt: int = 0


class Ended(NamedTuple, Generic[W]):
    """Slices to settle()."""

    work: W
    slices: Sequence[Slice]
    error: MoonpoolError | None


class WaitingSlices:
    """Slices of a batch that wait together; those that a path lost are a piece of their own."""

    __slots__ = ("attempt", "failed_on", "next_slice", "since_s", "slices")

    def __init__(
        self, slices: list[Slice], since_s: float, failed_on: frozenset[int] = frozenset(), attempt: int = 0
    ) -> None:
        self.slices = slices
        self.since_s = since_s
        self.failed_on = failed_on
        self.attempt = attempt
        self.next_slice = 0

    @property
    def is_empty(self) -> bool:
        return self.next_slice == len(self.slices)

    def take_run(self, nbytes: int) -> list[Slice]:
        """Remove and return what one thread should move: at least one slice, together no more than `nbytes`. So threads
        take small slices by the hundred; a slice that is larger is cut, and the rest of it stays.
        """
        slices, start = self.slices, self.next_slice
        head = slices[start]
        if head.nbytes > nbytes:
            slices[start] = Slice(head.request, head.start + nbytes, head.nbytes - nbytes)
            return [Slice(head.request, head.start, nbytes)]
        self.next_slice = end = self._end_of_run(nbytes)
        return slices[start:end]

    def take_requests(self, requests: set[int]) -> list[Slice]:
        """Remove and return the leading slices that belong to these requests."""
        start = self.next_slice
        while not self.is_empty and self.slices[self.next_slice].request in requests:
            self.next_slice += 1
        return self.slices[start : self.next_slice]

    def nbytes_up_to(self, nbytes: int) -> int:
        """Return the size of the run that could be taken, or `nbytes` if that is less."""
        found = 0
        for at in range(self.next_slice, min(len(self.slices), self.next_slice + MAX_RUN_SLICES)):
            found += self.slices[at].nbytes
            if found >= nbytes:
                return nbytes
        return found

    def waiting(self) -> list[Slice]:
        return self.slices[self.next_slice :]

    def _end_of_run(self, nbytes: int) -> int:
        limit = min(len(self.slices), self.next_slice + MAX_RUN_SLICES)
        left = nbytes
        for end in range(self.next_slice, limit):
            left -= self.slices[end].nbytes
            if left < 0:
                return end
        return limit


class PeerQueue(Generic[W]):
    """What waits for one peer. This class is for a peer with one path: any of its `max_runs` threads takes the next
    run, and batches of one priority are served in order of arrival.
    """

    def __init__(self, max_runs: int) -> None:
        self.waiting: list[OrderedDict[W, deque[WaitingSlices]]] = [OrderedDict() for _ in Priority]
        self.num_slices = [0] * len(Priority)  # that wait; a large one counts as what it will be cut into
        self.num_runs = 0  # under way
        self._max_runs = max_runs

    def can_start(self) -> bool:
        """Return whether take() may find a run, if something waits."""
        return self.num_runs < self._max_runs

    @property
    def is_idle(self) -> bool:
        return not self.num_runs and not any(self.waiting)

    def add(self, work: W, slices: list[Slice], now_s: float) -> None:
        self._put_piece(work, WaitingSlices(slices, now_s))

    def take(self, peer: Hashable, priority: Priority, now_s: float) -> SliceRun[W] | None:
        """Return the next run of this priority, of which something waits; None if nothing of it may start now."""
        work, pieces = next(iter(self.waiting[priority].items()))
        return SliceRun(work, self._take_run(work, pieces, work.run_nbytes), peer)

    def finished(self, run: SliceRun[W], outcomes: Sequence[SliceOutcome], now_s: float) -> list[Ended[W]]:
        """Record the end of a run. Return the slices that ended with it."""
        self.num_runs -= 1
        return [self._end(run.work, outcome) for outcome in outcomes]

    def withdraw(self, work: W) -> list[Slice]:
        """Remove the batch and return its slices that wait."""
        left = [part for piece in self.waiting[work.priority].pop(work, ()) for part in piece.waiting()]
        self._removed(work, left)
        return left

    def check_integrity(self) -> None:
        """Raise AssertionError when the counters do not match what waits."""
        for batches, num_slices in zip(self.waiting, self.num_slices, strict=True):
            pieces = [(work, piece) for work, of_batch in batches.items() for piece in of_batch]
            assert all(batches.values())
            assert all(not piece.is_empty for _, piece in pieces)
            assert num_slices == sum(count_slices(piece.waiting(), work.run_nbytes) for work, piece in pieces)
        assert 0 <= self.num_runs <= self._max_runs
        assert not self.is_idle, "a peer without work was kept"

    def _take_run(self, work: W, pieces: deque[WaitingSlices], nbytes: int) -> list[Slice]:
        """Remove a run of at most `nbytes` from the batch's first piece; it is under way from now on."""
        piece, start = pieces[0], pieces[0].next_slice
        run = piece.take_run(nbytes)
        num_taken = len(run)
        if nbytes != work.run_nbytes:
            num_taken = count_slices(run, work.run_nbytes)
            if piece.next_slice == start:
                rest, [taken] = piece.slices[start], run
                whole = Slice(rest.request, taken.start, taken.nbytes + rest.nbytes)
                num_taken = count_slices([whole], work.run_nbytes) - count_slices([rest], work.run_nbytes)
        if piece.is_empty:
            pieces.popleft()
            if not pieces:
                del self.waiting[work.priority][work]
        self.num_slices[work.priority] -= num_taken
        self.num_runs += 1
        return run

    def _end(self, work: W, outcome: SliceOutcome) -> Ended[W]:
        """Return the slices as ended; of requests that failed, those that wait, too."""
        slices, error = outcome
        pieces = None if error is None else self.waiting[work.priority].get(work)
        if pieces is None:
            return Ended(work, slices, error)
        # Requests are taken in their order, so only the first one that waits can have been begun.
        rest = pieces[-1].take_requests({part.request for part in slices})
        self._removed(work, rest)
        if pieces[-1].is_empty:
            pieces.pop()
            if not pieces:
                del self.waiting[work.priority][work]
        return Ended(work, [*slices, *rest], error)

    def _put_piece(self, work: W, piece: WaitingSlices) -> None:
        self.waiting[work.priority].setdefault(work, deque()).appendleft(piece)
        self._added(work, piece.slices)

    def _added(self, work: W, slices: Sequence[Slice]) -> None:
        self.num_slices[work.priority] += count_slices(slices, work.run_nbytes)

    def _removed(self, work: W, slices: Sequence[Slice]) -> None:
        """Record that these slices left the queue without being part of a run."""
        self.num_slices[work.priority] -= count_slices(slices, work.run_nbytes)


def count_slices(slices: Sequence[Slice], max_nbytes: int) -> int:
    """Return how many slices there are after those over `max_nbytes` are cut."""
    return len(slices) + sum([(nbytes - 1) // max_nbytes for _, _, nbytes in slices if nbytes > max_nbytes])
