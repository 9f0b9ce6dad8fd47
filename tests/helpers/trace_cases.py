"""Traces for tests: small random ones, and whole hours: a generated one, and Mooncake's where it is at hand."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
from hypothesis import strategies as st

from moonpool.traces.columns import Trace, offsets_of
from moonpool.traces.distributions import Arrivals
from moonpool.traces.generate import generate
from moonpool.traces.mooncake_jsonl import read_jsonl

BLOCK_TOKENS = 4
CONVERSATION = Path(__file__).parents[3] / "shared" / "traces" / "conversation_trace.jsonl"
HOURS = ["generated", *(["conversation"] if CONVERSATION.exists() else [])]


@cache
def hour(name: str) -> Trace:
    """Return one of HOURS: chat traffic of 12,031 requests in 3,537 s, in bursts every 3 s."""
    if name == "conversation":
        return read_jsonl(CONVERSATION)
    return generate("chat", num_requests=12_031, rate_per_s=3.4, seed=0, arrivals=Arrivals(cv=2.4, step_s=3.0))


def run_lru(trace: Trace, num_blocks: float) -> list[int]:
    """Leading hits of each request in a cache of so many blocks that is really run."""
    cache: OrderedDict[int, None] = OrderedDict()
    hits = []
    for request in trace:
        ids = request.block_ids.tolist()
        hits.append(next((at for at, block in enumerate(ids) if block not in cache), len(ids)))
        for block in reversed(ids):
            cache[block] = None
            cache.move_to_end(block)
        while len(cache) > num_blocks:
            cache.popitem(last=False)
    return hits


def run_share(trace: Trace, capacity_tokens: float) -> float:
    """The share of the input tokens that such a cache hits; the last token of a prompt is always computed."""
    hits = np.array(run_lru(trace, capacity_tokens // trace.block_tokens))
    return float(np.minimum(hits * trace.block_tokens, trace.num_input - 1).sum() / trace.num_input.sum())


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
    if len(rows) > 0 and draw(st.booleans()):
        _, num_input, _, ids = draw(st.sampled_from(rows))
        if draw(st.integers(0, 3)) == 0:
            return num_input, ids
        ids = ids[: draw(st.integers(0, num_input // BLOCK_TOKENS))]
    num_new = draw(st.integers(0 if ids else 1, 4))
    missing = draw(st.integers(0, BLOCK_TOKENS - 1)) if num_new else 0
    ids = [*ids, *range(fresh, fresh + num_new)]
    return len(ids) * BLOCK_TOKENS - missing, ids
