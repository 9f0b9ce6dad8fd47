"""The event queue: order, cancelling, bounded memory."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool.base.errors import InvalidInput
from moonpool.sim.world.clock import EventQueue


def drain(queue: EventQueue[int]) -> list[tuple[float, int]]:
    popped = []
    while (event := queue.pop()) is not None:
        popped.append(event)
    return popped


@given(st.lists(st.tuples(st.sampled_from([0.0, 1.0, 1.5, 2.0]), st.booleans())))
def test_events_come_by_time_then_in_the_order_put_without_the_cancelled(script: list[tuple[float, bool]]) -> None:
    queue: EventQueue[int] = EventQueue()
    handles = [queue.put(time_s, number) for number, (time_s, _) in enumerate(script)]
    for handle, (_, is_cancelled) in zip(handles, script, strict=True):
        if is_cancelled:
            queue.cancel(handle)
    kept = [(time_s, number) for number, (time_s, is_cancelled) in enumerate(script) if not is_cancelled]
    assert len(queue) == len(kept)
    assert queue.next_s() == min((time_s for time_s, _ in kept), default=None)
    assert drain(queue) == sorted(kept)
    assert (len(queue), queue.next_s()) == (0, None)


@given(st.integers(0, 10_000))
def test_a_long_run_with_events_put_and_cancelled_on_the_way(seed: int) -> None:
    rng = random.Random(seed)
    queue: EventQueue[int] = EventQueue()
    alive = {}
    seen: list[tuple[float, int]] = []
    for number in range(300):
        alive[number] = queue.put(queue.now_s + rng.choice([0.0, 0.5, 3.0]), number)
        if rng.random() < 0.6:
            queue.cancel(alive.pop(rng.choice(list(alive))))
        if rng.random() < 0.3 and (event := queue.pop()) is not None:
            seen.append(event)
            del alive[event[1]]
        assert len(queue) == len(alive)
    seen += drain(queue)
    assert [time_s for time_s, _ in seen] == sorted(time_s for time_s, _ in seen)


def test_cancelling_twice_or_after_the_event_does_nothing() -> None:
    queue: EventQueue[str] = EventQueue()
    first, second = queue.put(1.0, "first"), queue.put(2.0, "second")
    assert queue.pop() == (1.0, "first")
    queue.cancel(first)
    assert len(queue) == 1
    queue.cancel(second)
    queue.cancel(second)
    assert (len(queue), queue.pop()) == (0, None)


def test_payloads_are_never_compared() -> None:
    queue: EventQueue[object] = EventQueue()
    payloads = [object(), {}, None]
    for payload in payloads:
        queue.put(1.0, payload)
    assert [queue.pop() for _ in payloads] == [(1.0, payload) for payload in payloads]


def test_cancelled_events_do_not_pile_up() -> None:
    queue: EventQueue[int] = EventQueue()
    queue.put(1e9, -1)
    for number in range(10_000):
        queue.cancel(queue.put(1e6 + number, number))
    assert len(queue._entries) < 200
    assert drain(queue) == [(1e9, -1)]


@pytest.mark.parametrize("time_s", [0.5, float("nan")])
def test_events_in_the_past_are_refused(time_s: float) -> None:
    queue: EventQueue[int] = EventQueue()
    queue.put(1.0, 1)
    queue.pop()
    with pytest.raises(InvalidInput):
        queue.put(time_s, 2)
