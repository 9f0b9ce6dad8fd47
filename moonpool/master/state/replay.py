"""Pins, prefix chains and the eviction order while a journal is replayed: they are complete only at its end. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from moonpool.master.state.objects import PoolObjects
from moonpool.master.state.segments import Place
from moonpool.master.state.table import KEPT

_STEP = 8192


class _Held:
    """An object's pins, and the space that is freed with them."""

    __slots__ = ("nbytes", "pins", "places")

    def __init__(self) -> None:
        self.pins: Counter[int] = Counter()  # by session
        self.places: list[Place] = []
        self.nbytes = 0


class RecoveredPins:
    """Pins while the journal is replayed: by key, because the objects do not have their final state yet."""

    def __init__(self) -> None:
        self._held: dict[bytes, list[_Held]] = {}  # by key: removed objects, oldest first, then the present one
        self._keys_of: dict[int, set[bytes]] = {}  # by session

    def sessions(self) -> set[int]:
        return set(self._keys_of)

    def pinned(self, session: int, keys: Iterable[bytes]) -> None:
        for key in keys:
            self._held.setdefault(key, [_Held()])[-1].pins[session] += 1
            self._keys_of.setdefault(session, set()).add(key)

    def unpinned(self, session: int, keys: Iterable[bytes]) -> None:
        for key in keys:
            held = next((each for each in self._held.get(key, ()) if each.pins[session]), None)
            if held is not None:
                self._remove(key, held, session, 1)

    def viewed(self, key: bytes, places: Sequence[Place], nbytes: int, ended: bool) -> None:
        held = self._held.get(key)
        if held is None or not held[-1].pins:
            return  # pinned by connections, which did not survive the restart
        held[-1].places += places
        held[-1].nbytes = nbytes
        if ended:
            held.append(_Held())

    def ended(self, sessions: Iterable[int]) -> None:
        for session in sessions:
            for key in list(self._keys_of.get(session, ())):
                for held in [each for each in self._held[key] if each.pins[session]]:
                    self._remove(key, held, session, held.pins[session])

    def restore(self, objects: PoolObjects) -> None:
        """Add the pins to the objects."""
        for key, several in self._held.items():
            *removed, current = several
            for held in removed:
                objects.pins.add_removed(held.pins.elements(), key, held.places, held.nbytes)
            slot = objects.table.find(key)
            if slot is None or not current.pins:
                continue
            for session in current.pins.elements():
                objects.pin(session, slot)
            objects.pins.keep(slot, current.places, 0.0)

    def _remove(self, key: bytes, held: _Held, session: int, count: int) -> None:
        held.pins[session] -= count
        held.pins = +held.pins
        several = self._held[key]
        if not held.pins and held is not several[-1]:
            several.remove(held)
        elif not held.pins:
            several[-1] = _Held()
        if not any(each.pins[session] for each in several):
            self._keys_of[session].discard(key)
            if not self._keys_of[session]:
                del self._keys_of[session]
        if not any(each.pins for each in several):
            del self._held[key]


class RecoveredOrder:
    """The eviction order and the prefix chains during a replay. Detaches the objects' policy until restore().

    A snapshot has the objects by slot, so a child may come before its parent. At the end the objects enter the order as
    they were put, parents first.
    """

    def __init__(self, objects: PoolObjects) -> None:
        self._objects = objects
        self._policy = objects.policy
        objects.policy = _NoOrder()
        self._waiting: dict[int, tuple[int, bytes]] = {}  # slot -> its version, and the key of its parent

    def add_parent(self, slot: int, parent: bytes) -> None:
        """Remember that the object continues another one, which may be replayed later."""
        self._waiting[slot] = (self._objects.table.version[slot], parent)

    def restore(self) -> None:
        self._link()
        objects, table = self._objects, self._objects.table
        objects.policy = self._policy
        ordered = (table.dram_segments[: table.end] != 0) & (table.all_flags[: table.end] & KEPT == 0)
        slots = self._as_put(np.flatnonzero(ordered))
        objects.all_were_ordered = len(slots) == len(table)
        for start in range(0, len(slots), _STEP):
            self._enter(slots[start : start + _STEP])

    def _enter(self, slots: NDArray[np.int64]) -> None:
        table = self._objects.table
        keys = [table.keys[slot] or b"" for slot in slots.tolist()]
        parents: list[int | None] | None = None
        if table.parents[slots].any():
            parents = [parent - 1 if parent else None for parent in table.parents[slots].tolist()]
        self._policy.insert_many(slots.tolist(), parents, list(map(crc32, keys)))

    def _link(self) -> None:
        """Remove links to parents that are gone, and link every parent to the last of its children."""
        table = self._objects.table
        for slot, (version, key) in self._waiting.items():
            parent = table.find(key)
            if parent is not None and table.keys[slot] is not None and table.version[slot] == version:
                table.parent[slot] = parent + 1
        slots = self._as_put(np.flatnonzero(table.parents[: table.end]))
        parents = table.parents[slots].astype(np.int64) - 1
        used = (table.dram_segments[parents] != 0) | (table.ssd_segments[parents] != 0)
        known = used & (table.versions[parents] < table.versions[slots])
        table.parents[slots[~known]] = 0
        table.children[: table.end] = 0
        table.children[parents[known]] = slots[known] + 1

    def _as_put(self, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        """Sort slots by generation, so that parents come first."""
        return slots[np.argsort(self._objects.table.versions[slots], kind="stable")]


class _NoOrder:
    """A policy that does nothing."""

    def insert(self, slot: int, parent: int | None, nbytes: int, fingerprint: int) -> None:
        pass

    def insert_many(
        self, slots: Sequence[int], parents: Sequence[int | None] | None, fingerprints: Sequence[int]
    ) -> None:
        pass

    def access(self, slots: Sequence[int] | NDArray[np.int64]) -> None:
        pass

    def remove(self, slot: int) -> None:
        pass

    def victims(self) -> Iterator[int]:
        return iter(())

    def standing(self, slots: Sequence[int]) -> list[tuple[int, float | None]]:
        return [(0, None)] * len(slots)

    def __contains__(self, slot: int) -> bool:
        return False

    def __len__(self) -> int:
        return 0

    def check_integrity(self) -> None:
        pass
