"""The queue: each request leaves once, bounds hold, tenants get their shares, none starves, late ones are refused."""

from __future__ import annotations

import itertools
from typing import TypeAlias

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool.base.errors import AlreadyExists, ConfigError
from moonpool.conductor.admission.fairness import FairTurns
from moonpool.conductor.admission.queue import AdmissionQueue, QueueConfig, QueueRefusal, WaitingRequest


def yes(_: WaitingRequest) -> bool:
    return True


def drain(queue: AdmissionQueue, now_s: float, limit: int) -> list[WaitingRequest]:
    left = [limit]

    def fits(_: WaitingRequest) -> bool:
        left[0] -= 1
        return left[0] >= 0

    return queue.pop_ready(now_s, fits)


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from("ooooopxc"),
        st.floats(0, 5),
        st.sampled_from("abc"),
        st.integers(-2, 2),
        st.floats(0.01, 3),
        st.one_of(st.none(), st.floats(0, 20)),
    ),
    max_size=80,
)


Operation: TypeAlias = tuple[str, float, str, int, float, float | None]


def refused(turned: QueueRefusal | None) -> QueueRefusal:
    assert turned is not None
    return turned


@given(OPERATIONS, st.integers(1, 8))
def test_each_request_leaves_exactly_once_and_the_bound_holds(operations: list[Operation], capacity: int) -> None:
    queue, now_s = AdmissionQueue(QueueConfig(capacity=capacity, ageing_s=3.0)), 0.0
    inside: dict[str, WaitingRequest] = {}
    left: set[str] = set()

    def leaves(request: WaitingRequest) -> None:
        assert inside.pop(request.request_id) == request
        assert request.request_id not in left
        left.add(request.request_id)

    for number, (kind, passed_s, tenant, priority, work_s, patience_s) in enumerate(operations):
        now_s += passed_s
        if kind == "o":
            start_by_s = None if patience_s is None else now_s + patience_s
            request = WaitingRequest(f"r{number}", tenant, work_s, priority, start_by_s)
            inside[request.request_id] = request
            turned = queue.offer(request, now_s)
            if turned is not None:
                assert turned.retry_after_s >= 1
                assert turned.reason
                leaves(turned.request)
        elif kind == "p":
            for request in drain(queue, now_s, 1 + number % 3):
                assert request.start_by_s is None or request.start_by_s > now_s
                leaves(request)
        elif kind == "x":
            for late in queue.expire(now_s):
                assert late.request.start_by_s is not None
                assert late.request.start_by_s <= now_s
                leaves(late.request)
            event_s = queue.next_event_s()
            assert event_s is None or event_s > now_s
        elif inside:
            name = sorted(inside)[number % len(inside)]
            assert queue.cancel(name)
            assert not queue.cancel(name)
            leaves(inside[name])
        assert len(queue) <= capacity
        assert len(queue._deadlines) <= 2 * len(queue) + 65
        assert sum(len(each._heap) for each in queue._tenants.values()) <= 2 * len(queue) + 65 * len(queue._tenants)
    for late in queue.expire(now_s):
        leaves(late.request)
    assert len(queue) == len(inside)
    for request in queue.pop_ready(now_s, yes):
        leaves(request)
    assert not inside
    assert len(queue) == 0
    assert queue.next_event_s() is None
    assert not queue._tenants
    assert not len(queue._turns)


WORKS = st.lists(st.floats(0.01, 10), min_size=1, max_size=40)


@given(WORKS, WORKS, WORKS, st.floats(0.1, 10), st.lists(st.integers(-10, 10), min_size=1))
def test_over_their_weights_the_service_of_two_that_wait_differs_by_one_request_each(
    first: list[float], second: list[float], third: list[float], weight: float, priorities: list[int]
) -> None:
    """`weight` is that of the first tenant, whose requests have these priorities in turn; they help it to nothing."""
    queue, works = AdmissionQueue(QueueConfig()), {"a": first, "b": second, "c": third}
    weights = {"a": weight, "b": 1.0, "c": 1.0}
    for tenant, values in works.items():
        for number, work_s in enumerate(values):
            priority = priorities[number % len(priorities)] if tenant == "a" else 0
            request = WaitingRequest(f"{tenant}{number}", tenant, work_s, priority, weight=weights[tenant])
            assert queue.offer(request, 0.0) is None
    bound = max(first) / weight + max(second)
    left, difference, seen = {tenant: len(values) for tenant, values in works.items()}, 0.0, [0.0]
    while left["a"] and left["b"]:
        (request,) = drain(queue, 1.0, 1)
        left[request.tenant] -= 1
        sign = {"a": 1.0 / weight, "b": -1.0, "c": 0.0}[request.tenant]
        difference += sign * request.prefill_s
        seen.append(difference)
    # Over any stretch of time: the difference between any two moments.
    assert max(seen) - min(seen) <= bound * (1 + 1e-9)


def test_a_flooding_tenant_delays_itself_only() -> None:
    queue = AdmissionQueue(QueueConfig(capacity=50))
    for number in range(50):
        queue.offer(WaitingRequest(f"flood{number}", "flood", 1.0), 0.0)
    assert refused(queue.offer(WaitingRequest("flood50", "flood", 1.0), 0.0)).request.request_id == "flood50"
    turned = refused(queue.offer(WaitingRequest("calm", "calm", 1.0), 1.0))
    assert turned.request.request_id == "flood49"  # its own newest, although the queue was full
    assert "gave way to one of a tenant with less work" in turned.reason
    assert "calm" in [one.request_id for one in drain(queue, 1.0, 2)]


def test_a_tenant_alone_gets_everything_and_owes_nothing_for_it() -> None:
    queue = AdmissionQueue(QueueConfig())
    for number in range(100):
        queue.offer(WaitingRequest(f"a{number}", "a", 1.0), 0.0)
    assert len(drain(queue, 0.0, 80)) == 80
    for number in range(20):
        queue.offer(WaitingRequest(f"b{number}", "b", 1.0), 1.0)
    taken = [one.tenant for one in drain(queue, 1.0, 20)]
    assert 9 <= taken.count("a") <= 11


@given(
    st.lists(st.tuples(st.floats(0, 5), st.integers(-10, 10)), min_size=1, max_size=40),
    st.lists(st.integers(-10, 10), min_size=1, max_size=5),
)
def test_priorities_of_one_tenant_change_nothing_for_another(
    arrivals: list[tuple[float, int]], others: list[int]
) -> None:
    """Of equal work and arrivals, whatever priorities the tenant "a" gives: the same turns of "b" are served."""

    def turns_of_b(priorities: list[int]) -> list[int]:
        queue, now_s, served = AdmissionQueue(QueueConfig()), 0.0, list[str]()
        for number, (passed_s, _) in enumerate(arrivals):
            now_s += passed_s
            queue.offer(WaitingRequest(f"a{number}", "a", 1.0, priorities[number % len(priorities)]), now_s)
            queue.offer(WaitingRequest(f"b{number}", "b", 0.7), now_s)
            served += [one.tenant for one in drain(queue, now_s, number % 3)]
        served += [one.tenant for one in queue.pop_ready(now_s, yes)]
        return [turn for turn, tenant in enumerate(served) if tenant == "b"]

    assert turns_of_b([priority for _, priority in arrivals]) == turns_of_b(others)


@given(st.lists(st.tuples(st.floats(0, 30), st.integers(-3, 3)), min_size=1, max_size=40), st.floats(0.5, 10))
def test_a_level_of_priority_is_worth_a_fixed_time_so_no_request_starves(
    arrivals: list[tuple[float, int]], ageing_s: float
) -> None:
    queue, now_s, offered_s = AdmissionQueue(QueueConfig(ageing_s=ageing_s)), 0.0, dict[str, float]()
    for number, (passed_s, priority) in enumerate(arrivals):
        now_s += passed_s
        offered_s[f"r{number}"] = now_s
        queue.offer(WaitingRequest(f"r{number}", "t", 1.0, priority), now_s)
    order = queue.pop_ready(now_s, yes)
    for earlier, later in itertools.combinations(order, 2):
        head_start_s = (earlier.priority - later.priority) * ageing_s
        assert offered_s[earlier.request_id] <= offered_s[later.request_id] + head_start_s + 1e-9
        if earlier.priority == later.priority:
            assert int(earlier.request_id[1:]) < int(later.request_id[1:])


def test_higher_priority_first_and_the_lowest_newest_of_the_tenant_gives_way() -> None:
    queue = AdmissionQueue(QueueConfig(capacity=3))
    for name, priority in (("old", 0), ("new", 0), ("mid", 1)):
        assert queue.offer(WaitingRequest(name, "t", 1.0, priority), 0.0) is None
    turned = refused(queue.offer(WaitingRequest("high", "t", 1.0, 5), 0.0))
    assert (turned.request.request_id, turned.request.priority) == ("new", 0)
    assert "gave way to one of higher priority" in turned.reason
    low = refused(queue.offer(WaitingRequest("low", "t", 1.0, -1), 0.0))
    assert low.request.request_id == "low"
    assert low.reason == "3 requests are waiting already, the most that may wait"
    other = refused(queue.offer(WaitingRequest("other", "u", 9.0, 10), 0.0))
    assert other.request.request_id == "other", "the tenant with the most work gives way, whatever its priority"
    assert [one.request_id for one in queue.pop_ready(0.0, yes)] == ["high", "mid", "old"]


def test_what_comes_before_a_new_request_is_its_own_work_and_the_share_of_others() -> None:
    queue = AdmissionQueue(QueueConfig())
    for number in range(300):
        queue.offer(WaitingRequest(f"a{number}", "a", 2.0, priority=10), 0.0)
    assert queue.ahead_s("a", 10, 1.0, 0.0) == pytest.approx(600.0)
    assert queue.ahead_s("b", 0, 1.0, 0.0) == pytest.approx(2.0), "one request of the other tenant"
    queue.offer(WaitingRequest("b0", "b", 3.0), 0.0)
    assert queue.ahead_s("b", 0, 1.0, 1.0) == pytest.approx(3.0 + 3.0 + 2.0)
    assert queue.ahead_s("b", 1, 1.0, 1.0) == pytest.approx(2.0), "it passes over its own"
    assert queue.ahead_s("b", 0, 3.0, 1.0) == pytest.approx(3.0 + 1.0 + 2.0), "a third of it for the other's work"


def test_a_storm_of_cancelled_requests_leaves_nothing_behind() -> None:
    queue = AdmissionQueue(QueueConfig())
    queue.offer(WaitingRequest("stays", "b", 1.0), 0.0)
    for number in range(10_000):
        queue.offer(WaitingRequest(f"r{number}", "a", 1.0, number % 7, start_by_s=1e6), 0.0)
    for number in range(10_000):
        assert queue.cancel(f"r{number}")
    assert (len(queue), list(queue._tenants)) == (1, ["b"])
    assert len(queue._deadlines) + len(queue._turns._heap) <= 2 * 66
    assert [one.request_id for one in queue.pop_ready(0.0, yes)] == ["stays"]


def test_a_request_that_cannot_be_in_time_is_told_at_once() -> None:
    queue = AdmissionQueue(QueueConfig())
    assert refused(queue.offer(WaitingRequest("late", "t", 1.0, start_by_s=4.0), 5.0)).request.request_id == "late"
    queue.offer(WaitingRequest("b", "t", 2.0, start_by_s=9.0), 5.0)
    queue.offer(WaitingRequest("a", "t", 2.0, start_by_s=8.0), 5.0)
    assert queue.next_event_s() == 8.0
    assert queue.expire(7.9) == []
    (turned,) = queue.expire(8.0)
    assert turned.request.request_id == "a"
    assert turned.reason == (
        "it waited 3.00 s for a free worker, and with 2.00 s for its prompt the first token can no longer come in time"
    )
    assert queue.pop_ready(9.5, yes) == []  # too late for b as well; expire says so
    assert queue.next_event_s() == 9.0
    assert [one.request.request_id for one in queue.expire(9.5)] == ["b"]
    assert queue.next_event_s() is None


def test_what_is_late_can_still_be_cancelled() -> None:
    queue = AdmissionQueue(QueueConfig())
    queue.offer(WaitingRequest("a", "t", 2.0, start_by_s=8.0), 5.0)
    queue.pop_ready(9.0, yes)
    assert queue.cancel("a")
    assert queue.expire(9.0) == []


def test_retry_after_follows_the_measured_rate() -> None:
    queue = AdmissionQueue(QueueConfig(capacity=100))
    for number in range(100):
        queue.offer(WaitingRequest(f"r{number}", "t", 1.0), 0.0)
    first = refused(queue.offer(WaitingRequest("x", "t", 1.0), 0.0))
    assert first.retry_after_s == pytest.approx(101)  # one worker's pace until measured
    for second in range(1, 21):
        assert len(drain(queue, float(second), 4)) == 4
    for number in range(80):
        queue.offer(WaitingRequest(f"s{number}", "t", 1.0), 20.0)
    later = refused(queue.offer(WaitingRequest("y", "t", 1.0), 20.0))
    assert 101 / 4 < later.retry_after_s < 101 / 3


def test_a_large_request_is_not_overtaken_for_ever() -> None:
    queue = AdmissionQueue(QueueConfig())
    queue.offer(WaitingRequest("large", "t", 100.0), 0.0)
    queue.offer(WaitingRequest("small", "t", 1.0), 0.0)
    assert queue.pop_ready(0.0, lambda one: one.prefill_s < 50) == []
    assert [one.request_id for one in queue.pop_ready(0.0, yes)] == ["large", "small"]


def test_wrong_settings_and_doubles_are_refused() -> None:
    for wrong in ({"capacity": 0}, {"ageing_s": 0.0}):
        with pytest.raises(ConfigError):
            QueueConfig(**wrong)
    queue = AdmissionQueue(QueueConfig())
    queue.offer(WaitingRequest("a", "t", 1.0), 0.0)
    with pytest.raises(AlreadyExists):
        queue.offer(WaitingRequest("a", "t", 1.0), 0.0)


@given(st.booleans(), WORKS, WORKS)
def test_of_two_conductors_that_exchange_what_they_served_tenants_get_equal_shares(
    exchange: bool, first: list[float], second: list[float]
) -> None:
    """One tenant floods both of them, another one the first of them alone. Both serve as much as the other."""
    queues, served_s, done_s = [AdmissionQueue(QueueConfig()) for _ in range(2)], {"a": 0.0, "b": 0.0}, [0.0, 0.0]
    for number in range(600):
        queues[0].offer(WaitingRequest(f"b{number}", "b", second[number % len(second)]), 0.0)
        for queue in queues:
            queue.offer(WaitingRequest(f"a{number}", "a", first[number % len(first)]), 0.0)
    for _ in range(300):
        at = done_s.index(min(done_s))
        (request,) = drain(queues[at], 1.0, 1)
        served_s[request.tenant] += request.prefill_s
        done_s[at] += request.prefill_s
        if exchange:
            queues[1 - at].served_elsewhere({request.tenant: request.prefill_s})
    largest_s = max(first) + max(second)
    if exchange:
        assert abs(served_s["a"] - served_s["b"]) <= 2 * largest_s
    else:
        assert served_s["a"] >= 2 * served_s["b"] - 5 * largest_s, "it has more without"


def test_what_was_served_elsewhere_before_a_tenant_came_gives_it_no_claim() -> None:
    queue = AdmissionQueue(QueueConfig())
    for number in range(20):
        queue.offer(WaitingRequest(f"a{number}", "a", 1.0), 0.0)
    queue.served_elsewhere({"a": 1000.0, "unknown": 5.0})
    for number in range(20):
        queue.offer(WaitingRequest(f"b{number}", "b", 1.0), 0.0)
    assert 4 <= [one.tenant for one in drain(queue, 1.0, 10)].count("a") <= 6


def test_an_endless_stream_of_new_tenants_neither_starves_an_old_one_nor_stays_in_memory() -> None:
    turns: FairTurns[str] = FairTurns()
    for name in ("stays", "guest0"):
        turns.enter(name, 1.0)
    served: list[str] = []
    for number in range(1, 3_000):
        turns.enter(f"guest{number}", 1.0)  # two guests at any time
        one = turns.first()
        served.append(one)
        turns.serve(one)
        if one == "stays":
            turns.change(one, 1.0)
            turns.leave(f"guest{number}")
        else:
            turns.leave(one)
        assert len(turns) == 2
        assert len(turns._heap) <= 2 * 4 + 65
    assert served.count("stays") > 900
