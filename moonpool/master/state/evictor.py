"""Eviction from DRAM and from the table: above the watermark in steps, and at once for a put that finds no room. Pure.

Objects are evicted in three rounds: 0, those that are on SSD already or are not written to one; 1, those that wait to
be written to SSD; 2, and only for puts, soft-pinned objects. Leased, pinned and hard-pinned objects are never evicted.
An object that has extra replicas for the readers of a hot key loses these first, and is evicted at the earliest when
its turn comes again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from moonpool.master.rules import PoolRules
from moonpool.master.state.changes import RemovalReason
from moonpool.master.state.index import ObjectIndex
from moonpool.master.state.segments import SegmentTable
from moonpool.master.state.table import Flag

# The most candidates that one put batch checks in each round when it has to evict.
_URGENT_CANDIDATES = 4096
_URGENT_SLOTS = 2**16  # the most slots that it scans when the table is full
_SCAN_SLOTS = 4096
MayGo = Callable[[Sequence[int]], bool]  # of an object with its group, as slots


class Evictor:
    def __init__(self, rules: PoolRules, index: ObjectIndex, segments: SegmentTable) -> None:
        self._rules = rules
        self._index = index
        self._segments = segments
        self._evicting = False
        self._num_passed_over = 0  # candidates since round 0 at the watermark last evicted something
        self._candidates_left = [0, 0, 0]
        self._ssd_looks_left = 0
        self._clock_slot = 0

    def begin_event(self) -> None:
        """Reset the limits of candidates, which hold for one event."""
        self._candidates_left = [_URGENT_CANDIDATES] * 3
        self._ssd_looks_left = _URGENT_SLOTS

    def make_room(self, nbytes: int, now_s: float) -> bool:
        """Evict at least `nbytes` if possible. Return False if nothing could be evicted."""
        before = self._segments.used_nbytes
        for last_round, limit in enumerate(self._candidates_left):
            looked_at = self._evict(before - nbytes, last_round, RemovalReason.EVICTED_FOR_PUT, now_s, limit)
            self._candidates_left[last_round] -= looked_at
            if self._segments.used_nbytes <= before - nbytes:
                break
        return self._segments.used_nbytes < before

    def make_way(self, nbytes: int, may_go: MayGo, now_s: float, limit: int) -> int:
        """Evict what would be evicted next, until `nbytes` are free or the next object may not go. Check at most
        `limit` candidates, and return how many.
        """
        target = self._segments.used_nbytes - nbytes
        return self._evict(target, 0, RemovalReason.EVICTED_FOR_HOT, now_s, limit, may_go)

    def next_victims(self, now_s: float, limit: int) -> Sequence[int]:
        """Return what would be evicted next, an object with its group; empty if none of the next `limit` candidates may
        be evicted now.
        """
        for looked_at, slot in enumerate(self._index.policy.victims() if len(self._index.policy) else ()):
            if looked_at >= limit:
                break
            if self._round_of(slot, now_s) == 0:
                return self._index.table.group_members(slot)
        return ()

    def make_slots(self, count: int, now_s: float) -> None:
        """Evict `count` objects if possible: first objects that are only on SSD and were not used lately, then others
        in the order of the policy.
        """
        target = len(self._index.table) - count
        self._evict_from_ssd(target, now_s)
        for last_round, limit in enumerate(self._candidates_left):
            looked_at = 0
            for slot in self._index.policy.victims() if len(self._index.policy) else ():
                if len(self._index.table) <= target or looked_at >= limit:
                    break
                looked_at += 1
                if self._round_of(slot, now_s) <= last_round:
                    self._drop(slot, now_s)
            self._candidates_left[last_round] -= looked_at

    def _evict_from_ssd(self, target: int, now_s: float) -> None:
        """Evict objects that are only on SSD, by the clock algorithm: scan the slots, at most twice, and skip objects
        used since the last visit.
        """
        table, looked_at = self._index.table, 0
        while len(table) > target and looked_at < 2 * table.end and self._ssd_looks_left > 0:
            start = self._clock_slot if self._clock_slot < table.end else 0
            end = self._clock_slot = min(start + _SCAN_SLOTS, table.end)
            looked_at, self._ssd_looks_left = looked_at + end - start, self._ssd_looks_left - (end - start)
            there = (table.dram_segments[start:end] == 0) & (table.ssd_segments[start:end] != 0)
            for slot in (np.flatnonzero(there) + start).tolist():
                if len(table) <= target:
                    self._clock_slot = slot
                    return
                self._visit(slot, now_s)

    def _visit(self, slot: int, now_s: float) -> None:
        table = self._index.table
        flags = table.flags[slot]
        table.flags[slot] = flags & ~Flag.USED
        if table.keys[slot] is not None and not flags & (Flag.HARD_PIN | Flag.USED) and self._round_of(slot, now_s) < 2:
            self._drop(slot, now_s)

    def _drop(self, slot: int, now_s: float) -> None:
        """Remove the object with its group."""
        for each in self._index.table.group_members(slot):
            self._index.counters["evicted"] += 1
            self._index.drop(each, RemovalReason.EVICTED_FOR_PUT, now_s)

    def evict_to_watermark(self, now_s: float, limit: int) -> bool:
        """Do one step of eviction down to the low watermark. Return whether to continue soon."""
        used, capacity = self._segments.used_nbytes, self._segments.capacity_nbytes
        if used > self._rules.high_watermark * capacity:
            self._evicting = True
        if not self._evicting:
            return False
        target = int(self._rules.low_watermark * capacity)
        looked_at = self._evict(target, 0, RemovalReason.EVICTED_WATERMARK, now_s, limit)
        self._num_passed_over = 0 if self._segments.used_nbytes < used else self._num_passed_over + looked_at
        goes_on = looked_at == limit and self._num_passed_over < len(self._index.policy)
        if self._segments.used_nbytes == used and not goes_on:  # round 1 only now: SSDs get time to write
            self._evict(target, 1, RemovalReason.EVICTED_WATERMARK, now_s, limit)
            self._num_passed_over = 0
        self._evicting = self._segments.used_nbytes > target
        return self._evicting and (self._segments.used_nbytes < used or goes_on)

    def _evict(
        self,
        target: int,
        last_round: int,
        reason: RemovalReason,
        now_s: float,
        limit: int,
        may_go: MayGo | None = None,
    ) -> int:
        """Evict until at most `target` bytes are used, or the next object may not go. Return how many candidates were
        checked.
        """
        looked_at = 0
        victims = self._index.policy.victims() if len(self._index.policy) else iter(())
        while self._segments.used_nbytes > target and looked_at < limit:
            slot = next(victims, None)
            if slot is None:
                break
            looked_at += 1
            if self._round_of(slot, now_s) > last_round:
                continue
            if may_go is not None and not may_go(self._index.table.group_members(slot)):
                break
            self._evict_one(slot, reason, now_s)
        return looked_at

    def _round_of(self, slot: int, now_s: float) -> int:
        """Return the round in which the object may be evicted; 3 if in none."""
        table = self._index.table
        if not table.flags[slot] & Flag.GROUPED:
            return self._own_round(slot, now_s)
        members = table.groups[table.group_of[slot]]
        if any(table.flags[member] & (Flag.HARD_PIN | Flag.PINNED) for member in members):
            return 3
        return max(self._own_round(member, now_s) for member in members)

    def _own_round(self, slot: int, now_s: float) -> int:
        table = self._index.table
        if table.lease_until_s[slot] > now_s or table.flags[slot] & Flag.PINNED:
            return 3
        if table.flags[slot] & Flag.SOFT_PIN:
            if table.soft_pins[slot] > now_s:
                return 2
            del table.soft_pins[slot]
            table.flags[slot] &= ~Flag.SOFT_PIN
        if not table.flags[slot] & Flag.WAITING:
            return 0
        segment = self._segments.by_number.get(table.dram_segment[slot])
        ssd = None if segment is None else self._segments.ssd_of(segment.node)
        return 1 if ssd is not None and ssd.takes_new else 0

    def _evict_one(self, slot: int, reason: RemovalReason, now_s: float) -> None:
        index, table = self._index, self._index.table
        members = table.group_members(slot)
        with_extra = [each for each in members if each in table.hot]
        for each in with_extra:
            index.drop_hot_replicas(each, now_s)
        for each in () if with_extra else members:
            if not table.dram_segment[each]:
                continue
            index.counters["evicted"] += 1
            if index.has_record(each):
                index.drop_replicas(each, table.dram_replicas(each), now_s)
            else:
                index.drop(each, reason, now_s)
