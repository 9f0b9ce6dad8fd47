"""Look-ups: they find objects, lease them, pin them if asked, and count their use. Pure.

The uses decide which objects come back from SSD (ssd_tier.py), and which get another replica on another node
(hot_replicas.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from moonpool.master.rules import PoolRules
from moonpool.master.state.hot_replicas import HotReplicas
from moonpool.master.state.index import ObjectIndex
from moonpool.master.state.key_index import Slots
from moonpool.master.state.ssd_tier import SsdTier
from moonpool.master.state.table import Flag, Replica
from moonpool.master.state.voids import Voids
from moonpool.store.messages import ObjectInfo, RenewedLeases


class ReadState:
    def __init__(self, rules: PoolRules, index: ObjectIndex, ssd: SsdTier, hot: HotReplicas, voids: Voids) -> None:
        self._lease_s = rules.lease_s
        self._index = index
        self._voids = voids
        self._ssd = ssd
        self._hot = hot
        self.counters = dict.fromkeys(("hits", "misses"), 0)

    def lookup(
        self, keys: Sequence[bytes], prefix: bool, lease: bool, session: int, now_s: float, reads: bool = True
    ) -> list[ObjectInfo | None]:
        """Return where the objects are. With `prefix`, every item after the first missing key is None.

        A use is counted only if the caller `reads` the objects now: a caller that first asks whether objects are there,
        and later where, has used them once.
        """
        slots = self._index.find_many(keys, now_s)
        if prefix and None in slots:
            first = slots.index(None)
            slots[first:] = [None] * (len(slots) - first)
        found = [slot for slot in slots if slot is not None]
        if lease:
            self._lease(found, now_s)
            self.counters["misses"] += len(keys) - len(found)
            if reads:
                self._count_uses(found, now_s)
                self.counters["hits"] += len(found)
        if session:
            for slot in found:
                self._index.pin(session, slot)
        return self._infos(keys, slots, lease, now_s)

    def _infos(
        self, keys: Sequence[bytes], slots: Sequence[int | None], leased: bool, now_s: float
    ) -> list[ObjectInfo | None]:
        nbytes, placements = self._index.table.nbytes, self._index.placements
        lease_s = self._lease_s if leased else 0.0
        remember_s, not_remembered = self._voids.remember(keys, now_s) if leased else (0.0, frozenset())
        return [
            None
            if slot is None
            else ObjectInfo(key, nbytes[slot], placements(slot), lease_s, 0.0 if key in not_remembered else remember_s)
            for key, slot in zip(keys, slots, strict=True)
        ]

    def locate(self, keys: Sequence[bytes], now_s: float) -> list[ObjectInfo | None]:
        """As exist, and return where the objects are."""
        slots = self._index.find_many(keys, now_s)
        self._lease([slot for slot in slots if slot is not None], now_s)
        return self._infos(keys, slots, True, now_s)

    def renew(
        self, keys: Sequence[bytes], generations: Sequence[int], now_s: float, num_replicas: Sequence[int] = ()
    ) -> RenewedLeases:
        """Count uses of objects that were read where they were remembered, and lease those that are still there; see
        RenewLeases. An object that is about to be replaced does not count as there: clients may not remember it longer.
        """
        remember_s, not_remembered = self._voids.remember(keys, now_s)
        slots = self._index.find_many(keys, now_s)
        counts = num_replicas or [1] * len(keys)
        is_there = [
            slot is not None and self._has_replicas(slot, generation, count) and key not in not_remembered
            for key, slot, generation, count in zip(keys, slots, generations, counts, strict=True)
        ]
        found = [slot for slot, is_same in zip(slots, is_there, strict=True) if slot is not None and is_same]
        self._lease(found, now_s)
        self._count_uses(found, now_s)
        self.counters["hits"] += len(keys)  # those that left since were hits, too
        return RenewedLeases(is_there, remember_s)

    def _has_replicas(self, slot: int, last_generation: int, num_replicas: int) -> bool:
        """Return whether the object has those replicas in memory that a client remembers, no more, no fewer, no others:
        if one had been made since, its generation would be the last.
        """
        table = self._index.table
        if not table.flags[slot] & Flag.EXTRA:  # mostly: one replica, or none
            there = num_replicas == 1 and table.dram_segment[slot]
            return bool(there and table.dram_generation[slot] == last_generation)
        replicas: Sequence[Replica] = table.dram_replicas(slot)
        return len(replicas) == num_replicas and max([each.generation for each in replicas]) == last_generation

    def exist(self, keys: Sequence[bytes], now_s: float) -> list[bool]:
        """Return which keys have an object, and lease these. No use is counted: a reader calls lookup next."""
        found = self._index.find_batch(keys)
        if found is not None:
            there = found >= 0
            if there.any():
                self._lease(found[there], now_s)
            return there.tolist()  # type: ignore[no-any-return]
        slots = self._index.find_many(keys, now_s)
        if None in slots:
            self._lease([slot for slot in slots if slot is not None], now_s)
            return [slot is not None for slot in slots]
        self._lease(slots, now_s)  # type: ignore[arg-type]  # no slot is None here
        return [True] * len(slots)

    def exist_outside(self, keys: Sequence[bytes], without: Sequence[tuple[str, int]], now_s: float) -> list[bool]:
        """As exist, but objects that are only on the segments `without` (name and incarnation) do not count."""
        unreadable, slots = set(without), self._index.find_many(keys, now_s)
        found = [slot if slot is not None and self._lies_outside(slot, unreadable) else None for slot in slots]
        self._lease([slot for slot in found if slot is not None], now_s)
        return [slot is not None for slot in found]

    def _lies_outside(self, slot: int, unreadable: set[tuple[str, int]]) -> bool:
        return any((each.segment, each.incarnation) not in unreadable for each in self._index.placements(slot))

    def _lease(self, found: Sequence[int] | Slots, now_s: float) -> None:
        if len(found):
            self._index.touch(found, now_s)

    def _count_uses(self, found: Sequence[int], now_s: float) -> None:
        if not found:
            return
        if self._ssd.queues:
            self._ssd.on_found(found, now_s)
        if self._hot.is_used:
            self._hot.on_found(found, now_s)
