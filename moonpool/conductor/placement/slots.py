"""Small numbers for those that come and go, so that bits and columns can stand for them. Pure."""

from __future__ import annotations

import heapq

import numpy as np
from numpy.typing import NDArray


class Slots:
    """A retired slot is given again only after a whole sweep that began after it was retired."""

    def __init__(self) -> None:
        self.num_slots = 0  # one more than the highest ever given
        self.sweeping = 0  # mask of those whose traces are being cleared
        self._next = 0  # mask of those that wait for the next sweep
        self._free: list[int] = []

    def take(self) -> int:
        """The lowest free one."""
        if self._free:
            return heapq.heappop(self._free)
        self.num_slots += 1
        return self.num_slots - 1

    def retire(self, *slots: int) -> None:
        for slot in slots:
            self._next |= 1 << slot
        if not self.sweeping:
            self.sweeping, self._next = self._next, 0

    def give_back(self, slot: int) -> None:
        """For those that leave no traces: free at once."""
        heapq.heappush(self._free, slot)

    def swept(self) -> None:
        """No trace is left of those in `sweeping`."""
        for slot in slots_in(self.sweeping):
            self.give_back(slot)
        self.sweeping, self._next = self._next, 0


def slots_in(mask: int) -> list[int]:
    """The numbers of the bits, ascending."""
    found = []
    while mask:
        lowest = mask & -mask
        found.append(lowest.bit_length() - 1)
        mask ^= lowest
    return found


def where(mask: int) -> NDArray[np.intp]:
    """The same as an index into columns, fast for many of them."""
    packed = np.frombuffer(mask.to_bytes(-(-mask.bit_length() // 8), "little"), dtype=np.uint8)
    return np.unpackbits(packed, bitorder="little").nonzero()[0]
