"""What became of keys, in bounded memory: the newest endings are remembered, the oldest forgotten. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from enum import IntEnum

NEVER_STORED = "this object was never stored"  # how the answer about a key begins that the pool knows nothing of


class RemovalReason(IntEnum):
    """How a key ended. The numbers stand in journals."""

    EVICTED_WATERMARK = 1
    EVICTED_FOR_PUT = 2
    REMOVED = 3
    CORRUPT = 4
    NODE_GONE = 5
    PUT_ABANDONED = 6
    PUT_REVOKED = 7
    SSD_EVICTED = 8
    NOT_RECOVERED = 9
    REPLACED = 10
    LOG_DAMAGED = 11

    @property
    def sentence(self) -> str:
        """Completes "this object ..."."""
        return _SENTENCES[self]


_SENTENCES = {
    RemovalReason.EVICTED_WATERMARK: "was evicted: the pool was above its high watermark and the policy chose it",
    RemovalReason.EVICTED_FOR_PUT: "was evicted to make room for a put that found no space; the policy chose it",
    RemovalReason.REMOVED: "was removed by a caller",
    RemovalReason.CORRUPT: "was quarantined: wrong bytes were found in its last replica",
    RemovalReason.NODE_GONE: "was on a node that left or died, and nowhere else",
    RemovalReason.PUT_ABANDONED: "expired unfinished: its put was discarded because its writer did not end it in time",
    RemovalReason.PUT_REVOKED: "was never finished: its writer gave the put up",
    RemovalReason.SSD_EVICTED: "was evicted from SSD, where its last replica was: the disk's share was full",
    RemovalReason.NOT_RECOVERED: "was not there any more when its node, or the master, came back",
    RemovalReason.REPLACED: "was replaced by an upsert",
    RemovalReason.LOG_DAMAGED: "was lost with a damaged part of its node's SSD log, and was nowhere else",
}


class RemovalLog:
    """The last `limit` endings, by key."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._fates: OrderedDict[bytes, tuple[RemovalReason, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._fates)

    def record(self, key: bytes, fate: RemovalReason, now_s: float) -> None:
        fates = self._fates
        fates.pop(key, None)
        fates[key] = (fate, now_s)
        if len(fates) > self._limit:
            fates.popitem(last=False)

    def forget(self, key: bytes) -> None:
        self._fates.pop(key, None)

    def forget_many(self, keys: Iterable[bytes]) -> None:
        fates = self._fates
        if fates:
            for key in keys:
                fates.pop(key, None)

    def items(self) -> Iterator[tuple[bytes, RemovalReason, float]]:
        """Oldest first."""
        for key, (fate, at_s) in self._fates.items():
            yield key, fate, at_s

    def restore(self, items: Iterable[tuple[bytes, RemovalReason, float]]) -> None:
        for key, fate, at_s in items:
            self.record(key, fate, at_s)

    def tell(self, key: bytes, now_s: float) -> str:
        """A sentence about a key that is not stored."""
        if key not in self._fates:
            forgotten = f" (or that was longer ago than the last {self._limit} endings)"
            return NEVER_STORED + (forgotten if len(self._fates) >= self._limit else "")
        fate, at_s = self._fates[key]
        return f"this object {fate.sentence}, {now_s - at_s:.1f} s ago"
