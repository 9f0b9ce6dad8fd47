"""What a policy remembers of the slots that left it: by 32-bit fingerprint, in a table of fixed size, newer over older.

Each fingerprint has one place, so nothing is searched and nothing is ever moved. The memory is mapped by the system
when it is first touched: making a table of any size takes no time.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

MIN_SIZE, MAX_SIZE = 1 << 14, 1 << 22
_32_BITS = 0xFFFF_FFFF
_SPREAD = 2_654_435_761  # odd, near 2**32 / golden ratio: neighbours end far apart


class Ghosts:
    """`now` is the policy's own count; an age is how much of it has passed since the put, modulo 2**32."""

    def __init__(self, size: int = MIN_SIZE) -> None:
        assert size & (size - 1) == 0, "a power of two"
        self.size = size
        self._all_marks, self._all_stamps = np.zeros(size, np.uint8), np.zeros(size, np.uint32)
        # Single items are read and written faster through memoryviews than through numpy.
        self._all_fingerprints = np.zeros(size, np.uint32)
        self._fingerprints = self._all_fingerprints.data
        self._marks, self._stamps = self._all_marks.data, self._all_stamps.data

    @staticmethod
    def size_for(num_slots: int) -> int:
        """Room for two to four times as many as there are slots, as far as memory allows."""
        return min(max(1 << (2 * num_slots - 1).bit_length(), MIN_SIZE), MAX_SIZE)

    def put(self, fingerprint: int, mark: int, now: int, age: int = 0) -> tuple[int, int] | None:
        """Remembers it as if put `age` ago. Gives the (mark, age) of the one that makes room. Marks are 0 ... 254."""
        place = (fingerprint * _SPREAD & _32_BITS) * self.size >> 32
        old = None
        if self._marks[place]:
            old = self._marks[place] - 1, now - self._stamps[place] & _32_BITS
        self._fingerprints[place], self._marks[place], self._stamps[place] = fingerprint, mark + 1, now - age & _32_BITS
        return old

    def take(self, fingerprint: int, now: int) -> tuple[int, int] | None:
        """The mark with which it was put and its age, and forgets it."""
        place = (fingerprint * _SPREAD & _32_BITS) * self.size >> 32
        if not self._marks[place] or self._fingerprints[place] != fingerprint:
            return None
        mark, self._marks[place] = self._marks[place] - 1, 0
        return mark, now - self._stamps[place] & _32_BITS

    def take_many(
        self, fingerprints: NDArray[np.uint32], now: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.uint8], NDArray[np.int64]]:
        """take() for each, at its own moment: which of them were remembered, their marks and ages."""
        spread = fingerprints.astype(np.uint64) * np.uint64(_SPREAD) & np.uint64(_32_BITS)
        places = spread * np.uint64(self.size) >> np.uint64(32)
        marks = self._all_marks[places]
        found = np.flatnonzero((marks != 0) & (self._all_fingerprints[places] == fingerprints))
        self._all_marks[places[found]] = 0
        ages = now[found] - self._all_stamps[places[found]].astype(np.int64) & _32_BITS
        return found, marks[found] - np.uint8(1), ages

    def sample(self, part: slice, now: int) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        """The marks and ages of those in that part of the table."""
        marks, stamps = self._all_marks[part], self._all_stamps[part]
        there = np.flatnonzero(marks)
        return marks[there] - np.uint8(1), (np.uint32(now & _32_BITS) - stamps[there]).astype(np.int64)
