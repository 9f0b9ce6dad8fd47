"""Pulls under way: they count while they are on, and slow others by what passes meanwhile."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool.conductor.placement.tables import slots_in
from moonpool.conductor.placement.traffic import Traffic


def test_a_pull_counts_from_its_start_to_its_end() -> None:
    traffic = Traffic()
    traffic.expect("r", 3, 1000, 5.0, 7.0)
    traffic.advance(4.9)
    assert (traffic.num_flows, traffic.nbytes, set(traffic.busy_slots)) == (0, 0, set())
    traffic.advance(5.0)
    assert (traffic.num_flows, traffic.nbytes, set(traffic.busy_slots)) == (1, 1000, {3})
    traffic.advance(7.0)
    assert (traffic.num_flows, traffic.nbytes, set(traffic.busy_slots)) == (0, 0, set())


def test_a_prefill_that_ended_ends_its_pull() -> None:
    traffic = Traffic()
    for name in ("early", "on"):
        traffic.expect(name, 3, 1000, 5.0, 7.0)
    traffic.end("early")
    traffic.advance(6.0)
    traffic.end("on")
    traffic.end("never heard of")
    assert traffic.num_flows == 0
    traffic.expect("on", 3, 1000, 6.0, 9.0)  # routed again
    traffic.advance(6.5)
    assert traffic.num_flows == 1
    traffic.advance(7.5)  # the end of the earlier one is not its end
    assert traffic.num_flows == 1


def test_the_worse_of_worker_and_source_counts() -> None:
    traffic = Traffic()
    assert traffic.others(None) == (0.0, 0.0)
    traffic.num_sources = 2
    for name, slot in (("a", 1), ("b", 1), ("c", 2)):
        traffic.expect(name, slot, 100, 0.0, 9.0)
    traffic.advance(0.0)
    assert traffic.others(None) == traffic.others(9) == (150.0, 1.5)
    assert traffic.others(1) == (200, 2)
    assert traffic.others(2) == (150.0, 1.5)


STEPS = st.lists(
    st.tuples(st.integers(0, 5), st.integers(0, 3), st.integers(1, 99), st.floats(0, 5), st.floats(0, 5), st.booleans())
)


@given(STEPS)
def test_the_totals_are_the_sums(steps: list[tuple[int, int, int, float, float, bool]]) -> None:
    traffic, now_s = Traffic(), 0.0
    open_flows: dict[str, tuple[int, int, float, float]] = {}
    for number, slot, nbytes, wait_s, length_s, ends in steps:
        name = str(number)
        now_s += wait_s / 4
        if ends:
            traffic.end(name)
            open_flows.pop(name, None)
        else:
            traffic.expect(name, slot, nbytes, now_s + wait_s, now_s + wait_s + length_s)
            open_flows[name] = (slot, nbytes, now_s + wait_s, now_s + wait_s + length_s)
        traffic.advance(now_s)
    active = [one for one in open_flows.values() if one[2] <= now_s < one[3]]
    assert traffic.nbytes == sum(one[1] for one in active)
    assert set(traffic.busy_slots) == {one[0] for one in active}
    assert set(slots_in(traffic.busy_mask)) == set(traffic.busy_slots)


def test_requests_that_never_end_leave_nothing() -> None:
    traffic = Traffic()
    for number in range(1000):
        traffic.expect(str(number), number % 7, 10, number, number + 0.5)
        traffic.advance(number + 1)
    assert (traffic.num_flows, len(traffic._flows), len(traffic._events)) == (0, 0, 0)
    assert traffic.others(0) == pytest.approx((0, 0))
