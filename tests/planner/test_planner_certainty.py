"""How sure a plan is: draws keep slices whole, intervals are narrow where all slices are alike, doubts are told."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from trace_cases import make_trace, traces

from moonpool.planner.certainty import Certainty, certainty, doubts, draws
from moonpool.planner.demand import PoolSize, PrefillDemand, ReuseProfile, demand_of
from moonpool.planner.split import SplitEstimator, Targets, fewest_nodes
from moonpool.sim.fleet import machine_for
from moonpool.sim.physics.hardware import node
from moonpool.sim.physics.model_shape import preset
from moonpool.traces.columns import Trace
from moonpool.traces.generate import generate

MACHINE = machine_for(preset("llama3-70b"), node("a800"))
TARGETS = Targets(ttft_s=10.0, tbt_s=0.1)
TB = 1e12


def sure(trace: Trace, size: PoolSize, seed: int = 0, targets: Targets = TARGETS) -> Certainty:
    profile = ReuseProfile.of(trace)
    demand = demand_of(profile, size, MACHINE)
    rng = np.random.default_rng(seed)
    return certainty(profile, demand, size, SplitEstimator(demand, MACHINE, targets), rng)


@given(traces(), st.integers(1, 500), st.integers(0, 9))
def test_draws_keep_slices_whole(trace: Trace, slice_s: int, seed: int) -> None:
    demand = demand_of(ReuseProfile.of(trace), PoolSize(0.0), MACHINE)
    since_s = demand.arrival_s - demand.arrival_s[0]
    slice_of = (since_s + 1e-6) // slice_s
    for rows, arrival_s in draws(demand, slice_s, 3, np.random.default_rng(seed)):
        assert np.all(np.diff(arrival_s) >= 0)
        place_of = (arrival_s + 1e-6) // slice_s
        for place in np.unique(place_of):
            drawn = rows[place_of == place].tolist()
            assert drawn == np.flatnonzero(slice_of == slice_of[drawn[0]]).tolist()


def test_traffic_that_is_always_the_same_is_sure() -> None:
    rows = [(0.5 * n, 4096, 100, list(range(8 * n, 8 * n + 8))) for n in range(4000)]
    found = sure(make_trace(rows, block_tokens=512), PoolSize(1 * TB))
    assert (found.num_slices, found.slice_s) == (7, 300.0)
    assert found.hit_share.low == found.hit_share.high == 0.0
    assert found.num_nodes is not None
    assert found.num_nodes.low == found.num_nodes.high


def test_traffic_that_changes_is_not() -> None:
    """An hour of short prompts with five minutes of long ones: how many nodes depends on whether those are drawn."""
    blocks = [60 if 600 <= n < 900 else 4 for n in range(3600)]
    rows = [(float(n), 512 * count, 50, list(range(60 * n, 60 * n + count))) for n, count in enumerate(blocks)]
    found = sure(make_trace(rows, block_tokens=512), PoolSize(1 * TB))
    assert found.num_nodes is not None
    assert found.num_nodes.high > found.num_nodes.low


def test_the_plain_answer_lies_within_and_the_same_seed_says_the_same() -> None:
    trace = generate("chat", num_requests=1500, seed=6)
    size = PoolSize(4 * TB)
    demand: PrefillDemand = demand_of(ReuseProfile.of(trace), size, MACHINE)
    found = sure(trace, size)
    assert found.hit_share.low < demand.hit_share < found.hit_share.high
    needed = fewest_nodes(SplitEstimator(demand, MACHINE, TARGETS))
    assert found.num_nodes is not None
    assert found.num_nodes.low - 1 <= needed.num_prefill + needed.num_decode <= found.num_nodes.high + 1
    assert sure(trace, size) == found
    assert sure(trace, size, seed=1) != found


def test_where_no_number_of_nodes_does_there_is_no_interval() -> None:
    trace = generate("chat", num_requests=300, seed=6)
    assert sure(trace, PoolSize(1 * TB), targets=Targets(ttft_s=0.1, tbt_s=0.1)).num_nodes is None


def test_one_request_can_be_asked_about() -> None:
    found = sure(make_trace([(0.0, 600, 5, [0, 1])], block_tokens=512), PoolSize(1 * TB))
    assert found.num_nodes is not None
    assert found.num_nodes.high == 2


@pytest.mark.parametrize(
    ("duration_s", "pool_tb", "expected"),
    [
        (3600.0, 0.01, []),
        (60.0, 0.01, ["lasts 60 s"]),
        (3600.0, 50.0, ["too short for this pool: it writes 1.7 TB and never fills 50.0 TB"]),
    ],
)
def test_doubts(duration_s: float, pool_tb: float, expected: list[str]) -> None:
    rows = [(duration_s * n / 999, 5120, 10, list(range(10 * n, 10 * n + 10))) for n in range(1000)]
    profile = ReuseProfile.of(make_trace(rows, block_tokens=512))
    said = list(doubts(profile, PoolSize(pool_tb * TB), MACHINE))
    assert len(said) == len(expected)
    for text, part in zip(said, expected, strict=True):
        assert part in text


def test_late_reuse_and_an_empty_start_are_told() -> None:
    rows = [(float(n), 5120, 10, list(range(10 * (n % 1000), 10 * (n % 1000) + 10))) for n in range(1500)]
    profile = ReuseProfile.of(make_trace(rows, block_tokens=512))
    said = " ".join(doubts(profile, PoolSize(50 * TB), MACHINE))
    assert "100% of all reuse comes after more than half" in said
    assert "hit rate 0.0% in the first half" in said
