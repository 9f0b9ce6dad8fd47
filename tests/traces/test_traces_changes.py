"""Traces made from others: what stays and what changes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from trace_cases import BLOCK_TOKENS, make_trace, traces

from moonpool.base.errors import InvalidInput
from moonpool.traces.changes import (
    change_rate,
    label,
    merge,
    relabel,
    rescale_blocks,
    scale_load,
    slice_count,
    slice_time,
)
from moonpool.traces.columns import Trace
from moonpool.traces.distributions import POISSON, Arrivals, dispersion, draw_arrivals
from moonpool.traces.reuse import hit_curve, leading_hits
from moonpool.traces.statistics import hit_tokens


@given(traces(), st.floats(0.01, 100))
def test_scaled_load_is_the_same_requests_in_other_time(trace: Trace, factor: float) -> None:
    scaled = scale_load(trace, factor)
    assert scaled.duration_s == pytest.approx(trace.duration_s / factor)
    assert scaled.replace(arrival_s=trace.arrival_s) == trace


@given(traces(), st.integers(0, 10**6))
def test_two_slices_of_time_are_the_whole(trace: Trace, at_ms: int) -> None:
    at_s = (at_ms + 1) / 1000
    first, second = slice_time(trace, 0.0, at_s), slice_time(trace, at_s)
    assert len(first) + len(second) == len(trace)
    assert (first.arrival_s < at_s).all()
    assert np.concatenate([first.block_ids, second.block_ids]).tolist() == trace.block_ids.tolist()
    assert np.allclose(second.arrival_s + at_s, trace.arrival_s[len(first) :])


@given(traces(), st.data())
def test_two_slices_of_requests_are_the_whole(trace: Trace, data: st.DataObject) -> None:
    num = data.draw(st.integers(0, len(trace)))
    head, tail = slice_count(trace, 0, num), slice_count(trace, num)
    assert (len(head), len(tail)) == (num, len(trace) - num)
    assert [*head.num_input.tolist(), *tail.num_input.tolist()] == trace.num_input.tolist()


@given(traces(), traces())
def test_merged_traces_keep_their_blocks_apart(one: Trace, other: Trace) -> None:
    both = merge([one, other])
    assert len(both) == len(one) + len(other)
    assert (np.diff(both.arrival_s) >= 0).all()
    assert leading_hits(both).sum() == leading_hits(one).sum() + leading_hits(other).sum()
    shared = merge([one, other], share_blocks=True)
    assert set(shared.block_ids.tolist()) == set(one.block_ids.tolist()) | set(other.block_ids.tolist())


@given(traces())
def test_relabelled_blocks_are_numbered_by_first_appearance(trace: Trace) -> None:
    again = relabel(trace.replace(block_ids=trace.block_ids * 37 + 5))
    order = list(dict.fromkeys(again.block_ids.tolist()))
    assert order == list(range(len(order)))
    assert leading_hits(again).tolist() == leading_hits(trace).tolist()
    assert relabel(again) == again


@given(traces(), st.sampled_from([1, 2, 4]))
def test_smaller_blocks_share_the_same_tokens(trace: Trace, block_tokens: int) -> None:
    cut = rescale_blocks(trace, block_tokens)
    assert cut.block_tokens == block_tokens
    whole_hits, cut_hits = leading_hits(trace), leading_hits(cut)
    assert hit_tokens(cut, cut_hits).tolist() == hit_tokens(trace, whole_hits).tolist()
    assert hit_curve(cut, [1e12]) == pytest.approx(hit_curve(trace, [1e12]))


def test_a_block_becomes_its_halves() -> None:
    cut = rescale_blocks(make_trace([(0.0, 7, 1, [0, 5]), (1.0, 5, 1, [0, 6])]), BLOCK_TOKENS // 2)
    assert [row.block_ids.tolist() for row in cut] == [[0, 1, 10, 11], [0, 1, 12]]


def test_labels_go_through_merging() -> None:
    trace = make_trace([(0.0, 4, 1, [0]), (2.0, 4, 1, [0])])
    both = merge([trace, label(scale_load(trace, 2.0), tenant=3, name="other")])
    assert both.name == "trace+other"
    assert both.tenant is not None
    assert both.tenant.tolist() == [0, 3, 3, 0]
    assert both.priority is None


def test_other_arrivals_leave_the_requests_as_they_are() -> None:
    trace = make_trace([(float(second), 4, 1, [second]) for second in range(200)])
    poisson = change_rate(trace, 10.0, POISSON, np.random.default_rng(3))
    assert poisson.replace(arrival_s=trace.arrival_s) == trace
    assert len(poisson) / poisson.duration_s == pytest.approx(10.0, rel=0.01)
    assert poisson == change_rate(trace, 10.0, POISSON, np.random.default_rng(3))


@pytest.mark.parametrize("cv", [0.0, 0.5, 1.0, 3.0])
def test_gaps_vary_as_asked(cv: float) -> None:
    times = draw_arrivals(Arrivals(cv=cv), 50_000, 5.0, np.random.default_rng(1))
    gaps = np.diff(times)
    assert times[0] == 0
    assert gaps.mean() == pytest.approx(0.2, rel=0.001)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, abs=0.05 * max(cv, 0.1))
    assert dispersion(times, 30.0) == pytest.approx(cv**2, rel=0.15, abs=0.01)


def test_quantised_arrivals_fall_on_steps() -> None:
    times = draw_arrivals(Arrivals(cv=2.0, step_s=3.0), 1000, 4.0, np.random.default_rng(1))
    assert np.array_equal(times, np.round(times / 3.0) * 3.0)
    assert (np.diff(times) >= 0).all()


@pytest.mark.parametrize("num", [0, 1, 2])
def test_few_arrivals_are_drawn_too(num: int) -> None:
    assert len(draw_arrivals(Arrivals(cv=50.0), num, 1.0, np.random.default_rng(0))) == num


def test_what_cannot_be_is_refused() -> None:
    trace = make_trace([(0.0, 4, 1, [0])])
    for factor in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(InvalidInput, match="cannot be scaled"):
            scale_load(trace, factor)
    with pytest.raises(InvalidInput, match="no time from 5"):
        slice_time(trace, 5.0, 5.0)
    with pytest.raises(InvalidInput, match="no requests from 2 to 1"):
        slice_count(trace, 2, 1)
    with pytest.raises(InvalidInput, match="no traces"):
        merge([])
    with pytest.raises(InvalidInput, match="different sizes"):
        merge([trace, rescale_blocks(trace, 2)])
    with pytest.raises(InvalidInput, match="cannot be cut"):
        rescale_blocks(trace, 3)
    with pytest.raises(InvalidInput, match="cannot arrive at"):
        change_rate(trace, 0.0, POISSON, np.random.default_rng(0))
    for wrong in ({"cv": -1.0}, {"cv": float("nan")}, {"step_s": 0.0}):
        with pytest.raises(InvalidInput):
            Arrivals(**wrong)
