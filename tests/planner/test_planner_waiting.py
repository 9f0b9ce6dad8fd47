"""The two small models: against brute force, closed forms, and by what must hold."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool.planner.waiting import DecodeRoom, decode_gaps, fifo_waits, range_maximum
from moonpool.sim.physics.cost import DecodeCost

ROOM = DecodeRoom(max_num_seqs=256, kv_tokens=1_000_000)
COST = DecodeCost(base_s=0.02, per_seq_s=1e-4, per_kv_token_s=1e-7)
JOBS = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 20)), min_size=1, max_size=40)


@given(JOBS, st.integers(1, 5))
def test_waits_are_those_of_a_queue_really_run(jobs: list[tuple[int, int]], num_servers: int) -> None:
    arrivals = np.sort(np.array([job[0] for job in jobs], np.float64))
    services = np.array([job[1] for job in jobs], np.float64)
    free = [0.0] * num_servers
    expected = []
    for arrival, service in zip(arrivals.tolist(), services.tolist(), strict=True):
        server = free.index(min(free))
        begin = max(arrival, free[server])
        expected.append(begin - arrival)
        free[server] = begin + service
    waits = fifo_waits(arrivals, services, num_servers)
    assert waits.tolist() == expected
    assert np.all(fifo_waits(arrivals, services, num_servers + 1) <= waits)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=40), st.data())
def test_the_greatest_of_a_range(values: list[int], data: st.DataObject) -> None:
    places = st.integers(0, len(values) - 1)
    ranges = [sorted(pair) for pair in data.draw(st.lists(st.tuples(places, places), min_size=1))]
    first, last = np.array(ranges).T
    found = range_maximum(np.array(values, np.float64), first, last)
    assert found.tolist() == [max(values[low : high + 1]) for low, high in ranges]


def test_one_sequence_takes_the_time_of_its_steps() -> None:
    found = decode_gaps(COST, ROOM, np.array([5.0]), np.array([10_000]), np.array([500]), 1)
    assert found.tbt_s[0] == pytest.approx(COST.decode_step_s(1, 10_250), rel=0.01)
    assert not found.crowded[0]


def test_one_token_has_no_gap() -> None:
    found = decode_gaps(COST, ROOM, np.array([0.0, 1.0]), np.array([100, 100]), np.array([1, 0]), 1)
    assert found.tbt_s.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("num_nodes", [2, 3, 5])
def test_even_traffic_settles_where_littles_law_says(num_nodes: int) -> None:
    rate, num_input, num_output = 5.0, 4000, 400
    begin_s = np.arange(3000) / rate
    sizes = np.full(3000, num_input), np.full(3000, num_output)
    found = decode_gaps(COST, ROOM, begin_s, *sizes, num_nodes)
    tokens_s = rate * (num_output - 1) / num_nodes
    expected = COST.base_s / (1 - tokens_s * (COST.per_seq_s + COST.per_kv_token_s * (num_input + num_output / 2)))
    assert np.median(found.tbt_s) == pytest.approx(expected, rel=0.03)


def test_a_window_bounds_what_a_step_reads() -> None:
    """All layers with a window: wider than every sequence it changes nothing, narrow it makes steps fast."""
    begin_s, sizes = np.arange(50) / 5.0, (np.full(50, 4000), np.full(50, 400))

    def windowed(window: int) -> DecodeCost:
        return DecodeCost(base_s=0.02, per_seq_s=1e-4, per_kv_token_s=0.0, window=window, per_window_token_s=1e-7)

    plain = decode_gaps(COST, ROOM, begin_s, *sizes, 2).tbt_s
    assert decode_gaps(windowed(10_000), ROOM, begin_s, *sizes, 2).tbt_s == pytest.approx(plain, rel=0.01)
    narrow = decode_gaps(windowed(64), ROOM, begin_s, *sizes, 2).tbt_s
    assert narrow.mean() < plain.mean()


def test_too_much_traffic_does_not_settle() -> None:
    """One node of the last test would need more than all of its time."""
    begin_s = np.arange(3000) / 5.0
    found = decode_gaps(COST, ROOM, begin_s, np.full(3000, 4000), np.full(3000, 400), 1)
    assert found.tbt_s[2000:].min() > 10 * COST.base_s
    assert found.crowded[2000:].all()


def test_more_nodes_are_never_slower_and_too_few_are_crowded() -> None:
    rng = np.random.default_rng(3)
    begin_s = np.sort(rng.uniform(0, 300, 1500))
    num_input, num_output = rng.integers(100, 30_000, 1500), rng.integers(1, 800, 1500)
    room = DecodeRoom(max_num_seqs=40, kv_tokens=500_000)
    found = [decode_gaps(COST, room, begin_s, num_input, num_output, count) for count in (1, 2, 4, 8, 16, 64)]
    means = [float(each.tbt_s.mean()) for each in found]
    assert means == sorted(means, reverse=True)
    crowded = [int(each.crowded.sum()) for each in found]
    assert crowded == sorted(crowded, reverse=True)
    assert crowded[0] > 1000
    assert crowded[-1] == 0
