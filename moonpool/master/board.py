"""Segments that are announced at the master for others to find: memory of any engine, not only the pool's. Pure.

An announcement lasts for its time to live and is renewed by its owner, so that a dead owner's is forgotten.
"""

from __future__ import annotations

from typing import NamedTuple

from moonpool.base.descriptor import SegmentDescriptor
from moonpool.base.errors import InvalidInput, Overloaded
from moonpool.transfer.directory import check_newer

MAX_ANNOUNCEMENTS = 100_000
MAX_TTL_S = 3600.0


class _Announcement(NamedTuple):
    descriptor: SegmentDescriptor
    until_s: float


class SegmentBoard:
    """Forgets by itself: whoever asks brings the time."""

    def __init__(self, max_announcements: int = MAX_ANNOUNCEMENTS) -> None:
        self._max_announcements = max_announcements
        self._known: dict[str, _Announcement] = {}

    def __len__(self) -> int:
        return len(self._known)

    def announce(self, descriptor: SegmentDescriptor, ttl_s: float, now_s: float) -> None:
        """New, renewed, or in place of an earlier incarnation; AlreadyExists when a newer one is announced."""
        if not 0.0 < ttl_s <= MAX_TTL_S:
            raise InvalidInput(f"an announcement lasts up to {MAX_TTL_S:g} s, not {ttl_s:g} s")
        check_newer(self.find(descriptor.name, now_s), descriptor)
        if descriptor.name not in self._known and len(self._known) >= self._max_announcements:
            self.expire(now_s)
            if len(self._known) >= self._max_announcements:
                raise Overloaded(f"{len(self._known)} segments are announced here already")
        self._known[descriptor.name] = _Announcement(descriptor, now_s + ttl_s)

    def retract(self, name: str, incarnation: int) -> None:
        """Nothing happens unless this very incarnation is announced."""
        known = self._known.get(name)
        if known is not None and known.descriptor.incarnation == incarnation:
            del self._known[name]

    def find(self, name: str, now_s: float) -> SegmentDescriptor | None:
        known = self._known.get(name)
        return known.descriptor if known is not None and now_s < known.until_s else None

    def expire(self, now_s: float) -> None:
        """Drops what has run out."""
        for name in [name for name, known in self._known.items() if now_s >= known.until_s]:
            del self._known[name]
