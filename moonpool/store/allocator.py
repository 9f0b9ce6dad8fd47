"""Where in a segment an object goes: a pure offset allocator over granules of 4 KiB.

Free ranges lie in bins by size, eight bins to each doubling, and merge with their free neighbours at once. An
allocation first looks at the lowest-lying ranges of its own bin, then takes the lowest-lying range of the next
bin that is not empty, where every range fits.

What it promises:
- Internal waste is less than one granule per allocation.
- An allocation of n granules fails only when no free range has n + n/8 granules or more; so space that is free
  and unusable for n is in ranges shorter than that.
- allocate and free cost O(log n) in the number of free ranges, whatever the number of allocations, which the
  allocator itself does not remember: the owner gives offset and size back.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush

GRANULE_NBYTES = 4096
# Bins per doubling: 2**3, so a bin's ranges differ by at most an eighth.
_SUB_BITS = 3
# How many ranges of its own bin an allocation tries before it takes a larger one.
_TRIES = 8
_COMPACT_SLACK = 64


def num_granules(nbytes: int) -> int:
    """Granules that hold `nbytes`."""
    return -(-nbytes // GRANULE_NBYTES)


def _bin_of(granules: int) -> int:
    if granules < 1 << _SUB_BITS:
        return granules
    shift = granules.bit_length() - 1 - _SUB_BITS
    return (shift << _SUB_BITS) + (granules >> shift)


class _Bin:
    """Starts of free ranges of about one size, lowest first. Ranges that left are skipped when met."""

    __slots__ = ("heap", "num_ranges")

    def __init__(self) -> None:
        self.heap: list[int] = []
        self.num_ranges = 0


class OffsetAllocator:
    """Hands out byte ranges of a span of `nbytes` (rounded down to whole granules)."""

    def __init__(self, nbytes: int) -> None:
        self.num_granules = nbytes // GRANULE_NBYTES
        self._size_at: dict[int, int] = {}  # first granule of a free range -> its length
        self._start_of: dict[int, int] = {}  # granule behind a free range -> its first
        self._bins = [_Bin() for _ in range(_bin_of(self.num_granules) + 1)]
        self._filled = 0  # bit b: bin b has a range
        self._free = 0
        if self.num_granules:
            self._put(0, self.num_granules)

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
        return len(self._size_at)

    def largest_free_nbytes(self) -> int:
        """Length of the longest free range."""
        return max(self._size_at.values(), default=0) * GRANULE_NBYTES

    def allocate(self, nbytes: int) -> int | None:
        """The offset of `nbytes` free bytes, now taken; None when no range fits."""
        assert nbytes > 0, "an allocation has at least one byte"
        granules = num_granules(nbytes)
        start = self._find(granules)
        if start is None:
            return None
        size = self._take(start)
        if size > granules:
            self._put(start + granules, size - granules)
        return start * GRANULE_NBYTES

    def free(self, offset: int, nbytes: int) -> None:
        """Takes a range back, with the offset and size it was allocated with."""
        start, granules = offset // GRANULE_NBYTES, num_granules(nbytes)
        assert offset % GRANULE_NBYTES == 0, "the range was not allocated here"
        assert 0 <= start <= self.num_granules - granules, "the range was not allocated here"
        assert start not in self._size_at, "the range is free already"
        if (before := self._start_of.get(start)) is not None:
            granules += self._take(before)
            start = before
        if (start + granules) in self._size_at:
            granules += self._take(start + granules)
        self._put(start, granules)

    def free_ranges(self) -> list[tuple[int, int]]:
        """(offset, nbytes) of every free range, in order."""
        return [(start * GRANULE_NBYTES, size * GRANULE_NBYTES) for start, size in sorted(self._size_at.items())]

    def check_integrity(self) -> None:
        """Raises AssertionError when the structures disagree."""
        end = -1
        for start, size in sorted(self._size_at.items()):
            assert size > 0, "free ranges are not empty"
            assert start > end, "free ranges neither overlap nor touch"
            end = start + size
            assert self._start_of.get(end) == start, "a range can be found by its end"
            assert start in self._bins[_bin_of(size)].heap, "a range is in its bin"
        assert end <= self.num_granules, "free ranges lie inside"
        assert len(self._start_of) == len(self._size_at), "no range is known by its end only"
        assert sum(self._size_at.values()) == self._free, "the free count is the sum of the ranges"
        counts = [0] * len(self._bins)
        for size in self._size_at.values():
            counts[_bin_of(size)] += 1
        assert counts == [each.num_ranges for each in self._bins], "bins count their ranges"
        assert self._filled == sum(1 << at for at, count in enumerate(counts) if count), "the bin map is right"

    def _find(self, granules: int) -> int | None:
        own = _bin_of(granules)
        if own >= len(self._bins):
            return None
        if self._filled >> own & 1 and (start := self._find_in_own(own, granules)) is not None:
            return start
        larger = self._filled >> (own + 1)
        if not larger:
            return None
        return self._lowest(own + 1 + (larger & -larger).bit_length() - 1)

    def _find_in_own(self, index: int, granules: int) -> int | None:
        """Ranges here may be up to an eighth too short, so a few are tried."""
        heap, short = self._bins[index].heap, []
        found = None
        for _ in range(min(_TRIES, self._bins[index].num_ranges)):
            start = self._lowest(index)
            if self._size_at[start] >= granules:
                found = start
                break
            short.append(heappop(heap))
            if len(short) == self._bins[index].num_ranges:
                break
        for start in short:
            heappush(heap, start)
        return found

    def _lowest(self, index: int) -> int:
        """The lowest range of a bin that has one. Entries of ranges that left or moved to another bin go."""
        heap = self._bins[index].heap
        while (size := self._size_at.get(heap[0])) is None or _bin_of(size) != index:
            heappop(heap)
        return heap[0]

    def _put(self, start: int, granules: int) -> None:
        self._size_at[start] = granules
        self._start_of[start + granules] = start
        self._free += granules
        index = _bin_of(granules)
        found = self._bins[index]
        heappush(found.heap, start)
        found.num_ranges += 1
        self._filled |= 1 << index
        if len(found.heap) > 2 * found.num_ranges + _COMPACT_SLACK:
            self._compact(index)

    def _take(self, start: int) -> int:
        granules = self._size_at.pop(start)
        del self._start_of[start + granules]
        self._free -= granules
        index = _bin_of(granules)
        self._bins[index].num_ranges -= 1
        if not self._bins[index].num_ranges:
            self._filled &= ~(1 << index)
            self._bins[index].heap.clear()
        return granules

    def _compact(self, index: int) -> None:
        sizes, heap = self._size_at, self._bins[index].heap
        heap[:] = {start for start in heap if start in sizes and _bin_of(sizes[start]) == index}
        heapify(heap)
