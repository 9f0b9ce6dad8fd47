"""The order of slices for one peer of several paths, run over fake rails on a virtual clock, with a check of everything
it reports.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from moonpool.base.errors import Cancelled, DeadlineExceeded, MoonpoolError, PeerLost
from moonpool.transfer.paths.path_load import PathState, PlanConfig
from moonpool.transfer.paths.peer_paths import PeerPaths
from moonpool.transfer.paths.peer_queue import Ended, Slice, SliceOutcome, SliceRun
from moonpool.transfer.paths.priority import Priority
from moonpool.transfer.paths.slice_queue import SliceOrder

MIB = 1 << 20
RATE = 125e6
CONFIG = PlanConfig()
# For tests that wait for real: small slices, short rests.
FAST = PlanConfig(
    max_slice_nbytes=4096,
    min_slice_nbytes=512,
    slice_timeout_s=0.1,
    first_rest_s=0.01,
    max_rest_s=0.05,
    max_attempts=50,
)

_REFUSED_AFTER_S = 0.001


@dataclass
class Rail:
    """A fake path: bytes per second, and spans of time in which it is silent or refuses."""

    rate: float = RATE
    silent: list[tuple[float, float]] = field(default_factory=list)
    refusing: list[tuple[float, float]] = field(default_factory=list)
    free_at_s: float = 0.0  # when it has sent what it was given: one after the other
    moved: list[tuple[float, int]] = field(default_factory=list)

    def outcome(self, nbytes: int, timeout_s: float, now_s: float) -> tuple[float, MoonpoolError | None]:
        """When a slice given now ends, and how."""
        if any(low <= now_s < high for low, high in self.refusing):
            if timeout_s < _REFUSED_AFTER_S:
                return now_s + timeout_s, DeadlineExceeded("silence")
            return now_s + _REFUSED_AFTER_S, PeerLost("refused")
        start_s = max(now_s, self.free_at_s)
        end_s = start_s + nbytes / self.rate + 0.0001
        if any(low < end_s and now_s < high for low, high in self.silent) or end_s > now_s + timeout_s:
            return now_s + timeout_s, DeadlineExceeded("silence")
        self.free_at_s = end_s
        return end_s, None


@dataclass(eq=False)
class Task:
    """A batch for a peer with several paths. It counts what is left of it."""

    number: int
    sizes: list[int]
    deadline_s: float
    priority: Priority
    slices_of_peers: dict[Hashable, list[Slice]]
    run_nbytes: int = MIB
    wants_retry: bool = True
    error: MoonpoolError | None = None

    def __post_init__(self) -> None:
        self.left = sum(nbytes or 1 for nbytes in self.sizes)

    def run(self, run: SliceRun[Any]) -> list[SliceOutcome]:
        raise AssertionError("nothing is moved here")

    def settle(self, slices: Sequence[Slice], error: MoonpoolError | None) -> None:
        self.error = self.error or error
        self.left -= sum(part.nbytes or 1 for part in slices)


class Planner:
    """The order of slices with one peer of several paths, one call at a time."""

    def __init__(self, num_paths: int, config: PlanConfig = CONFIG, num_secondary: int = 0) -> None:
        self.config, self.num_secondary = config, num_secondary
        self.peer: PeerPaths[Task] = PeerPaths(
            [f"path {n}" for n in range(num_paths)], config, num_secondary=num_secondary
        )
        self.order: SliceOrder[Task] = SliceOrder(10**9, threads_per_peer=1)
        self.paths = self.peer.paths
        self.tasks: dict[int, Task] = {}
        self._num_tasks = 0

    def submit(self, sizes: list[int], deadline_s: float, now_s: float, priority: Priority = Priority.PREFETCH) -> int:
        self._num_tasks += 1
        slices = [Slice(request, 0, nbytes) for request, nbytes in enumerate(sizes)]
        task = Task(self._num_tasks, sizes, deadline_s, priority, {self.peer: slices})
        self.tasks[task.number] = task
        self.order.add(task, now_s)
        return task.number

    def next_assignments(self, now_s: float) -> list[SliceRun[Task]]:
        _settle(self.order.expire(now_s))
        found: list[SliceRun[Task]] = []
        while (run := self.order.take(now_s)) is not None:
            found.append(run)
        return found

    def completed(self, run: SliceRun[Task], now_s: float) -> None:
        _settle(self.order.finished(run, [SliceOutcome(run.slices, None)], now_s))

    def failed(self, run: SliceRun[Task], error: MoonpoolError, now_s: float) -> None:
        _settle(self.order.finished(run, [SliceOutcome(run.slices, error)], now_s))

    def probes_due(self, now_s: float) -> list[int]:
        return [path for _, path in self.order.probes_due(now_s)]

    def probed(self, path: int, error: MoonpoolError | None, now_s: float) -> None:
        _settle(self.order.probed(self.peer, path, error, now_s))

    def wake_s(self) -> float | None:
        wake_s = self.order.wake_s()
        return None if wake_s == math.inf else wake_s

    def cancel(self, number: int) -> None:
        task = self.tasks.get(number)
        if task is not None:
            task.wants_retry = False
            left = self.order.withdraw(task)
            task.settle(left, Cancelled("cancelled") if left else None)

    def take_ended(self) -> list[tuple[int, MoonpoolError | None]]:
        """The tasks of which nothing is left, since the last call."""
        ended = [(number, task.error) for number, task in self.tasks.items() if not task.left]
        for number, _ in ended:
            del self.tasks[number]
        return ended

    def check_integrity(self) -> None:
        self.order.check_integrity()
        assert all(task.left > 0 for task in self.tasks.values() if task in self.waiting())

    def waiting(self) -> set[Task]:
        return {task for batches in self.peer.waiting for task in batches}


def _settle(ended: Sequence[Ended[Task]]) -> None:
    for task, slices, error in ended:
        task.settle(slices, error)


class World:
    """Runs a planner over rails. Records what each task was told to have got."""

    def __init__(self, rails: list[Rail], config: PlanConfig = CONFIG, num_secondary: int = 0) -> None:
        self.rails, self.config = rails, config
        self.planner = Planner(len(rails), config, num_secondary)
        self.now_s = 0.0
        self.events: list[tuple[float, int, object, MoonpoolError | None]] = []
        self.order = itertools.count()
        self.acknowledged: dict[tuple[int, int], list[tuple[int, int]]] = {}
        self.sizes: dict[int, list[int]] = {}
        self.deadlines: dict[int, float] = {}
        self.ended: dict[int, tuple[float, MoonpoolError | None]] = {}

    def submit(self, sizes: list[int], timeout_s: float = 60.0, priority: Priority = Priority.PREFETCH) -> int:
        task = self.planner.submit(sizes, self.now_s + timeout_s, self.now_s, priority)
        self.sizes[task], self.deadlines[task] = sizes, self.now_s + timeout_s
        self._advance()
        return task

    def cancel(self, task: int) -> None:
        self.planner.cancel(task)
        self._advance()

    def run(self, until_s: float = 1e9) -> None:
        while len(self.ended) < len(self.sizes):
            wake_s = self.planner.wake_s()
            times = [t for t in (wake_s, self.events[0][0] if self.events else None) if t is not None]
            assert times, "a task waits for nothing"
            if min(times) > until_s:
                self.now_s = until_s
                return
            self.now_s = max(self.now_s, min(times))
            while self.events and self.events[0][0] <= self.now_s:
                self._report(*heapq.heappop(self.events)[2:])
            self._advance()
        self.now_s = max(self.now_s, until_s if until_s < 1e9 else self.now_s)

    def _report(self, what: object, error: MoonpoolError | None) -> None:
        if isinstance(what, int):
            self.planner.probed(what, error, self.now_s)
            return
        assert isinstance(what, SliceRun)
        if error is not None:
            self.planner.failed(what, error, self.now_s)
            return
        for request, start, nbytes in what.slices:
            self.acknowledged.setdefault((what.work.number, request), []).append((start, nbytes))
        assert what.path is not None
        self.rails[what.path].moved.append((self.now_s, what.nbytes))
        self.planner.completed(what, self.now_s)

    def _advance(self) -> None:
        for given_ in self.planner.next_assignments(self.now_s):
            self._check_path(given_)
            assert given_.nbytes == sum(part.nbytes for part in given_.slices)
            end_s, error = self.rails[given_.path or 0].outcome(given_.nbytes, given_.timeout_s, self.now_s)
            heapq.heappush(self.events, (end_s, next(self.order), given_, error))
        for path in self.planner.probes_due(self.now_s):
            end_s, error = self.rails[path].outcome(0, self.config.slice_timeout_s, self.now_s)
            heapq.heappush(self.events, (end_s, next(self.order), path, error))
        self.planner.check_integrity()
        for task, failure in self.planner.take_ended():
            assert task not in self.ended, "reported twice"
            under_way = [e[2] for e in self.events if isinstance(e[2], SliceRun) and e[2].work.number == task]
            assert not under_way, "reported while a slice is under way"
            self.ended[task] = (self.now_s, failure)
            if failure is None:
                self._check_whole(task)

    def _check_path(self, given_: SliceRun[Task]) -> None:
        """A secondary path is taken only when no preferred one is there to be taken."""
        num_preferred = len(self.rails) - self.planner.num_secondary
        assert given_.path is not None
        if given_.path < num_preferred:
            return
        for number, path in enumerate(self.planner.paths[:num_preferred]):
            if number not in given_.failed_on:
                assert path.state is not PathState.UP
                assert path.state is not PathState.TRIAL or path.num_under_way, "it could have been tried"

    def _check_whole(self, task: int) -> None:
        """What is reported done was acknowledged, every byte exactly once."""
        for request, nbytes in enumerate(self.sizes[task]):
            at = 0
            for start, length in sorted(self.acknowledged[task, request]):
                assert start == at
                at += length
            assert at == nbytes
