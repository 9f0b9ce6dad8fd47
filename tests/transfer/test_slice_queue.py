"""The order in which batches are served: purely, over random histories, and then with threads."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from waiting import HANG_S

from moonpool.base.errors import MoonpoolError, NotFound, Overloaded, PeerLost
from moonpool.transfer.paths.peer_queue import MAX_RUN_SLICES, Slice, SliceOutcome, SliceRun
from moonpool.transfer.paths.priority import Priority, PriorityOrder
from moonpool.transfer.paths.slice_queue import SliceOrder, SliceQueue

HANDOFF, PREFETCH, REPLICATION = Priority
LIMIT = 100
AFTER_S = 0.1


@dataclass(eq=False)
class Job:
    priority: Priority
    slices: Sequence[Slice]
    added_s: float = 0.0
    handed_out: list[Slice] = field(default_factory=list)
    abandoned: list[Slice] = field(default_factory=list)
    peer: str = "peer"
    run_nbytes: int = LIMIT
    gate: threading.Event | None = None
    started: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    lock: threading.Lock = field(default_factory=threading.Lock)
    deadline_s: float = 1e9
    wants_retry: bool = True

    @property
    def slices_of_peers(self) -> dict[Hashable, list[Slice]]:
        return {self.peer: list(self.slices)}

    def run(self, run: SliceRun[Job]) -> list[SliceOutcome]:
        self.started.release()
        if self.gate is not None:
            assert self.gate.wait(HANG_S)
        return [SliceOutcome(run.slices, None)]

    def settle(self, slices: Sequence[Slice], error: MoonpoolError | None) -> None:
        with self.lock:
            ended = self.handed_out if error is None else self.abandoned
            ended += slices


def cut_batch(sizes: Sequence[int], limit: int = 1 << 20) -> list[Slice]:
    """The slices of requests that were cut before."""
    return [
        Slice(request, at, min(limit, nbytes - at))
        for request, nbytes in enumerate(sizes)
        for at in range(0, nbytes or 1, limit)
    ]


def job(priority: Priority, num_slices: int = 1, nbytes: int = LIMIT) -> Job:
    return Job(priority, cut_batch([nbytes] * num_slices, LIMIT))


def order(max_slices: int = 1000, threads_per_peer: int = 10**6) -> SliceOrder[Job]:
    return SliceOrder(max_slices, AFTER_S, threads_per_peer=threads_per_peer)


def test_higher_first_then_by_arrival() -> None:
    line = order()
    jobs = [job(priority) for priority in (REPLICATION, PREFETCH, HANDOFF, PREFETCH, HANDOFF, REPLICATION)]
    for each in jobs:
        line.add(each, 0.0)
    taken = []
    while (run := line.take(0.01)) is not None:
        taken.append(jobs.index(run.work))
    assert taken == [2, 4, 1, 3, 0, 5]


def test_overdue_work_has_every_fourth_turn() -> None:
    line = order()
    low, high = job(REPLICATION, 100), job(HANDOFF, 100)
    line.add(low, 0.0)
    line.add(high, 0.01)
    served = [line.take(0.05).work is low for _ in range(4)]  # type: ignore[union-attr]
    assert not any(served), "not overdue yet"
    served = [line.take(0.2).work is low for _ in range(40)]  # type: ignore[union-attr]
    assert sum(served) == 10
    assert all(sum(served[at : at + 4]) == 1 for at in range(0, 40, 4))


def test_two_overdue_priorities_share_that_turn() -> None:
    line = order()
    jobs = [job(REPLICATION, 100), job(PREFETCH, 100), job(HANDOFF, 100)]
    for number, each in enumerate(jobs):
        line.add(each, number / 100)
    served = [line.take(0.2).work.priority for _ in range(80)]  # type: ignore[union-attr]
    assert [served.count(priority) for priority in Priority] == [60, 10, 10]


def test_runs_are_bounded_in_bytes_and_number() -> None:
    line = order(max_slices=10**6)
    line.add(job(PREFETCH, 3, LIMIT), 0.0)
    line.add(job(PREFETCH, 2000, 0), 0.0)
    lengths = []
    while (run := line.take(0.0)) is not None:
        lengths.append(len(run.slices))
    assert lengths == [1, 1, 1, *[MAX_RUN_SLICES] * 3, 2000 - 3 * MAX_RUN_SLICES]


def test_each_priority_has_its_own_bound() -> None:
    line = order(max_slices=10)
    line.add(job(REPLICATION, 10), 0.0)
    assert not line.has_room(job(REPLICATION))
    assert line.has_room(job(HANDOFF, 10))
    assert line.has_room(job(PREFETCH, 99))  # larger than the bound: alone
    other = job(HANDOFF, 10)
    other.peer = "other"
    line.add(other, 0.0)
    assert not line.has_room(job(HANDOFF))
    assert line.withdraw(other) == other.slices
    assert line.has_room(job(HANDOFF, 10))
    line.check_integrity()


def test_a_request_that_failed_is_moved_no_further() -> None:
    line = order(threads_per_peer=1)
    large = Job(PREFETCH, [Slice(0, 0, LIMIT), Slice(1, 0, 5 * LIMIT), Slice(2, 0, LIMIT)])
    line.add(large, 0.0)
    error = NotFound("x")
    for expected in ([Slice(0, 0, LIMIT)], [Slice(1, 0, LIMIT)]):
        run = line.take(0.0)
        assert run is not None
        assert run.slices == expected
        ended = line.finished(run, [SliceOutcome(run.slices, error)], 0.0)
    assert [(work, list(slices), found) for work, slices, found in ended] == [
        (large, [Slice(1, 0, LIMIT), Slice(1, LIMIT, 4 * LIMIT)], error)
    ]
    line.check_integrity()
    assert line.withdraw(large) == [Slice(2, 0, LIMIT)]


# What happens: a batch arrives, a thread asks for work, a batch is cancelled; each after some time.
events_ = st.lists(
    st.tuples(
        st.sampled_from(["add", "take", "take", "take", "withdraw"]),
        st.sampled_from(Priority),
        st.lists(st.integers(0, 3 * LIMIT), min_size=1, max_size=6),
        st.floats(0, 0.2),
    ),
    max_size=60,
)


@settings(max_examples=300)
@given(events_)
def test_nothing_is_lost_doubled_starved_or_out_of_order(
    events: list[tuple[str, Priority, list[int], float]],
) -> None:
    line, now_s = order(), 0.0
    waiting: list[Job] = []
    everyone: list[Job] = []
    watch = Watch()
    for what, priority, sizes, pause_s in events:
        now_s += pause_s
        if what == "add":
            made = Job(priority, cut_batch(sizes, LIMIT), added_s=now_s)
            line.add(made, now_s)
            waiting.append(made)
            everyone.append(made)
        elif what == "take":
            watch.take(line, waiting, now_s)
        elif waiting:
            victim = waiting.pop(len(sizes) % len(waiting))
            victim.handed_out += line.withdraw(victim)
            assert line.withdraw(victim) == []
        line.check_integrity()
    while waiting:
        watch.take(line, waiting, now_s)
    assert line.take(now_s) is None
    assert all(each.handed_out == each.slices for each in everyone)


class Watch:
    """Takes runs and checks whose turn it was."""

    def __init__(self) -> None:
        self._passed_over = dict.fromkeys(Priority, 0)

    def take(self, line: SliceOrder[Job], waiting: list[Job], now_s: float) -> None:
        run = line.take(now_s)
        if run is None:
            assert not waiting
            return
        heads = {each.priority: each for each in reversed(waiting)}  # the first of each
        highest = heads[min(heads)]
        before_s = min(highest.added_s, now_s - AFTER_S)
        overdue = {p for p, head in heads.items() if p > highest.priority and head.added_s < before_s}
        assert run.work is heads[run.work.priority]
        assert run.work is highest or run.work.priority in overdue
        for priority in Priority:
            served = priority is run.work.priority or priority not in overdue
            self._passed_over[priority] = 0 if served else self._passed_over[priority] + 1
        assert max(self._passed_over.values()) < 8, "starved"  # every fourth turn, shared by two
        run.work.handed_out += run.slices
        if len(run.work.handed_out) == len(run.work.slices):
            waiting.remove(run.work)


@given(st.lists(st.tuples(*[st.none() | st.floats(0, 1)] * 3), min_size=1, max_size=50))
def test_turns_only_ever_name_those_that_wait(states: list[tuple[float | None, ...]]) -> None:
    turns = PriorityOrder(AFTER_S)
    for since_s in states:
        named = turns.order(since_s, 1.0)
        assert sorted(named) == [priority for priority in Priority if since_s[priority] is not None]
        assert sorted(named[1:]) == named[1:]
        if named:
            turns.served(named[0], since_s, 1.0)


def test_a_full_low_queue_does_not_keep_high_work_out() -> None:
    queue = SliceQueue(order(max_slices=2, threads_per_peer=1))
    gate = threading.Event()
    running = Job(PREFETCH, cut_batch([1]), gate=gate)
    queue.put(running, 0)
    assert running.started.acquire(timeout=HANG_S)
    low = job(REPLICATION, 2)
    queue.put(low, 0)
    with pytest.raises(Overloaded, match="replication"):
        queue.put(job(REPLICATION), 0.01)
    urgent = Job(HANDOFF, cut_batch([1]), gate=(second := threading.Event()))
    queue.put(urgent, 0)
    gate.set()
    assert urgent.started.acquire(timeout=HANG_S)
    assert not low.handed_out
    second.set()
    queue.close()
    queue.join(HANG_S)


def test_many_threads_take_everything_once() -> None:
    queue = SliceQueue(order(max_slices=20, threads_per_peer=4))
    jobs = [job(Priority(number % 3), number % 7 + 1) for number in range(300)]
    for number, each in enumerate(jobs):
        each.peer = f"peer {number % 3}"
    with ThreadPoolExecutor(6) as pool:  # putters that must wait for room again and again
        list(pool.map(lambda each: queue.put(each, 10.0), jobs))
    done = job(REPLICATION)
    queue.put(done, 10.0)
    queue.close()
    queue.join(HANG_S)
    taken = [(*part, id(each)) for each in [*jobs, done] for part in (*each.handed_out, *each.abandoned)]
    assert sorted(taken) == sorted((*part, id(each)) for each in [*jobs, done] for part in each.slices)
    with pytest.raises(PeerLost):
        queue.put(done, 0)


def test_close_wakes_those_that_wait_for_room_and_ends_the_threads() -> None:
    queue = SliceQueue(order(max_slices=1, threads_per_peer=1))
    gate = threading.Event()
    running, waiting = Job(PREFETCH, cut_batch([1]), gate=gate), job(PREFETCH)
    queue.put(running, 0)
    assert running.started.acquire(timeout=HANG_S)
    queue.put(waiting, 0)
    with ThreadPoolExecutor(1) as pool:
        putting = pool.submit(queue.put, job(PREFETCH), 10.0)
        queue.close()
        assert waiting.abandoned == waiting.slices
        with pytest.raises(PeerLost):
            putting.result(HANG_S)
    gate.set()
    queue.join(HANG_S)
    assert running.handed_out == running.slices
    assert not [thread for thread in threading.enumerate() if thread.name == "transfer-slices"]


def test_a_slow_peer_has_its_share_of_threads_and_delays_no_other() -> None:
    queue = SliceQueue(order(threads_per_peer=2))
    gate = threading.Event()
    slow = [Job(HANDOFF, cut_batch([LIMIT] * 5, LIMIT), peer="slow", gate=gate) for _ in range(3)]
    for each in slow:
        queue.put(each, 0)
    for _ in range(2):
        assert slow[0].started.acquire(timeout=HANG_S)
    for number in range(20):
        other = Job(REPLICATION, cut_batch([LIMIT] * 3, LIMIT), peer=f"peer {number}")
        queue.put(other, 0)
        for _ in range(3):
            assert other.started.acquire(timeout=HANG_S), "held up by a peer that answers nothing"
    assert not slow[0].started.acquire(timeout=0.02), "more threads than its share"
    gate.set()
    for each in slow[1:]:
        for _ in range(5):
            assert each.started.acquire(timeout=HANG_S)
    queue.close()
    queue.join(HANG_S)


def test_a_thread_that_leaves_a_peer_for_urgent_work_is_replaced() -> None:
    queue = SliceQueue(order(threads_per_peer=1))
    first, second = threading.Event(), threading.Event()
    bulk = Job(REPLICATION, cut_batch([LIMIT] * 2, LIMIT), peer="one", gate=first)
    holding = Job(HANDOFF, cut_batch([LIMIT]), peer="two", gate=second)
    behind = Job(HANDOFF, cut_batch([LIMIT]), peer="two", gate=second)
    for each in (bulk, holding, behind):
        queue.put(each, 0)
    assert bulk.started.acquire(timeout=HANG_S)
    assert holding.started.acquire(timeout=HANG_S)
    first.set()
    assert bulk.started.acquire(timeout=HANG_S)
    second.set()
    assert behind.started.acquire(timeout=HANG_S)
    queue.close()
    queue.join(HANG_S)


def test_the_order_serves_other_peers_while_one_has_its_share() -> None:
    line = order(threads_per_peer=1)
    one, two = job(HANDOFF, 3), job(REPLICATION, 2)
    two.peer = "other"
    line.add(one, 0.0)
    line.add(two, 0.0)
    first, second = line.take(0.0), line.take(0.0)
    assert first is not None
    assert second is not None
    assert (first.work, second.work) == (one, two)
    assert line.take(0.0) is None
    for run in (second, first):
        line.finished(run, [SliceOutcome(run.slices, None)], 0.0)
    third = line.take(0.0)
    assert third is not None
    assert third.work is one
    line.check_integrity()
