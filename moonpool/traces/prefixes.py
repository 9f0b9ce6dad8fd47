"""Turns a plan of who continues whom into a trace with chained block ids.

A stem is what several conversations begin with: a system prompt, a document, an agent's tools. All stems begin with
the same `common_tokens`. A conversation's first request begins with its stem, each later one with a part of the
request it continues. Only whole blocks are shared. Ids are numbered by first appearance.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from moonpool.traces.columns import MOONCAKE_BLOCK_TOKENS, Floats, Ints, Trace, blocks_of, offsets_of

ROOT = -1  # the parent of a conversation's first request


class PrefixPlan(NamedTuple):
    """One row per request, sorted by arrival; a parent stands in front of its children."""

    arrival_s: Floats
    num_input: Ints
    num_output: Ints
    parent: Ints  # a row, or ROOT
    kept_tokens: Ints  # of the parent's input, with which this one begins too
    stem: Ints
    stem_tokens: Ints  # of this row's stem, the common ones included


def in_order(plan: PrefixPlan, arrival_s: Floats | None = None) -> PrefixPlan:
    """The plan sorted by its arrivals, of which a child's must not be before its parent's; perhaps with others then."""
    order = np.argsort(plan.arrival_s, kind="stable")
    rows = np.empty(len(order), np.int64)
    rows[order] = np.arange(len(order))
    parent = plan.parent[order]
    return PrefixPlan(
        arrival_s=plan.arrival_s[order] if arrival_s is None else arrival_s,
        num_input=plan.num_input[order],
        num_output=plan.num_output[order],
        parent=np.where(parent == ROOT, ROOT, rows[parent]),
        kept_tokens=plan.kept_tokens[order],
        stem=plan.stem[order],
        stem_tokens=plan.stem_tokens[order],
    )


def to_trace(
    plan: PrefixPlan, *, name: str, common_tokens: int = 0, block_tokens: int = MOONCAKE_BLOCK_TOKENS
) -> Trace:
    """The trace in which these requests share what the plan says."""
    parent, shared = _with_stems(plan, common_tokens)
    kept = np.minimum(shared, np.minimum(plan.num_input, np.where(parent == ROOT, 0, plan.num_input[parent])))
    kept //= block_tokens
    counts = blocks_of(plan.num_input, block_tokens)
    offsets = offsets_of(counts)
    ids = _fresh_ids(counts, offsets, kept)
    for row in np.flatnonzero(kept).tolist():
        begin, from_, num = offsets[row], offsets[parent[row]], kept[row]
        ids[begin : begin + num] = ids[from_ : from_ + num]
    return Trace(
        name=name,
        block_tokens=block_tokens,
        arrival_s=plan.arrival_s,
        num_input=plan.num_input,
        num_output=plan.num_output,
        block_ids=ids,
        block_offsets=offsets,
    )


def _with_stems(plan: PrefixPlan, common_tokens: int) -> tuple[Ints, Ints]:
    """Parents and shared tokens: a root continues the first one of its stem, and that one the trace's first request."""
    rows = np.arange(len(plan.parent))
    roots = np.flatnonzero(plan.parent == ROOT)
    _, first_at, which = np.unique(plan.stem[roots], return_index=True, return_inverse=True)
    parent, shared = plan.parent.copy(), plan.kept_tokens.copy()
    parent[roots], shared[roots] = roots[first_at][which], plan.stem_tokens[roots]
    founders = parent == rows
    parent[founders], shared[founders] = 0, common_tokens
    if len(parent):
        parent[0] = ROOT
    return parent, shared


def _fresh_ids(counts: Ints, offsets: Ints, kept: Ints) -> Ints:
    """New numbers, one after the other, for all blocks but the kept ones, whose places wait to be filled."""
    within = np.arange(offsets[-1]) - np.repeat(offsets[:-1], counts)
    is_new = within >= np.repeat(kept, counts)
    ids: Ints = np.cumsum(is_new) - 1
    return ids
