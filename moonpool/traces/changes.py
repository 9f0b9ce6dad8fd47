"""A trace made from another: more load, a part, several as one, other arrivals, other ids, smaller blocks.

Every function leaves what it is given alone. Times and requests that a caller asks for and that do not exist are
refused.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from moonpool.base.errors import InvalidInput
from moonpool.traces.columns import Ints, Trace, blocks_of, offsets_of
from moonpool.traces.distributions import Arrivals, draw_arrivals


def scale_load(trace: Trace, factor: float) -> Trace:
    """`factor` times as many requests per second: the same requests in 1 / factor of the time."""
    if not (math.isfinite(factor) and factor > 0):
        raise InvalidInput(f"load cannot be scaled by {factor}")
    return trace.but(arrival_s=trace.arrival_s / factor)


def slice_time(trace: Trace, begin_s: float = 0.0, end_s: float = math.inf) -> Trace:
    """Requests that arrive at begin_s or later and before end_s; begin_s becomes 0."""
    if not 0 <= begin_s < end_s:
        raise InvalidInput(f"there is no time from {begin_s:g} s to {end_s:g} s")
    first, last = np.searchsorted(trace.arrival_s, (begin_s, end_s))
    part = _rows(trace, int(first), int(last))
    return part.but(arrival_s=part.arrival_s - begin_s)


def slice_count(trace: Trace, begin: int = 0, end: int | None = None) -> Trace:
    """Requests begin, begin + 1, ... before end; the first one arrives at 0."""
    end = len(trace) if end is None else end
    if not 0 <= begin <= end:
        raise InvalidInput(f"there are no requests from {begin} to {end}")
    part = _rows(trace, begin, min(end, len(trace)))
    return part.but(arrival_s=part.arrival_s - part.arrival_s[:1]) if len(part) else part


def merge(traces: Sequence[Trace], *, share_blocks: bool = False, name: str | None = None) -> Trace:
    """All requests in the order of their arrival; at the same time, those of the trace named first go first.

    Equal block ids of two traces mean different blocks, unless they `share_blocks`.
    """
    if not traces:
        raise InvalidInput("no traces to merge")
    if len({trace.block_tokens for trace in traces}) > 1:
        raise InvalidInput("traces with blocks of different sizes cannot be merged; rescale their blocks first")
    arrival_s = np.concatenate([trace.arrival_s for trace in traces])
    joined = Trace(
        name=name or "+".join(trace.name for trace in traces),
        block_tokens=traces[0].block_tokens,
        arrival_s=np.zeros_like(arrival_s),  # they are not in order yet
        num_input=np.concatenate([trace.num_input for trace in traces]),
        num_output=np.concatenate([trace.num_output for trace in traces]),
        block_ids=np.concatenate(_apart(traces, share_blocks)),
        block_offsets=offsets_of(np.concatenate([trace.num_blocks for trace in traces])),
        tenant=_labels(traces, "tenant"),
        priority=_labels(traces, "priority"),
    )
    order = np.argsort(arrival_s, kind="stable")
    return joined.take(order).but(arrival_s=arrival_s[order])


def change_rate(trace: Trace, rate_per_s: float, arrivals: Arrivals, rng: np.random.Generator) -> Trace:
    """The same requests in the same order, arriving by another process."""
    return trace.but(arrival_s=draw_arrivals(arrivals, len(trace), rate_per_s, rng))


def relabel(trace: Trace, first_id: int = 0) -> Trace:
    """Block ids numbered by first appearance, as Mooncake's are: equal traffic, equal numbers."""
    _, first_at, which = np.unique(trace.block_ids, return_index=True, return_inverse=True)
    numbers = np.empty(len(first_at), np.int64)
    numbers[np.argsort(first_at)] = np.arange(len(first_at)) + first_id
    return trace.but(block_ids=numbers[which])


def label(trace: Trace, *, name: str | None = None, tenant: int | None = None, priority: int | None = None) -> Trace:
    """Every request is this tenant's, with this priority; None leaves what there is."""
    return trace.but(
        name=trace.name if name is None else name,
        tenant=trace.tenant if tenant is None else np.full(len(trace), tenant, np.int64),
        priority=trace.priority if priority is None else np.full(len(trace), priority, np.int64),
    )


def rescale_blocks(trace: Trace, block_tokens: int) -> Trace:
    """Smaller blocks: each becomes its parts, of which a partial block has fewer. The same tokens are shared."""
    if block_tokens < 1 or trace.block_tokens % block_tokens:
        raise InvalidInput(f"blocks of {trace.block_tokens} tokens cannot be cut into blocks of {block_tokens}")
    parts = trace.block_tokens // block_tokens
    counts = blocks_of(trace.num_input, block_tokens)
    offsets = offsets_of(counts)
    within = np.arange(offsets[-1]) - np.repeat(offsets[:-1], counts)
    whole = trace.block_ids[np.repeat(trace.block_offsets[:-1], counts) + within // parts]
    return trace.but(block_tokens=block_tokens, block_ids=whole * parts + within % parts, block_offsets=offsets)


def _rows(trace: Trace, begin: int, end: int) -> Trace:
    return trace.take(np.arange(begin, max(begin, end)))


def _apart(traces: Sequence[Trace], share_blocks: bool) -> list[Ints]:
    if share_blocks:
        return [trace.block_ids for trace in traces]
    ids, base = [], 0
    for trace in traces:
        ids.append(trace.block_ids + base)
        base += int(trace.block_ids.max(initial=-1)) + 1
    return ids


def _labels(traces: Sequence[Trace], field: str) -> Ints | None:
    """None where no trace has it; 0 for the requests of those that do not."""
    columns = [getattr(trace, field) for trace in traces]
    if all(column is None for column in columns):
        return None
    filled = [
        np.zeros(len(trace), np.int64) if column is None else column
        for trace, column in zip(traces, columns, strict=True)
    ]
    return np.concatenate(filled)
