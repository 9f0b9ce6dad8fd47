"""Objects that lost replicas because a segment ended, went away or came back without them. Pure.

An object is pruned when a client asks for it; a sweep prunes the rest in steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from moonpool.master.state.changes import RemovalReason
from moonpool.master.state.segments import SegmentTable
from moonpool.master.state.table import Flag, Replica

if TYPE_CHECKING:
    from moonpool.master.state.index import ObjectIndex

# Offset of an SSD record that may exist: its node has not reported yet.
UNKNOWN_OFFSET = 2**64 - 1


class Losses:
    def __init__(self, index: ObjectIndex, segments: SegmentTable) -> None:
        self._index = index
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
        start, end = self._swept_to, min(self._swept_to + 64 * num_objects, self._index.table.end)
        slots = np.flatnonzero(self._may_be_lost(start, end))[:num_objects]
        for at in slots.tolist():
            self.prune(start + at, now_s)
        self._swept_to = start + int(slots[-1]) + 1 if len(slots) == num_objects else end
        if self._swept_to >= self._index.table.end:
            for number in self.pending:
                self.backing_ssds.pop(number, None)
            self.pending.clear()
            self._swept_to = 0
        return bool(self.pending)

    def _may_be_lost(self, start: int, end: int) -> NDArray[np.bool_]:
        """Return which of these slots prune() may change."""
        table, span = self._index.table, slice(start, end)
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
        table, by_number, reason = self._index.table, self._segments.by_number, RemovalReason.NODE_GONE
        ssd = table.ssd_segment[slot]
        if ssd and self._ssd_is_lost(slot):
            reason = self.pending.get(ssd, reason)
            self._index.set_ssd(slot, None)
        replicas = table.dram_replicas(slot)
        left = [each for each in replicas if each.segment in by_number]
        if len(left) < len(replicas):
            if not table.ssd_segment[slot]:
                self._expect_on_ssd(slot, [each for each in replicas if each not in left])
            self._index.set_dram(slot, left)
        if left or self._index.tier(slot):
            self._index.mark_readable(slot)
            if ssd in self.pending and not self._segments.is_live(ssd):
                self._index.tier_changed(slot)
            return True
        if table.ssd_segment[slot]:
            self._index.mark_dormant(slot)
            return True
        self._index.counters["lost"] += 1
        self._index.drop(slot, reason, now_s)
        return False

    def _ssd_is_lost(self, slot: int) -> bool:
        """Return whether the record was lost with its segment, or was only expected there and does not exist."""
        segment = self._segments.by_number.get(self._index.table.ssd_segment[slot])
        return segment is None or (self._index.table.ssd_offset[slot] == UNKNOWN_OFFSET and segment.has_reported)

    def _expect_on_ssd(self, slot: int, lost: Sequence[Replica]) -> None:
        """Expect the object on the SSD of its node, which may have written it there before it died,
        without a report.
        """
        for replica in lost:
            ssd = self._segments.by_number.get(self.backing_ssds.get(replica.segment, 0))
            if ssd is not None and not ssd.has_reported:
                self._index.set_ssd(slot, Replica(ssd.number, UNKNOWN_OFFSET, replica.generation))
                return
