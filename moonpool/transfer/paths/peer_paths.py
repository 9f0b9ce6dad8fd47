"""Several paths to one peer, used together: the threads and sockets around plan.py.

A PeerPaths has all paths to one peer and what is known of them; the handles of all segments of the peer share it.
transfer() waits: the caller's thread moves slices too, so a small request costs no change of threads. start() does not
wait: a thread pool moves the slices, and one of its threads is the timer. A path that dies costs its slices the
planner's slice timeout, not the caller's deadline.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

from moonpool.base.errors import MoonpoolError, PeerLost
from moonpool.transfer.paths.path_load import PathState, PlanConfig
from moonpool.transfer.paths.plan import Assignment, Planner
from moonpool.transfer.paths.priority import Priority
from moonpool.transfer.pending import Pending, ThreadPool, attempt

Mover = Callable[[int, int, int, float], None]  # takes path, start, nbytes, timeout_s
Prober = Callable[[int, float], None]  # takes path, timeout_s
_LONGEST_WAIT_S = 1.0
_NO_TASK = 0  # no task has this number


class PathReport(NamedTuple):
    """The state of one path; throughput in bytes per second."""

    endpoint: str
    state: PathState
    throughput: float
    in_flight_nbytes: int
    done_nbytes: int
    num_failures: int
    is_secondary: bool = False


class _Job(NamedTuple):
    move: Mover
    probe: Prober
    pending: Pending[None]


class PeerPaths:
    """Thread-safe. close() fails what is under way; join() waits for the threads, once the sockets are closed."""

    def __init__(self, endpoints: Sequence[str], config: PlanConfig, *, num_secondary: int = 0) -> None:
        """The last `num_secondary` endpoints are used only when the others fail."""
        self.endpoints = tuple(endpoints)
        self.config = config
        # One for each slice under way, one for each path's probe, and the timer.
        self.threads = ThreadPool("transfer-path", (config.slices_per_path + 1) * len(endpoints) + 1)
        weakref.finalize(self, self.threads.close).atexit = False  # a peer that could not be opened is never closed
        self._planner = Planner(len(endpoints), config, num_secondary)
        self._lock = threading.Lock()
        self._timer_changed = threading.Condition(self._lock)  # something is due before `_timer_until_s`
        self._timer_until_s: float | None = None  # None: no timer runs
        self._jobs: dict[int, _Job] = {}
        self._ended: list[tuple[Pending[None], MoonpoolError | None]] = []
        self._closed = False

    def transfer(
        self, nbytes: int, move: Mover, probe: Prober, timeout_s: float, priority: Priority = Priority.PREFETCH
    ) -> None:
        """Return when all bytes were moved. When this raises, no slice is under way any more."""
        with self._changing():
            task, pending = self._submit(nbytes, move, probe, timeout_s, priority)
            mine = self._advance(task)
        while not pending.done():
            mine = self._move_slice(mine, task) if mine is not None else self._wait(pending, task)
        pending.wait()

    def start(self, nbytes: int, move: Mover, probe: Prober, timeout_s: float, priority: Priority) -> Pending[None]:
        """As transfer(), without waiting. cancel() of the result drops what is not under way."""
        with self._changing():
            _, pending = self._submit(nbytes, move, probe, timeout_s, priority)
            self._advance(_NO_TASK)
            if self._timer_until_s is None and self._jobs:
                self._timer_until_s = time.monotonic()
                self.threads.run(self._run_timer)
        return pending

    def path_failed(self, path: int, error: MoonpoolError) -> None:
        """Report a failure of a path that was found by other means than a transfer."""
        with self._changing():
            self._planner.probed(path, error, time.monotonic())
            self._advance(_NO_TASK)

    def report(self) -> list[PathReport]:
        first_secondary = self._planner.num_paths - self._planner.num_secondary
        with self._lock:
            return [
                PathReport(
                    self.endpoints[number], path.state, path.throughput, path.in_flight_nbytes, path.done_nbytes,
                    path.num_failures, number >= first_secondary,
                )
                for number, path in enumerate(self._planner.paths)
            ]  # fmt: skip

    def close(self) -> None:
        """Idempotent."""
        with self._changing():
            self._closed = True
            self._planner.fail_all(PeerLost("the transfer engine was closed"))
            self._settle()
            self._timer_changed.notify_all()
        self.threads.close()

    def join(self, timeout_s: float) -> None:
        self.threads.join(timeout_s)

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Hold the lock; afterwards, without it, resolve what waits for tasks that ended."""
        try:
            with self._lock:
                yield
        finally:
            self._notify_waiters()

    def _notify_waiters(self) -> None:
        while self._ended:
            with self._lock:
                over, self._ended = self._ended, []
            for pending, error in over:
                if error is None:
                    pending.resolve(None)
                else:
                    pending.fail(error)

    def _submit(
        self, nbytes: int, move: Mover, probe: Prober, timeout_s: float, priority: Priority
    ) -> tuple[int, Pending[None]]:
        if self._closed:
            raise PeerLost("the transfer engine is closed")
        now_s = time.monotonic()
        task = self._planner.submit([nbytes], now_s + timeout_s, now_s, priority)
        pending: Pending[None] = Pending(partial(self._cancel, task))
        self._jobs[task] = _Job(move, probe, pending)
        return task, pending

    def _cancel(self, task: int) -> None:
        with self._changing():
            self._planner.cancel(task)
            self._advance(_NO_TASK)

    def _advance(self, task: int | None) -> Assignment | None:
        """Start what the planner assigns, and return one slice for the calling thread: of `task`, or of any task for a
        thread of the pool (None). Call it with the lock held.
        """
        now_s = time.monotonic()
        kept: Assignment | None = None
        for assignment in self._planner.next_assignments(now_s):
            if kept is None and task in (None, assignment.task):
                kept = assignment
            else:
                self.threads.run(partial(self._work, assignment))
        for path in self._planner.probes_due(now_s):
            probe = next(iter(self._jobs.values())).probe
            self.threads.run(partial(self._probe, path, probe))
        self._settle()
        wake_s = self._planner.wake_s()
        if wake_s is not None and self._timer_until_s is not None and wake_s < self._timer_until_s:
            self._timer_changed.notify_all()
        return kept

    def _settle(self) -> None:
        for task, error in self._planner.take_ended():
            self._ended.append((self._jobs.pop(task).pending, error))

    def _work(self, first: Assignment) -> None:
        assignment: Assignment | None = first
        while assignment is not None:
            assignment = self._move_slice(assignment, None)

    def _move_slice(self, assignment: Assignment, task: int | None) -> Assignment | None:
        """Move a slice, report it, and return the next one for this thread."""
        error = attempt(
            self._jobs[assignment.task].move,
            assignment.path, assignment.start, assignment.nbytes, assignment.timeout_s,
        )  # fmt: skip
        with self._changing():
            now_s = time.monotonic()
            if error is None:
                self._planner.completed(assignment, now_s)
            else:
                self._planner.failed(assignment, error, now_s)
            return self._advance(task)

    def _probe(self, path: int, probe: Prober) -> None:
        error = attempt(probe, path, self.config.slice_timeout_s)
        with self._changing():
            self._planner.probed(path, error, time.monotonic())
            assignment = self._advance(None)
        if assignment is not None:
            self._work(assignment)

    def _wait(self, pending: Pending[None], task: int) -> Assignment | None:
        """Wait until the task ends or a deadline or probe is due; return a slice for this thread."""
        with self._lock:
            pause_s = self._pause_s()
        if pending.done_within(pause_s):
            return None
        with self._changing():
            return self._advance(task)

    def _run_timer(self) -> None:
        """Handle deadlines and probes of tasks that no thread waits for, until there are none."""
        while True:
            with self._changing():
                if not self._jobs or self._closed:
                    self._timer_until_s = None
                    return
                pause_s = self._pause_s()
                self._timer_until_s = time.monotonic() + pause_s
                self._timer_changed.wait(pause_s)
                self._advance(_NO_TASK)

    def _pause_s(self) -> float:
        wake_s = self._planner.wake_s()
        return _LONGEST_WAIT_S if wake_s is None else min(max(wake_s - time.monotonic(), 0.0), _LONGEST_WAIT_S)
