"""What changed since listeners were told last: per key the latest word. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import IntEnum
from typing import NamedTuple

from moonpool.store.messages import Tier


class Change(IntEnum):
    REMOVED = 0
    STORED = 1
    MOVED = 2  # other places in the same tiers
    TIER = 3  # in other tiers than before


_KINDS = (Change.STORED, Change.REMOVED, Change.MOVED, Change.TIER)


class Changes(NamedTuple):
    """As in EventBatch."""

    stored: tuple[bytes, ...]
    removed: tuple[bytes, ...]
    moved: tuple[bytes, ...]
    tiers: tuple[tuple[bytes, Tier], ...]


class ChangeLog:
    """A key that was stored and then changed is still news as stored."""

    def __init__(self) -> None:
        self.enabled = True  # off, nothing is kept
        self._changes: dict[bytes, Change] = {}

    def stored(self, key: bytes) -> None:
        if self.enabled:
            self._changes[key] = Change.STORED

    def stored_many(self, keys: Iterable[bytes]) -> None:
        if self.enabled:
            self._changes.update(dict.fromkeys(keys, Change.STORED))

    def removed(self, key: bytes) -> None:
        if self.enabled:
            self._changes[key] = Change.REMOVED

    def moved(self, key: bytes) -> None:
        if self.enabled:
            self._changes.setdefault(key, Change.MOVED)

    def tier(self, key: bytes) -> None:
        if self.enabled and self._changes.get(key) is not Change.STORED:
            self._changes[key] = Change.TIER

    def take(self, tiers_of: Callable[[Sequence[bytes]], list[Tier]]) -> Changes | None:
        """None when nothing changed. `tiers_of` says where stored keys lie now."""
        if not self._changes:
            return None
        changes, self._changes = self._changes, {}
        stored, removed, moved, tiers = [
            tuple([key for key, each in changes.items() if each is kind]) for kind in _KINDS
        ]
        dram = Tier.DRAM
        news = [(key, tier) for key, tier in zip(stored, tiers_of(stored), strict=True) if tier is not dram]
        if tiers:
            news += zip(tiers, tiers_of(tiers), strict=True)
        return Changes(stored, removed, moved, tuple(news))


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

    def explain(self, key: bytes, now_s: float) -> str:
        """A sentence about a key that is not stored."""
        if key not in self._fates:
            forgotten = f" (or that was longer ago than the last {self._limit} endings)"
            return NEVER_STORED + (forgotten if len(self._fates) >= self._limit else "")
        fate, at_s = self._fates[key]
        return f"this object {fate.sentence}, {now_s - at_s:.1f} s ago"
