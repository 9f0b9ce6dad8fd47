"""Finding objects: leased, pinned if asked, counted, and told to those who move objects by what is read. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moonpool.store.messages import ObjectInfo
from moonpool.store.rules import PoolRules
from moonpool.store.state.hot_keys import HotKeys
from moonpool.store.state.index import ObjectIndex
from moonpool.store.state.key_index import Slots
from moonpool.store.state.ssd_tier import SsdTier


class Reads:
    def __init__(self, rules: PoolRules, index: ObjectIndex, ssd: SsdTier, hot: HotKeys) -> None:
        self._lease_s = rules.lease_s
        self._index = index
        self._ssd = ssd
        self._hot = hot
        self.counters = dict.fromkeys(("hits", "misses"), 0)

    def lookup(
        self, keys: Sequence[bytes], prefix: bool, lease: bool, session: int, now_s: float
    ) -> list[ObjectInfo | None]:
        """Where the objects are; with `prefix` everything behind the first missing key is None."""
        slots = self._index.find_many(keys, now_s)
        if prefix and None in slots:
            first = slots.index(None)
            slots[first:] = [None] * (len(slots) - first)
        found = [slot for slot in slots if slot is not None]
        if lease:
            self._note(found, now_s)
            self.counters["hits"] += len(found)
            self.counters["misses"] += len(keys) - len(found)
        if session:
            for slot in found:
                self._index.pin(session, slot)
        nbytes, placements, lease_s = self._index.table.nbytes, self._index.placements, self._lease_s if lease else 0.0
        return [
            None if slot is None else ObjectInfo(key, nbytes[slot], placements(slot), lease_s)
            for key, slot in zip(keys, slots, strict=True)
        ]

    def exist(self, keys: Sequence[bytes], now_s: float) -> list[bool]:
        """As lookup, leases included, without the places."""
        found = self._index.find_plainly(keys)
        if found is not None:
            there = found >= 0
            if there.any():
                self._note(found[there], now_s)
            return there.tolist()  # type: ignore[no-any-return]
        slots = self._index.find_many(keys, now_s)
        if None in slots:
            self._note([slot for slot in slots if slot is not None], now_s)
            return [slot is not None for slot in slots]
        self._note(slots, now_s)  # type: ignore[arg-type]  # none of them is None
        return [True] * len(slots)

    def exist_outside(self, keys: Sequence[bytes], without: Sequence[tuple[str, int]], now_s: float) -> list[bool]:
        """As exist, but what lies only on the segments `without` (name and incarnation) is not there."""
        unreadable, slots = set(without), self._index.find_many(keys, now_s)
        found = [slot if slot is not None and self._lies_outside(slot, unreadable) else None for slot in slots]
        self._note([slot for slot in found if slot is not None], now_s)
        return [slot is not None for slot in found]

    def _lies_outside(self, slot: int, unreadable: set[tuple[str, int]]) -> bool:
        return any((each.segment, each.incarnation) not in unreadable for each in self._index.placements(slot))

    def _note(self, found: Sequence[int] | Slots, now_s: float) -> None:
        if not len(found):
            return
        self._index.touch(found, now_s)
        for each in (self._ssd, self._hot):
            if each.is_used:
                each.on_found(found.tolist() if isinstance(found, np.ndarray) else found, now_s)
