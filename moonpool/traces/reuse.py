"""Reuse distances of blocks, which give the hit rate of every LRU cache size at once.

A request hits its leading run of blocks that are cached when it arrives; then all its blocks are used, the last one
first, so that the heads of prefixes stay longest. A cache of C blocks holds the C blocks used last: a block hits
exactly if fewer than C others were used since its own last use (its reuse distance), whatever C is. The distances of
all uses are counted together, exactly, in log2(n) steps over whole arrays: a hundred thousand blocks in some 50 ms.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moonpool.traces.columns import Floats, Ints, Trace

NEVER = np.iinfo(np.int64).max  # the distance of a first use


def previous_uses(trace: Trace) -> Ints:
    """Return for each entry of `block_ids` the previous entry with the same id; NEVER for the first use."""
    ids = trace.block_ids
    order = np.argsort(ids, kind="stable")
    again = np.diff(ids[order]) == 0
    previous = np.full(len(ids), NEVER, np.int64)
    previous[order[1:][again]] = order[:-1][again]
    return previous


def leading_hits(trace: Trace) -> Ints:
    """Return per request the number of leading blocks of earlier requests: the hits of an unlimited cache."""
    return _leading(trace, previous_uses(trace) != NEVER)


def block_weights(trace: Trace) -> Ints:
    """Return the tokens that a hit of each entry saves: its own, minus the last token of a prompt (always computed)."""
    counts, offsets = trace.num_blocks, trace.block_offsets
    weights = np.full(len(trace.block_ids), trace.block_tokens, np.int64)
    weights[offsets[1:] - 1] = trace.num_input - (counts - 1) * trace.block_tokens - 1
    return weights


def reuse_distances(trace: Trace) -> Ints:
    """Return for each entry of `block_ids` how many other blocks a cache must hold for a hit; NEVER for a first use.

    The values never fall within a request: a block hits only if all blocks before it hit.
    """
    distances = _stack_distances(trace)
    return _running_maximum(trace, distances)


def hit_curve(trace: Trace, capacities_tokens: Sequence[float]) -> Floats:
    """Return the share of input tokens that an LRU cache of each size hits. Partial blocks count as whole ones."""
    total = int(trace.num_input.sum())
    if total == 0:
        return np.zeros(len(capacities_tokens))
    distances = reuse_distances(trace)
    known = distances != NEVER
    order = np.argsort(distances[known], kind="stable")
    saved = np.concatenate(([0], np.cumsum(block_weights(trace)[known][order])))
    capacities = np.floor(np.asarray(capacities_tokens, np.float64) / trace.block_tokens)
    shares: Floats = saved[np.searchsorted(distances[known][order], capacities, side="left")] / total
    return shares


def _stack_distances(trace: Trace) -> Ints:
    """Return for each entry the blocks used since its last use and before its request.

    Between a use at moment p and a request that begins at moment s lie s - p - 1 uses; each one that came again
    before s was the same block twice, so the distance is what remains without those nested pairs.
    """
    moments, begins = _moments(trace)
    previous = previous_uses(trace)
    again = np.flatnonzero(previous != NEVER)
    since, until = moments[previous[again]], begins[again]
    order = np.lexsort((since, until))  # pairs of one request stand so that none counts another
    nested = np.empty(len(again), np.int64)
    nested[order] = count_greater_before(since[order])
    distances = np.full(len(previous), NEVER, np.int64)
    distances[again] = until - since - 1 - nested
    return distances


def _moments(trace: Trace) -> tuple[Ints, Ints]:
    """Return when each entry is used (last block of a request first) and when its request begins, counted in uses."""
    offsets = trace.block_offsets
    begins = np.repeat(offsets[:-1], trace.num_blocks)
    ends = np.repeat(offsets[1:], trace.num_blocks)
    return begins + ends - 1 - np.arange(len(trace.block_ids)), begins


def count_greater_before(values: Ints) -> Ints:
    """Return for each of these distinct numbers how many numbers before it are greater.

    The method is a radix sort from the highest bit: at the first bit where two numbers differ, the pair is counted (a
    one before a zero), and then the two are separated. Every step is a few operations on the whole array.
    """
    n = len(values)
    places = np.empty(n, np.int64)
    places[np.argsort(values, kind="stable")] = np.arange(n)
    ranks = places.copy()
    greater = np.zeros(n, np.int64)  # by rank
    for bit in range(max(n - 1, 0).bit_length() - 1, -1, -1):
        ones = (ranks >> bit) & 1
        begins = (ranks >> (bit + 1)) << (bit + 1)
        ones_before = offsets_before(ones)
        ones_before -= ones_before[begins]
        zeros = ones == 0
        greater[ranks[zeros]] += ones_before[zeros]
        zeros_before = np.arange(n) - begins - ones_before
        ordered = np.empty(n, np.int64)
        ordered[begins + np.where(zeros, zeros_before, (1 << bit) + ones_before)] = ranks
        ranks = ordered
    return greater[places]


def offsets_before(counts: Ints) -> Ints:
    """Return the exclusive prefix sums."""
    sums: Ints = np.cumsum(counts) - counts
    return sums


def _leading(trace: Trace, hits: np.typing.NDArray[np.bool_]) -> Ints:
    """Return per request how many of its first entries are true in a row."""
    offsets = trace.block_offsets
    misses = np.flatnonzero(~hits)
    first_miss = np.append(misses, len(hits))[np.searchsorted(misses, offsets[:-1])]
    leading: Ints = np.minimum(first_miss, offsets[1:]) - offsets[:-1]
    return leading


def _running_maximum(trace: Trace, distances: Ints) -> Ints:
    """Return the running maximum within each request. Values are raised by the request's number, so that the maximum of
    an earlier request has no effect."""
    lift = len(distances) + 1
    lifts = trace.block_owners() * lift
    highest = np.maximum.accumulate(np.minimum(distances, lift - 1) + lifts) - lifts
    highest[highest == lift - 1] = NEVER
    return highest
