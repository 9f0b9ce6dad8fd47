"""Cuts transfers into slices and decides which path each slice takes. Pure: the caller owns clock, threads and sockets.

cut_batch() is for peers with one path. A Planner is for one peer with several paths; it promises:
- A task is done only when every one of its bytes was acknowledged. A slice that failed is sent again, by a path it has
  not failed on if there is one; so bytes may be moved twice, always the same ones to the same place.
- A slice takes the path where it is expected to arrive first, (in flight + slice) / throughput. Its size is such that
  all paths finish together. A slow path gets no slice that the others would have moved sooner.
- Secondary paths carry nothing while a preferred path is up, or could be tried with a slice; except slices that failed
  on the preferred paths.
- A path that fails rests, twice as long each time up to a bound. Then it is tried with a probe that carries no task's
  bytes, then with one small slice, before it carries its share again.
- The peer's own answer (bad range, stale generation, not served) fails the task at once. So does the loss of the last
  path, if it was refused; if it fell silent, probing goes on until the task's deadline, since a frozen peer may return.
- A task of higher priority goes first; tasks of one priority are served round-robin. PriorityOrder prevents starvation.
- A failed or cancelled task is reported when none of its slices is under way: nothing touches its buffers after that.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from moonpool.base.errors import Cancelled, DeadlineExceeded, MoonpoolError, PeerLost
from moonpool.transfer.paths.path_load import PathLoad, PathState, PlanConfig, is_retriable
from moonpool.transfer.paths.priority import Priority, PriorityOrder

# Measured over two lanes of loopback tcp: 256 KiB slices move 0.4 GB/s, 1 MiB ones 0.8 to 1.7, 4 MiB ones 1.1 to 1.7.
# The smallest of the good sizes shares a batch most evenly over the lanes.
DEFAULT_SLICE_NBYTES = 1024 * 1024
MAX_RUN_SLICES = 512  # tiny slices take about 10 us each: a run ends in some milliseconds, and others are served
# Tasks for which a free path is considered in a row. When none can use it something is under way, and the next tasks
# are considered when that ends.
_MAX_TRIES = 16


class Slice(NamedTuple):
    """Bytes start .. start + nbytes of one request of the batch."""

    request: int
    start: int
    nbytes: int


def cut_batch(request_nbytes: Sequence[int], slice_nbytes: int | Sequence[int] = DEFAULT_SLICE_NBYTES) -> list[Slice]:
    """Return all slices of a batch whose requests have these sizes. None is larger than `slice_nbytes` (one limit for
    all, or each request's own). They cover each request exactly, in order and without overlap; requests keep their
    order. A request of no bytes still has one slice, so that its checks are made and it is reported done.
    """
    limits = [slice_nbytes] * len(request_nbytes) if isinstance(slice_nbytes, int) else slice_nbytes
    slices: list[Slice] = []
    for request, (nbytes, limit) in enumerate(zip(request_nbytes, limits, strict=True)):
        assert limit > 0
        if nbytes <= limit:
            slices.append(Slice(request, 0, nbytes))  # the common case; it must be cheap
        else:
            slices += (Slice(request, at, min(limit, nbytes - at)) for at in range(0, nbytes, limit))
    return slices


def take_run(slices: Sequence[Slice], start: int, slice_nbytes: int = DEFAULT_SLICE_NBYTES) -> int:
    """Return the end of the run that one thread should take from `start` on: at least one slice, together no larger
    than one full slice. So threads take small transfers by the hundred and large ones one by one.
    """
    nbytes = 0
    limit = min(len(slices), start + MAX_RUN_SLICES)
    for end in range(start, limit):
        nbytes += slices[end].nbytes
        if nbytes > slice_nbytes and end > start:
            return end
    return limit


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
    priority: Priority
    submitted_s: float
    deadline_s: float
    pieces: deque[_Piece]
    waiting_nbytes: int
    cancelled: bool = False
    num_under_way: int = 0
    error: MoonpoolError | None = None


@dataclass
class Planner:
    """Not thread-safe. After any event ask next_assignments(), probes_due() and take_ended(); ask them again, without
    an event, at wake_s(). Every assignment must come back by completed() or failed(), every probe by probed().
    """

    num_paths: int
    config: PlanConfig = field(default_factory=PlanConfig)
    num_secondary: int = 0  # of the paths, the last ones

    def __post_init__(self) -> None:
        assert 0 <= self.num_secondary < self.num_paths
        self.paths = [PathLoad(self.config.first_throughput) for _ in range(self.num_paths)]
        self._tasks: dict[int, _Task] = {}
        self._queues: list[deque[int]] = [deque() for _ in Priority]  # tasks with pieces, served in turn
        self._priorities = PriorityOrder(self.config.promote_after_s)
        self._deadlines: list[tuple[float, int]] = []  # a heap; those of tasks that ended stay until they are on top
        self._ended: list[tuple[int, MoonpoolError | None]] = []
        self._waiting_nbytes = [0] * len(Priority)
        self._num_tasks = 0

    def submit(
        self, request_nbytes: Sequence[int], deadline_s: float, now_s: float, priority: Priority = Priority.PREFETCH
    ) -> int:
        """Add a task of these requests, to be done by `deadline_s`, and return its number."""
        assert request_nbytes
        self._num_tasks += 1
        pieces = deque(_Piece(request, 0, nbytes) for request, nbytes in enumerate(request_nbytes))
        self._tasks[self._num_tasks] = _Task(priority, now_s, deadline_s, pieces, sum(request_nbytes))
        self._queues[priority].append(self._num_tasks)
        self._add_deadline(deadline_s, self._num_tasks)
        self._waiting_nbytes[priority] += sum(request_nbytes)
        if all(path.state is PathState.RESTING for path in self.paths):
            for path in self.paths:  # do not let a new task wait for the end of a rest
                path.rest_until_s = now_s
        return self._num_tasks

    def next_assignments(self, now_s: float) -> list[Assignment]:
        """Return what to start now. Tasks past their deadline fail here."""
        while (deadline := self._next_deadline()) is not None and now_s >= deadline[0]:
            self._fail(deadline[1], DeadlineExceeded(f"not done in time; {self._path_errors()}"))
        assignments: list[Assignment] = []
        while (assignment := self._assign(now_s)) is not None:
            assignments.append(assignment)
        return assignments

    def probes_due(self, now_s: float) -> list[int]:
        """Return the paths to probe now, by an exchange that moves no bytes of a task; none without tasks."""
        due = [n for n, path in enumerate(self.paths) if path.state is PathState.RESTING and now_s >= path.rest_until_s]
        if not self._tasks:
            return []
        for number in due:
            self.paths[number].state = PathState.PROBING
        return due

    def wake_s(self) -> float | None:
        """Return when to call again without an event: a deadline or the end of a rest. None without tasks."""
        if not self._tasks:
            return None
        times = [path.rest_until_s for path in self.paths if path.state is PathState.RESTING]
        deadline = self._next_deadline()
        return min([*times, deadline[0]] if deadline is not None else times, default=None)

    def completed(self, assignment: Assignment, now_s: float) -> None:
        """The bytes of the assignment were acknowledged."""
        path = self.paths[assignment.path]
        path.ended(assignment.nbytes, now_s)
        path.arrived(assignment.nbytes, self.config)
        self._tasks[assignment.task].num_under_way -= 1
        self._end_if_over(assignment.task)

    def failed(self, assignment: Assignment, error: MoonpoolError, now_s: float) -> None:
        """The assignment failed; its bytes may have arrived or not."""
        path, task = self.paths[assignment.path], self._tasks[assignment.task]
        path.ended(assignment.nbytes, now_s)
        task.num_under_way -= 1
        if not is_retriable(error):
            self._fail(assignment.task, error)
            return
        # A timeout cut short by the task's own deadline says nothing about the path.
        if assignment.timeout_s >= 4 * self.config.slice_s or not isinstance(error, DeadlineExceeded):
            path.broke(error, now_s, self.config)
        if task.cancelled:
            self._fail(assignment.task, _cancelled())
        elif assignment.attempt + 1 >= self.config.max_attempts:
            self._fail(assignment.task, error)
        elif task.error is None:
            self._requeue(assignment)
        self._fail_if_cut_off()
        self._end_if_over(assignment.task)

    def probed(self, path: int, error: MoonpoolError | None, now_s: float) -> None:
        """Record the result of a probe. A refusal by the peer shows that the path works."""
        load = self.paths[path]
        if error is not None and is_retriable(error):
            if load.state is PathState.PROBING or load.usable:
                load.broke(error, now_s, self.config)
            self._fail_if_cut_off()
        elif load.state is PathState.PROBING:
            load.state, load.error = PathState.TRIAL, None

    def cancel(self, task: int) -> None:
        """Start no more slices of the task. It ends with Cancelled, or as done if the rest was under way already and
        arrives. A task that has ended is ignored.
        """
        found = self._tasks.get(task)
        if found is not None:
            found.cancelled = True
            if found.pieces:
                self._fail(task, _cancelled())

    def fail_all(self, error: MoonpoolError) -> None:
        """Fail every task."""
        for number in list(self._tasks):
            self._fail(number, error)

    def take_ended(self) -> list[tuple[int, MoonpoolError | None]]:
        """Return the tasks that ended since the last call: done (None), or failed. No slice of them is under way."""
        ended, self._ended = self._ended, []
        return ended

    def check_integrity(self) -> None:
        """Raise AssertionError when the counters do not match the tasks."""
        assert sum(p.num_under_way for p in self.paths) == sum(t.num_under_way for t in self._tasks.values())
        for priority in Priority:
            own = {number: task for number, task in self._tasks.items() if task.priority is priority}
            assert self._waiting_nbytes[priority] == sum(task.waiting_nbytes for task in own.values())
            assert sorted(self._queues[priority]) == sorted(n for n, task in own.items() if task.pieces)
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
        since_s = [self._tasks[queue[0]].submitted_s if queue else None for queue in self._queues]
        for priority in self._priorities.order(since_s, now_s):
            assignment = self._assign_from(priority, now_s)
            if assignment is not None:
                self._priorities.served(priority, since_s, now_s)
                return assignment
        return None

    def _assign_from(self, priority: Priority, now_s: float) -> Assignment | None:
        queue = self._queues[priority]
        if not any(path.usable and path.num_under_way < self._limit(path) for path in self.paths):
            return None
        waiting_nbytes = sum(self._waiting_nbytes[: priority + 1])  # of this priority and higher ones
        for _ in range(min(len(queue), _MAX_TRIES)):
            number = queue[0]
            task = self._tasks[number]
            choice = self._choose(task.pieces[0], waiting_nbytes)
            if choice is not None:
                return self._start(number, task, *choice, now_s)
            queue.rotate(-1)
        return None

    def _choose(self, piece: _Piece, waiting_nbytes: int) -> tuple[int, int] | None:
        """Return (path, nbytes) for the start of the piece; None when it should wait."""
        candidates = self._candidates(piece)
        best: tuple[float, int, int] | None = None
        for number, path in candidates:
            if path.num_under_way < self._limit(path):
                nbytes = self._slice_nbytes(path, piece.nbytes, candidates, waiting_nbytes)
                finish_s = (path.in_flight_nbytes + nbytes) / path.throughput
                best = min(best or (finish_s, number, nbytes), (finish_s, number, nbytes))
        if best is None:
            return None
        # Wait for busy paths only: they report when they are done, and then the choice is made again.
        others = [path for number, path in candidates if number != best[1] and path.num_under_way]
        if others and best[0] > _finish_together_s(others, waiting_nbytes):
            return None  # the others will have moved everything, this piece included, before the best free path
        return best[1], best[2]

    def _candidates(self, piece: _Piece) -> list[tuple[int, PathLoad]]:
        """Return the paths that may carry the piece: those it has not failed on, else all; preferred ones first."""
        usable = [(number, path) for number, path in enumerate(self.paths) if path.usable]
        untried = [(number, path) for number, path in usable if number not in piece.failed_on]
        group = untried or usable
        preferred = [(number, path) for number, path in group if number < self.num_paths - self.num_secondary]
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

    def _start(self, number: int, task: _Task, path: int, nbytes: int, now_s: float) -> Assignment:
        piece, queue = task.pieces[0], self._queues[task.priority]
        if nbytes < piece.nbytes:
            task.pieces[0] = piece._replace(start=piece.start + nbytes, nbytes=piece.nbytes - nbytes)
        else:
            task.pieces.popleft()
        queue.popleft()
        if task.pieces:
            queue.append(number)
        task.waiting_nbytes -= nbytes
        self._waiting_nbytes[task.priority] -= nbytes
        task.num_under_way += 1
        self.paths[path].started(nbytes, now_s)
        # Half of what is left, so that there is time for another path after a silent one.
        timeout_s = min(self.config.slice_timeout_s, (task.deadline_s - now_s) / 2)
        return Assignment(number, path, piece.request, piece.start, nbytes, timeout_s, piece.failed_on, piece.attempt)

    def _requeue(self, lost: Assignment) -> None:
        task = self._tasks[lost.task]
        failed_on = lost.failed_on | {lost.path}
        if not task.pieces:
            self._queues[task.priority].append(lost.task)
        task.pieces.appendleft(_Piece(lost.request, lost.start, lost.nbytes, failed_on, lost.attempt + 1))
        task.waiting_nbytes += lost.nbytes
        self._waiting_nbytes[task.priority] += lost.nbytes

    def _fail_if_cut_off(self) -> None:
        """Fail every task when all paths were refused. With a silent path wait until the deadlines."""
        if all(p.state is PathState.RESTING and not isinstance(p.error, DeadlineExceeded) for p in self.paths):
            latest = max(self.paths, key=lambda path: path.rest_until_s)
            self.fail_all(latest.error or PeerLost("no path is left"))

    def _fail(self, number: int, error: MoonpoolError) -> None:
        task = self._tasks[number]
        task.error = task.error or error
        if task.pieces:
            self._queues[task.priority].remove(number)
        task.pieces.clear()
        self._waiting_nbytes[task.priority] -= task.waiting_nbytes
        task.waiting_nbytes = 0
        self._end_if_over(number)

    def _end_if_over(self, number: int) -> None:
        task = self._tasks.get(number)
        if task is not None and not task.pieces and not task.num_under_way:
            del self._tasks[number]
            self._ended.append((number, task.error))

    def _add_deadline(self, deadline_s: float, number: int) -> None:
        heapq.heappush(self._deadlines, (deadline_s, number))
        if len(self._deadlines) > 2 * len(self._tasks) + 64:
            self._deadlines = [(task.deadline_s, number) for number, task in self._tasks.items()]
            heapq.heapify(self._deadlines)

    def _next_deadline(self) -> tuple[float, int] | None:
        """Return the earliest deadline of a task that has not failed, and the task."""
        while self._deadlines:
            task = self._tasks.get(self._deadlines[0][1])
            if task is not None and task.error is None:
                return self._deadlines[0]
            heapq.heappop(self._deadlines)
        return None

    def _path_errors(self) -> str:
        errors = [f"path {number}: {path.error}" for number, path in enumerate(self.paths) if path.error is not None]
        return "; ".join(errors) or "no path failed"


def _cancelled() -> Cancelled:
    return Cancelled("the transfer was cancelled")


def _finish_together_s(paths: Sequence[PathLoad], waiting_nbytes: int) -> float:
    """Return in how many seconds these paths would move all that waits and all that they have in flight."""
    in_flight_nbytes = sum(path.in_flight_nbytes for path in paths)
    return (in_flight_nbytes + waiting_nbytes) / sum(path.throughput for path in paths)
