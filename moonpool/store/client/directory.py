"""From a placement to memory: which segments there are, which cannot be read now, and the open handles to them.
Thread-safe.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import NamedTuple

from moonpool.base.clock import Clock, SystemClock
from moonpool.base.descriptor import SegmentDescriptor
from moonpool.base.errors import MoonpoolError, NotFound, Unauthorized, Unavailable
from moonpool.store.client.unreadable import UnreadableSegments
from moonpool.store.messages import Placement, SegmentInfo, Tier
from moonpool.transfer.engine import TransferEngine
from moonpool.transfer.memory.location import host_id
from moonpool.transfer.transports.base import RemoteSegment

# An owner that did not let us in is not asked again so soon: only a changed setting and a restart make a difference.
REFUSED_FOR_S = 10.0
_UNKNOWN_RANK = 4  # behind local memory, other memory, local disks, other disks
_UNREADABLE_RANK = 5
_PROBE_TIMEOUT_S = 2.0


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
        list_segments: Callable[[], list[SegmentInfo]],
        clock: Clock | None = None,
    ) -> None:
        self._engine = engine
        self._list_segments = list_segments
        self._clock: Clock = clock or SystemClock()
        self._lock = threading.Lock()
        self._known: dict[str, SegmentInfo] = {}
        self._ranks: dict[str, int] = {}  # by segment: the lower, the sooner it is read
        self._refusals: dict[str, _Refusal] = {}  # by segment
        self._handles: dict[tuple[str, int], RemoteSegment] = {}  # by segment and incarnation; the engine's
        self.unreadable = UnreadableSegments(self._is_over)
        self.local: tuple[SegmentInfo, ...] = ()  # on this machine; another object after each change

    def info(self, placement: Placement) -> SegmentInfo:
        """NotFound when that incarnation of the segment is not mounted any more."""
        info = self._known.get(placement.segment)
        if info is None or info.descriptor.incarnation != placement.incarnation:
            self.refresh()
            info = self._known.get(placement.segment)
        if info is None or info.descriptor.incarnation != placement.incarnation:
            raise NotFound(f"segment {placement.segment!r} was mounted anew or is gone")
        return info

    def is_disk(self, placement: Placement) -> bool:
        """As far as known; asks nobody."""
        info = self._known.get(placement.segment)
        return info is not None and not info.tier & Tier.DRAM

    def open(self, placement: Placement) -> RemoteSegment:
        """NotFound when that incarnation is not mounted any more; PeerLost when its owner is gone; Unauthorized when
        the owner asks for another secret or certificate than this process has. A segment that could not be read fails
        at once with the same error as before, until it can be read again.
        """
        handle = self._handles.get((placement.segment, placement.incarnation))
        if handle is None or self.unreadable.listed:
            return self.open_segment(self.info(placement))
        return handle

    def open_segment(self, info: SegmentInfo) -> RemoteSegment:
        """As open(), for a segment that info() gave."""
        descriptor = info.descriptor
        failure = self.unreadable.failure(descriptor.name, descriptor.incarnation)
        if failure is not None:
            raise failure
        handle = self._handles.get((descriptor.name, descriptor.incarnation))
        if handle is None:
            handle = self._open_anew(descriptor)
            with self._lock:
                if self._known.get(descriptor.name) is info:
                    self._handles[descriptor.name, descriptor.incarnation] = handle
        return handle

    def best_first(self, placements: Iterable[Placement]) -> list[Placement]:
        """In the order in which they should be read: this machine's memory, others' memory, this machine's disks, the
        rest.
        """
        ranks, unreadable = self._ranks, self.unreadable.listed
        if not unreadable:
            return sorted(placements, key=lambda each: ranks.get(each.segment, _UNKNOWN_RANK))

        def rank(each: Placement) -> int:
            is_readable = (each.segment, each.incarnation) not in unreadable
            return ranks.get(each.segment, _UNKNOWN_RANK) if is_readable else _UNREADABLE_RANK

        return sorted(placements, key=rank)

    def local_segment(self) -> str | None:
        """Memory of the pool on this machine, to prefer for new objects; None when there is none."""
        if not self._known:
            self.refresh()
        return next((each.descriptor.name for each in self.local if each.tier & Tier.DRAM), None)

    def refresh(self) -> None:
        fresh = {each.descriptor.name: each for each in self._list_segments()}
        local = tuple(info for _, info in sorted(fresh.items()) if _is_local(info))
        with self._lock:
            old, self._known = self._known, fresh
            self._ranks = {name: _rank(info) for name, info in fresh.items()}
            self._refusals = {name: refusal for name, refusal in self._refusals.items() if name in fresh}
            self._handles.clear()
            if local != self.local:
                self.local = local
        for name, info in old.items():
            if name not in fresh or fresh[name].descriptor != info.descriptor:
                self._engine.forget(info.descriptor)

    def close(self) -> None:
        """Idempotent. The handles are the engine's."""
        self.unreadable.close()

    def _is_over(self, place: Placement) -> bool:
        """Whether a segment that could not be read can be, or this incarnation of it is gone."""
        try:
            descriptor = self.info(place).descriptor
            remote = self._engine.open(descriptor)
            remote.read_into(place.offset, [bytearray(1)], timeout_s=_PROBE_TIMEOUT_S)
        except (Unavailable, Unauthorized):
            return self._is_gone(place)
        except MoonpoolError:  # not listed any more; or its owner has answered
            return True
        return True

    def _is_gone(self, place: Placement) -> bool:
        try:
            self.refresh()
            self.info(place)
        except NotFound:
            return True
        except MoonpoolError:
            pass
        return False

    def _open_anew(self, descriptor: SegmentDescriptor) -> RemoteSegment:
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


def _is_local(info: SegmentInfo) -> bool:
    return info.descriptor.host == host_id()


def _rank(info: SegmentInfo) -> int:
    return (0 if info.tier & Tier.DRAM else 2) + (0 if _is_local(info) else 1)
