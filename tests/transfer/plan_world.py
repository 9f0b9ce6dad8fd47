"""A planner run over fake rails on a virtual clock, with a check of everything it reports."""

from __future__ import annotations

import heapq
import itertools
from dataclasses import dataclass, field

from moonpool.base.errors import DeadlineExceeded, MoonpoolError, PeerLost
from moonpool.transfer.paths.path_load import PathState, PlanConfig
from moonpool.transfer.paths.plan import Assignment, Planner
from moonpool.transfer.paths.priority import Priority

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
        assert isinstance(what, Assignment)
        if error is not None:
            self.planner.failed(what, error, self.now_s)
            return
        self.acknowledged.setdefault((what.task, what.request), []).append((what.start, what.nbytes))
        self.rails[what.path].moved.append((self.now_s, what.nbytes))
        self.planner.completed(what, self.now_s)

    def _advance(self) -> None:
        for given_ in self.planner.next_assignments(self.now_s):
            self._check_path(given_)
            end_s, error = self.rails[given_.path].outcome(given_.nbytes, given_.timeout_s, self.now_s)
            heapq.heappush(self.events, (end_s, next(self.order), given_, error))
        for path in self.planner.probes_due(self.now_s):
            end_s, error = self.rails[path].outcome(0, self.config.slice_timeout_s, self.now_s)
            heapq.heappush(self.events, (end_s, next(self.order), path, error))
        self.planner.check_integrity()
        for task, failure in self.planner.take_ended():
            assert task not in self.ended, "reported twice"
            under_way = [e[2] for e in self.events if isinstance(e[2], Assignment) and e[2].task == task]
            assert not under_way, "reported while a slice is under way"
            self.ended[task] = (self.now_s, failure)
            if failure is None:
                self._check_whole(task)

    def _check_path(self, given_: Assignment) -> None:
        """A secondary path is taken only when no preferred one is there to be taken."""
        num_preferred = len(self.rails) - self.planner.num_secondary
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
