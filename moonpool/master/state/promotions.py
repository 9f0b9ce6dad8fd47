"""Copies from SSD to DRAM that readers ask for before they need the objects. Pure.

A request that waits for its turn gives the disk time: when its blocks are pulled, they come from memory. Copies that
were asked for and have not ended take at most MAX_PART of the pool's DRAM, so that waiting requests neither fill the
memory nor the queues of the disks; what exceeds this stays on SSD, and is read from there. A request that goes
elsewhere gives nothing back: the record on SSD stays, so the copy in DRAM can be evicted at once when its lease ends.
"""

from __future__ import annotations

from collections.abc import Sequence

from moonpool.master.state.index import ObjectIndex
from moonpool.master.state.segments import SegmentTable
from moonpool.master.state.ssd_tier import SsdTier
from moonpool.store.messages import Refusal

MAX_PART = 1 / 16


class AskedPromotions:
    def __init__(self, index: ObjectIndex, segments: SegmentTable, ssd: SsdTier) -> None:
        self._index, self._segments, self._ssd = index, segments, ssd
        self._nbytes = 0  # of copies that have not ended

    def ask(self, keys: Sequence[bytes], now_s: float) -> int:
        """Lease the objects, and order copies of those that are only on SSD, in this order and within the budget.
        Return how many were ordered."""
        slots = [slot for slot in self._index.find_many(keys, now_s) if slot is not None]
        if slots:
            self._index.touch(slots, now_s)
        return sum([self._order(slot, now_s) for slot in slots])

    def _order(self, slot: int, now_s: float) -> bool:
        table = self._index.table
        nbytes = table.nbytes[slot]
        if table.dram_segment[slot] or self._nbytes + nbytes > MAX_PART * self._segments.capacity_nbytes:
            return False

        def ended(key: bytes, refusal: Refusal | None, now_s: float) -> None:
            self._nbytes -= nbytes

        is_ordered = self._ssd.promote(slot, now_s, ended)
        self._nbytes += nbytes * is_ordered
        return is_ordered
