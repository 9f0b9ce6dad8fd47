"""What a node finds written in its memory that the master's journal does not know of. Pure.

A journal loses its last moments when a machine loses power. Grants of that time are unknown, and so is what was given
up to make room for them; but nodes have stamped the memory that was written.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moonpool.master.state.allocator import OffsetAllocator
from moonpool.master.state.table import ObjectTable, Replica
from moonpool.store.messages import GRANULE_NBYTES

Span = tuple[int, int]  # (offset, nbytes) in one segment, in whole granules


def overwritten(table: ObjectTable, number: int, spans: Sequence[Span]) -> Iterable[tuple[int, list[Replica]]]:
    """Slots with those replicas on the segment that share a byte with one of the spans."""
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


def common(one: Span, other: Span) -> Span:
    """What both have; without bytes when that is nothing."""
    begin, end = max(one[0], other[0]), min(sum(one), sum(other))
    return begin, max(end - begin, 0)


def unowned(allocator: OffsetAllocator, spans: Sequence[Span]) -> list[Span]:
    """The parts of the spans that belong to nobody."""
    free, found = allocator.free_ranges(), []
    for offset, nbytes in spans:
        # From the last range that begins at the span's offset or before.
        at = max(bisect_right(free, (offset, allocator.capacity_nbytes)) - 1, 0)
        while at < len(free) and free[at][0] < offset + nbytes:
            start, size = free[at]
            begin, end = max(start, offset), min(start + size, offset + nbytes)
            if begin < end:
                found.append((begin, end - begin))
            at += 1
    return found


def with_taken(allocator: OffsetAllocator, spans: Sequence[Span]) -> OffsetAllocator:
    """An allocator in which these free spans are taken as well."""
    free = np.array(allocator.free_ranges(), dtype=np.int64).reshape(-1, 2)
    begins, ends = np.append(0, free.sum(axis=1)), np.append(free[:, 0], allocator.capacity_nbytes)
    owned = ends > begins
    more = np.array(spans, dtype=np.int64).reshape(-1, 2)
    offsets = np.concatenate((begins[owned], more[:, 0]))
    sizes = np.concatenate(((ends - begins)[owned], more[:, 1]))
    return OffsetAllocator.rebuilt(allocator.num_granules * GRANULE_NBYTES, offsets, sizes)
