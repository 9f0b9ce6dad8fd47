"""The eviction order of a master that comes back, with its chains. Pure.

While records are read nothing is ordered: a snapshot has the objects by slot, so that a child may stand before its
parent. At the end they enter the order as they were put, parents first, whatever the records were.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from moonpool.master.state.index import ObjectIndex
from moonpool.master.state.table import KEPT

_STEP = 8192


class RecoveredOrder:
    """Takes the index's policy away until restore()."""

    def __init__(self, index: ObjectIndex) -> None:
        self._index = index
        self._policy = index.policy
        index.policy = _NoOrder()
        self._waiting: dict[int, tuple[int, bytes]] = {}  # slot -> its version, and the key of its parent

    def told(self, slot: int, parent: bytes) -> None:
        """That object continues another one, which may be told of later."""
        self._waiting[slot] = (self._index.table.version[slot], parent)

    def restore(self) -> None:
        self._link()
        index, table = self._index, self._index.table
        index.policy = self._policy
        ordered = (table.dram_segments[: table.end] != 0) & (table.all_flags[: table.end] & KEPT == 0)
        slots = self._as_put(np.flatnonzero(ordered))
        index.all_were_ordered = len(slots) == len(table)
        for start in range(0, len(slots), _STEP):
            self._enter(slots[start : start + _STEP])

    def _enter(self, slots: NDArray[np.int64]) -> None:
        table = self._index.table
        keys = [table.keys[slot] or b"" for slot in slots.tolist()]
        parents: list[int | None] | None = None
        if table.parents[slots].any():
            parents = [parent - 1 if parent else None for parent in table.parents[slots].tolist()]
        self._policy.insert_many(slots.tolist(), parents, list(map(crc32, keys)))

    def _link(self) -> None:
        """Forgets parents that are gone, and makes the last of its children every parent's child again."""
        table = self._index.table
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
        """Generations rise, so parents come first."""
        return slots[np.argsort(self._index.table.versions[slots], kind="stable")]


class _NoOrder:
    """A policy that takes no notice."""

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

    def __contains__(self, slot: int) -> bool:
        return False

    def __len__(self) -> int:
        return 0

    def check_integrity(self) -> None:
        pass
