"""Look-ups: they find objects, lease them, pin them if asked, and count their use. Pure.

The uses decide which objects come back from SSD (ssd_tier.py) and which keys are hot: a hot key gets another replica on
another node.
"""

from __future__ import annotations

from collections.abc import Sequence

from moonpool.master.rules import PoolRules
from moonpool.master.state.index import ObjectIndex
from moonpool.master.state.key_index import Slots
from moonpool.master.state.orders import Copies
from moonpool.master.state.segments import SegmentTable
from moonpool.master.state.ssd_tier import SsdTier
from moonpool.master.state.table import Flag, Replica
from moonpool.master.state.voids import Voids
from moonpool.store.messages import ObjectInfo, RenewedLeases
from moonpool.store.messages.values import MAX_REPLICAS

_MAX_TRACKED = 50_000
# Above this part of the pool's bytes, no second replica is made.
_FULL = 0.85


class HotKeys:
    """Counts look-ups in time windows, for a bounded number of keys; extra replicas take a bounded part of the pool."""

    def __init__(self, rules: PoolRules, index: ObjectIndex, segments: SegmentTable, copies: Copies) -> None:
        self._rules = rules
        self._index = index
        self._segments = segments
        self._copies = copies
        self._hits: dict[int, int] = {}  # by slot, in this window
        self._window_ends_s = 0.0
        self.counters = {"hot_replicas": 0}

    @property
    def is_used(self) -> bool:
        """Whether hot keys are replicated. A pool of one node has no place for a second replica."""
        return self._rules.hot_hits > 0 and self._segments.num_dram_nodes > 1

    def on_found(self, slots: Sequence[int], now_s: float) -> None:
        hits, limit = self._hits, self._rules.hot_hits
        if now_s >= self._window_ends_s or len(hits) > _MAX_TRACKED:
            hits.clear()
            self._window_ends_s = now_s + self._rules.hot_window_s
        for slot in slots:
            count = hits[slot] = hits.get(slot, 0) + 1
            if count == limit:
                self._replicate(slot, now_s)

    def _replicate(self, slot: int, now_s: float) -> None:
        table, by_number = self._index.table, self._segments.by_number
        replicas = table.dram_replicas(slot)
        if not replicas or len(replicas) >= self._rules.hot_max_replicas or not self._affords(table.nbytes[slot]):
            return
        nodes = [by_number[each.segment].node for each in replicas if each.segment in by_number]
        if self._copies.start(slot, now_s, avoid_nodes=nodes):
            self.counters["hot_replicas"] += 1

    def _affords(self, nbytes: int) -> bool:
        capacity = self._segments.capacity_nbytes
        if self._index.table.extra_nbytes + nbytes > self._rules.hot_max_part * capacity:
            return False
        return self._segments.used_nbytes + nbytes <= _FULL * capacity


class ReadState:
    def __init__(self, rules: PoolRules, index: ObjectIndex, ssd: SsdTier, hot: HotKeys, voids: Voids) -> None:
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
        """Count uses of objects that were read where they were remembered, and lease those that are still there.
        An object that is about to be replaced does not count as there: clients may not remember it longer. Nor does one
        that has more replicas in memory than `num_replicas` says (empty: as many as there are), so that readers of a
        hot key find the new ones.
        """
        remember_s, not_remembered = self._voids.remember(keys, now_s)
        slots = self._index.find_many(keys, now_s)
        counts = num_replicas or [MAX_REPLICAS] * len(keys)
        is_there = [
            slot is not None and self._has_replica(slot, generation, count) and key not in not_remembered
            for key, slot, generation, count in zip(keys, slots, generations, counts, strict=True)
        ]
        found = [slot for slot, is_same in zip(slots, is_there, strict=True) if slot is not None and is_same]
        self._lease(found, now_s)
        self._count_uses(found, now_s)
        self.counters["hits"] += len(keys)  # those that left since were hits, too
        return RenewedLeases(is_there, remember_s)

    def _has_replica(self, slot: int, generation: int, max_replicas: int) -> bool:
        """Return whether a replica in memory has this generation, and there are no more than that many."""
        table = self._index.table
        if not table.flags[slot] & Flag.EXTRA:  # mostly: one replica, or none
            return bool(max_replicas >= 1 and table.dram_segment[slot] and table.dram_generation[slot] == generation)
        replicas: Sequence[Replica] = table.dram_replicas(slot)
        return len(replicas) <= max_replicas and any(each.generation == generation for each in replicas)

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
