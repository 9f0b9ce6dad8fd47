"""Keys that many ask for get another replica, on another node. Pure.

Look-ups are counted in windows, for a bounded number of keys; extra replicas take a bounded part of the pool.
"""

from __future__ import annotations

from collections.abc import Sequence

from moonpool.master.rules import PoolRules
from moonpool.master.state.copies import Copies
from moonpool.master.state.index import ObjectIndex
from moonpool.master.state.segments import SegmentTable

_MAX_TRACKED = 50_000
# A pool this full has better uses for its space than a second copy.
_FULL = 0.85


class HotKeys:
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
        """One node has nowhere to copy to."""
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
