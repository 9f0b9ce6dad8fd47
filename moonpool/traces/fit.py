"""Fits a chat generator to a trace, to generate similar traffic of any length and rate.

Where many requests branch after the same block, this block ends a stem: a system prompt, a document, an agent's
instructions. A request that hits no more than a stem begins a session; a request that hits more continues the request
that used the last hit block before. These pairs give think times, growth, and the chance of another turn by turn number
and length. Turns after the trace's end are unseen: a long think time has a higher weight, for the similar ones that did
not fit in, and the chances are corrected by the share of think times that did.

The fit is made for sessions. For traffic of questions about documents with few questions each, it reproduces lengths
and the maximum hit rate, but the hits come sooner than in the trace.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from moonpool.base.errors import InvalidInput
from moonpool.traces.columns import Floats, Ints, Trace
from moonpool.traces.distributions import Arrivals, dispersion, fit_quantiles
from moonpool.traces.reuse import leading_hits, previous_uses
from moonpool.traces.sessions import ROOT, SessionTurns
from moonpool.traces.workloads import ChatSpec, Stem

_MIN_REQUESTS = 100  # with fewer, percentiles mean nothing
_NUM_INPUT_CLASSES = 8
_NUM_TURN_CLASSES = 4
_MIN_BRANCHES = 5  # after one block; conversations with short messages have a few
_SHARED_BY = 0.5  # a block used by this share of all requests is part of the system prompt
_MIN_STEP_REQUESTS = 4  # with this many requests per distinct arrival, arrivals are rounded to steps
_BURST_INTERVAL_S = 3.0


class _Links(NamedTuple):
    """Which request continues which. Rows of children only, except `turn`."""

    child: Ints
    parent: Ints
    kept_blocks: Ints
    turn: Ints  # of every request: 0 for the first of its session


def fit(trace: Trace) -> ChatSpec:
    """Return the fitted parameters. Raise InvalidInput for a trace of less than 100 requests or without duration."""
    if len(trace) < _MIN_REQUESTS or trace.duration_s <= 0:
        raise InvalidInput(
            f"a trace of {len(trace)} requests in {trace.duration_s:g} s is too small to fit a generator to"
        )
    hits = leading_hits(trace)
    is_stem = _stem_entries(trace, hits)
    links = _links(trace, hits, is_stem)
    roots = np.setdiff1d(np.arange(len(trace)), links.child, assume_unique=True)
    stem_tokens, stems = _fit_stems(trace, is_stem, roots)
    return ChatSpec(
        system_tokens=_shared_blocks(trace) * trace.block_tokens,
        stems=stems,
        first_message=fit_quantiles(trace.num_input[roots] - stem_tokens),
        output=fit_quantiles(trace.num_output),
        turns=_fit_turns(trace, links),
        arrivals=fit_arrivals(trace),
        block_tokens=trace.block_tokens,
    )


def fit_arrivals(trace: Trace) -> Arrivals:
    """Return the burstiness per 3 s, and the step to which arrivals are rounded, if they are."""
    distinct = np.unique(trace.arrival_s)
    step_s = None
    if len(trace) >= _MIN_STEP_REQUESTS * len(distinct) > _MIN_STEP_REQUESTS:
        step_s = round(float(np.median(np.diff(distinct))), 3)
    return Arrivals(cv=round(dispersion(trace.arrival_s, _BURST_INTERVAL_S) ** 0.5, 3), step_s=step_s)


def _shared_blocks(trace: Trace) -> int:
    """Return the number of leading blocks that most requests share."""
    depth = 0
    while True:
        long_enough = np.flatnonzero(trace.num_blocks > depth)
        if len(long_enough) < _SHARED_BY * len(trace):
            return depth
        ids = trace.block_ids[trace.block_offsets[long_enough] + depth]
        if np.unique(ids, return_counts=True)[1].max() < _SHARED_BY * len(trace):
            return depth
        depth += 1


def _stem_entries(trace: Trace, hits: Ints) -> NDArray[np.bool_]:
    """Return which entries of `block_ids` end a stem."""
    hit = np.flatnonzero(hits)
    ends = trace.block_ids[trace.block_offsets[hit] + hits[hit] - 1]
    ids, branches = np.unique(ends, return_counts=True)
    return np.isin(trace.block_ids, ids[branches >= _MIN_BRANCHES])


def _fit_stems(trace: Trace, is_stem: NDArray[np.bool_], roots: Ints) -> tuple[Ints, tuple[Stem, ...]]:
    """Return the tokens of each root's longest stem, and all stems with their number of roots."""
    within = np.arange(len(is_stem)) - np.repeat(trace.block_offsets[:-1], trace.num_blocks) + 1
    num_blocks = np.maximum.reduceat(np.where(is_stem, within, 0), trace.block_offsets[:-1])[roots]
    num_blocks = np.minimum(num_blocks, (trace.num_input[roots] - 1) // trace.block_tokens)
    ends = trace.block_ids[trace.block_offsets[roots] + num_blocks - 1]
    which = np.where(num_blocks == 0, -1, ends)
    _, first_at, counts = np.unique(which, return_index=True, return_counts=True)
    tokens = num_blocks * trace.block_tokens
    stems = zip(tokens[first_at].tolist(), counts.tolist(), strict=True)
    return tokens, tuple(Stem(num_tokens, float(count)) for num_tokens, count in stems)


def _links(trace: Trace, hits: Ints, is_stem: NDArray[np.bool_]) -> _Links:
    ends = trace.block_offsets[:-1] + hits - 1
    child = np.flatnonzero((hits > 0) & ~is_stem[np.maximum(ends, 0)])
    parent = trace.block_owners()[previous_uses(trace)[ends[child]]]
    return _Links(child, parent, hits[child], _turn_numbers(len(trace), child, parent))


def _turn_numbers(num_requests: int, child: Ints, parent: Ints) -> Ints:
    parents = np.full(num_requests, ROOT, np.int64)
    parents[child] = parent
    turn = [0] * num_requests
    for row, before in enumerate(parents.tolist()):
        if before != ROOT:
            turn[row] = turn[before] + 1
    return np.array(turn, np.int64)


def _fit_turns(trace: Trace, links: _Links) -> SessionTurns:
    child, parent = links.child, links.parent
    think_s = trace.arrival_s[child] - trace.arrival_s[parent]
    growth = trace.num_input[child] - trace.num_input[parent]
    whole_blocks = trace.num_input[parent] // trace.block_tokens
    is_edited = links.kept_blocks < np.minimum(whole_blocks, trace.num_input[child] // trace.block_tokens)
    edges = np.unique(np.quantile(trace.num_input, np.arange(1, _NUM_INPUT_CLASSES) / _NUM_INPUT_CLASSES))
    kept_tokens = (links.kept_blocks + 0.5) * trace.block_tokens  # the kept part ends somewhere in a block
    weights = _unseen_weights(trace, think_s)
    return SessionTurns(
        go_on=_go_on(trace, links, think_s, weights, edges),
        input_edges=tuple(edges.tolist()),
        think_s=fit_quantiles(think_s, weights=weights),
        added_tokens=fit_quantiles((growth - trace.num_output[parent])[~is_edited]),
        edited=float(is_edited.mean()) if len(child) else 0.0,
        kept_share=fit_quantiles(np.minimum(kept_tokens / trace.num_input[parent], 1.0)[is_edited], 1.0),
        edited_growth=fit_quantiles(growth[is_edited]),
        max_input=int(trace.num_input.max()),
    )


def _unseen_weights(trace: Trace, think_s: Floats) -> Floats:
    """Return the weight of each think time: one over the share of requests after which it fitted into the trace."""
    left_s = np.sort(trace.arrival_s[-1] - trace.arrival_s)
    fitted = len(trace) - np.searchsorted(left_s, think_s, side="left")
    weights: Floats = len(trace) / np.maximum(fitted, 1)
    return weights


def _go_on(
    trace: Trace, links: _Links, think_s: Floats, weights: Floats, edges: Floats
) -> tuple[tuple[float, ...], ...]:
    went_on = np.bincount(links.parent, minlength=len(trace))
    order = np.argsort(think_s, kind="stable")
    reached = np.concatenate(([0.0], np.cumsum(weights[order])))
    left_s = trace.arrival_s[-1] - trace.arrival_s
    seen = reached[np.searchsorted(think_s[order], left_s, side="right")] / max(reached[-1], 1.0)
    column = np.searchsorted(edges, trace.num_input, side="right")
    row = np.minimum(links.turn, _NUM_TURN_CLASSES - 1)
    return tuple(
        tuple(_chance(went_on, seen, (row == turn) & (column == length)) for length in range(len(edges) + 1))
        for turn in range(_NUM_TURN_CLASSES)
    )


def _chance(went_on: Ints, seen: Floats, which: NDArray[np.bool_]) -> float:
    could_be_seen = float(seen[which].sum())
    return round(min(1.0, float(went_on[which].sum()) / could_be_seen), 4) if could_be_seen > 0 else 0.0
