"""Flat memory for policies: columns by slot, dense sets of slots, and a table of removed objects. No call pauses for
long.

A column is an array.array or a bytearray that grows in chunks: single items are cheap to read and write from Python,
and numpy uses the same bytes through view(). A view locks the array's size, so it lives only inside one function.
"""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
from numpy.typing import NDArray

CHUNK_SLOTS = 16_384
Column = bytearray | array  # type: ignore[type-arg]  # array is not generic at run time in Python 3.11
_ABSENT, _READY, _ASIDE = 0, 1, 2


def grow(slot: int, *columns: Column) -> None:
    """Make room for the slot, in whole chunks of zeros."""
    num_chunks = slot // CHUNK_SLOTS + 1
    for column in columns:
        missing = num_chunks * CHUNK_SLOTS - len(column)
        if missing <= 0:
            continue
        if isinstance(column, bytearray):
            column.extend(bytes(missing))
        else:
            column.frombytes(bytes(missing * column.itemsize))


def view(column: Column) -> NDArray[Any]:
    """Return the column's own memory as a writable array."""
    return np.frombuffer(column, dtype=np.uint8 if isinstance(column, bytearray) else column.typecode)


class Candidates:
    """Two dense sets of slots, ready and set aside; a slot is in at most one. Moving a slot is O(1).

    Removal moves the last member into the gap, so the sets stay dense and every k-th member is a fair sample.
    """

    def __init__(self) -> None:
        self._where = bytearray()  # by slot: absent, or in which of the two lists
        self._places = array("I")  # by slot: its position in that list
        self._lists = {_READY: array("I"), _ASIDE: array("I")}
        self._num_returning = 0  # the first this many slots set aside become ready again
        self._phase = 0

    def __len__(self) -> int:
        return sum(map(len, self._lists.values()))

    def __contains__(self, slot: int) -> bool:
        return slot < len(self._where) and self._where[slot] != _ABSENT

    def is_ready(self, slot: int) -> bool:
        return self._where[slot] == _READY

    def add(self, slot: int) -> None:
        """Add a slot to the ready set. There must be room for the slot."""
        self._put(slot, _READY)

    def add_many(self, slots: NDArray[np.int64]) -> None:
        """Call add() for each."""
        members, where = self._lists[_READY], view(self._where)
        assert not where[slots].any(), "none of the slots is in a list"
        where[slots] = _READY
        view(self._places)[slots] = np.arange(len(members), len(members) + len(slots))
        members.frombytes(slots.astype(np.uint32).tobytes())

    def reserve(self, slot: int) -> None:
        """Make room for slots up to this one."""
        grow(slot, self._where, self._places)

    def discard(self, slot: int) -> None:
        which = self._where[slot]
        if which == _ABSENT:
            return
        members, place = self._lists[which], self._places[slot]
        last = members.pop()
        if last != slot:
            members[place] = last
            self._places[last] = place
        self._where[slot] = _ABSENT

    def replace(self, slot: int, successor: int) -> None:
        """Put the successor, which is in no set, in the slot's place, or add it to the ready set if the slot is in
        none.
        """
        which = self._where[slot]
        if which != _READY:  # the successor is new, so it is not set aside
            self.discard(slot)
            self.add(successor)
            return
        place = self._places[slot]
        self._lists[which][place] = successor
        self._where[slot], self._where[successor] = _ABSENT, which
        self._places[successor] = place

    def set_aside(self, slot: int) -> None:
        """Move a slot, which is in one of the sets, to those set aside."""
        self.discard(slot)
        self._put(slot, _ASIDE)

    def start_return(self) -> None:
        """Let the slots that are set aside now become ready again, in steps."""
        self._num_returning = len(self._lists[_ASIDE])

    def go_on_returning(self, most: int) -> None:
        """Make up to `most` of them ready."""
        aside = self._lists[_ASIDE]
        for _ in range(most):
            self._num_returning = min(self._num_returning, len(aside)) - 1
            if self._num_returning < 0:
                self._num_returning = 0
                return
            slot = aside[self._num_returning]
            self.discard(slot)
            self.add(slot)

    def sample(self, most: int) -> NDArray[np.uint32]:
        """Return every k-th ready slot, at most `most`; the next call returns others. If there are few, return all."""
        members = self._lists[_READY]
        step = -(-len(members) // most)
        if step <= 1:
            return np.array(members, np.uint32)
        self._phase = (self._phase + 1) % step
        return np.array(members[self._phase :: step], np.uint32)

    def check_integrity(self) -> None:
        for which, members in self._lists.items():
            for place, slot in enumerate(members):
                assert self._where[slot] == which, "a member knows its list"
                assert self._places[slot] == place, "a member knows its place"
        assert len(self) == len(self._where) - self._where.count(_ABSENT), "nothing is in a list and marked absent"

    def _put(self, slot: int, which: int) -> None:
        assert self._where[slot] == _ABSENT, "the slot is in a list already"
        members = self._lists[which]
        self._where[slot], self._places[slot] = which, len(members)
        members.append(slot)


MIN_SIZE, MAX_SIZE = 1 << 14, 1 << 22
_32_BITS = 0xFFFF_FFFF
_SPREAD = 2_654_435_761  # odd, near 2**32 / golden ratio: neighbours end far apart


class Ghosts:
    """What a policy remembers of removed objects: by 32-bit fingerprint, in a table of fixed size, newer over older.

    Each fingerprint has one place, so nothing is searched or moved. The system maps the memory when it is first
    touched, so making a table of any size takes no time. `now` is the policy's own count; an age is how much of it has
    passed since the put, modulo 2**32.
    """

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
        """Return a size of two to four times the number of slots, within the limits."""
        return min(max(1 << (2 * num_slots - 1).bit_length(), MIN_SIZE), MAX_SIZE)

    def put(self, fingerprint: int, mark: int, now: int, age: int = 0) -> tuple[int, int] | None:
        """Store a fingerprint as if put `age` ago. Return the (mark, age) of the one it replaces.
        Marks are 0 ... 254.
        """
        place = (fingerprint * _SPREAD & _32_BITS) * self.size >> 32
        old = None
        if self._marks[place]:
            old = self._marks[place] - 1, now - self._stamps[place] & _32_BITS
        self._fingerprints[place], self._marks[place], self._stamps[place] = fingerprint, mark + 1, now - age & _32_BITS
        return old

    def pop(self, fingerprint: int, now: int) -> tuple[int, int] | None:
        """Remove a fingerprint. Return its mark and age, None if it is not stored."""
        place = (fingerprint * _SPREAD & _32_BITS) * self.size >> 32
        if not self._marks[place] or self._fingerprints[place] != fingerprint:
            return None
        mark, self._marks[place] = self._marks[place] - 1, 0
        return mark, now - self._stamps[place] & _32_BITS

    def pop_many(
        self, fingerprints: NDArray[np.uint32], now: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.uint8], NDArray[np.int64]]:
        """Call pop() for each, at its own `now`. Return which were stored, their marks and ages."""
        spread = fingerprints.astype(np.uint64) * np.uint64(_SPREAD) & np.uint64(_32_BITS)
        places = spread * np.uint64(self.size) >> np.uint64(32)
        marks = self._all_marks[places]
        found = np.flatnonzero((marks != 0) & (self._all_fingerprints[places] == fingerprints))
        self._all_marks[places[found]] = 0
        ages = now[found] - self._all_stamps[places[found]].astype(np.int64) & _32_BITS
        return found, marks[found] - np.uint8(1), ages

    def sample(self, part: slice, now: int) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        """Return the marks and ages in that part of the table."""
        marks, stamps = self._all_marks[part], self._all_stamps[part]
        there = np.flatnonzero(marks)
        return marks[there] - np.uint8(1), (np.uint32(now & _32_BITS) - stamps[there]).astype(np.int64)
