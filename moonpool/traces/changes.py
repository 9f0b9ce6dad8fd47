"""Make a trace from others: scale the load, slice, merge, change arrivals, renumber or cut blocks.

The functions do not change their arguments. They raise InvalidInput for times and requests that do not exist.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from moonpool.base.errors import InvalidInput
from moonpool.traces.columns import Ints, Trace, blocks_of, offsets_of
from moonpool.traces.distributions import Arrivals, draw_arrivals


def scale_load(trace: Trace, factor: float) -> Trace:
    """Return the same requests in 1 / factor of the time: `factor` times as many requests per second."""
    if not (math.isfinite(factor) and factor > 0):
        raise InvalidInput(f"load cannot be scaled by {factor}")
    return trace.replace(arrival_s=trace.arrival_s / factor)


def slice_time(trace: Trace, begin_s: float = 0.0, end_s: float = math.inf) -> Trace:
    """Return the requests that arrive at begin_s or later and before end_s; begin_s becomes time 0."""
    if not 0 <= begin_s < end_s:
        raise InvalidInput(f"there is no time from {begin_s:g} s to {end_s:g} s")
    first, last = np.searchsorted(trace.arrival_s, (begin_s, end_s))
    part = _rows(trace, int(first), int(last))
    return part.replace(arrival_s=part.arrival_s - begin_s)


def slice_count(trace: Trace, begin: int = 0, end: int | None = None) -> Trace:
    """Return requests begin..end - 1; the first of them arrives at 0."""
    end = len(trace) if end is None else end
    if not 0 <= begin <= end:
        raise InvalidInput(f"there are no requests from {begin} to {end}")
    part = _rows(trace, begin, min(end, len(trace)))
    return part.replace(arrival_s=part.arrival_s - part.arrival_s[:1]) if len(part) else part


def merge(traces: Sequence[Trace], *, share_blocks: bool = False, name: str | None = None) -> Trace:
    """Return all requests by arrival time; at equal times, requests of earlier traces come first.

    Equal block ids of two traces mean different blocks, unless `share_blocks`.
    """
    if not traces:
        raise InvalidInput("no traces to merge")
    if len({trace.block_tokens for trace in traces}) > 1:
        raise InvalidInput("traces with blocks of different sizes cannot be merged; rescale their blocks first")
    arrival_s = np.concatenate([trace.arrival_s for trace in traces])
    joined = Trace(
        name=name or "+".join(trace.name for trace in traces),
        block_tokens=traces[0].block_tokens,
        arrival_s=np.zeros_like(arrival_s),  # set below, when the rows are in order
        num_input=np.concatenate([trace.num_input for trace in traces]),
        num_output=np.concatenate([trace.num_output for trace in traces]),
        block_ids=np.concatenate(_separate_ids(traces, share_blocks)),
        block_offsets=offsets_of(np.concatenate([trace.num_blocks for trace in traces])),
        tenant=_labels(traces, "tenant"),
        priority=_labels(traces, "priority"),
    )
    order = np.argsort(arrival_s, kind="stable")
    return joined.select(order).replace(arrival_s=arrival_s[order])


def change_rate(trace: Trace, rate_per_s: float, arrivals: Arrivals, rng: np.random.Generator) -> Trace:
    """Return the same requests in the same order with newly drawn arrivals."""
    return trace.replace(arrival_s=draw_arrivals(arrivals, len(trace), rate_per_s, rng))


def relabel(trace: Trace, first_id: int = 0) -> Trace:
    """Return the trace with block ids numbered by first appearance, as in Mooncake's traces."""
    _, first_at, which = np.unique(trace.block_ids, return_index=True, return_inverse=True)
    numbers = np.empty(len(first_at), np.int64)
    numbers[np.argsort(first_at)] = np.arange(len(first_at)) + first_id
    return trace.replace(block_ids=numbers[which])


def label(trace: Trace, *, name: str | None = None, tenant: int | None = None, priority: int | None = None) -> Trace:
    """Set name, tenant and priority of all requests; None leaves a value unchanged."""
    return trace.replace(
        name=trace.name if name is None else name,
        tenant=trace.tenant if tenant is None else np.full(len(trace), tenant, np.int64),
        priority=trace.priority if priority is None else np.full(len(trace), priority, np.int64),
    )


def rescale_blocks(trace: Trace, block_tokens: int) -> Trace:
    """Cut each block into smaller ones. The same tokens are shared as before."""
    if block_tokens < 1 or trace.block_tokens % block_tokens:
        raise InvalidInput(f"blocks of {trace.block_tokens} tokens cannot be cut into blocks of {block_tokens}")
    parts = trace.block_tokens // block_tokens
    counts = blocks_of(trace.num_input, block_tokens)
    offsets = offsets_of(counts)
    within = np.arange(offsets[-1]) - np.repeat(offsets[:-1], counts)
    whole = trace.block_ids[np.repeat(trace.block_offsets[:-1], counts) + within // parts]
    return trace.replace(block_tokens=block_tokens, block_ids=whole * parts + within % parts, block_offsets=offsets)


def _rows(trace: Trace, begin: int, end: int) -> Trace:
    return trace.select(np.arange(begin, max(begin, end)))


def _separate_ids(traces: Sequence[Trace], share_blocks: bool) -> list[Ints]:
    if share_blocks:
        return [trace.block_ids for trace in traces]
    ids, base = [], 0
    for trace in traces:
        ids.append(trace.block_ids + base)
        base += int(trace.block_ids.max(initial=-1)) + 1
    return ids


def _labels(traces: Sequence[Trace], field: str) -> Ints | None:
    """Return the merged column: None if no trace has it, else 0 for requests of traces without it."""
    columns = [getattr(trace, field) for trace in traces]
    if all(column is None for column in columns):
        return None
    filled = [
        np.zeros(len(trace), np.int64) if column is None else column
        for trace, column in zip(traces, columns, strict=True)
    ]
    return np.concatenate(filled)
