"""Overlap by layer and by chunk, against walking the stations one by one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool.base.errors import InvalidInput
from moonpool.sim.physics.cost import chunk_ends, overlapped_s, pipelined_prefill_s
from moonpool.sim.physics.paper_fit import paper_cost

times = st.floats(0, 100)


def walk(stations: list[list[float]]) -> float:
    """When the last item leaves the last station: stations[i][k] is the time of item k at station i."""
    free = [0.0] * len(stations)
    for item in range(len(stations[0])):
        ready = 0.0
        for station, durations in enumerate(stations):
            ready = free[station] = max(ready, free[station]) + durations[item]
    return free[-1]


@given(times, times, times, st.integers(1, 100))
def test_layers_overlap_as_stations_do(compute_s: float, load_s: float, store_s: float, num_layers: int) -> None:
    stations = [[each / num_layers] * num_layers for each in (load_s, compute_s, store_s)]
    assert overlapped_s(compute_s, load_s, num_layers, store_s) == pytest.approx(walk(stations), abs=1e-9)


@given(times, times, st.integers(1, 100))
def test_overlap_is_never_better_than_the_longer_nor_worse_than_both(
    compute_s: float, load_s: float, num_layers: int
) -> None:
    together = overlapped_s(compute_s, load_s, num_layers)
    assert max(compute_s, load_s) <= together * (1 + 1e-9) + 1e-12
    assert together <= (compute_s + load_s) * (1 + 1e-9) + 1e-12
    assert overlapped_s(compute_s, 0.0, num_layers) == pytest.approx(compute_s)


@given(st.integers(1, 60_000), st.integers(0, 60_000), st.integers(500, 8192), st.integers(1, 8))
def test_a_pipeline_of_chunks_is_what_the_stages_do(n: int, prefix: int, chunk_tokens: int, num_stages: int) -> None:
    cost = paper_cost().prefill
    took = pipelined_prefill_s(cost, n, prefix, chunk_tokens=chunk_tokens, num_stages=num_stages)
    chunks = [cost.compute_s(end, start) / num_stages for end, start in chunk_ends(n, prefix, chunk_tokens)]
    loaded = cost.load_s(min(prefix, n - 1)) / num_stages
    assert took == pytest.approx(loaded + walk([chunks] * num_stages))


def test_equal_chunks_follow_the_formula_of_paper_md() -> None:
    cost = paper_cost().prefill
    chunks = [cost.compute_s(end, start) for end, start in chunk_ends(65536, 0, 8192)]
    expected = sum(chunks) / 4 + 3 / 4 * chunks[-1]
    assert pipelined_prefill_s(cost, 65536, 0, chunk_tokens=8192, num_stages=4) == pytest.approx(expected)
    one = pipelined_prefill_s(cost, 65536, 0, chunk_tokens=65536, num_stages=1)
    assert one == pytest.approx(cost.prefill_s(65536))
    handed = pipelined_prefill_s(cost, 65536, 0, chunk_tokens=8192, num_stages=4, boundary_s=0.01)
    assert handed == pytest.approx(expected + 0.03)


def test_long_prompts_gain_from_stages() -> None:
    cost = paper_cost().prefill
    took = [pipelined_prefill_s(cost, 131072, 0, chunk_tokens=8192, num_stages=stages) for stages in (1, 2, 4)]
    assert took[0] > 1.8 * took[1] > 3.0 * took[2]


@given(st.integers(1, 5000), st.integers(0, 6000), st.integers(1, 700))
def test_chunks_cover_what_is_not_cached_and_nothing_else(n: int, prefix: int, chunk_tokens: int) -> None:
    chunks = chunk_ends(n, prefix, chunk_tokens)
    tokens = [token for end, start in chunks for token in range(start, end)]
    assert tokens == list(range(min(prefix, n - 1), n))
    assert max(end - start for end, start in chunks) <= chunk_tokens


def test_nonsense_is_refused() -> None:
    cost = paper_cost().prefill
    with pytest.raises(InvalidInput):
        overlapped_s(1.0, 1.0, 0)
    with pytest.raises(InvalidInput):
        pipelined_prefill_s(cost, 10, 0, chunk_tokens=0, num_stages=1)
    with pytest.raises(InvalidInput):
        pipelined_prefill_s(cost, 10, 0, chunk_tokens=5, num_stages=0)
