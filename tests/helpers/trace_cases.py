"""Traces for tests: small random ones, and the real one where it is at hand."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import strategies as st

from moonpool.traces.columns import Trace, offsets_of

BLOCK_TOKENS = 4
CONVERSATION = Path(__file__).parents[3] / "shared" / "traces" / "conversation_trace.jsonl"
needs_conversation = pytest.mark.skipif(not CONVERSATION.exists(), reason=f"Mooncake's trace is not at {CONVERSATION}")


def make_trace(rows: Sequence[tuple[float, int, int, Sequence[int]]], block_tokens: int = BLOCK_TOKENS) -> Trace:
    """From (arrival_s, num_input, num_output, block ids)."""
    return Trace(
        block_tokens=block_tokens,
        arrival_s=np.array([row[0] for row in rows], np.float64),
        num_input=np.array([row[1] for row in rows], np.int64),
        num_output=np.array([row[2] for row in rows], np.int64),
        block_ids=np.array([block for row in rows for block in row[3]], np.int64),
        block_offsets=offsets_of(np.array([len(row[3]) for row in rows], np.int64)),
    )


@st.composite
def traces(draw: st.DrawFn, *, chained: bool = True, min_size: int = 1, max_size: int = 30) -> Trace:
    """Requests that share prefixes; or, unless `chained`, blocks in any order."""
    arrivals = sorted(draw(st.lists(st.integers(0, 10**6), min_size=min_size, max_size=max_size)))
    rows: list[tuple[float, int, int, list[int]]] = []
    fresh = 0
    for arrival_ms in arrivals:
        if chained:
            num_input, ids = draw(_continued(rows, fresh))
            fresh = max(fresh, max(ids) + 1)
        else:
            ids = draw(st.lists(st.integers(0, 12), min_size=1, max_size=6, unique=True))
            num_input = len(ids) * BLOCK_TOKENS - draw(st.integers(0, BLOCK_TOKENS - 1))
        rows.append((arrival_ms / 1000, num_input, draw(st.integers(0, 9)), ids))
    return make_trace(rows)


@st.composite
def _continued(draw: st.DrawFn, rows: Sequence[tuple[float, int, int, list[int]]], fresh: int) -> tuple[int, list[int]]:
    """Input and ids of a request that begins like a row, is the same, or is new. Partial blocks are never continued."""
    ids: list[int] = []
    if rows and draw(st.booleans()):
        _, num_input, _, ids = draw(st.sampled_from(rows))
        if draw(st.integers(0, 3)) == 0:
            return num_input, ids
        ids = ids[: draw(st.integers(0, num_input // BLOCK_TOKENS))]
    num_new = draw(st.integers(0 if ids else 1, 4))
    missing = draw(st.integers(0, BLOCK_TOKENS - 1)) if num_new else 0
    ids = [*ids, *range(fresh, fresh + num_new)]
    return len(ids) * BLOCK_TOKENS - missing, ids
