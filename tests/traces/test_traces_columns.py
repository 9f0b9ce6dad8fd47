"""A trace at rest: rows, views, and what it refuses."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from trace_cases import make_trace, traces

from moonpool.base.errors import InvalidInput
from moonpool.traces.columns import Trace

ROWS = [(0.0, 8, 1, [0, 1]), (1.5, 5, 2, [0, 2]), (1.5, 1, 0, [3])]


def test_rows_are_what_was_given() -> None:
    trace = make_trace(ROWS)
    assert len(trace) == 3
    assert trace.duration_s == 1.5
    assert [(*row[:3], row.block_ids.tolist()) for row in trace] == ROWS


def test_it_cannot_be_changed() -> None:
    trace = make_trace(ROWS)
    with pytest.raises(ValueError, match="read-only"):
        trace.block_ids[0] = 9
    with pytest.raises(AttributeError):
        trace.name = "other"  # type: ignore[misc]


@given(traces())
def test_all_rows_taken_are_the_same_trace(trace: Trace) -> None:
    assert trace.select(np.arange(len(trace))) == trace
    assert trace != trace.replace(num_output=trace.num_output + 1)


def test_taken_rows_bring_their_blocks_and_labels() -> None:
    trace = make_trace(ROWS).replace(tenant=np.array([7, 8, 9]))
    part = trace.select(np.array([0, 2]))
    assert part.block_ids.tolist() == [0, 1, 3]
    assert part.tenant is not None
    assert part.tenant.tolist() == [7, 9]


def test_an_empty_trace_is_one() -> None:
    trace = make_trace([])
    assert (len(trace), trace.duration_s, list(trace)) == (0, 0.0, [])


@pytest.mark.parametrize(
    ("rows", "complaint"),
    [
        ([(1.0, 4, 1, [0]), (0.5, 4, 1, [0])], "request 1 arrives before"),
        ([(float("nan"), 4, 1, [0])], "request 0 has no finite"),
        ([(0.0, 0, 1, [])], "request 0 has no input"),
        ([(0.0, 4, -1, [0])], "request 0 has a negative"),
        ([(0.0, 5, 1, [0])], "request 0 has a wrong number of blocks"),
    ],
)
def test_what_does_not_fit_is_refused(rows: list[tuple[float, int, int, list[int]]], complaint: str) -> None:
    with pytest.raises(InvalidInput, match=complaint):
        make_trace(rows)


def test_columns_of_different_lengths_are_refused() -> None:
    with pytest.raises(InvalidInput, match="equally long"):
        make_trace(ROWS).replace(num_output=np.array([1]))
    with pytest.raises(InvalidInput, match="block_offsets"):
        make_trace(ROWS).replace(block_ids=np.array([1]))
    with pytest.raises(InvalidInput, match="0 tokens"):
        make_trace(ROWS).replace(block_tokens=0)
