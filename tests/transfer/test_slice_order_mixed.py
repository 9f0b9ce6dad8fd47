"""One order of slices for peers with one path and with several, over random histories."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from moonpool.base.errors import DeadlineExceeded, MoonpoolError, NotFound, PeerLost
from moonpool.transfer.paths.path_load import PlanConfig
from moonpool.transfer.paths.peer_paths import PeerPaths
from moonpool.transfer.paths.peer_queue import Ended, Slice, SliceOutcome, SliceRun
from moonpool.transfer.paths.priority import Priority
from moonpool.transfer.paths.slice_queue import SliceOrder

LIMIT = 100
CONFIG = PlanConfig(max_slice_nbytes=LIMIT, min_slice_nbytes=10, first_throughput=1e4, max_attempts=3)


@dataclass(eq=False)
class Job:
    """Writes down how often each byte ended; a request of no bytes has one."""

    priority: Priority
    sizes: dict[int, int]
    slices_of_peers: dict[Hashable, list[Slice]]
    deadline_s: float
    run_nbytes: int = LIMIT
    wants_retry: bool = True
    ended: Counter[tuple[int, int]] = field(default_factory=Counter)
    errors: dict[int, MoonpoolError] = field(default_factory=dict)

    def run(self, run: SliceRun[Any]) -> list[SliceOutcome]:
        raise AssertionError("nothing is moved here")

    def settle(self, slices: Sequence[Slice], error: MoonpoolError | None) -> None:
        for request, start, nbytes in slices:
            self.ended.update((request, at) for at in range(start, start + (nbytes or 1)))
            if error is not None:
                self.errors.setdefault(request, error)

    def check_over(self) -> None:
        expected = Counter((request, at) for request, nbytes in self.sizes.items() for at in range(nbytes or 1))
        assert self.ended == expected, "a byte was lost or ended twice"


class Engine:
    """Drives the order as its threads do."""

    def __init__(self) -> None:
        self.order: SliceOrder[Job] = SliceOrder(10**6, threads_per_peer=2)
        self.peers: list[Hashable] = ["one", "two", PeerPaths[Job](["a", "b"], CONFIG), PeerPaths[Job](["c"], CONFIG)]
        self.running: list[SliceRun[Job]] = []
        self.jobs: list[Job] = []

    def add(self, priority: Priority, sizes: list[int], peer: int, deadline_s: float, now_s: float) -> None:
        """Requests to two peers, one after the other."""
        slices: dict[Hashable, list[Slice]] = {}
        for request, nbytes in enumerate(sizes):
            target = self.peers[(peer + request // 3) % len(self.peers)]
            slices.setdefault(target, []).append(Slice(request, 0, nbytes))
        job = Job(priority, dict(enumerate(sizes)), slices, deadline_s)
        self.jobs.append(job)
        self.order.add(job, now_s)

    def step(self, now_s: float) -> None:
        self.settle(self.order.expire(now_s))
        while (run := self.order.take(now_s)) is not None:
            assert run.slices
            assert sum(part.nbytes for part in run.slices) <= LIMIT + CONFIG.min_slice_nbytes
            self.running.append(run)
        for paths, path in self.order.probes_due(now_s):
            self.settle(self.order.probed(paths, path, None, now_s))
        self.order.check_integrity()

    def finish(self, number: int, error: MoonpoolError | None, now_s: float) -> None:
        if self.running:
            run = self.running.pop(number % len(self.running))
            self.settle(self.order.finished(run, [SliceOutcome(run.slices, error)], now_s))

    def cancel(self, number: int) -> None:
        if self.jobs:
            job = self.jobs[number % len(self.jobs)]
            job.wants_retry = False
            job.settle(self.order.withdraw(job), PeerLost("cancelled"))

    def settle(self, ended: list[Ended[Job]]) -> None:
        for job, slices, error in ended:
            job.settle(slices, error)


events_ = st.lists(
    st.tuples(
        st.sampled_from(["add", "done", "done", "lost", "silent", "refused", "cancel"]),
        st.sampled_from(Priority),
        st.lists(st.integers(0, 5 * LIMIT), min_size=1, max_size=6),
        st.integers(0, 20),
        st.floats(0, 0.3),
    ),
    max_size=60,
)
ERRORS = {"done": None, "lost": PeerLost("x"), "silent": DeadlineExceeded("x"), "refused": NotFound("x")}


@settings(max_examples=200, deadline=None)
@given(events_)
def test_every_byte_ends_once_whatever_happens(
    events: list[tuple[str, Priority, list[int], int, float]],
) -> None:
    engine, now_s = Engine(), 0.0
    for what, priority, sizes, number, pause_s in events:
        now_s += pause_s
        if what == "add":
            engine.add(priority, sizes, number, now_s + 0.1 + 10 * pause_s, now_s)
        elif what == "cancel":
            engine.cancel(number)
        else:
            engine.finish(number, ERRORS[what], now_s)
        engine.step(now_s)
    while engine.running:
        engine.finish(0, None, now_s)
        now_s += 0.01
        engine.step(now_s)
    engine.step(now_s + 1e6)  # what no path could move ends with its deadline
    while engine.running:
        engine.finish(0, None, now_s)
    for job in engine.jobs:
        job.check_over()
    assert not engine.order.paths
    assert engine.order.take(now_s) is None


def test_a_hand_off_goes_before_bulk_whichever_peer_it_is_for() -> None:
    engine = Engine()
    for peer in range(len(engine.peers)):
        engine.add(Priority.REPLICATION, [50 * LIMIT], peer, 1e9, 0.0)
    engine.step(0.0)
    for peer in range(len(engine.peers)):
        engine.add(Priority.HANDOFF, [LIMIT], peer, 1e9, 0.0)
    bulk, started = list(engine.running), dict[Hashable, Priority]()
    for _ in bulk:
        engine.finish(0, None, 0.01)
        engine.step(0.01)
        for run in engine.running:
            if run not in bulk:
                started.setdefault(run.peer, run.work.priority)
    assert started == dict.fromkeys(engine.peers, Priority.HANDOFF)
