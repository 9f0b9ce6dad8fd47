"""From a placement to memory: which segments there are, and the open handles to them. Thread-safe."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import NamedTuple

from moonpool.base.clock import Clock, SystemClock
from moonpool.base.errors import NotFound, Unauthorized
from moonpool.store.messages import Placement
from moonpool.transfer.descriptor import SegmentDescriptor
from moonpool.transfer.engine import TransferEngine
from moonpool.transfer.host import host_id
from moonpool.transfer.transports.base import RemoteSegment

# An owner that did not let us in is not asked again so soon: only a changed setting and a restart make a difference.
REFUSED_FOR_S = 10.0


class _Refusal(NamedTuple):
    incarnation: int
    until_s: float
    message: str

    def holds(self, incarnation: int, now_s: float) -> bool:
        return incarnation == self.incarnation and now_s < self.until_s


class SegmentDirectory:
    """Asks the master (`list_segments`) only when it meets a segment or an incarnation it does not know."""

    def __init__(
        self,
        engine: TransferEngine,
        list_segments: Callable[[], list[SegmentDescriptor]],
        clock: Clock | None = None,
    ) -> None:
        self._engine = engine
        self._list_segments = list_segments
        self._clock: Clock = clock or SystemClock()
        self._lock = threading.Lock()
        self._known: dict[str, SegmentDescriptor] = {}
        self._refusals: dict[str, _Refusal] = {}  # by segment

    def open(self, placement: Placement) -> RemoteSegment:
        """NotFound when that incarnation is not mounted any more; PeerLost when its owner is gone; Unauthorized when
        the owner asks for another secret or certificate than this process has.
        """
        descriptor = self._known.get(placement.segment)
        if descriptor is None or descriptor.incarnation != placement.incarnation:
            self._refresh()
            descriptor = self._known.get(placement.segment)
        if descriptor is None or descriptor.incarnation != placement.incarnation:
            raise NotFound(f"segment {placement.segment!r} was mounted anew or is gone")
        return self._open(descriptor)

    def nearest_first(self, placements: Iterable[Placement]) -> list[Placement]:
        """Replicas on this machine first."""
        return sorted(placements, key=lambda each: not self._is_local(each.segment))

    def local_segment(self) -> str | None:
        """A segment on this machine, to prefer for new objects; None when there is none."""
        if not self._known:
            self._refresh()
        return next((name for name in sorted(self._known) if self._is_local(name)), None)

    def _open(self, descriptor: SegmentDescriptor) -> RemoteSegment:
        refusal = self._refusals.get(descriptor.name)
        if refusal is not None and refusal.holds(descriptor.incarnation, self._clock.now_s()):
            raise Unauthorized(refusal.message)
        try:
            return self._engine.open(descriptor)
        except Unauthorized as error:
            message = f"no access to segment {descriptor.name!r}: {error}"
            refusal = _Refusal(descriptor.incarnation, self._clock.now_s() + REFUSED_FOR_S, message)
            with self._lock:
                self._refusals[descriptor.name] = refusal
            raise Unauthorized(message) from error

    def _is_local(self, name: str) -> bool:
        descriptor = self._known.get(name)
        return descriptor is not None and descriptor.host == host_id()

    def _refresh(self) -> None:
        fresh = {each.name: each for each in self._list_segments()}
        with self._lock:
            old, self._known = self._known, fresh
            self._refusals = {name: refusal for name, refusal in self._refusals.items() if name in fresh}
        for name, descriptor in old.items():
            if fresh.get(name) != descriptor:
                self._engine.forget(descriptor)
