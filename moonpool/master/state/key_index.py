"""From key to slot: an open-addressing hash table in flat memory. Pure.

A dict has six cache misses per key, one after the other; numpy looks many keys up at once and overlaps their misses,
which with a hundred thousand objects is three times as fast. The table grows in steps: no event moves more than a few
thousand entries.

A single key is compared with the stored key. A batch compares 64-bit hashes, whose seed differs in every process, and
the last bytes of the keys. For keys that are hashes a false match happens once in billions of years, for others once in
years of nothing but misses; the client then sees a miss, because objects carry their keys.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # Python 3.11 and 3.12 do not name it
_FLAGS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE


class Column:
    """`length` values of one type ("B", "H", "I", "Q" or "d" as in struct), all zero at first.

    An anonymous mapping of its final size, of which the kernel allocates one page at a time: a growing array would be
    copied now and then, which with ten million objects is a noticeable pause. `cells` reads and writes single values
    fast, `array` is the same memory for numpy.
    """

    __slots__ = ("array", "cells")

    def __init__(self, code: str, length: int) -> None:
        dtype = np.dtype(code)
        memory = mmap.mmap(-1, length * dtype.itemsize, flags=_FLAGS)
        self.cells: memoryview[Any] = memoryview(memory).cast("B").cast(code)  # type: ignore[call-overload]
        self.array: NDArray[Any] = np.frombuffer(memory, dtype=dtype)


Hashes = NDArray[np.uint64]
Slots = NDArray[np.int64]

_LEAST_CELLS = 1024
FEW = 16  # up to this many keys, one by one is as fast
_LEFTOVERS = 24  # up to this many keys, the rest of a batch is faster one by one
_GROW_AT = 0.45  # of the cells, removed ones included
# Cells of the old table that are moved for every key that is added, so that it is empty long before the new one is
# full; and the least number of cells to move, because fewer take as long.
_MOVED_PER_KEY, _LEAST_MOVED = 4, 256
# A cell is 0 (never used), _REMOVED, or the upper half of a hash, made odd, above the slot plus one.
_SLOT = np.uint64(0xFFFF_FFFF)
_REMOVED = 0xFFFF_FFFF
_HALF = np.uint64(32)
_ONE = np.uint64(1)
_ODD, _ODD_HALF = np.uint64(1 << 32), 1 << 32
_TAIL_NBYTES = 8
_MASK_64 = 0xFFFF_FFFF_FFFF_FFFF


class _Cells:
    """One table. Its length is a power of two."""

    __slots__ = ("array", "grow_at", "mask", "num_used", "values")

    def __init__(self, length: int) -> None:
        column = Column("Q", length)
        self.array, self.values = column.array, column.cells
        self.mask = length - 1
        self.grow_at = _GROW_AT * length
        self.num_used = 0  # removed cells included

    def __len__(self) -> int:
        return self.mask + 1

    def add_many(self, hashes: Hashes, slots: Slots) -> None:
        """Add keys that are not in the table."""
        array, mask = self.array, np.uint64(self.mask)
        values = (hashes & ~_SLOT) | _ODD | (slots + 1).astype(np.uint64)
        at = hashes & mask
        self.num_used += len(slots)
        while len(at):
            free = array[at] == 0
            array[at[free]] = values[free]  # if several want the same cell, one of them gets it
            lost = array[at] != values
            at, values = (at[lost] + _ONE) & mask, values[lost]

    def candidates(self, hashes: Hashes) -> Slots:
        """Return for each hash the slot whose cell has the same upper half, -1 if there is none."""
        array, mask, tags = self.array, np.uint64(self.mask), (hashes | _ODD) >> _HALF
        at = hashes & mask
        seen = array[at]
        ours = seen >> _HALF == tags
        found: Slots = (seen & _SLOT).view(np.int64) - 1
        found[~ours] = -1
        open_ = np.flatnonzero(~ours & (seen != 0))
        at = at[open_]
        while len(open_) > _LEFTOVERS:
            at = (at + _ONE) & mask
            seen = array[at]
            ours = seen >> _HALF == tags[open_]
            found[open_[ours]] = (seen[ours] & _SLOT).view(np.int64) - 1
            on = ~ours & (seen != 0)
            open_, at = open_[on], at[on]
        for position in open_.tolist():
            found[position] = self._candidate(int(hashes[position]))
        return found

    def _candidate(self, hashed: int) -> int:
        values, mask, tag = self.values, self.mask, (hashed | _ODD_HALF) >> 32
        at = hashed & mask
        while value := int(values[at]):
            if value >> 32 == tag:
                return (value & 0xFFFF_FFFF) - 1
            at = at + 1 & mask
        return -1

    def find(self, hashed: int, key: bytes, keys: Sequence[bytes | None]) -> int | None:
        """Return the position of the key's cell, None if there is none."""
        values, mask, tag = self.values, self.mask, (hashed | _ODD_HALF) >> 32
        at = hashed & mask
        while value := values[at]:
            if value >> 32 == tag and keys[(value & 0xFFFF_FFFF) - 1] == key:
                return at
            at = at + 1 & mask
        return None

    def add(self, hashed: int, slot: int) -> None:
        values, mask = self.values, self.mask
        at = hashed & mask
        while values[at]:
            at = at + 1 & mask
        values[at] = (hashed | _ODD_HALF) >> 32 << 32 | slot + 1
        self.num_used += 1


class KeyIndex:
    """`keys` is the caller's list by slot; the caller updates it before it calls a method here."""

    def __init__(self, keys: list[bytes | None], max_keys: int) -> None:
        self._keys = keys
        self._hashes = Column("Q", max_keys)
        self._tails = Column("Q", max_keys)
        self._cells = _Cells(_LEAST_CELLS)
        self._old: _Cells | None = None  # entries that are not yet moved to _cells
        self._num_moved = 0  # cells of _old that were moved
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def find(self, key: bytes) -> int | None:
        hashed, cells = hash(key) & _MASK_64, self._cells
        if self._old is None and not cells.values[hashed & cells.mask]:  # most new keys
            return None
        at = cells.find(hashed, key, self._keys)
        if at is None and self._old is not None:
            cells = self._old
            at = cells.find(hashed, key, self._keys)
        return None if at is None else (cells.values[at] & 0xFFFF_FFFF) - 1

    def find_many(self, keys: Sequence[bytes]) -> Slots:
        """Return the slots of the keys, -1 for keys that are not in the index."""
        if len(keys) <= FEW:
            return np.array([-1 if slot is None else slot for slot in map(self.find, keys)], np.int64)
        hashes, tails = _hashes_of(keys), _tails_of(keys)
        found = self._cells.candidates(hashes)
        if self._old is not None:
            missing = np.flatnonzero(found < 0)
            found[missing] = self._old.candidates(hashes[missing])
        there = np.flatnonzero(found >= 0)
        slots = found[there]
        doubtful = (self._hashes.array[slots] != hashes[there]) | (self._tails.array[slots] != tails[there])
        for position in there[doubtful].tolist():  # only half of the hash matched: search again
            slot = self.find(keys[position])
            found[position] = -1 if slot is None else slot
        return found

    def add(self, key: bytes, slot: int) -> None:
        """Add a key that is not in the index."""
        hashed = hash(key) & _MASK_64
        self._hashes.cells[slot] = hashed
        self._tails.cells[slot] = int.from_bytes(key[-_TAIL_NBYTES:], "little")
        if self._old is not None or self._cells.num_used + 1 > self._cells.grow_at:
            self._make_room(1)
        self._cells.add(hashed, slot)
        self._count += 1

    def add_many(self, keys: Sequence[bytes], slots: Sequence[int]) -> None:
        """Add distinct keys that are not in the index."""
        at = np.array(slots, np.int64)
        hashes, tails = _hashes_of(keys), _tails_of(keys)
        self._hashes.array[at], self._tails.array[at] = hashes, tails
        self._make_room(len(at))
        self._cells.add_many(hashes, at)
        self._count += len(at)

    def discard(self, key: bytes) -> None:
        """Remove a key that is in the index."""
        hashed = hash(key) & _MASK_64
        for cells in (self._cells, self._old):
            at = None if cells is None else cells.find(hashed, key, self._keys)
            if cells is not None and at is not None:
                cells.values[at] = _REMOVED
                self._count -= 1
                return
        raise AssertionError("the key is in the index")

    def items(self) -> Iterator[tuple[bytes, int]]:
        """Yield all keys and slots, in an order that differs between processes. For tests."""
        for cells in (self._cells, self._old):
            for value in () if cells is None else cells.values:
                if value and value != _REMOVED:
                    slot = (value & 0xFFFF_FFFF) - 1
                    key = self._keys[slot]
                    assert key is not None, "a cell leads to a key"
                    yield key, slot

    # growing

    def _make_room(self, num: int) -> None:
        if self._old is not None:
            self._move(max(_LEAST_MOVED, _MOVED_PER_KEY * num))
        if self._cells.num_used + num > self._cells.grow_at:
            if self._old is not None:
                self._move(len(self._old))  # a batch as large as the table
            self._start_growing(num)
            self._move(max(_LEAST_MOVED, _MOVED_PER_KEY * num))

    def _start_growing(self, num: int) -> None:
        """Start a table with room for twice as many keys; as large as before if most cells were removed ones."""
        length = _LEAST_CELLS
        while _GROW_AT * length < 2 * (self._count + num):
            length *= 2
        self._old, self._cells, self._num_moved = self._cells, _Cells(length), 0

    def _move(self, most: int) -> None:
        old = self._old
        if old is None:
            return
        first, end = self._num_moved, min(self._num_moved + most, len(old))
        values = old.array[first:end]
        there = values[(values != 0) & (values != _REMOVED)]
        slots = (there & _SLOT).astype(np.int64) - 1
        self._cells.add_many(self._hashes.array[slots], slots)
        values[values != 0] = _REMOVED  # now found in _cells; the cells behind them must still be found here
        self._num_moved = end
        if end == len(old):
            self._old = None


def _hashes_of(keys: Sequence[bytes]) -> Hashes:
    return np.fromiter(map(hash, keys), np.int64, len(keys)).view(np.uint64)


def _tail_of(key: bytes) -> int:
    return int.from_bytes(key[-_TAIL_NBYTES:], "little")


def _tails_of(keys: Sequence[bytes]) -> Hashes:
    nbytes = len(keys[0])
    if nbytes < _TAIL_NBYTES or len(set(map(len, keys))) > 1:
        return np.fromiter(map(_tail_of, keys), np.uint64, len(keys))
    rows = np.frombuffer(b"".join(keys), np.uint8).reshape(len(keys), nbytes)
    return np.ascontiguousarray(rows[:, -_TAIL_NBYTES:]).view("<u8")[:, 0]
