"""Where in a segment an object goes: a pure offset allocator over granules of 4 KiB.

An allocation takes the best fit, of equal ones the lowest, and cuts it at its low side; what is freed merges with its
free neighbours at once. The owner gives offset and size back: only free ranges are remembered, in two sorted orders,
so a call costs O(log n) in their number and none of them ever waits for a table to grow.

What it promises (sizes in granules; n is what is asked for):
- Internal waste is less than one granule per object.
- An allocation fails only when no free range is as long as n. Between two free ranges lies at least one object, so
  with k objects there are at most k + 1 free ranges, and at most (k + 1) * (n - 1) granules are free when it fails.
- When every object has the same length n there is no external waste: every object begins at a multiple of n, so every
  free range is a multiple of n long, save the last by what the segment's length leaves over.
- Where things go depends on what is taken, not on how it came about: a rebuilt allocator goes on as the old one would.

What it cannot promise: that mixed sizes leave no holes. An allocator that never moves an object can be driven, by
sizes up to n, to need (log2 n) / 2 times the space that is in use (Robson, 1971). A pool that meets such holes
evicts; the tests say how full it stays under churn.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from moonpool.base.errors import InvalidInput
from moonpool.master.state.allocator_index import AddressOrder, Granules, SizeOrder
from moonpool.store.messages import GRANULE_NBYTES, num_granules

# What a batch keeps together when no range holds the whole of it: 256 KiB, which is enough for one read to be worth
# its call, or a sixteenth of the longest range. More would use up the long ranges and leave large objects no place.
_TOGETHER_NBYTES = 64 * GRANULE_NBYTES
_TOGETHER_SHARE = 16


class OffsetAllocator:
    """Hands out byte ranges of a span of `nbytes` (rounded down to whole granules)."""

    def __init__(self, nbytes: int) -> None:
        self._set_free(nbytes // GRANULE_NBYTES, np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64))

    @classmethod
    def rebuilt(cls, nbytes: int, offsets: npt.NDArray[Any], sizes: npt.NDArray[Any]) -> OffsetAllocator:
        """An allocator in which exactly these spans (both in bytes, in any order) are taken.

        Raises InvalidInput when they overlap, are empty, lie outside or do not begin at a granule.
        """
        offsets, sizes = offsets.astype(np.int64), sizes.astype(np.int64)
        if len(sizes) and (sizes.min() <= 0 or (offsets % GRANULE_NBYTES).any()):
            raise InvalidInput("a span is empty or does not begin at a granule")
        if len(sizes) and (offsets.min() < 0 or max(offsets.max(), sizes.max()) > nbytes):
            raise InvalidInput("a span lies outside the segment")
        order = np.argsort(offsets, kind="stable")
        starts = offsets[order] // GRANULE_NBYTES
        ends = starts - -sizes[order] // GRANULE_NBYTES
        if (starts[1:] < ends[:-1]).any():
            raise InvalidInput("two spans overlap")
        capacity = nbytes // GRANULE_NBYTES
        if len(ends) and ends[-1] > capacity:
            raise InvalidInput("a span lies outside the segment")
        made = cls.__new__(cls)
        made._set_free(capacity, starts, ends)
        return made

    @property
    def capacity_nbytes(self) -> int:
        return self.num_granules * GRANULE_NBYTES

    @property
    def free_nbytes(self) -> int:
        return self._free * GRANULE_NBYTES

    @property
    def used_nbytes(self) -> int:
        return self.capacity_nbytes - self.free_nbytes

    @property
    def num_free_ranges(self) -> int:
        return self._by_address.num_ranges

    def largest_free_nbytes(self) -> int:
        """Length of the longest free range."""
        return self._by_size.largest() * GRANULE_NBYTES

    def allocate(self, nbytes: int) -> int | None:
        """The offset of `nbytes` free bytes, now taken; None when no range fits."""
        assert nbytes > 0, "an allocation has at least one byte"
        granules = -(-nbytes // GRANULE_NBYTES)
        return self._cut(granules) if granules <= self._free else None

    def allocate_many(self, sizes: Sequence[int]) -> list[int | None]:
        """An offset for each size, by position; None where no range fitted when its turn came.

        Neighbours in the batch are neighbours in the segment: all of them when one range holds the batch, else as
        many as can be kept together without using up the long ranges.
        """
        assert min(sizes, default=1) > 0, "an allocation has at least one byte"
        ends, least = _ends_of(sizes), min(sizes, default=0)
        offsets: list[int | None] = []
        while (done := len(offsets)) < len(sizes):
            begin = ends[done]
            stop = bisect_right(ends, begin + self._room_for(ends[-1] - begin, ends[done + 1] - begin), done) - 1
            if stop == done:
                nothing_fits = self.largest_free_nbytes() < least
                offsets += [None] * (len(sizes) - done if nothing_fits else 1)
                continue
            offset = self._cut((ends[stop] - begin) // GRANULE_NBYTES)
            assert offset is not None, "the longest range is long enough"
            shift = offset - begin
            offsets += [shift + end for end in ends[done:stop]]
        return offsets

    def free(self, offset: int, nbytes: int) -> None:
        """Takes a range back, with the offset and size it was allocated with."""
        start, misfit = divmod(offset, GRANULE_NBYTES)
        end = start + -(-nbytes // GRANULE_NBYTES)
        assert not misfit, "the range was not allocated here"
        assert 0 <= start < end <= self.num_granules, "the range was not allocated here"
        first, last = self._by_address.give(start, end)
        self._free += end - start
        bits, by_size = self._end_bits, self._by_size
        merged = (last - first) << bits | last
        if first < start:
            if last > end:
                by_size.remove((last - end) << bits | last)
            by_size.replace((start - first) << bits | start, merged)
        elif last > end:
            by_size.replace((last - end) << bits | last, merged)
        else:
            by_size.add(merged)

    def free_many(self, spans: Sequence[tuple[int, int]]) -> None:
        """Takes many ranges back, (offset, nbytes) each: those that touch as one."""
        begin = end = 0
        for offset, nbytes in sorted(spans):
            if offset != end:
                if begin != end:
                    self.free(begin, end - begin)
                begin = end = offset
            end += -(-nbytes // GRANULE_NBYTES) * GRANULE_NBYTES
        if begin != end:
            self.free(begin, end - begin)

    def free_ranges(self) -> list[tuple[int, int]]:
        """(offset, nbytes) of every free range, in order."""
        return [(start * GRANULE_NBYTES, (end - start) * GRANULE_NBYTES) for start, end in self._by_address.ranges()]

    def check_integrity(self) -> None:
        """Raises AssertionError when the structures disagree."""
        self._by_address.check_integrity()
        self._by_size.check_integrity()
        ranges = list(self._by_address.ranges())
        assert all(start >= 0 and end <= self.num_granules for start, end in ranges), "free ranges lie inside"
        keys = sorted((end - start) << self._end_bits | end for start, end in ranges)
        assert keys == list(self._by_size.keys()), "both orders hold the same ranges"
        assert sum(end - start for start, end in ranges) == self._free, "the free count is the sum of the ranges"

    def _set_free(self, capacity: int, starts: Granules, ends: Granules) -> None:
        """Frees what lies between the taken spans, which are in order."""
        firsts, lasts = np.append(0, ends), np.append(starts, capacity)
        gaps = lasts > firsts
        firsts, lasts = firsts[gaps], lasts[gaps]
        self.num_granules = capacity
        self._free = int((lasts - firsts).sum())
        self._by_address = AddressOrder(firsts, lasts, capacity)
        self._by_size = SizeOrder(firsts, lasts, capacity)
        self._end_bits = self._by_size.end_bits
        self._end_mask = (1 << self._end_bits) - 1

    def _room_for(self, batch_nbytes: int, first_nbytes: int) -> int:
        """Bytes of a batch, whose first object is given too, that go to one place."""
        longest = self._by_size.largest() * GRANULE_NBYTES
        if batch_nbytes <= longest:
            return batch_nbytes
        return min(longest, max(_TOGETHER_NBYTES, longest // _TOGETHER_SHARE, first_nbytes))

    def _cut(self, granules: int) -> int | None:
        """The offset of the first granules of the best fit, now taken."""
        key = self._by_size.cut(granules)
        if key is None:
            return None
        end = key & self._end_mask
        start = end - (key >> self._end_bits)
        self._by_address.take(start, end, granules)
        self._free -= granules
        return start * GRANULE_NBYTES


def _ends_of(sizes: Sequence[int]) -> Sequence[int]:
    """Where each object of a batch ends when they lie one behind the other from 0; first comes 0 itself."""
    if sizes and sizes.count(sizes[0]) == len(sizes):  # one size: nothing to add up
        step = num_granules(sizes[0]) * GRANULE_NBYTES
        return range(0, step * len(sizes) + 1, step)
    return list(accumulate((-(-nbytes // GRANULE_NBYTES) * GRANULE_NBYTES for nbytes in sizes), initial=0))
