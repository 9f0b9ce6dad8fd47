"""What happened to keys: changes for listeners, and the reasons of the latest removals for `why`. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import IntEnum
from typing import NamedTuple

from moonpool.store.messages import Tier


class Change(IntEnum):
    REMOVED = 0
    STORED = 1
    MOVED = 2  # has other places in the same tiers
    TIER = 3  # is in other tiers than before


_KINDS = (Change.STORED, Change.REMOVED, Change.MOVED, Change.TIER)


class Changes(NamedTuple):
    """Changed keys, with the fields of EventBatch."""

    stored: tuple[bytes, ...]
    removed: tuple[bytes, ...]
    moved: tuple[bytes, ...]
    tiers: tuple[tuple[bytes, Tier], ...]
    nodes: tuple[tuple[str, int], ...] = ()


class ChangeLog:
    """Keeps one change per key. A key that was stored and then changed is reported as stored."""

    def __init__(self) -> None:
        self.enabled = True  # if False, changes are ignored
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

    def take(
        self,
        tiers_of: Callable[[Sequence[bytes]], list[Tier]],
        nodes_of: Callable[[Sequence[bytes]], tuple[tuple[str, int], ...]],
    ) -> Changes | None:
        """Return the changes since the last call, None if there are none. `tiers_of` returns the tiers of stored keys,
        `nodes_of` their nodes.
        """
        if not self._changes:
            return None
        changes, self._changes = self._changes, {}
        stored, removed, moved, tiers = [
            tuple([key for key, each in changes.items() if each is kind]) for kind in _KINDS
        ]
        dram = Tier.DRAM
        moved_tiers = [(key, tier) for key, tier in zip(stored, tiers_of(stored), strict=True) if tier is not dram]
        if tiers:
            moved_tiers += zip(tiers, tiers_of(tiers), strict=True)
        return Changes(stored, removed, moved, tuple(moved_tiers), nodes_of(stored))


NEVER_STORED = "this object was never stored"  # the answer about an unknown key begins with this


class RemovalReason(IntEnum):
    """Why an object was removed, or a put ended without one. The numbers are in journals."""

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
    EVICTED_FOR_HOT = 12

    @property
    def sentence(self) -> str:
        """The rest of a sentence that begins with "this object"."""
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
    RemovalReason.EVICTED_FOR_HOT: "was evicted: a second replica of an object that is used more took its place",
    RemovalReason.LOG_DAMAGED: "was lost with a damaged part of its node's SSD log, and was nowhere else",
}


class RemovalLog:
    """The reasons of the last `limit` removals, by key.

    A ring of keys, so that a snapshot can read it in bounded steps while it changes.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._reasons: dict[bytes, tuple[int, RemovalReason, float]] = {}  # with the number of the removal
        self._ring: list[bytes] = []  # removal n is at n % limit
        self.num_recorded = 0

    def __len__(self) -> int:
        return len(self._reasons)

    def record(self, key: bytes, reason: RemovalReason, now_s: float) -> None:
        number, ring = self.num_recorded, self._ring
        self.num_recorded = number + 1
        if number < self._limit:
            ring.append(key)
        else:
            at = number % self._limit
            self._drop_oldest(ring[at], number - self._limit)
            ring[at] = key
        self._reasons[key] = (number, reason, now_s)

    def _drop_oldest(self, key: bytes, number: int) -> None:
        found = self._reasons.get(key)
        if found is not None and found[0] == number:  # otherwise it was removed again, or stored, since
            del self._reasons[key]

    def forget(self, key: bytes) -> None:
        self._reasons.pop(key, None)

    def forget_many(self, keys: Iterable[bytes]) -> None:
        reasons = self._reasons
        if reasons:
            for key in keys:
                reasons.pop(key, None)

    def parts(self, num_keys: int) -> Iterator[list[tuple[bytes, RemovalReason, float]]]:
        """Yield key, reason and time, oldest first, in parts of at most `num_keys`. Removals that are recorded after
        the first part may be missing.
        """
        end = self.num_recorded
        start = max(0, end - self._limit)
        while start < end:
            part = []
            for number in range(start, min(start + num_keys, end)):
                key = self._ring[number % self._limit]
                found = self._reasons.get(key)
                if found is not None and found[0] == number:
                    part.append((key, found[1], found[2]))
            yield part
            start += num_keys

    def reason(self, key: bytes) -> RemovalReason | None:
        found = self._reasons.get(key)
        return None if found is None else found[1]

    def explain(self, key: bytes, now_s: float) -> str:
        """Return a sentence about a key that is not stored."""
        found = self._reasons.get(key)
        if found is None:
            forgotten = f" (or that was longer ago than the last {self._limit} endings)"
            return NEVER_STORED + (forgotten if self.num_recorded > self._limit else "")
        _, reason, at_s = found
        return f"this object {reason.sentence}, {now_s - at_s:.1f} s ago"
