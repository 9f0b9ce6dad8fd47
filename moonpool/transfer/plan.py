"""Cuts transfers into slices and decides which path each slice takes. Pure: the caller owns clock, threads and sockets.

cut_batch() is for peers with one path. A Planner is for a peer with several; it promises:
- A task is done only when every one of its bytes was acknowledged. A slice that failed goes again, on a path it has not
  failed on where there is one; so bytes may be moved twice, always the same ones to the same place.
- A slice goes where it is expected to arrive first, (in flight + slice) / throughput, and is as large as lets all paths
  finish together. A slow path gets no slice that the others would have moved sooner.
- A path that fails rests, twice as long each time up to a bound, and is tried with a probe that carries nobody's bytes,
  then with one small slice, before it carries its share again.
- The peer's own answer (bad range, stale generation, not served) fails the task at once. So does the loss of the last
  path, if it was refused; if it fell silent, probing goes on until the task's deadline, since a frozen peer may return.
- A failed task is reported when none of its slices is under way: the caller's buffers are then untouched.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from moonpool.base.errors import DeadlineExceeded, MoonpoolError, PeerLost
from moonpool.transfer.path_load import PathLoad, PathState, PlanConfig, is_retriable

# Measured over two lanes of loopback tcp: 256 KiB slices move 0.4 GB/s, 1 MiB ones 0.8 to 1.7, 4 MiB ones 1.1 to 1.7.
# The smallest of the good sizes shares a batch most evenly over the lanes.
DEFAULT_SLICE_NBYTES = 1024 * 1024


class Slice(NamedTuple):
    """Bytes start .. start + nbytes of one request of the batch."""

    request: int
    start: int
    nbytes: int


def cut_batch(request_nbytes: Sequence[int], slice_nbytes: int | Sequence[int] = DEFAULT_SLICE_NBYTES) -> list[Slice]:
    """All slices of a batch whose requests have these sizes, none larger than `slice_nbytes` (one for all, or each
    request's own). They cover each request exactly, in order and without overlap; requests keep their order. A request
    of no bytes still has one slice, so that its checks are made and it is reported done.
    """
    limits = [slice_nbytes] * len(request_nbytes) if isinstance(slice_nbytes, int) else slice_nbytes
    assert all(limit > 0 for limit in limits)
    return [
        Slice(request, start, min(limit, nbytes - start))
        for request, (nbytes, limit) in enumerate(zip(request_nbytes, limits, strict=True))
        for start in range(0, max(nbytes, 1), limit)
    ]


def take_run(slices: Sequence[Slice], start: int, slice_nbytes: int = DEFAULT_SLICE_NBYTES) -> int:
    """End of the run that one thread should take from `start` on: at least one slice, together no larger than
    one full slice. Small transfers are thus handed out by the dozen, large ones one by one.
    """
    end, nbytes = start, 0
    while end < len(slices) and (end == start or nbytes + slices[end].nbytes <= slice_nbytes):
        nbytes += slices[end].nbytes
        end += 1
    return end


class Assignment(NamedTuple):
    """Move bytes start .. start + nbytes of the task's request over this path now."""

    task: int
    path: int
    request: int
    start: int
    nbytes: int
    timeout_s: float
    failed_on: frozenset[int]
    attempt: int


class _Piece(NamedTuple):
    """Bytes of a request that wait for a path."""

    request: int
    start: int
    nbytes: int
    failed_on: frozenset[int] = frozenset()
    attempt: int = 0


@dataclass
class _Task:
    deadline_s: float
    pieces: deque[_Piece]
    waiting_nbytes: int
    num_under_way: int = 0
    error: MoonpoolError | None = None


@dataclass
class Planner:
    """Not thread-safe. After any event ask next_assignments(), probes_due() and take_ended(); ask them again, without
    an event, at wake_s(). Every assignment must come back by completed() or failed(), every probe by probed().
    """

    num_paths: int
    config: PlanConfig = field(default_factory=PlanConfig)

    def __post_init__(self) -> None:
        self.paths = [PathLoad(self.config.first_throughput) for _ in range(self.num_paths)]
        self._tasks: dict[int, _Task] = {}
        self._turns: deque[int] = deque()  # tasks with pieces, each served in turn
        self._ended: list[tuple[int, MoonpoolError | None]] = []
        self._waiting_nbytes = 0
        self._num_tasks = 0

    def submit(self, request_nbytes: Sequence[int], deadline_s: float, now_s: float) -> int:
        """A new task of these requests, to be done by `deadline_s`."""
        assert request_nbytes
        self._num_tasks += 1
        pieces = deque(_Piece(request, 0, nbytes) for request, nbytes in enumerate(request_nbytes))
        self._tasks[self._num_tasks] = _Task(deadline_s, pieces, sum(request_nbytes))
        self._turns.append(self._num_tasks)
        self._waiting_nbytes += sum(request_nbytes)
        if all(path.state is PathState.RESTING for path in self.paths):
            for path in self.paths:  # somebody asks: do not let it wait for a rest to end
                path.rest_until_s = now_s
        return self._num_tasks

    def next_assignments(self, now_s: float) -> list[Assignment]:
        """What to start now. Tasks past their deadline fail here."""
        for number, task in list(self._tasks.items()):
            if now_s >= task.deadline_s and task.error is None:
                self._fail(number, DeadlineExceeded(f"not done in time; {self._trouble()}"))
        assignments: list[Assignment] = []
        while (assignment := self._assign(now_s)) is not None:
            assignments.append(assignment)
        return assignments

    def probes_due(self, now_s: float) -> list[int]:
        """Paths to try now with an exchange that moves nobody's bytes; none while there is no task."""
        due = [n for n, path in enumerate(self.paths) if path.state is PathState.RESTING and now_s >= path.rest_until_s]
        if not self._tasks:
            return []
        for number in due:
            self.paths[number].state = PathState.PROBING
        return due

    def wake_s(self) -> float | None:
        """When something may change by itself: a deadline or the end of a rest. None without tasks."""
        if not self._tasks:
            return None
        deadlines = [task.deadline_s for task in self._tasks.values() if task.error is None]
        return min([*deadlines, *(p.rest_until_s for p in self.paths if p.state is PathState.RESTING)], default=None)

    def completed(self, assignment: Assignment, now_s: float) -> None:
        """Its bytes were acknowledged."""
        path = self.paths[assignment.path]
        path.ended(assignment.nbytes, now_s)
        path.arrived(assignment.nbytes, self.config)
        self._tasks[assignment.task].num_under_way -= 1
        self._end_if_over(assignment.task)

    def failed(self, assignment: Assignment, error: MoonpoolError, now_s: float) -> None:
        """Its bytes may have arrived or not."""
        path, task = self.paths[assignment.path], self._tasks[assignment.task]
        path.ended(assignment.nbytes, now_s)
        task.num_under_way -= 1
        if not is_retriable(error):
            self._fail(assignment.task, error)
            return
        # A slice that the task's own deadline cut short says nothing about the path.
        if assignment.timeout_s >= 4 * self.config.slice_s or not isinstance(error, DeadlineExceeded):
            path.broke(error, now_s, self.config)
        if assignment.attempt + 1 >= self.config.max_attempts:
            self._fail(assignment.task, error)
        elif task.error is None:
            self._requeue(assignment)
        self._fail_if_cut_off()
        self._end_if_over(assignment.task)

    def probed(self, path: int, error: MoonpoolError | None, now_s: float) -> None:
        """How a probe went. An answer is an answer: a refusal shows that the path works."""
        load = self.paths[path]
        if error is not None and is_retriable(error):
            if load.state is PathState.PROBING or load.usable:
                load.broke(error, now_s, self.config)
            self._fail_if_cut_off()
        elif load.state is PathState.PROBING:
            load.state, load.error = PathState.TRIAL, None

    def fail_all(self, error: MoonpoolError) -> None:
        """Gives up on every task."""
        for number in list(self._tasks):
            self._fail(number, error)

    def take_ended(self) -> list[tuple[int, MoonpoolError | None]]:
        """Tasks that ended since the last call: done (None), or failed. Nothing of them is under way."""
        ended, self._ended = self._ended, []
        return ended

    def check_integrity(self) -> None:
        """AssertionError when the books do not balance."""
        assert self._waiting_nbytes == sum(task.waiting_nbytes for task in self._tasks.values())
        assert sum(p.num_under_way for p in self.paths) == sum(t.num_under_way for t in self._tasks.values())
        assert sorted(self._turns) == sorted(n for n, task in self._tasks.items() if task.pieces)
        for task in self._tasks.values():
            assert task.waiting_nbytes == sum(piece.nbytes for piece in task.pieces)
            assert task.error is None or not task.pieces
            assert task.pieces or task.num_under_way, "an ended task was kept"
            spans = sorted((piece.request, piece.start, piece.nbytes) for piece in task.pieces)
            assert all(a[0] < b[0] or a[1] + a[2] <= b[1] for a, b in pairwise(spans))
        for path in self.paths:
            assert 0 <= path.num_under_way <= self.config.slices_per_path
            assert path.in_flight_nbytes >= 0
            assert path.throughput > 0

    def _assign(self, now_s: float) -> Assignment | None:
        for _ in range(len(self._turns)):
            number = self._turns[0]
            task = self._tasks[number]
            piece = task.pieces[0]
            choice = self._choose(piece)
            if choice is not None:
                return self._start(number, task, piece, *choice, now_s)
            self._turns.rotate(-1)
        return None

    def _choose(self, piece: _Piece) -> tuple[int, int] | None:
        """(path, nbytes) for the head of the piece; None when it had better wait."""
        usable = [(number, path) for number, path in enumerate(self.paths) if path.usable]
        untried = [(number, path) for number, path in usable if number not in piece.failed_on]
        best: tuple[float, int, int] | None = None
        for number, path in untried or usable:
            if path.num_under_way < (self.config.slices_per_path if path.state is PathState.UP else 1):
                nbytes = self._slice_nbytes(path, piece.nbytes, usable)
                finish_s = (path.in_flight_nbytes + nbytes) / path.throughput
                best = min(best or (finish_s, number, nbytes), (finish_s, number, nbytes))
        if best is None:
            return None
        # Idle ones are no reason to wait: nothing would happen. Busy ones report, and this is asked again.
        others = [path for number, path in untried or usable if number != best[1] and path.num_under_way]
        if others and best[0] > _together_s(others, self._waiting_nbytes):
            return None  # they will have moved everything, this included, before that path had
        return best[1], best[2]

    def _slice_nbytes(self, path: PathLoad, piece_nbytes: int, usable: Iterable[tuple[int, PathLoad]]) -> int:
        """The path's share of what waits if all are to finish together, within its limits; no crumbs are left."""
        low = self.config.min_slice_nbytes
        if path.state is PathState.TRIAL:
            return min(piece_nbytes, low)
        high = min(max(int(path.throughput * self.config.slice_s), low), self.config.max_slice_nbytes)
        finish_s = _together_s([load for _, load in usable], self._waiting_nbytes)
        share = int(finish_s * path.throughput) - path.in_flight_nbytes
        nbytes = min(max(share, low), high)
        return piece_nbytes if piece_nbytes < nbytes + low else nbytes

    def _start(self, number: int, task: _Task, piece: _Piece, path: int, nbytes: int, now_s: float) -> Assignment:
        if nbytes < piece.nbytes:
            task.pieces[0] = piece._replace(start=piece.start + nbytes, nbytes=piece.nbytes - nbytes)
        else:
            task.pieces.popleft()
        self._turns.popleft()
        if task.pieces:
            self._turns.append(number)
        task.waiting_nbytes -= nbytes
        self._waiting_nbytes -= nbytes
        task.num_under_way += 1
        self.paths[path].started(nbytes, now_s)
        # Half of what is left, so that there is time for another path after a silent one.
        timeout_s = min(self.config.slice_timeout_s, (task.deadline_s - now_s) / 2)
        return Assignment(number, path, piece.request, piece.start, nbytes, timeout_s, piece.failed_on, piece.attempt)

    def _requeue(self, lost: Assignment) -> None:
        task = self._tasks[lost.task]
        failed_on = lost.failed_on | {lost.path}
        if not task.pieces:
            self._turns.append(lost.task)
        task.pieces.appendleft(_Piece(lost.request, lost.start, lost.nbytes, failed_on, lost.attempt + 1))
        task.waiting_nbytes += lost.nbytes
        self._waiting_nbytes += lost.nbytes

    def _fail_if_cut_off(self) -> None:
        """Fails every task when all paths were refused. Silence is waited out until the deadlines."""
        if all(p.state is PathState.RESTING and not isinstance(p.error, DeadlineExceeded) for p in self.paths):
            latest = max(self.paths, key=lambda path: path.rest_until_s)
            self.fail_all(latest.error or PeerLost("no path is left"))

    def _fail(self, number: int, error: MoonpoolError) -> None:
        task = self._tasks[number]
        task.error = task.error or error
        if task.pieces:
            self._turns.remove(number)
        task.pieces.clear()
        self._waiting_nbytes -= task.waiting_nbytes
        task.waiting_nbytes = 0
        self._end_if_over(number)

    def _end_if_over(self, number: int) -> None:
        task = self._tasks.get(number)
        if task is not None and not task.pieces and not task.num_under_way:
            del self._tasks[number]
            self._ended.append((number, task.error))

    def _trouble(self) -> str:
        errors = [f"path {number}: {path.error}" for number, path in enumerate(self.paths) if path.error is not None]
        return "; ".join(errors) or "no path failed"


def _together_s(paths: Sequence[PathLoad], waiting_nbytes: int) -> float:
    """When these paths would have moved all that waits beside what they have in flight."""
    in_flight_nbytes = sum(path.in_flight_nbytes for path in paths)
    return (in_flight_nbytes + waiting_nbytes) / sum(path.throughput for path in paths)
