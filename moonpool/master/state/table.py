"""The table of objects: found by key, stored in columns by slot. Pure.

A slot is a small number that an object has from its insert to its removal; then another object may get it. An object
takes a few hundred bytes, of ten million objects too; no column grows in one step long enough to delay a call, and the
garbage collector visits nothing here.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from moonpool.master.state.key_index import FEW, Column, KeyIndex
from moonpool.store.messages import GRANULE_NBYTES, num_granules


class Replica(NamedTuple):
    """One copy of an object: the number of its segment, its offset there, and the generation of that allocation."""

    segment: int
    offset: int
    generation: int


class HotMark:
    """The generations of the extra replicas that an object has for the readers of a hot key, and what they saved."""

    __slots__ = ("generations", "saved_nbytes")

    def __init__(self) -> None:
        self.generations: set[int] = set()
        self.saved_nbytes = 0


# Offset of an SSD record that may exist: its node has not reported yet.
UNKNOWN_OFFSET = 2**64 - 1


class Flag:
    """Bits of ObjectTable.flags."""

    HARD_PIN = 1  # requested by its writer, until it is removed
    PINNED = 2  # by processes (pins.py)
    SOFT_PIN = 4  # see ObjectTable.soft_pins
    GROUPED = 8  # see ObjectTable.groups
    EXTRA = 16  # it has more replicas in DRAM than its first: ObjectTable.extras
    DORMANT = 32  # all its replicas are on segments that are away: it cannot be read now
    USED = 64  # since the SSD eviction last visited it (clock algorithm)
    WAITING = 128  # to be written to an SSD


# An object with one of these flags is not in the eviction order. An object that processes pin stays in the order and is
# skipped, because pins come and go with every view.
KEPT = Flag.HARD_PIN | Flag.DORMANT


class ObjectTable:
    """Segment number 0 means none: if `dram_segment[slot]` is 0, the object has no replica in DRAM."""

    def __init__(self, max_objects: int) -> None:
        self.max_objects = max_objects
        self.keys: list[bytes | None] = []  # by slot
        self.slots_of = KeyIndex(self.keys, max_objects)
        self.find = self.slots_of.find  # the slot of a key, or None
        self._free: list[int] = []
        self._columns: dict[str, NDArray[Any]] = {}  # by the name of the cells
        self.nbytes, self.sizes = self._column("nbytes", "Q")
        self.lease_until_s, self.leases = self._column("lease_until_s", "d")
        self.version, self.versions = self._column("version", "Q")  # generation of its put, different for every object
        self.flags, self.all_flags = self._column("flags", "B")
        self.identity, _ = self._column("identity", "H")  # number of its identity, 0 for none
        self.parent, self.parents = self._column("parent", "I")  # slot + 1 of the block it continues; may be stale
        self.child, self.children = self._column("child", "I")  # slot + 1 of the last block stored as its continuation
        self.dram_segment, self.dram_segments = self._column("dram_segment", "I")
        self.dram_offset, self.dram_offsets = self._column("dram_offset", "Q")
        self.dram_generation, _ = self._column("dram_generation", "Q")
        self.ssd_segment, self.ssd_segments = self._column("ssd_segment", "I")
        self.ssd_offset, self.ssd_offsets = self._column("ssd_offset", "Q")
        self.ssd_generation, _ = self._column("ssd_generation", "Q")
        self.use, self.uses = self._column("use", "Q")  # how often it was used lately (uses.py)
        self.extras: dict[int, list[Replica]] = {}
        self.hot: OrderedDict[int, HotMark] = OrderedDict()  # objects with extra replicas for readers
        self.hot_nbytes = 0  # of these replicas
        self.soft_pins: dict[int, float] = {}  # slot -> until when
        self.group_of: dict[int, bytes] = {}
        self.groups: dict[bytes, set[int]] = {}
        self.num_dormant = 0
        self.promised: Collection[bytes] = ()  # keys of unfinished puts, which will need a slot each

    def _column(self, name: str, code: str) -> tuple[memoryview[Any], NDArray[Any]]:
        """Make a column. Return its cells, for single slots, and the same memory as an array."""
        column = Column(code, self.max_objects)
        self._columns[name] = column.array
        return column.cells, column.array

    def __len__(self) -> int:
        """Return the number of objects, dormant ones included."""
        return len(self.keys) - len(self._free)

    @property
    def is_full(self) -> bool:
        """Whether every slot is used or promised."""
        return len(self) + len(self.promised) >= self.max_objects

    @property
    def end(self) -> int:
        """One past the highest slot ever used."""
        return len(self.keys)

    def find_many(self, keys: Sequence[bytes]) -> list[int | None]:
        if len(keys) <= FEW:
            return [self.slots_of.find(key) for key in keys]
        slots: list[int | None] = self.slots_of.find_many(keys).tolist()
        return [None if slot == -1 else slot for slot in slots] if -1 in slots else slots

    def add(self, key: bytes, nbytes: int) -> int:
        """Return a slot for a key that has none. All its columns except the size are zero."""
        if self._free:
            slot = self._free.pop()
            self.keys[slot] = key
        else:
            slot = len(self.keys)
            self.keys.append(key)
        self.slots_of.add(key, slot)
        self.nbytes[slot] = nbytes
        return slot

    def add_many(self, keys: Sequence[bytes]) -> list[int]:
        """Return slots for keys that have none. The caller sets the columns with fill()."""
        reused = self._free[len(self._free) - len(keys) :] if self._free else []
        if reused:
            del self._free[len(self._free) - len(reused) :]
            reused.reverse()  # the order in which add() would use them
        for slot, key in zip(reused, keys, strict=False):
            self.keys[slot] = key
        first = len(self.keys)
        self.keys.extend(keys[len(reused) :])
        slots = reused + list(range(first, len(self.keys)))
        self.slots_of.add_many(keys, slots)
        return slots

    def fill(self, slots: Sequence[int], columns: Mapping[str, Sequence[int]]) -> None:
        """Set the named columns of these slots, one value per slot."""
        at = np.array(slots, dtype=np.int64)
        for name, values in columns.items():
            column = self._columns[name]
            column[at] = np.array(values, dtype=column.dtype)

    def discard(self, slot: int) -> None:
        """Free the slot. The caller has handled the object's replicas, pins and place in the eviction order."""
        key = self.keys[slot]
        assert key is not None, "the slot is in use"
        self.slots_of.discard(key)
        flags = self.flags[slot]
        if flags & Flag.SOFT_PIN:
            self.soft_pins.pop(slot, None)
        if flags & Flag.GROUPED:
            self._leave_group(slot)
        if flags & Flag.EXTRA:
            del self.extras[slot]
            self.set_hot(slot, ())
        if flags & Flag.DORMANT:
            self.num_dormant -= 1
        self.keys[slot] = None
        self.flags[slot] = 0
        self.lease_until_s[slot] = 0.0
        self.use[slot] = 0
        self.identity[slot] = 0
        self.parent[slot] = 0
        self.child[slot] = 0
        self.dram_segment[slot] = 0
        self.ssd_segment[slot] = 0
        self._free.append(slot)

    # fields of one object

    def key(self, slot: int) -> bytes:
        """Return the key of a slot in use."""
        key = self.keys[slot]
        assert key is not None, "the slot is in use"
        return key

    def group_members(self, slot: int) -> Sequence[int]:
        """Return the slots of the object's group in order, the object alone if it has none."""
        return sorted(self.groups[self.group_of[slot]]) if self.flags[slot] & Flag.GROUPED else (slot,)

    def parent_slot(self, slot: int) -> int | None:
        """Return the slot of the block that this one continues, None if that block is gone: a newer object in its slot
        is another one.
        """
        parent = self.parent[slot] - 1
        known = parent >= 0 and self.keys[parent] is not None and self.version[parent] < self.version[slot]
        return parent if known else None

    def parent_key(self, slot: int) -> bytes | None:
        parent = self.parent_slot(slot)
        return None if parent is None else self.keys[parent]

    def dram_replicas(self, slot: int) -> list[Replica]:
        if not self.dram_segment[slot]:
            return []
        first = Replica(self.dram_segment[slot], self.dram_offset[slot], self.dram_generation[slot])
        return [first, *self.extras.get(slot, ())] if self.flags[slot] & Flag.EXTRA else [first]

    def ssd_replica(self, slot: int) -> Replica | None:
        if not self.ssd_segment[slot]:
            return None
        return Replica(self.ssd_segment[slot], self.ssd_offset[slot], self.ssd_generation[slot])

    def set_dram(self, slot: int, replicas: Sequence[Replica]) -> None:
        """Replace the object's DRAM replicas."""
        if not replicas:
            self.dram_segment[slot] = 0
        else:
            self.dram_segment[slot], self.dram_offset[slot], self.dram_generation[slot] = replicas[0]
        if self.flags[slot] & Flag.EXTRA:
            del self.extras[slot]
            self.flags[slot] &= ~Flag.EXTRA
        if len(replicas) > 1:
            self.extras[slot] = list(replicas[1:])
            self.flags[slot] |= Flag.EXTRA
        mark = self.hot.get(slot)
        if mark is not None:
            self.set_hot(slot, mark.generations)

    def set_hot(self, slot: int, generations: Iterable[int]) -> None:
        """State which of the object's extra replicas are there for readers alone; its first one never is."""
        mark = self.hot.get(slot) or HotMark()
        wanted = {each.generation for each in self.extras.get(slot, ())}.intersection(generations)
        self.hot_nbytes += (len(wanted) - len(mark.generations)) * num_granules(self.nbytes[slot]) * GRANULE_NBYTES
        mark.generations = wanted
        if wanted:
            self.hot[slot] = mark
        else:
            self.hot.pop(slot, None)

    def set_ssd(self, slot: int, replica: Replica | None) -> None:
        if replica is None:
            self.ssd_segment[slot] = 0
        else:
            self.ssd_segment[slot], self.ssd_offset[slot], self.ssd_generation[slot] = replica

    def set_dormant(self, slot: int, dormant: bool) -> None:
        if bool(self.flags[slot] & Flag.DORMANT) is not dormant:
            self.flags[slot] ^= Flag.DORMANT
            self.num_dormant += 1 if dormant else -1

    def join_group(self, slot: int, group: bytes) -> None:
        self.flags[slot] |= Flag.GROUPED
        self.group_of[slot] = group
        self.groups.setdefault(group, set()).add(slot)

    def _leave_group(self, slot: int) -> None:
        group = self.group_of.pop(slot)
        members = self.groups[group]
        members.discard(slot)
        if not members:
            del self.groups[group]

    def slots(self) -> Iterator[int]:
        """Yield every slot in use, in order."""
        return (slot for slot, key in enumerate(self.keys) if key is not None)
