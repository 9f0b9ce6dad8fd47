"""Columns by slot, and dense sets of slots over them: flat arrays that grow in chunks and never pause for long.

A column is an array.array or a bytearray: single items are cheap to read and write from Python, and numpy looks at the
same bytes through view(). A view pins the array's size, so it lives only inside one expression or function.
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
    """Makes room for the slot, in whole chunks of zeros."""
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
    """The column's own memory; writable."""
    return np.frombuffer(column, dtype=np.uint8 if isinstance(column, bytearray) else column.typecode)


class Candidates:
    """Two dense sets of slots, ready and set aside; a slot is in at most one. A move of one slot is O(1).

    Dense, so that every k-th member is a fair sample: removal moves the last member into the gap.
    """

    def __init__(self) -> None:
        self._where = bytearray()  # by slot: absent, or in which of the two lists
        self._places = array("I")  # by slot: where in that list
        self._lists = {_READY: array("I"), _ASIDE: array("I")}
        self._num_returning = 0  # so many of the first in the second list are on their way back
        self._phase = 0

    def __len__(self) -> int:
        return sum(map(len, self._lists.values()))

    def __contains__(self, slot: int) -> bool:
        return slot < len(self._where) and self._where[slot] != _ABSENT

    def is_ready(self, slot: int) -> bool:
        return self._where[slot] == _READY

    def add(self, slot: int) -> None:
        """Among the ready ones. There must be room for the slot."""
        self._put(slot, _READY)

    def add_many(self, slots: NDArray[np.int64]) -> None:
        """As add() of each."""
        members, where = self._lists[_READY], view(self._where)
        assert not where[slots].any(), "none of the slots is in a list"
        where[slots] = _READY
        view(self._places)[slots] = np.arange(len(members), len(members) + len(slots))
        members.frombytes(slots.astype(np.uint32).tobytes())

    def reserve(self, slot: int) -> None:
        """Makes room for slots up to this one."""
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
        """The successor, which is in no set, takes the slot's place, or becomes ready when the slot is in none."""
        which = self._where[slot]
        if which != _READY:  # a new one was not set aside, whatever it replaces
            self.discard(slot)
            self.add(successor)
            return
        place = self._places[slot]
        self._lists[which][place] = successor
        self._where[slot], self._where[successor] = _ABSENT, which
        self._places[successor] = place

    def set_aside(self, slot: int) -> None:
        """It must be in one of the sets."""
        self.discard(slot)
        self._put(slot, _ASIDE)

    def start_return(self) -> None:
        """Those that are set aside now are to become ready again."""
        self._num_returning = len(self._lists[_ASIDE])

    def go_on_returning(self, most: int) -> None:
        """Some of them do, at most so many."""
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
        """Every k-th ready slot, at most so many; the next call takes the next ones. All of them when they are few."""
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
