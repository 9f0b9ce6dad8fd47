"""Finding objects by key, and the objects that lost replicas with their segments. Pure.

An object that lost a replica is pruned before it is returned to a caller, so no caller sees lost replicas.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from moonpool.master.policies.base import EvictionPolicy
from moonpool.master.rules import PoolRules
from moonpool.master.state.changes import RemovalReason
from moonpool.master.state.key_index import Slots
from moonpool.master.state.objects import PoolObjects
from moonpool.master.state.records import Outcomes
from moonpool.master.state.segments import SegmentTable
from moonpool.master.state.space import PoolSpace
from moonpool.master.state.table import KEPT, UNKNOWN_OFFSET, Flag, Replica

# From this many keys on, numpy is faster than a loop.
_VECTOR = 24


class ObjectIndex(PoolObjects):
    def __init__(
        self, rules: PoolRules, segments: SegmentTable, space: PoolSpace, policy: EvictionPolicy, outcomes: Outcomes
    ) -> None:
        super().__init__(rules, segments, space, policy, outcomes)
        self.losses = Losses(self, segments)
        self._lease_s = rules.lease_s

    def find(self, key: bytes, now_s: float) -> int | None:
        """Return the slot of a readable object, None if there is none."""
        slot = self.find_any(key, now_s)
        return None if slot is None or self.table.flags[slot] & Flag.DORMANT else slot

    def find_any(self, key: bytes, now_s: float) -> int | None:
        """Return the slot of an object, readable or dormant."""
        slot = self.table.find(key)
        return None if slot is None or (self.losses.pending and not self.losses.prune(slot, now_s)) else slot

    def find_many(self, keys: Sequence[bytes], now_s: float) -> list[int | None]:
        if self.losses.pending or self.table.num_dormant:
            return [self.find(key, now_s) for key in keys]
        return self.table.find_many(keys)

    def find_batch(self, keys: Sequence[bytes]) -> Slots | None:
        """Return the slots of many keys as an array, -1 where there is no object. Return None if the keys are few, or
        have to be looked up one by one.
        """
        if len(keys) < _VECTOR or self.losses.pending or self.table.num_dormant:
            return None
        return self.table.slots_of.find_many(keys)

    def touch(self, slots: Sequence[int] | Slots, now_s: float) -> None:
        """Lease readable objects and report the access to the eviction policy, in the caller's order."""
        table, until_s = self.table, now_s + self._lease_s
        if len(slots) < _VECTOR:
            leases = table.lease_until_s
            for slot in slots:
                leases[slot] = until_s
        else:
            table.leases[np.asarray(slots, dtype=np.int64)] = until_s
        if table.groups:
            self._lease_groups(slots, until_s)
        if self.all_were_ordered:
            self.policy.access(slots)
        else:
            flags, segments = table.flags, table.dram_segment
            self.policy.access([int(slot) for slot in slots if segments[slot] and not flags[slot] & KEPT])

    def _lease_groups(self, slots: Sequence[int] | Slots, until_s: float) -> None:
        table = self.table
        for group in {table.group_of[int(slot)] for slot in slots if table.flags[slot] & Flag.GROUPED}:
            for member in table.groups[group]:
                table.lease_until_s[member] = until_s


class Losses:
    """Objects that lost replicas because a segment ended, went away or came back without them.

    An object is pruned when a client asks for it; a sweep prunes the rest in steps. So losing a node costs nothing at
    that moment.
    """

    def __init__(self, objects: PoolObjects, segments: SegmentTable) -> None:
        self._objects = objects
        self._segments = segments
        # Segments whose objects are not all checked yet -> the removal reason of objects that were only there.
        self.pending: dict[int, RemovalReason] = {}
        # Ended DRAM segment -> the SSD segment of its node, which may have the same objects.
        self.backing_ssds: dict[int, int] = {}
        self._swept_to = 0

    def start_sweep(self, numbers: Iterable[int], reason: RemovalReason = RemovalReason.NODE_GONE) -> None:
        """Check every object once, because these segments ended, went away or reported all their records."""
        self.pending.update(dict.fromkeys(numbers, reason))
        self._swept_to = 0

    def sweep(self, now_s: float, num_objects: int) -> bool:
        """Prune the objects of some slots. Return whether there are more to check."""
        if not self.pending:
            return False
        start, end = self._swept_to, min(self._swept_to + 64 * num_objects, self._objects.table.end)
        slots = np.flatnonzero(self._may_be_lost(start, end))[:num_objects]
        for at in slots.tolist():
            self.prune(start + at, now_s)
        self._swept_to = start + int(slots[-1]) + 1 if len(slots) == num_objects else end
        if self._swept_to >= self._objects.table.end:
            for number in self.pending:
                self.backing_ssds.pop(number, None)
            self.pending.clear()
            self._swept_to = 0
        return bool(self.pending)

    def _may_be_lost(self, start: int, end: int) -> NDArray[np.bool_]:
        """Return which of these slots prune() may change."""
        table, span = self._objects.table, slice(start, end)
        gone = [number for number in self.pending if not self._segments.is_live(number)]
        numbers = np.array(gone, dtype=np.uint32)
        found = np.isin(table.dram_segments[span], numbers) | np.isin(table.ssd_segments[span], numbers)
        found |= table.all_flags[span] & Flag.EXTRA != 0
        found |= (table.ssd_offsets[span] == UNKNOWN_OFFSET) & (table.ssd_segments[span] != 0)
        return found

    def prune(self, slot: int, now_s: float) -> bool:
        """Remove the replicas that were lost with their segments. Return False if no replica was left and the object is
        removed.
        """
        table, by_number, reason = self._objects.table, self._segments.by_number, RemovalReason.NODE_GONE
        ssd = table.ssd_segment[slot]
        if ssd and self._ssd_is_lost(slot):
            reason = self.pending.get(ssd, reason)
            self._objects.set_ssd(slot, None)
        replicas = table.dram_replicas(slot)
        left = [each for each in replicas if each.segment in by_number]
        if len(left) < len(replicas):
            lost = [each for each in replicas if each not in left]
            if not table.ssd_segment[slot]:
                self._expect_on_ssd(slot, lost)
            self._objects.void(slot, lost, now_s)
            self._objects.set_dram(slot, left)
        if left or self._objects.tier(slot):
            self._objects.mark_readable(slot)
            if ssd in self.pending and not self._segments.is_live(ssd):
                self._objects.tier_changed(slot)
            return True
        if table.ssd_segment[slot]:
            self._objects.mark_dormant(slot)
            return True
        self._objects.counters["lost"] += 1
        self._objects.drop(slot, reason, now_s)
        return False

    def _ssd_is_lost(self, slot: int) -> bool:
        """Return whether the record was lost with its segment, or was only expected there and does not exist."""
        segment = self._segments.by_number.get(self._objects.table.ssd_segment[slot])
        return segment is None or (self._objects.table.ssd_offset[slot] == UNKNOWN_OFFSET and segment.has_reported)

    def _expect_on_ssd(self, slot: int, lost: Sequence[Replica]) -> None:
        """Expect the object on the SSD of its node, which may have written it there before it died,
        without a report.
        """
        for replica in lost:
            ssd = self._segments.by_number.get(self.backing_ssds.get(replica.segment, 0))
            if ssd is not None and not ssd.has_reported:
                self._objects.set_ssd(slot, Replica(ssd.number, UNKNOWN_OFFSET, replica.generation))
                return
