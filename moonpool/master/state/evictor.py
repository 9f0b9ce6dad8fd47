"""Making room in DRAM and in the table: by the watermark in steps, and at once for a put that finds none. Pure.

What may go, in three rounds: first what is on SSD already or goes to none; then what waits to be written to one; last,
and only for puts, what is softly pinned. What is leased, pinned or hard-pinned never goes.
"""

from __future__ import annotations

import numpy as np

from moonpool.master.rules import PoolRules
from moonpool.master.state.changes import RemovalReason
from moonpool.master.state.index import ObjectIndex
from moonpool.master.state.segments import SegmentTable
from moonpool.master.state.table import Flag

# Candidates that one put batch may look at in each round when it has to evict before it can place.
_URGENT_CANDIDATES = 4096
_URGENT_SLOTS = 2**16  # that it may go over when the table is full
_SCAN_SLOTS = 4096


class Evictor:
    def __init__(self, rules: PoolRules, index: ObjectIndex, segments: SegmentTable) -> None:
        self._rules = rules
        self._index = index
        self._segments = segments
        self._evicting = False
        self._num_passed_over = 0  # since the watermark last found something to evict that is on SSD, or goes to none
        self._candidates_left = [0, 0, 0]
        self._ssd_looks_left = 0
        self._hand = 0

    def begin_event(self) -> None:
        """Each event has candidates of its own, however often it asks for room."""
        self._candidates_left = [_URGENT_CANDIDATES] * 3
        self._ssd_looks_left = _URGENT_SLOTS

    def make_room(self, nbytes: int, now_s: float) -> bool:
        """Evicts at least `nbytes` if it can. False when nothing could go."""
        before = self._segments.used_nbytes
        for last_round, limit in enumerate(self._candidates_left):
            looked_at = self._evict(before - nbytes, last_round, RemovalReason.EVICTED_FOR_PUT, now_s, limit)
            self._candidates_left[last_round] -= looked_at
            if self._segments.used_nbytes <= before - nbytes:
                break
        return self._segments.used_nbytes < before

    def make_slots(self, count: int, now_s: float) -> None:
        """Evicts `count` objects if it can, wherever they lie: those on SSD alone that nobody used for longest, then
        the rest in their order.
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
        """A clock's hand goes over the slots, twice at most; what was used since it last came by is passed over."""
        table, looked_at = self._index.table, 0
        while len(table) > target and looked_at < 2 * table.end and self._ssd_looks_left > 0:
            start = self._hand if self._hand < table.end else 0
            end = self._hand = min(start + _SCAN_SLOTS, table.end)
            looked_at, self._ssd_looks_left = looked_at + end - start, self._ssd_looks_left - (end - start)
            there = (table.dram_segments[start:end] == 0) & (table.ssd_segments[start:end] != 0)
            for slot in (np.flatnonzero(there) + start).tolist():
                if len(table) <= target:
                    self._hand = slot
                    return
                self._pass_by(slot, now_s)

    def _pass_by(self, slot: int, now_s: float) -> None:
        table = self._index.table
        flags = table.flags[slot]
        table.flags[slot] = flags & ~Flag.USED
        if table.keys[slot] is not None and not flags & (Flag.HARD_PIN | Flag.USED) and self._round_of(slot, now_s) < 2:
            self._drop(slot, now_s)

    def _drop(self, slot: int, now_s: float) -> None:
        """With its group."""
        table = self._index.table
        grouped = table.flags[slot] & Flag.GROUPED
        for each in sorted(table.groups[table.group_of[slot]]) if grouped else (slot,):
            self._index.counters["evicted"] += 1
            self._index.drop(each, RemovalReason.EVICTED_FOR_PUT, now_s)

    def by_watermark(self, now_s: float, limit: int) -> bool:
        """One step down to the low mark. True when it should go on soon."""
        used, capacity = self._segments.used_nbytes, self._segments.capacity_nbytes
        if used > self._rules.high_watermark * capacity:
            self._evicting = True
        if not self._evicting:
            return False
        target = int(self._rules.low_watermark * capacity)
        looked_at = self._evict(target, 0, RemovalReason.EVICTED_WATERMARK, now_s, limit)
        self._num_passed_over = 0 if self._segments.used_nbytes < used else self._num_passed_over + looked_at
        goes_on = looked_at == limit and self._num_passed_over < len(self._index.policy)
        if self._segments.used_nbytes == used and not goes_on:  # an SSD that keeps up is given the time to
            self._evict(target, 1, RemovalReason.EVICTED_WATERMARK, now_s, limit)
            self._num_passed_over = 0
        self._evicting = self._segments.used_nbytes > target
        return self._evicting and (self._segments.used_nbytes < used or goes_on)

    def _evict(self, target: int, last_round: int, fate: RemovalReason, now_s: float, limit: int) -> int:
        """Evicts until no more than `target` bytes are used; how many candidates were looked at."""
        looked_at = 0
        policy = self._index.policy
        if limit <= 0 or not len(policy):
            return 0
        for slot in policy.victims():
            if self._segments.used_nbytes <= target or looked_at >= limit:
                break
            looked_at += 1
            if self._round_of(slot, now_s) <= last_round:
                self._evict_one(slot, fate, now_s)
        return looked_at

    def _round_of(self, slot: int, now_s: float) -> int:
        """In which round the object may go; 3 when it may not."""
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

    def _evict_one(self, slot: int, fate: RemovalReason, now_s: float) -> None:
        index, table = self._index, self._index.table
        grouped = table.flags[slot] & Flag.GROUPED
        for each in sorted(table.groups[table.group_of[slot]]) if grouped else (slot,):
            if not table.dram_segment[each]:
                continue
            index.counters["evicted"] += 1
            if index.has_record(each):
                index.drop_replicas(each, table.dram_replicas(each), now_s)
            else:
                index.drop(each, fate, now_s)
