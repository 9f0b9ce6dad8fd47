"""Objects whose segments ended, went away or came back without them: pruned when asked for, the rest in steps. Pure."""

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

# Offset of an SSD record that may exist: its node has not said yet.
UNKNOWN_OFFSET = 2**64 - 1


class Losses:
    def __init__(self, index: ObjectIndex, segments: SegmentTable) -> None:
        self._index = index
        self._segments = segments
        self.pending: dict[
            int, RemovalReason
        ] = {}  # segments not all of whose objects were seen: what becomes of these
        self.heirs: dict[int, int] = {}  # ended DRAM segment -> the SSD segment of its node, which may have its objects
        self._swept_to = 0

    def start_sweep(self, numbers: Iterable[int], fate: RemovalReason = RemovalReason.NODE_GONE) -> None:
        """These segments ended, went away or said all they have: from here on every object must be seen once."""
        self.pending.update(dict.fromkeys(numbers, fate))
        self._swept_to = 0

    def sweep(self, now_s: float, num_objects: int) -> bool:
        """Prunes the objects of some slots. True when there are more to see."""
        if not self.pending:
            return False
        start, end = self._swept_to, min(self._swept_to + 64 * num_objects, self._index.table.end)
        slots = np.flatnonzero(self._may_be_lost(start, end))[:num_objects]
        for at in slots.tolist():
            self.prune(start + at, now_s)
        self._swept_to = start + int(slots[-1]) + 1 if len(slots) == num_objects else end
        if self._swept_to >= self._index.table.end:
            for number in self.pending:
                self.heirs.pop(number, None)
            self.pending.clear()
            self._swept_to = 0
        return bool(self.pending)

    def _may_be_lost(self, start: int, end: int) -> NDArray[np.bool_]:
        """The objects among these slots that prune() may change."""
        table, span = self._index.table, slice(start, end)
        gone = [number for number in self.pending if not self._segments.is_live(number)]
        numbers = np.array(gone, dtype=np.uint32)
        found = np.isin(table.dram_segments[span], numbers) | np.isin(table.ssd_segments[span], numbers)
        found |= table.all_flags[span] & Flag.EXTRA != 0
        found |= (table.ssd_offsets[span] == UNKNOWN_OFFSET) & (table.ssd_segments[span] != 0)
        return found

    def prune(self, slot: int, now_s: float) -> bool:
        """Takes replicas away that went with their segment. False when that ended the object."""
        table, by_number, fate = self._index.table, self._segments.by_number, RemovalReason.NODE_GONE
        ssd = table.ssd_segment[slot]
        if ssd and self._ssd_is_lost(slot):
            fate = self.pending.get(ssd, fate)
            self._index.set_ssd(slot, None)
        replicas = table.dram_replicas(slot)
        left = [each for each in replicas if each.segment in by_number]
        if len(left) < len(replicas):
            if not table.ssd_segment[slot]:
                self._expect_on_ssd(slot, [each for each in replicas if each not in left])
            self._index.set_dram(slot, left)
        if left or self._index.tier(slot):
            self._index.wake(slot)
            if ssd in self.pending and not self._segments.is_live(ssd):
                self._index.tier_changed(slot)
            return True
        if table.ssd_segment[slot]:
            self._index.sleep(slot)
            return True
        self._index.counters["lost"] += 1
        self._index.drop(slot, fate, now_s)
        return False

    def _ssd_is_lost(self, slot: int) -> bool:
        """The record went with its segment, or was only hoped for and is not there."""
        segment = self._segments.by_number.get(self._index.table.ssd_segment[slot])
        return segment is None or (self._index.table.ssd_offset[slot] == UNKNOWN_OFFSET and segment.has_spoken)

    def _expect_on_ssd(self, slot: int, lost: Sequence[Replica]) -> None:
        """A node that died may have written the object to its SSD without having said so."""
        for replica in lost:
            heir = self._segments.by_number.get(self.heirs.get(replica.segment, 0))
            if heir is not None and not heir.has_spoken:
                self._index.set_ssd(slot, Replica(heir.number, UNKNOWN_OFFSET, replica.generation))
                return
