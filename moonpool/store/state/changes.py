"""What changed since listeners were told last: per key the latest word. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum
from typing import NamedTuple

from moonpool.store.messages import Tier


class Change(IntEnum):
    REMOVED = 0
    STORED = 1
    MOVED = 2  # other places in the same tiers
    TIER = 3  # in other tiers than before


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
        by_kind: dict[Change, list[bytes]] = {kind: [] for kind in Change}
        for key, kind in changes.items():
            by_kind[kind].append(key)
        stored, moved = by_kind[Change.STORED], by_kind[Change.TIER]
        dram = Tier.DRAM
        news = [(key, tier) for key, tier in zip(stored, tiers_of(stored), strict=True) if tier is not dram]
        news += zip(moved, tiers_of(moved), strict=True)
        return Changes(
            tuple(by_kind[Change.STORED]), tuple(by_kind[Change.REMOVED]), tuple(by_kind[Change.MOVED]), tuple(news)
        )
