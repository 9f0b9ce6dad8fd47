"""Several paths to one peer, used together: the threads and sockets around plan.py.

A PeerPaths is all ways to one peer, with what was learned about them; it is shared by the handles of all its segments.
A MultiPathRemote is one such handle. Its caller's own thread carries slices too, so a small request costs no change of
threads; the others are carried by a crew. A path that dies costs its slices the planner's slice timeout, not the
caller's deadline.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import NamedTuple

from moonpool.base.clock import Deadline
from moonpool.base.errors import Cancelled, DeadlineExceeded, Internal, MoonpoolError, PeerLost, Unavailable
from moonpool.transfer.buffers import Buffer, as_bytes_view, as_bytes_views, cut, total_nbytes
from moonpool.transfer.crew import Crew
from moonpool.transfer.path_load import PathState, PlanConfig, is_retriable
from moonpool.transfer.plan import Assignment, Planner
from moonpool.transfer.transports.base import RemoteSegment, check_bounds

Opener = Callable[[float], RemoteSegment]  # takes a timeout_s
Mover = Callable[[int, int, int, float], None]  # takes path, start, nbytes, timeout_s
Prober = Callable[[int, float], None]  # takes path, timeout_s
_LONGEST_WAIT_S = 1.0


class PathReport(NamedTuple):
    """One path as it stands now; throughput in bytes per second."""

    endpoint: str
    state: PathState
    throughput: float
    in_flight_nbytes: int
    done_nbytes: int
    num_failures: int


@dataclass
class _Job:
    move: Mover
    probe: Prober
    ended: threading.Event
    error: MoonpoolError | None = None


class PeerPaths:
    """Thread-safe. `close()` fails what is under way; `join()` waits for the threads, once the sockets are closed."""

    def __init__(self, endpoints: Sequence[str], config: PlanConfig) -> None:
        self.endpoints = tuple(endpoints)
        self.config = config
        self.crew = Crew("transfer-path", (config.slices_per_path + 1) * len(endpoints))
        self._planner = Planner(len(endpoints), config)
        self._lock = threading.Lock()
        self._jobs: dict[int, _Job] = {}
        self._closed = False

    def transfer(self, nbytes: int, move: Mover, probe: Prober, timeout_s: float) -> None:
        """Returns when all bytes were moved. When it raises, no slice is under way any more."""
        job = _Job(move, probe, threading.Event())
        with self._lock:
            if self._closed:
                raise PeerLost("the transfer engine is closed")
            now_s = time.monotonic()
            task = self._planner.submit([nbytes], now_s + timeout_s, now_s)
            self._jobs[task] = job
            mine = self._advance(now_s, task)
        while not job.ended.is_set():
            mine = self._carry(mine, task) if mine is not None else self._wait(job, task)
        if job.error is not None:
            raise job.error

    def path_failed(self, path: int, error: MoonpoolError) -> None:
        """For whoever found out by other means than a transfer."""
        with self._lock:
            self._planner.probed(path, error, time.monotonic())
            self._advance(time.monotonic(), None)

    def report(self) -> list[PathReport]:
        with self._lock:
            return [
                PathReport(name, p.state, p.throughput, p.in_flight_nbytes, p.done_nbytes, p.num_failures)
                for name, p in zip(self.endpoints, self._planner.paths, strict=True)
            ]

    def close(self) -> None:
        """Idempotent."""
        with self._lock:
            self._closed = True
            self._planner.fail_all(PeerLost("the transfer engine was closed"))
            self._settle()
        self.crew.close()

    def join(self, timeout_s: float) -> None:
        self.crew.join(timeout_s)

    def _advance(self, now_s: float, task: int | None) -> Assignment | None:
        """Starts what the planner wants started; returns one slice for the calling thread: of this task, or any when
        it is a thread of the crew (None). Call it with the lock held.
        """
        kept: Assignment | None = None
        for assignment in self._planner.next_assignments(now_s):
            if kept is None and task in (None, assignment.task):
                kept = assignment
            else:
                self.crew.run(partial(self._work, assignment))
        for path in self._planner.probes_due(now_s):
            probe = next(iter(self._jobs.values())).probe
            self.crew.run(partial(self._probe, path, probe))
        self._settle()
        return kept

    def _settle(self) -> None:
        for task, error in self._planner.take_ended():
            job = self._jobs.pop(task)
            job.error = error
            job.ended.set()

    def _work(self, first: Assignment) -> None:
        assignment: Assignment | None = first
        while assignment is not None:
            assignment = self._carry(assignment, None)

    def _carry(self, assignment: Assignment, task: int | None) -> Assignment | None:
        """Moves a slice, reports it, and returns the next one for this thread."""
        error = _attempt(
            self._jobs[assignment.task].move,
            assignment.path, assignment.start, assignment.nbytes, assignment.timeout_s,
        )  # fmt: skip
        with self._lock:
            now_s = time.monotonic()
            if error is None:
                self._planner.completed(assignment, now_s)
            else:
                self._planner.failed(assignment, error, now_s)
            return self._advance(now_s, task)

    def _probe(self, path: int, probe: Prober) -> None:
        error = _attempt(probe, path, self.config.slice_timeout_s)
        with self._lock:
            now_s = time.monotonic()
            self._planner.probed(path, error, now_s)
            assignment = self._advance(now_s, None)
        if assignment is not None:
            self._work(assignment)

    def _wait(self, job: _Job, task: int) -> Assignment | None:
        """Until the task ends or something is due by the clock."""
        with self._lock:
            wake_s = self._planner.wake_s()
        pause_s = _LONGEST_WAIT_S if wake_s is None else min(max(wake_s - time.monotonic(), 0.0), _LONGEST_WAIT_S)
        if job.ended.wait(pause_s):
            return None
        with self._lock:
            return self._advance(time.monotonic(), task)


class MultiPathRemote(RemoteSegment):
    """A segment reached by all paths of its peer. The handles of the single paths are opened here, when first used."""

    transport = "paths"

    def __init__(self, paths: PeerPaths, nbytes: int, openers: Sequence[Opener]) -> None:
        assert len(openers) == len(paths.endpoints)
        self.nbytes = nbytes
        self._paths = paths
        self._openers = openers
        self._remotes: list[RemoteSegment | None] = [None] * len(openers)
        self._lock = threading.Lock()
        self._closed = False

    def connect(self, timeout_s: float) -> None:
        """Tries all paths at once and returns with the first that works. Raises the peer's refusal, or the last
        error when no path works; silence is waited out until the timeout.
        """
        deadline = Deadline(timeout_s)
        while True:
            error = self._connect_once(min(deadline.remaining_s(), self._paths.config.slice_timeout_s))
            if error is None:
                return
            if deadline.expired() or not isinstance(error, DeadlineExceeded):
                raise error

    def read_into(self, offset: int, buffers: Sequence[Buffer], *, timeout_s: float) -> None:
        views = as_bytes_views(buffers, writable=True)

        def move(path: int, start: int, nbytes: int, timeout_s: float) -> None:
            deadline = Deadline(timeout_s)
            remote = self._remote(path, deadline)
            remote.read_into(offset + start, cut(views, start, nbytes), timeout_s=deadline.remaining_s())

        self._transfer(offset, total_nbytes(views), move, timeout_s)

    def write_from(self, offset: int, buffers: Sequence[Buffer], *, generation: int, timeout_s: float) -> None:
        views = as_bytes_views(buffers, writable=False)

        def move(path: int, start: int, nbytes: int, timeout_s: float) -> None:
            deadline = Deadline(timeout_s)
            remote, parts = self._remote(path, deadline), cut(views, start, nbytes)
            remote.write_from(offset + start, parts, generation=generation, timeout_s=deadline.remaining_s())

        self._transfer(offset, total_nbytes(views), move, timeout_s)

    def read_many(self, items: Sequence[tuple[int, Buffer]], *, timeout_s: float) -> None:
        places = [(offset, as_bytes_view(buffer, writable=True)) for offset, buffer in items]

        def move(path: int, start: int, nbytes: int, timeout_s: float) -> None:
            deadline = Deadline(timeout_s)
            remote, parts = self._remote(path, deadline), list(_cut_places(places, start, nbytes))
            remote.read_many(parts, timeout_s=deadline.remaining_s())

        self._transfer_places(places, move, timeout_s)

    def write_many(self, items: Sequence[tuple[int, Buffer]], *, generation: int, timeout_s: float) -> None:
        places = [(offset, as_bytes_view(buffer, writable=False)) for offset, buffer in items]

        def move(path: int, start: int, nbytes: int, timeout_s: float) -> None:
            deadline = Deadline(timeout_s)
            remote, parts = self._remote(path, deadline), list(_cut_places(places, start, nbytes))
            remote.write_many(parts, generation=generation, timeout_s=deadline.remaining_s())

        self._transfer_places(places, move, timeout_s)

    def report(self) -> list[PathReport]:
        """How each path is doing, over all segments of the peer."""
        return self._paths.report()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            remotes = [remote for remote in self._remotes if remote is not None]
        for remote in remotes:
            remote.close()

    def _transfer(self, offset: int, nbytes: int, move: Mover, timeout_s: float) -> None:
        check_bounds(offset, nbytes, self.nbytes)
        self._run(nbytes, move, timeout_s)

    def _transfer_places(self, places: Sequence[tuple[int, memoryview]], move: Mover, timeout_s: float) -> None:
        for offset, view in places:
            check_bounds(offset, view.nbytes, self.nbytes)
        self._run(sum(view.nbytes for _, view in places), move, timeout_s)

    def _run(self, nbytes: int, move: Mover, timeout_s: float) -> None:
        """A handle closed on this side is no fault of the paths, which carry other segments too."""
        if self._closed:
            raise PeerLost("this handle is closed")

        def move_if_open(path: int, start: int, nbytes: int, timeout_s: float) -> None:
            try:
                move(path, start, nbytes, timeout_s)
            except Unavailable as error:
                if self._closed:
                    raise Cancelled("this handle was closed") from error
                raise

        try:
            self._paths.transfer(nbytes, move_if_open, self._probe, timeout_s)
        except Cancelled as error:
            raise PeerLost(str(error)) from error

    def _probe(self, path: int, timeout_s: float) -> None:
        """A round trip that moves nothing."""
        deadline = Deadline(timeout_s)
        self._remote(path, deadline).read_into(0, [], timeout_s=deadline.remaining_s())

    def _remote(self, path: int, deadline: Deadline) -> RemoteSegment:
        """This path's handle; opened now if it is not yet."""
        if self._closed:
            raise PeerLost("this handle is closed")
        remote = self._remotes[path]
        if remote is not None:
            return remote
        made = self._openers[path](deadline.remaining_s())
        with self._lock:
            kept = self._remotes[path] = self._remotes[path] or made
        if kept is not made or self._closed:
            made.close()
        return kept

    def _connect_once(self, timeout_s: float) -> MoonpoolError | None:
        results: SimpleQueue[MoonpoolError | None] = SimpleQueue()

        def connect(path: int) -> None:
            error = _attempt(self._remote, path, Deadline(timeout_s))
            results.put(error)
            if error is not None and is_retriable(error):
                self._paths.path_failed(path, error)

        for path in range(len(self._openers)):
            if not self._paths.crew.run(partial(connect, path)):
                return PeerLost("the transfer engine is closed")
        error: MoonpoolError | None = None
        for _ in self._openers:
            error = results.get()
            if error is None or not is_retriable(error):
                return error
        return error


def _cut_places(places: Sequence[tuple[int, memoryview]], start: int, nbytes: int) -> Iterator[tuple[int, memoryview]]:
    """The parts that hold bytes start .. start + nbytes of all places, one after the other."""
    at = 0
    for offset, view in places:
        low, high = max(start - at, 0), min(start + nbytes - at, view.nbytes)
        if low < high:
            yield offset + low, view[low:high]
        at += view.nbytes
        if at >= start + nbytes:
            return


def _attempt(act: Callable[..., object], *arguments: object) -> MoonpoolError | None:
    """Why it failed; None when it did not."""
    try:
        act(*arguments)
    except MoonpoolError as error:
        return error
    except Exception as error:  # noqa: BLE001 - a bug must fail its task, not hang it
        return Internal(f"{type(error).__name__}: {error}")
    return None
