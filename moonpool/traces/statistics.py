"""Statistics of a trace: amount, rate, lengths, reuse.

A hit is a leading block of an earlier request, in an unlimited cache. Hit tokens are at most the input minus one,
because the last token is always computed. Reuse gaps leave out block 0 of the first request, which in chat traces is
the system prompt of all requests.
"""

from __future__ import annotations

import msgspec
import numpy as np

from moonpool.base.errors import InvalidInput
from moonpool.traces.columns import Floats, Ints, Trace
from moonpool.traces.distributions import dispersion
from moonpool.traces.reuse import NEVER, block_weights, hit_curve, previous_uses
from moonpool.traces.reuse import leading_hits as count_leading_hits

BURST_INTERVAL_S = 3.0
LENGTH_PERCENTILES = (5, 25, 50, 75, 90, 95, 99, 100)
GAP_PERCENTILES = (10, 50, 90, 99)
CURVE_TOKENS = (1e4, 1e5, 1e6, 2e6, 3e6, 4e6, 5e6, 8e6, 1e7, 3e7, 5e7, 1e8)


class Lengths(msgspec.Struct, frozen=True):
    """Lengths of inputs or outputs, in tokens."""

    mean: float
    percentiles: dict[int, float]  # by LENGTH_PERCENTILES; 100 is the longest


class TraceStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Shares are between 0 and 1."""

    name: str
    block_tokens: int
    num_requests: int
    duration_s: float
    rate_per_s: float
    num_distinct_arrivals: int
    dispersion: float  # variance / mean of arrivals per 3 s
    num_input: Lengths
    num_output: Lengths
    num_blocks: int
    num_unique_blocks: int
    used_once: float  # of the unique blocks
    hit_tokens: float  # of all input tokens, in an unlimited cache
    hit_blocks: float
    hit_mean_per_request: float
    no_hit: float  # of requests
    one_hit: float
    more_hits: float
    reuse_gap_s: dict[int, float]  # by GAP_PERCENTILES; empty without reuse
    lru_hit_tokens: dict[int, float]  # by capacity in tokens


def describe(trace: Trace, capacities_tokens: tuple[float, ...] = CURVE_TOKENS) -> TraceStatistics:
    """Return the statistics. Raise InvalidInput for a trace without requests."""
    if not len(trace):
        raise InvalidInput(f"the trace {trace.name} has no requests")
    hits = count_leading_hits(trace)
    saved = hit_tokens(trace, hits)
    uses = np.unique(trace.block_ids, return_counts=True)[1]
    curve = hit_curve(trace, capacities_tokens)
    duration_s = trace.duration_s
    return TraceStatistics(
        name=trace.name,
        block_tokens=trace.block_tokens,
        num_requests=len(trace),
        duration_s=duration_s,
        rate_per_s=len(trace) / duration_s if duration_s else 0.0,
        num_distinct_arrivals=len(np.unique(trace.arrival_s)),
        dispersion=dispersion(trace.arrival_s, BURST_INTERVAL_S),
        num_input=_lengths(trace.num_input),
        num_output=_lengths(trace.num_output),
        num_blocks=len(trace.block_ids),
        num_unique_blocks=len(uses),
        used_once=float((uses == 1).mean()),
        hit_tokens=float(saved.sum() / trace.num_input.sum()),
        hit_blocks=float(hits.sum() / len(trace.block_ids)),
        hit_mean_per_request=float((saved / trace.num_input).mean()),
        no_hit=float((hits == 0).mean()),
        one_hit=float((hits == 1).mean()),
        more_hits=float((hits >= 2).mean()),
        reuse_gap_s=_percentiles(reuse_gaps_s(trace), GAP_PERCENTILES),
        lru_hit_tokens={int(tokens): float(share) for tokens, share in zip(capacities_tokens, curve, strict=True)},
    )


def hit_tokens(trace: Trace, hits: Ints) -> Ints:
    """Return the tokens saved per request by hits of this many leading blocks."""
    saved = np.concatenate(([0], np.cumsum(block_weights(trace))))
    begins = trace.block_offsets[:-1]
    tokens: Ints = saved[begins + hits] - saved[begins]
    return tokens


def reuse_gaps_s(trace: Trace) -> Floats:
    """Return the seconds from each use of a block to its next use, without the first block of the trace."""
    previous = previous_uses(trace)
    counted = (previous != NEVER) & (trace.block_ids != trace.block_ids[0])
    arrivals = np.repeat(trace.arrival_s, trace.num_blocks)
    gaps: Floats = arrivals[counted] - arrivals[previous[counted]]
    return gaps


def _lengths(tokens: Ints) -> Lengths:
    return Lengths(float(tokens.mean()), _percentiles(tokens, LENGTH_PERCENTILES))


def _percentiles(values: Ints | Floats, which: tuple[int, ...]) -> dict[int, float]:
    if not len(values):
        return {}
    found = np.percentile(values, which)
    return {percent: float(value) for percent, value in zip(which, found, strict=True)}
