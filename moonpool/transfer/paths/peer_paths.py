"""A peer with several paths: which path moves the next slice, what is tried again, which path rests. Pure.

It promises:
- A request is done only when every one of its bytes was acknowledged. A slice that failed is sent again, by a path it
  has not failed on if there is one; so bytes may be moved twice, always the same ones to the same place.
- A slice takes the path where it is expected to arrive first, (in flight + slice) / throughput. Its size is such that
  all paths finish together. A slow path gets no slice that the others would have moved sooner.
- Secondary paths carry nothing while a preferred path is up, or could be tried with a slice; except slices that failed
  on the preferred paths.
- A path that fails rests, twice as long each time up to a bound. Then it is tried with a probe that carries no batch's
  bytes, then with one small slice, before it carries its share again.
- The peer's own answer (bad range, stale generation, not served) is final. When the last path is refused, all that
  waits fails at once; when it falls silent, probing goes on until the deadlines, since a frozen peer may return.
- Batches of one priority are served round-robin: callers of read_into() and write_from() wait here, too, and share.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple, Protocol
from weakref import WeakSet

from moonpool.base.errors import Cancelled, DeadlineExceeded, MoonpoolError, PeerLost
from moonpool.transfer.paths.path_load import PathLoad, PathState, PlanConfig, is_retriable
from moonpool.transfer.paths.peer_queue import Ended, PeerQueue, Slice, SliceOutcome, SliceRun, W, WaitingSlices
from moonpool.transfer.paths.priority import Priority

# Batches for which a free path is considered in a row. When none can use it something is under way, and the next ones
# are considered when that ends.
_MAX_TRIES = 16


class PathReport(NamedTuple):
    """The state of one path; throughput in bytes per second."""

    endpoint: str
    state: PathState
    throughput: float
    in_flight_nbytes: int
    done_nbytes: int
    num_failures: int
    is_secondary: bool = False


class PathProber(Protocol):
    def probe(self, path: int, timeout_s: float) -> None:
        """Make a round trip on this path that moves no bytes."""
        ...


class PeerPaths(PeerQueue[W]):
    """The paths to one peer and what waits for them. Its own key in `QueuedBatch.slices_of_peers`.

    After any event ask SliceOrder.take() and probes_due(); ask them again, and expire(), without an event at wake_s().
    Every probe must come back by probed().
    """

    def __init__(self, endpoints: Sequence[str], config: PlanConfig, *, num_secondary: int = 0) -> None:
        """The last `num_secondary` endpoints are used only when the others fail."""
        assert 0 <= num_secondary < len(endpoints)
        super().__init__(config.slices_per_path * len(endpoints))
        self.endpoints = tuple(endpoints)
        self.config = config
        self.probers: WeakSet[PathProber] = WeakSet()  # open handles; any of them can probe for all
        self.paths = [PathLoad(config.first_throughput) for _ in endpoints]
        self._num_preferred = len(endpoints) - num_secondary
        self._waiting_nbytes = [0] * len(Priority)
        self._next_deadline_s = math.inf  # no batch that waits has an earlier one

    def can_start(self) -> bool:
        return any(path.usable and path.num_under_way < self._limit(path) for path in self.paths)

    def add(self, work: W, slices: list[Slice], now_s: float) -> None:
        super().add(work, slices, now_s)
        if all(path.state is PathState.RESTING for path in self.paths):
            for path in self.paths:  # do not let a new batch wait for the end of a rest
                path.rest_until_s = now_s

    def take(self, peer: Hashable, priority: Priority, now_s: float) -> SliceRun[W] | None:
        batches = self.waiting[priority]
        waiting_nbytes = sum(self._waiting_nbytes[: priority + 1])  # of this priority and higher ones
        for _ in range(min(len(batches), _MAX_TRIES)):
            work, pieces = next(iter(batches.items()))
            piece = pieces[0]
            choice = self._choose(piece, waiting_nbytes)
            batches.move_to_end(work)
            if choice is not None:
                path, nbytes = choice
                slices = self._take_run(work, pieces, nbytes)
                nbytes = _nbytes_of(slices)
                self._waiting_nbytes[priority] -= nbytes
                self.paths[path].started(nbytes, now_s)
                # Half of what is left, so that there is time for another path after a silent one.
                timeout_s = min(self.config.slice_timeout_s, (work.deadline_s - now_s) / 2)
                return SliceRun(
                    work, slices, peer, path, timeout_s, nbytes, piece.since_s, piece.failed_on, piece.attempt
                )
        return None

    def finished(self, run: SliceRun[W], outcomes: Sequence[SliceOutcome], now_s: float) -> list[Ended[W]]:
        assert run.path is not None
        path = self.paths[run.path]
        path.ended(run.nbytes, now_s)
        lost = [each for each in outcomes if each.error is not None and is_retriable(each.error)]
        kept = [each for each in outcomes if each.error is None or not is_retriable(each.error)]
        if lost:
            # A timeout cut short by the batch's own deadline says nothing about the path.
            is_cut_short = run.timeout_s < 4 * self.config.slice_s or now_s >= run.work.deadline_s
            failure = lost[0].error
            if failure is not None and not (is_cut_short and isinstance(failure, DeadlineExceeded)):
                path.broke(failure, now_s, self.config)
        elif any(each.error is None for each in kept):
            path.arrived(sum(_nbytes_of(each.slices) for each in kept if each.error is None), self.config)
        ended = super().finished(run, kept, now_s)
        for outcome in lost:
            ended += self._retry(run, outcome, now_s)
        return ended + self._end_if_cut_off()

    def expire(self, now_s: float) -> list[Ended[W]]:
        """End what waits past its deadline."""
        if now_s < self._next_deadline_s:
            return []
        works = [work for batches in self.waiting for work in batches]
        self._next_deadline_s = min((w.deadline_s for w in works if w.deadline_s > now_s), default=math.inf)
        return self._end_all(
            [work for work in works if work.deadline_s <= now_s],
            DeadlineExceeded(f"not done in time; {self._path_errors()}"),
        )

    def probes_due(self, now_s: float) -> list[int]:
        """Return the paths to probe now, by an exchange that moves no bytes of a batch; none without work."""
        if self.is_idle:
            return []
        due = [n for n, path in enumerate(self.paths) if path.state is PathState.RESTING and now_s >= path.rest_until_s]
        for number in due:
            self.paths[number].state = PathState.PROBING
        return due

    def probed(self, path: int, error: MoonpoolError | None, now_s: float) -> list[Ended[W]]:
        """Record the result of a probe. A refusal by the peer shows that the path works."""
        load = self.paths[path]
        if error is not None and is_retriable(error):
            if load.state is PathState.PROBING or load.usable:
                load.broke(error, now_s, self.config)
            return self._end_if_cut_off()
        if load.state is PathState.PROBING:
            load.state, load.error = PathState.TRIAL, None
        return []

    def wake_s(self) -> float:
        """Return when to look again without an event: a deadline or the end of a rest; inf without work."""
        if self.is_idle:
            return math.inf
        rests = [path.rest_until_s for path in self.paths if path.state is PathState.RESTING]
        return min([*rests, self._next_deadline_s])

    def report(self) -> list[PathReport]:
        return [
            PathReport(
                self.endpoints[number], path.state, path.throughput, path.in_flight_nbytes, path.done_nbytes,
                path.num_failures, number >= self._num_preferred,
            )
            for number, path in enumerate(self.paths)
        ]  # fmt: skip

    def check_integrity(self) -> None:
        super().check_integrity()
        assert self.num_runs == sum(path.num_under_way for path in self.paths)
        for batches, nbytes in zip(self.waiting, self._waiting_nbytes, strict=True):
            assert nbytes == sum(_nbytes_of(piece.waiting()) for pieces in batches.values() for piece in pieces)
            assert all(work.deadline_s >= self._next_deadline_s for work in batches)
        for path in self.paths:
            assert 0 <= path.num_under_way <= self.config.slices_per_path
            assert path.in_flight_nbytes >= 0
            assert path.throughput > 0

    def _choose(self, piece: WaitingSlices, waiting_nbytes: int) -> tuple[int, int] | None:
        """Return (path, nbytes) for the start of the piece; None when it should wait."""
        piece_nbytes = piece.nbytes_up_to(self.config.max_slice_nbytes + self.config.min_slice_nbytes)
        candidates = self._candidates(piece)
        best: tuple[float, int, int] | None = None
        for number, path in candidates:
            if path.num_under_way < self._limit(path):
                nbytes = self._slice_nbytes(path, piece_nbytes, candidates, waiting_nbytes)
                finish_s = (path.in_flight_nbytes + nbytes) / path.throughput
                best = min(best or (finish_s, number, nbytes), (finish_s, number, nbytes))
        if best is None:
            return None
        # Wait for busy paths only: they report when they are done, and then the choice is made again.
        others = [path for number, path in candidates if number != best[1] and path.num_under_way]
        if others and best[0] > _finish_together_s(others, waiting_nbytes):
            return None  # the others will have moved everything, this piece included, before the best free path
        return best[1], best[2]

    def _candidates(self, piece: WaitingSlices) -> list[tuple[int, PathLoad]]:
        """Return the paths that may carry the piece: those it has not failed on, else all; preferred ones first."""
        usable = [(number, path) for number, path in enumerate(self.paths) if path.usable]
        untried = [(number, path) for number, path in usable if number not in piece.failed_on]
        group = untried or usable
        preferred = [(number, path) for number, path in group if number < self._num_preferred]
        secondary = group[len(preferred) :]
        # A path that is busy with its trial slice may fail again: do not wait for it if a secondary path is up.
        if secondary and not any(path.state is PathState.UP or not path.num_under_way for _, path in preferred):
            return secondary
        return preferred

    def _limit(self, path: PathLoad) -> int:
        return self.config.slices_per_path if path.state is PathState.UP else 1

    def _slice_nbytes(
        self, path: PathLoad, piece_nbytes: int, usable: Iterable[tuple[int, PathLoad]], waiting_nbytes: int
    ) -> int:
        """Return the path's share of what waits if all paths finish together, within its limits; leave no tiny rest."""
        low = self.config.min_slice_nbytes
        if path.state is PathState.TRIAL:
            return min(piece_nbytes, low)
        high = min(max(int(path.throughput * self.config.slice_s), low), self.config.max_slice_nbytes)
        finish_s = _finish_together_s([load for _, load in usable], waiting_nbytes)
        share = int(finish_s * path.throughput) - path.in_flight_nbytes
        nbytes = min(max(share, low), high)
        return piece_nbytes if piece_nbytes < nbytes + low else nbytes

    def _retry(self, run: SliceRun[W], lost: SliceOutcome, now_s: float) -> list[Ended[W]]:
        """Let slices that their path lost wait for another one, or end them."""
        assert run.path is not None
        if not run.work.wants_retry:
            return [self._end(run.work, SliceOutcome(lost.slices, Cancelled("the transfer was cancelled")))]
        if run.attempt + 1 >= self.config.max_attempts or now_s >= run.work.deadline_s:
            return [self._end(run.work, lost)]
        self._put_piece(
            run.work, WaitingSlices(list(lost.slices), run.since_s, run.failed_on | {run.path}, run.attempt + 1)
        )
        return []

    def _end_if_cut_off(self) -> list[Ended[W]]:
        """End all that waits when every path was refused. With a silent path wait until the deadlines."""
        if not all(p.state is PathState.RESTING and not isinstance(p.error, DeadlineExceeded) for p in self.paths):
            return []
        latest = max(self.paths, key=lambda path: path.rest_until_s)
        works = [work for batches in self.waiting for work in batches]
        return self._end_all(works, latest.error or PeerLost("no path is left"))

    def _end_all(self, works: Sequence[W], error: MoonpoolError) -> list[Ended[W]]:
        return [Ended(work, self.withdraw(work), error) for work in works]

    def _put_piece(self, work: W, piece: WaitingSlices) -> None:
        super()._put_piece(work, piece)
        self._next_deadline_s = min(self._next_deadline_s, work.deadline_s)

    def _added(self, work: W, slices: Sequence[Slice]) -> None:
        super()._added(work, slices)
        self._waiting_nbytes[work.priority] += _nbytes_of(slices)

    def _removed(self, work: W, slices: Sequence[Slice]) -> None:
        super()._removed(work, slices)
        self._waiting_nbytes[work.priority] -= _nbytes_of(slices)

    def _path_errors(self) -> str:
        errors = [f"path {number}: {path.error}" for number, path in enumerate(self.paths) if path.error is not None]
        return "; ".join(errors) or "no path failed"


def _nbytes_of(slices: Iterable[Slice]) -> int:
    return sum(part.nbytes for part in slices)


def _finish_together_s(paths: Sequence[PathLoad], waiting_nbytes: int) -> float:
    """Return in how many seconds these paths would move all that waits and all that they have in flight."""
    in_flight_nbytes = sum(path.in_flight_nbytes for path in paths)
    return (in_flight_nbytes + waiting_nbytes) / sum(path.throughput for path in paths)
