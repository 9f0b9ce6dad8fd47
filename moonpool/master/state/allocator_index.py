"""A segment's free ranges in two orders, as a file system keeps them: by address, to merge; by size, to fit.

Each order is a list of sorted chunks of integers, searched by bisection: no hash table that stops the world when it
grows, no object per range for the garbage collector to visit, 25 to 40 bytes a range. The dearest single step is to
cut a full chunk in two. All places and lengths here are in granules.

Both orders end in a range that nobody can take, and the one by size begins with one, so that a search always arrives.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections.abc import Iterator
from itertools import pairwise
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Chunk: TypeAlias = "array[int] | list[int]"
Granules: TypeAlias = npt.NDArray[np.int64]

# Values in a full chunk: moving 4 KiB costs about as much as one step of bisection.
CHUNK_VALUES = 512


class AddressOrder:
    """Free ranges as start, end, start, end...: what stands at an odd position of a chunk is an end."""

    __slots__ = ("_chunks", "_lasts", "num_ranges")

    def __init__(self, starts: Granules, ends: Granules, num_granules: int) -> None:
        """Begins with these free ranges, which are in order and do not touch."""
        self.num_ranges = len(starts)
        bounds = array("q", np.stack((starts, ends), axis=1).tobytes())
        self._chunks = _chunks_of(bounds + array("q", (num_granules + 1, num_granules + 2)))
        self._lasts = [chunk[-1] for chunk in self._chunks]

    def give(self, start: int, end: int) -> tuple[int, int]:
        """Makes a span free. Returns the range that it is now part of: itself and the free ranges it touches."""
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
        """Takes the first granules of the free range from `start` to `end`."""
        at = bisect_left(self._lasts, end)
        chunk = self._chunks[at]
        position = bisect_left(chunk, start)
        if start + granules < end:
            chunk[position] = start + granules
        else:
            self._drop(at, position)

    def ranges(self) -> Iterator[tuple[int, int]]:
        """(start, end) of every free range, in order."""
        values = (value for chunk in self._chunks for value in chunk)
        return ((start, next(values)) for start, _ in zip(values, range(self.num_ranges), strict=False))

    def nbytes(self) -> int:
        """Memory that the chunks take."""
        return _nbytes_of(self._chunks)

    def check_integrity(self) -> None:
        """Raises AssertionError when ranges overlap, touch or cannot be found."""
        _check(self._chunks, self._lasts)
        assert all(len(chunk) % 2 == 0 for chunk in self._chunks), "no range lies in two chunks"
        assert sum(map(len, self._chunks)) == 2 * self.num_ranges + 2, "every range is counted"

    def _lengthen(self, at: int, position: int, end: int) -> tuple[int, int]:
        """The range whose end stands at `position` now ends at `end`, or where the range that begins there does."""
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
    """Free ranges as keys of size and end, so the first key of a size or above is the best fit that lies lowest.

    A range that is cut at its low side keeps its end, and often its place among the keys too.
    """

    __slots__ = ("_chunks", "_lasts", "end_bits", "top")

    def __init__(self, starts: Granules, ends: Granules, num_granules: int) -> None:
        """Begins with these free ranges."""
        self.end_bits = (num_granules + 1).bit_length()
        self.top = (num_granules + 1) << self.end_bits  # above the key of any range
        self._chunks = _chunks_of(self._sorted_keys(ends - starts, ends))
        self._lasts = [chunk[-1] for chunk in self._chunks]

    def largest(self) -> int:
        """Granules of the longest free range, 0 when nothing is free."""
        chunk = self._chunks[-1]
        return (chunk[-2] if len(chunk) > 1 else self._chunks[-2][-1]) >> self.end_bits

    def cut(self, granules: int) -> int | None:
        """Takes the first granules of the best fit. Returns the key it had before, None when nothing fits."""
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
        """Adds a range."""
        at = bisect_left(self._lasts, key)
        chunk = self._chunks[at]
        insort(chunk, key)
        if len(chunk) > CHUNK_VALUES:
            _halve(self._chunks, self._lasts, at)

    def remove(self, key: int) -> None:
        """Removes a range that is here."""
        at = bisect_left(self._lasts, key)
        self._drop(at, bisect_left(self._chunks[at], key))

    def replace(self, old: int, new: int) -> None:
        """Removes a range and adds another."""
        at = bisect_left(self._lasts, old)
        self._change(at, bisect_left(self._chunks[at], old), new)

    def keys(self) -> Iterator[int]:
        """The key of every free range, in order."""
        return (key for chunk in self._chunks for key in chunk if 0 < key < self.top)

    def nbytes(self) -> int:
        """Memory that the chunks take."""
        return _nbytes_of(self._chunks)

    def check_integrity(self) -> None:
        """Raises AssertionError when keys are not in order or cannot be found."""
        _check(self._chunks, self._lasts)
        assert (self._chunks[0][0], self._chunks[-1][-1]) == (0, self.top), "the first and last key are no ranges"

    def _sorted_keys(self, sizes: Granules, ends: Granules) -> Chunk:
        """A size and an end fit in eight bytes in segments below 16 TiB; larger ones pay for Python's integers."""
        if self.top >= 1 << 64:
            pairs = zip(sizes.tolist(), ends.tolist(), strict=True)
            return [0, *sorted(size << self.end_bits | end for size, end in pairs), self.top]
        keys = np.sort(sizes.astype(np.uint64) << np.uint64(self.end_bits) | ends.astype(np.uint64))
        return array("Q", (0,)) + array("Q", keys.tobytes()) + array("Q", (self.top,))

    def _change(self, at: int, position: int, new: int) -> None:
        chunk = self._chunks[at]
        if 0 < position < len(chunk) - 1 and chunk[position - 1] < new < chunk[position + 1]:
            chunk[position] = new  # it stays where it is
        else:
            self._drop(at, position)
            self.add(new)

    def _drop(self, at: int, position: int) -> None:
        chunk = self._chunks[at]
        del chunk[position]
        if position == len(chunk):
            _mend(self._chunks, self._lasts, at)


def _chunks_of(values: Chunk) -> list[Chunk]:
    """Half full, so that the first that is added does not cut them."""
    return [values[at : at + CHUNK_VALUES // 2] for at in range(0, len(values), CHUNK_VALUES // 2)]


def _halve(chunks: list[Chunk], lasts: list[int], at: int) -> None:
    chunk = chunks[at]
    chunks.insert(at + 1, chunk[CHUNK_VALUES // 2 :])
    del chunk[CHUNK_VALUES // 2 :]
    lasts.insert(at, chunk[-1])


def _mend(chunks: list[Chunk], lasts: list[int], at: int) -> None:
    """After the last value of a chunk went."""
    if chunks[at]:
        lasts[at] = chunks[at][-1]
    else:
        del chunks[at], lasts[at]


def _nbytes_of(chunks: list[Chunk]) -> int:
    return sum(chunk.__sizeof__() for chunk in chunks)


def _check(chunks: list[Chunk], lasts: list[int]) -> None:
    assert all(here < there for here, there in pairwise(value for chunk in chunks for value in chunk)), "in order"
    assert lasts == [chunk[-1] for chunk in chunks], "a chunk is found by its last value"
    assert all(0 < len(chunk) <= CHUNK_VALUES for chunk in chunks), "no chunk is empty or too long"
