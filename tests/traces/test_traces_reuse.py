"""Reuse distances against a cache that is really run."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from trace_cases import make_trace, run_lru, run_share, traces

from moonpool.traces.columns import Trace
from moonpool.traces.reuse import NEVER, count_greater_before, hit_curve, leading_hits, reuse_distances

ANY_TRACE = st.booleans().flatmap(lambda chained: traces(chained=chained))


@given(ANY_TRACE, st.integers(0, 40))
def test_a_distance_says_in_which_caches_a_block_hits(trace: Trace, num_blocks: int) -> None:
    hits = reuse_distances(trace) < num_blocks
    offsets = trace.block_offsets.tolist()
    per_request = [int(hits[begin:end].sum()) for begin, end in pairwise(offsets)]
    assert per_request == run_lru(trace, num_blocks)


@given(ANY_TRACE, st.lists(st.integers(0, 200), max_size=5))
def test_the_curve_is_the_hit_rate_of_each_cache(trace: Trace, capacities: list[int]) -> None:
    curve = hit_curve(trace, capacities)
    for capacity, share in zip(capacities, curve, strict=True):
        assert share == pytest.approx(run_share(trace, capacity))


@given(ANY_TRACE)
def test_a_cache_without_limit_hits_all_that_was_there(trace: Trace) -> None:
    assert leading_hits(trace).tolist() == run_lru(trace, 10**9)
    counted = (reuse_distances(trace) != NEVER).sum()
    assert counted == leading_hits(trace).sum()


@given(st.lists(st.integers(-1000, 1000), unique=True, max_size=70))
def test_counting_greater_ones_in_front(values: list[int]) -> None:
    wanted = [sum(other > value for other in values[:at]) for at, value in enumerate(values)]
    assert count_greater_before(np.array(values, np.int64)).tolist() == wanted


def test_distances_of_a_small_trace() -> None:
    trace = make_trace([(0.0, 8, 1, [0, 1]), (1.0, 8, 1, [0, 2]), (2.0, 8, 1, [0, 1])])
    assert reuse_distances(trace).tolist() == [NEVER, NEVER, 0, NEVER, 0, 2]


def test_an_empty_trace_hits_nothing() -> None:
    assert hit_curve(make_trace([]), [10.0]).tolist() == [0.0]
