"""What a node reports of its memory after a restart of the master. Pure.

A journal loses its last moments when the machine loses power: grants of that time are unknown, and so are the objects
that were evicted for them. But nodes have stamped the memory that was written.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moonpool.master.state.allocator import OffsetAllocator
from moonpool.master.state.changes import RemovalReason
from moonpool.master.state.objects import PoolObjects
from moonpool.master.state.segments import MountedSegment
from moonpool.master.state.space import Generations
from moonpool.master.state.table import ObjectTable, Replica
from moonpool.store.messages import GRANULE_NBYTES, num_granules

_MAX_SPANS = 256  # of one FenceAhead; the node asks again for the rest
Span = tuple[int, int]  # (offset, nbytes) in one segment, in whole granules


def reserve_unknown(
    segment: MountedSegment, spans: Sequence[Span], objects: PoolObjects, free_s: float, now_s: float
) -> list[Span]:
    """Reserve spans written under grants that the journal lost, because their writers may still write until `free_s`.
    Return the spans that were free; the caller frees them at that time and counts the totals.

    Replicas that the journal has in these spans are overwritten, so they are lost.
    """
    allocator = segment.allocator
    assert allocator is not None, "the segment is in DRAM"
    for slot, lost in list(_overwritten(objects.table, segment.number, spans)):
        objects.lose_replicas(slot, lost, RemovalReason.NOT_RECOVERED, free_s, now_s)
    new = _unowned(allocator, spans)
    segment.allocator = _with_taken(allocator, new)
    segment.num_replicas += len(new)
    return new


def lowered_stamps(
    segment: MountedSegment, spans: Sequence[tuple[int, int, int]], table: ObjectTable, generations: Generations
) -> list[tuple[int, int, int, int]]:
    """Return what a node has to stamp in place of generations that were never issued; see FenceAhead.

    Free space gets a generation that no writer has, so that late writes are refused; the space of an object gets the
    object's generation.
    """
    spans = [span for span in spans if span[2] > generations.last][:_MAX_SPANS]
    if not spans or segment.allocator is None:
        return []
    fresh = generations.issue()
    lowered = [
        (*free, stamp, fresh)
        for offset, nbytes, stamp in spans
        for free in _unowned(segment.allocator, [(offset, nbytes)])
    ]
    for slot, replicas in _overwritten(table, segment.number, [span[:2] for span in spans]):
        nbytes = num_granules(table.nbytes[slot]) * GRANULE_NBYTES
        for each in replicas:
            shared = ((_common((each.offset, nbytes), span[:2]), span[2]) for span in spans)
            lowered += [(*span, stamp, each.generation) for span, stamp in shared if span[1] > 0]
    return lowered


def _overwritten(table: ObjectTable, number: int, spans: Sequence[Span]) -> Iterable[tuple[int, list[Replica]]]:
    """Yield each slot with its replicas on the segment that overlap one of the spans."""
    bounds = sorted((offset, offset + nbytes) for offset, nbytes in spans)
    starts, ends = np.array([start for start, _ in bounds]), np.array([end for _, end in bounds])

    def touched(offsets: NDArray[Any], sizes: NDArray[Any]) -> NDArray[np.bool_]:
        before = np.searchsorted(starts, (offsets + sizes).astype(np.int64), side="left")
        hit: NDArray[np.bool_] = (before > 0) & (ends[before - 1] > offsets.astype(np.int64))
        return hit

    firsts = np.flatnonzero(table.dram_segments[: table.end] == number)
    hit = {*firsts[touched(table.dram_offsets[firsts], table.sizes[firsts])].tolist(), *table.extras}
    for slot in sorted(hit):
        here = [each for each in table.dram_replicas(slot) if each.segment == number]
        nbytes = np.array([table.nbytes[slot]])
        lost = [each for each in here if touched(np.array([each.offset]), nbytes)[0]]
        if lost:
            yield slot, lost


def _common(one: Span, other: Span) -> Span:
    """Return the intersection of two spans; 0 bytes if they do not overlap."""
    begin, end = max(one[0], other[0]), min(sum(one), sum(other))
    return begin, max(end - begin, 0)


def _unowned(allocator: OffsetAllocator, spans: Sequence[Span]) -> list[Span]:
    """Return the parts of the spans that are free."""
    free, found = allocator.free_ranges(), []
    for offset, nbytes in spans:
        # Start at the last range that begins at the span's offset or before.
        at = max(bisect_right(free, (offset, allocator.capacity_nbytes)) - 1, 0)
        while at < len(free) and free[at][0] < offset + nbytes:
            start, size = free[at]
            begin, end = max(start, offset), min(start + size, offset + nbytes)
            if begin < end:
                found.append((begin, end - begin))
            at += 1
    return found


def _with_taken(allocator: OffsetAllocator, spans: Sequence[Span]) -> OffsetAllocator:
    """Return an allocator in which these free spans are allocated too."""
    free = np.array(allocator.free_ranges(), dtype=np.int64).reshape(-1, 2)
    begins, ends = np.append(0, free.sum(axis=1)), np.append(free[:, 0], allocator.capacity_nbytes)
    owned = ends > begins
    more = np.array(spans, dtype=np.int64).reshape(-1, 2)
    offsets = np.concatenate((begins[owned], more[:, 0]))
    sizes = np.concatenate(((ends - begins)[owned], more[:, 1]))
    return OffsetAllocator.rebuilt(allocator.num_granules * GRANULE_NBYTES, offsets, sizes)
