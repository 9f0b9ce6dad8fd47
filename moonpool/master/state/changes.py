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
