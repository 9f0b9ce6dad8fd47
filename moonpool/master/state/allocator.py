"""A pure offset allocator for a segment, in granules of 4 KiB.

An allocation takes the best fit, of equal ones the lowest, and cuts it at its low side; a freed span is merged with its
free neighbours at once. The owner passes offset and size to free(): the allocator stores only free ranges, in two
sorted orders as a file system does, by address to merge them and by size to fit. A call costs O(log n) in their number.
Each order is a list of sorted chunks of integers, searched by bisection: no hash table that pauses when it grows, no
object per range for the garbage collector, 25 to 40 bytes a range. The slowest single step is to split a full chunk.

What it promises (sizes in granules; n is the size asked for):
- Internal waste is less than one granule per object.
- An allocation fails only if no free range is as long as n. Between two free ranges there is at least one object, so
  with k objects there are at most k + 1 free ranges, and at most (k + 1) * (n - 1) granules are free when it fails.
- If every object has the same length n there is no external waste: every object begins at a multiple of n, so every
  free range is a multiple of n long, except the last if the segment's length is no multiple of n.
- Offsets depend on which spans are in use, not on the order of calls: a rebuilt allocator continues as the old one.

What it cannot promise: that mixed sizes leave no holes. An allocator that never moves an object can be driven, by sizes
up to n, to need (log2 n) / 2 times the space that is in use (Robson, 1971). A pool with such holes evicts objects; the
tests check how full it stays under churn.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from moonpool.base.errors import InvalidInput
from moonpool.store.messages import GRANULE_NBYTES, num_granules

# The part of a batch that is placed contiguously if no range holds the whole batch: 256 KiB, which is enough for one
# efficient read, or a sixteenth of the longest range. More would use up the long ranges that large objects need.
_TOGETHER_NBYTES = 64 * GRANULE_NBYTES
_TOGETHER_SHARE = 16


class OffsetAllocator:
    """Allocates byte ranges of a span of `nbytes` (rounded down to whole granules)."""

    def __init__(self, nbytes: int) -> None:
        self._set_free(nbytes // GRANULE_NBYTES, np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64))

    @classmethod
    def rebuilt(cls, nbytes: int, offsets: npt.NDArray[Any], sizes: npt.NDArray[Any]) -> OffsetAllocator:
        """Return an allocator in which exactly these spans (both in bytes, in any order) are in use.

        Raise InvalidInput if they overlap, are empty, lie outside or do not begin at a granule.
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

    def largest_free_nbytes(self) -> int:
        """Return the length of the longest free range."""
        return self._by_size.largest() * GRANULE_NBYTES

    def allocate(self, nbytes: int) -> int | None:
        """Allocate `nbytes`. Return the offset, None if no range is long enough."""
        assert nbytes > 0, "an allocation has at least one byte"
        granules = -(-nbytes // GRANULE_NBYTES)
        return self._cut(granules) if granules <= self._free else None

    def allocate_many(self, sizes: Sequence[int]) -> list[int | None]:
        """Allocate each size in turn. Return the offsets by position, None where no range was long enough.

        Neighbours in the batch are neighbours in the segment: all of them if one range holds the batch, otherwise as
        many as possible without using up the long ranges.
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
        """Free a range, with the offset and size of its allocation."""
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

    def free_ranges(self) -> list[tuple[int, int]]:
        """Return (offset, nbytes) of every free range, in order."""
        return [(start * GRANULE_NBYTES, (end - start) * GRANULE_NBYTES) for start, end in self._by_address.ranges()]

    def check_integrity(self) -> None:
        """Raise AssertionError if the two orders disagree."""
        self._by_address.check_integrity()
        self._by_size.check_integrity()
        ranges = list(self._by_address.ranges())
        assert all(start >= 0 and end <= self.num_granules for start, end in ranges), "free ranges lie inside"
        keys = sorted((end - start) << self._end_bits | end for start, end in ranges)
        assert keys == list(self._by_size.keys()), "both orders hold the same ranges"
        assert sum(end - start for start, end in ranges) == self._free, "the free count is the sum of the ranges"

    def _set_free(self, capacity: int, starts: Granules, ends: Granules) -> None:
        """Free everything between the used spans, which are in order."""
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
        """Return how many bytes of a batch are placed contiguously; at least the first object, if it fits."""
        longest = self._by_size.largest() * GRANULE_NBYTES
        if batch_nbytes <= longest:
            return batch_nbytes
        return min(longest, max(_TOGETHER_NBYTES, longest // _TOGETHER_SHARE, first_nbytes))

    def _cut(self, granules: int) -> int | None:
        """Allocate the first granules of the best fit. Return the offset, None if nothing fits."""
        key = self._by_size.cut(granules)
        if key is None:
            return None
        end = key & self._end_mask
        start = end - (key >> self._end_bits)
        self._by_address.take(start, end, granules)
        self._free -= granules
        return start * GRANULE_NBYTES


def _ends_of(sizes: Sequence[int]) -> Sequence[int]:
    """Return 0, and then the end of each object of a batch if they are placed contiguously from 0."""
    if sizes and sizes.count(sizes[0]) == len(sizes):  # one size: no sums needed
        step = num_granules(sizes[0]) * GRANULE_NBYTES
        return range(0, step * len(sizes) + 1, step)
    return list(accumulate((-(-nbytes // GRANULE_NBYTES) * GRANULE_NBYTES for nbytes in sizes), initial=0))


Chunk: TypeAlias = "array[int] | list[int]"
Granules: TypeAlias = npt.NDArray[np.int64]

# Values in a full chunk: moving 4 KiB costs about as much as one step of bisection.
CHUNK_VALUES = 512


class AddressOrder:
    """Free ranges as start, end, start, end...: values at odd positions of a chunk are ends. Places and lengths are in
    granules here. The order ends in a range that cannot be allocated, so that a search always finds something.
    """

    __slots__ = ("_chunks", "_lasts", "num_ranges")

    def __init__(self, starts: Granules, ends: Granules, num_granules: int) -> None:
        """Start with these free ranges, which are in order and do not touch."""
        self.num_ranges = len(starts)
        bounds = array("q", np.stack((starts, ends), axis=1).tobytes())
        self._chunks = _chunks_of(bounds + array("q", (num_granules + 1, num_granules + 2)))
        self._lasts = [chunk[-1] for chunk in self._chunks]

    def give(self, start: int, end: int) -> tuple[int, int]:
        """Free a span. Return the range that it is now part of: the span and the free ranges it touches."""
        at = bisect_left(self._lasts, start)
        chunk = self._chunks[at]
        position = bisect_left(chunk, start)
        following = chunk[position]
        if position & 1:
            assert following == start, "the range is free already"
            return self._lengthen(at, position, end)
        assert end <= following, "the range is free already"
        if end == following:
            chunk[position] = start
            return start, chunk[position + 1]
        chunk.insert(position, end)
        chunk.insert(position, start)
        self.num_ranges += 1
        if len(chunk) > CHUNK_VALUES:
            _halve(self._chunks, self._lasts, at)
        return start, end

    def take(self, start: int, end: int, granules: int) -> None:
        """Allocate the first granules of the free range from `start` to `end`."""
        at = bisect_left(self._lasts, end)
        chunk = self._chunks[at]
        position = bisect_left(chunk, start)
        if start + granules < end:
            chunk[position] = start + granules
        else:
            self._drop(at, position)

    def ranges(self) -> Iterator[tuple[int, int]]:
        """Yield (start, end) of every free range, in order."""
        values = (value for chunk in self._chunks for value in chunk)
        return ((start, next(values)) for start, _ in zip(values, range(self.num_ranges), strict=False))

    def check_integrity(self) -> None:
        """Raise AssertionError if ranges overlap, touch or cannot be found."""
        _check(self._chunks, self._lasts)
        assert all(len(chunk) % 2 == 0 for chunk in self._chunks), "no range lies in two chunks"
        assert sum(map(len, self._chunks)) == 2 * self.num_ranges + 2, "every range is counted"

    def _lengthen(self, at: int, position: int, end: int) -> tuple[int, int]:
        """Extend the range whose end is at `position` to `end`, and merge it with a range that begins there."""
        chunk = self._chunks[at]
        is_last = position + 1 == len(chunk)
        after_at, after = (at + 1, 0) if is_last else (at, position + 1)
        following = self._chunks[after_at][after]
        assert end <= following, "the range is free already"
        if end == following:
            end = self._chunks[after_at][after + 1]
            self._drop(after_at, after)
        chunk[position] = end
        if position + 1 == len(chunk):
            self._lasts[at] = end
        return chunk[position - 1], end

    def _drop(self, at: int, position: int) -> None:
        chunk = self._chunks[at]
        del chunk[position : position + 2]
        self.num_ranges -= 1
        if position == len(chunk):
            _mend(self._chunks, self._lasts, at)


class SizeOrder:
    """Free ranges as keys of size and end, so the first key of a size or above is the lowest best fit.

    A range that is cut at its low side keeps its end, and often its position among the keys too. The first and the last
    key are not ranges, so that a search always finds something.
    """

    __slots__ = ("_chunks", "_lasts", "end_bits", "top")

    def __init__(self, starts: Granules, ends: Granules, num_granules: int) -> None:
        """Start with these free ranges."""
        self.end_bits = (num_granules + 1).bit_length()
        self.top = (num_granules + 1) << self.end_bits  # above the key of any range
        self._chunks = _chunks_of(self._sorted_keys(ends - starts, ends))
        self._lasts = [chunk[-1] for chunk in self._chunks]

    def largest(self) -> int:
        """Return the granules of the longest free range, 0 if nothing is free."""
        chunk = self._chunks[-1]
        return (chunk[-2] if len(chunk) > 1 else self._chunks[-2][-1]) >> self.end_bits

    def cut(self, granules: int) -> int | None:
        """Allocate the first granules of the best fit. Return the key it had before, None if nothing fits."""
        wanted = granules << self.end_bits
        if wanted >= self.top:
            return None
        at = bisect_left(self._lasts, wanted)
        chunk = self._chunks[at]
        position = bisect_left(chunk, wanted)
        key = chunk[position]
        if key == self.top:
            return None
        rest = key - wanted
        if rest >> self.end_bits:
            self._change(at, position, rest)
        else:
            self._drop(at, position)
        return key

    def add(self, key: int) -> None:
        """Add a range."""
        at = bisect_left(self._lasts, key)
        chunk = self._chunks[at]
        insort(chunk, key)
        if len(chunk) > CHUNK_VALUES:
            _halve(self._chunks, self._lasts, at)

    def remove(self, key: int) -> None:
        """Remove a range."""
        at = bisect_left(self._lasts, key)
        self._drop(at, bisect_left(self._chunks[at], key))

    def replace(self, old: int, new: int) -> None:
        """Remove a range and add another."""
        at = bisect_left(self._lasts, old)
        self._change(at, bisect_left(self._chunks[at], old), new)

    def keys(self) -> Iterator[int]:
        """Yield the key of every free range, in order."""
        return (key for chunk in self._chunks for key in chunk if 0 < key < self.top)

    def check_integrity(self) -> None:
        """Raise AssertionError if keys are not in order or cannot be found."""
        _check(self._chunks, self._lasts)
        assert (self._chunks[0][0], self._chunks[-1][-1]) == (0, self.top), "the first and last key are no ranges"

    def _sorted_keys(self, sizes: Granules, ends: Granules) -> Chunk:
        """In segments below 16 TiB a size and an end fit in eight bytes; larger segments use Python's integers."""
        if self.top >= 1 << 64:
            pairs = zip(sizes.tolist(), ends.tolist(), strict=True)
            return [0, *sorted(size << self.end_bits | end for size, end in pairs), self.top]
        keys = np.sort(sizes.astype(np.uint64) << np.uint64(self.end_bits) | ends.astype(np.uint64))
        return array("Q", (0,)) + array("Q", keys.tobytes()) + array("Q", (self.top,))

    def _change(self, at: int, position: int, new: int) -> None:
        chunk = self._chunks[at]
        if 0 < position < len(chunk) - 1 and chunk[position - 1] < new < chunk[position + 1]:
            chunk[position] = new  # its position stays
        else:
            self._drop(at, position)
            self.add(new)

    def _drop(self, at: int, position: int) -> None:
        chunk = self._chunks[at]
        del chunk[position]
        if position == len(chunk):
            _mend(self._chunks, self._lasts, at)


def _chunks_of(values: Chunk) -> list[Chunk]:
    """Return half-full chunks, so that the next insert does not split them."""
    return [values[at : at + CHUNK_VALUES // 2] for at in range(0, len(values), CHUNK_VALUES // 2)]


def _halve(chunks: list[Chunk], lasts: list[int], at: int) -> None:
    chunk = chunks[at]
    chunks.insert(at + 1, chunk[CHUNK_VALUES // 2 :])
    del chunk[CHUNK_VALUES // 2 :]
    lasts.insert(at, chunk[-1])


def _mend(chunks: list[Chunk], lasts: list[int], at: int) -> None:
    """Update the index after the last value of a chunk was removed."""
    if chunks[at]:
        lasts[at] = chunks[at][-1]
    else:
        del chunks[at], lasts[at]


def _check(chunks: list[Chunk], lasts: list[int]) -> None:
    assert all(here < there for here, there in pairwise(value for chunk in chunks for value in chunk)), "in order"
    assert lasts == [chunk[-1] for chunk in chunks], "a chunk is found by its last value"
    assert all(0 < len(chunk) <= CHUNK_VALUES for chunk in chunks), "no chunk is empty or too long"
