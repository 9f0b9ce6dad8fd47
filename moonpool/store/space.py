"""Space on its way back: freed now, after a lease, after a writer's last moment, or when the last pin ends. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator

from moonpool.store.messages import Placement
from moonpool.store.objects import StoredObject
from moonpool.store.segments import SegmentTable


class SpaceReturns:
    """Owns every placement that belongs to no object and no put and is not free yet."""

    def __init__(self, segments: SegmentTable) -> None:
        self._segments = segments
        self._resting: list[tuple[float, int, Placement, int]] = []  # (free at, tie-break, where, nbytes)
        self._held: dict[StoredObject, list[Placement]] = {}  # until the last pin of a removed object ends
        self._count = 0

    def retire(self, entry: StoredObject, placements: Iterable[Placement], now_s: float) -> None:
        """Frees what readers of `entry` may still look at, once its pins and its lease are over."""
        if entry.num_pins:
            self._held.setdefault(entry, []).extend(placements)
        else:
            self.rest(placements, entry.nbytes, entry.lease_until_s, now_s)

    def on_unpinned(self, entry: StoredObject, now_s: float) -> None:
        """To be called when the last pin of `entry` ended."""
        placements = self._held.pop(entry, None)
        if placements is not None:
            self.rest(placements, entry.nbytes, entry.lease_until_s, now_s)

    def rest(self, placements: Iterable[Placement], nbytes: int, until_s: float, now_s: float) -> None:
        """Frees the space at `until_s`, at once when that is past."""
        for placement in placements:
            if until_s <= now_s:
                self._segments.release(placement, nbytes)
            else:
                self._count += 1
                heapq.heappush(self._resting, (until_s, self._count, placement, nbytes))

    def release_due(self, now_s: float, limit: int) -> int:
        """Frees up to `limit` spans whose time has come; how many."""
        done = 0
        while done < limit and self._resting and self._resting[0][0] <= now_s:
            _, _, placement, nbytes = heapq.heappop(self._resting)
            self._segments.release(placement, nbytes)
            done += 1
        return done

    def spans(self) -> Iterator[tuple[Placement, int]]:
        """All space still on its way, with its size."""
        for _, _, placement, nbytes in self._resting:
            yield placement, nbytes
        for entry, placements in self._held.items():
            for placement in placements:
                yield placement, entry.nbytes
