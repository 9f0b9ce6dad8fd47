"""What became of keys, in bounded memory: the newest endings are remembered, the oldest forgotten."""

from __future__ import annotations

from collections import OrderedDict
from enum import StrEnum


class Fate(StrEnum):
    """How a key ended. The text completes "this object ..."."""

    EVICTED_WATERMARK = "was evicted: the pool was above its high watermark and it was the least recently used"
    EVICTED_FOR_PUT = "was evicted to make room for a put that found no space; it was the least recently used"
    REMOVED = "was removed by a caller"
    CORRUPT = "was quarantined: a reader found wrong bytes in its last replica"
    NODE_GONE = "was on a node that left or died, and nowhere else"
    PUT_ABANDONED = "was never finished: its put was discarded because its writer did not end it in time"
    PUT_REVOKED = "was never finished: its writer gave the put up"


class Fates:
    """The last `limit` endings, by key."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._fates: OrderedDict[bytes, tuple[Fate, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._fates)

    def record(self, key: bytes, fate: Fate, now_s: float) -> None:
        self._fates[key] = (fate, now_s)
        self._fates.move_to_end(key)
        if len(self._fates) > self._limit:
            self._fates.popitem(last=False)

    def forget(self, key: bytes) -> None:
        self._fates.pop(key, None)

    def tell(self, key: bytes, now_s: float) -> str:
        """A sentence about a key that is not stored."""
        if key not in self._fates:
            forgotten = f" (or that was longer ago than the last {self._limit} endings)"
            return "this object was never stored" + (forgotten if len(self._fates) >= self._limit else "")
        fate, at_s = self._fates[key]
        return f"this object {fate.value}, {now_s - at_s:.1f} s ago"
