"""The pool's segments as one client sees them: where they are, open handles, and which cannot be read. Thread-safe.

A segment that could not be read is remembered (UnreadableSegments) until it can be read again. Objects that are only
there are misses for this client meanwhile; otherwise every caller would wait for a transfer that fails. A thread probes
such segments, soon at first and then every few seconds. An incarnation that the master no longer lists is removed.
"""

from __future__ import annotations

import itertools
import logging
import secrets
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

from moonpool.base.backoff import Backoff
from moonpool.base.clock import Clock, SystemClock
from moonpool.base.descriptor import SegmentDescriptor
from moonpool.base.errors import (
    BreakerOpen,
    Cancelled,
    HandleClosed,
    MoonpoolError,
    NotFound,
    Unauthorized,
    Unavailable,
)
from moonpool.base.side_thread import SideThread
from moonpool.store.messages import Placement, SegmentInfo, Tier
from moonpool.transfer.engine import TransferEngine
from moonpool.transfer.memory.location import host_id
from moonpool.transfer.transports.base import RemoteSegment

_LOG = logging.getLogger(__name__)
_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 2.0
_JOIN_TIMEOUT_S = 2.0
_NOT_THE_SEGMENTS = (BreakerOpen, Cancelled, HandleClosed)  # errors of this process, or of the master

SegmentKey = tuple[str, int]  # name and incarnation


class _Failure(NamedTuple):
    error: MoonpoolError
    place: Placement  # the replica whose read failed


class UnreadableSegments:
    """Thread-safe. The probing thread calls `is_resolved(place)`: whether the segment can be read again, or its
    incarnation is gone.
    """

    def __init__(self, is_resolved: Callable[[Placement], bool]) -> None:
        self._is_resolved = is_resolved
        self._lock = threading.Lock()
        self._failures: dict[SegmentKey, _Failure] = {}
        self.listed: tuple[SegmentKey, ...] = ()  # the segments that cannot be read now
        self._prober: SideThread | None = None
        self._ended = threading.Event()

    def add(self, place: Placement, error: MoonpoolError) -> None:
        """Add the segment of a replica whose read failed. Ignore errors that say nothing about the segment."""
        if not isinstance(error, Unavailable | Unauthorized) or isinstance(error, _NOT_THE_SEGMENTS):
            return
        key = (place.segment, place.incarnation)
        with self._lock:
            if key in self._failures or self._ended.is_set():
                return
            self._change({**self._failures, key: _Failure(error, place)})
            if self._prober is None or not self._prober.is_alive():
                self._prober = SideThread(self._probe_loop, "store-segments")
        # The caller gets an Unauthorized error as an exception, so the log does not repeat it.
        level = logging.DEBUG if isinstance(error, Unauthorized) else logging.WARNING
        _LOG.log(level, "segment %s cannot be read; objects that are only there are misses: %s", place.segment, error)

    def failure(self, segment: str, incarnation: int) -> MoonpoolError | None:
        """Return why the segment could not be read; None if it is not known to be unreadable."""
        found = self._failures.get((segment, incarnation))
        return None if found is None else type(found.error)(str(found.error))

    def close(self) -> None:
        """Idempotent."""
        with self._lock:
            self._ended.set()
            prober = self._prober
        if prober is not None:
            prober.join(_JOIN_TIMEOUT_S)

    def _probe_loop(self) -> None:
        backoff = Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)
        while not self._ended.wait(backoff.next_s()):
            over = [key for key, failure in list(self._failures.items()) if self._is_resolved(failure.place)]
            for segment, _ in over:
                _LOG.info("segment %s can be read again, or its node has mounted another one", segment)
            with self._lock:
                self._change({key: each for key, each in self._failures.items() if key not in over})
                if not self._failures:
                    self._prober = None
                    return

    def _change(self, failures: dict[SegmentKey, _Failure]) -> None:
        self._failures, self.listed = failures, tuple(failures)


# After a refusal the owner is not asked again for this time: only a changed setting and a restart change its answer.
REFUSED_FOR_S = 10.0
_UNKNOWN_RANK = 4  # after local memory, other memory, local disks, other disks
_UNREADABLE_RANK = 5
_PROBE_TIMEOUT_S = 2.0


class _Refusal(NamedTuple):
    incarnation: int
    until_s: float
    message: str

    def holds(self, incarnation: int, now_s: float) -> bool:
        return incarnation == self.incarnation and now_s < self.until_s


class SegmentDirectory:
    """Asks the master (`list_segments`) only for segments and incarnations that it does not know."""

    def __init__(
        self,
        engine: TransferEngine,
        list_segments: Callable[[], list[SegmentInfo]],
        clock: Clock | None = None,
        open_timeout_s: float | None = None,
    ) -> None:
        """`open_timeout_s` is for reaching a segment's owner the first time; None: the engine's own."""
        self.engine = engine
        self._list_segments = list_segments
        self._open_timeout_s = open_timeout_s
        self._clock: Clock = clock or SystemClock()
        self._lock = threading.Lock()
        self._known: dict[str, SegmentInfo] = {}
        self._memory: frozenset[tuple[str, int]] = frozenset()  # segments of _known in memory, with their incarnations
        self._ranks: dict[str, int] = {}  # by segment; the lowest is read first
        self._refusals: dict[str, _Refusal] = {}  # by segment
        self._turn = secrets.randbelow(2**32)  # which of equally good replicas this client reads
        self._local_memory: tuple[str, ...] = ()  # names of the memory segments on this machine
        self._puts = itertools.count(self._turn)
        self._handles: dict[tuple[str, int], RemoteSegment] = {}  # by segment and incarnation; owned by the engine
        self.unreadable = UnreadableSegments(self._is_resolved)
        self.local: tuple[SegmentInfo, ...] = ()  # on this machine; a new tuple after each change

    def info(self, placement: Placement) -> SegmentInfo:
        """Return the segment. Raise NotFound when that incarnation is no longer mounted."""
        info = self._known.get(placement.segment)
        if info is None or info.descriptor.incarnation != placement.incarnation:
            self.refresh()
            info = self._known.get(placement.segment)
        if info is None or info.descriptor.incarnation != placement.incarnation:
            raise NotFound(f"segment {placement.segment!r} was mounted again or is gone")
        return info

    def is_disk(self, placement: Placement) -> bool:
        """Return whether the segment is known to be a disk, without a call."""
        info = self._known.get(placement.segment)
        return info is not None and not info.tier & Tier.DRAM

    def is_remote(self, placement: Placement) -> bool:
        """Return whether the segment is known to be on another machine, without a call."""
        info = self._known.get(placement.segment)
        return info is not None and not _is_local(info)

    def node_of(self, placement: Placement) -> str:
        """Return the segment's node, "" if it is not known, without a call."""
        info = self._known.get(placement.segment)
        return "" if info is None else info.node

    def is_memory(self, placement: Placement) -> bool:
        """Return whether the segment is mounted memory. Ask the master if the segment is not known."""
        if (placement.segment, placement.incarnation) in self._memory:
            return True
        try:
            return bool(self.info(placement).tier & Tier.DRAM)
        except MoonpoolError:
            return False

    def open(self, placement: Placement) -> RemoteSegment:
        """Return a handle. Raise NotFound when that incarnation is no longer mounted, PeerLost when its owner is gone,
        Unauthorized when the owner requires another secret or certificate than this process has. A segment that could
        not be read fails at once with the same error as before, until it can be read again.
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
            handle = self._open_handle(descriptor)
            with self._lock:
                if self._known.get(descriptor.name) is info:
                    self._handles[descriptor.name, descriptor.incarnation] = handle
        return handle

    def best_first(self, placements: Sequence[Placement]) -> list[Placement]:
        """Sort the replicas: this machine's memory, others' memory, this machine's disks, other disks.

        Equally good replicas take turns, by object and by client, so that the readers of a hot prefix use the links of
        all nodes that have it. The order of one object's replicas stays the same.
        """
        if len(placements) < 2:
            return list(placements)
        first = (placements[0].generation + self._turn) % len(placements)
        placements = (*placements[first:], *placements[:first])
        ranks, unreadable = self._ranks, self.unreadable.listed
        if not unreadable:
            return sorted(placements, key=lambda each: ranks.get(each.segment, _UNKNOWN_RANK))

        def rank(each: Placement) -> int:
            is_readable = (each.segment, each.incarnation) not in unreadable
            return ranks.get(each.segment, _UNKNOWN_RANK) if is_readable else _UNREADABLE_RANK

        return sorted(placements, key=rank)

    def local_segment(self) -> str | None:
        """Return a memory segment on this machine, to prefer for new objects; None when there is none. Several take
        turns, so that the loss of one costs only its share of the blocks.
        """
        if not self._known:
            self.refresh()
        names = self._local_memory
        return names[next(self._puts) % len(names)] if names else None

    def is_local_memory(self, name: str) -> bool:
        """Return whether this is a known memory segment of this machine."""
        return name in self._local_memory

    def refresh(self) -> None:
        fresh = {each.descriptor.name: each for each in self._list_segments()}
        local = tuple(info for _, info in sorted(fresh.items()) if _is_local(info))
        with self._lock:
            old, self._known = self._known, fresh
            in_memory = [each.descriptor for each in fresh.values() if each.tier & Tier.DRAM]
            self._memory = frozenset((each.name, each.incarnation) for each in in_memory)
            self._ranks = {name: _rank(info) for name, info in fresh.items()}
            self._refusals = {name: refusal for name, refusal in self._refusals.items() if name in fresh}
            self._handles.clear()
            if local != self.local:
                self.local = local
                self._local_memory = tuple(each.descriptor.name for each in local if each.tier & Tier.DRAM)
        for name, info in old.items():
            if name not in fresh or fresh[name].descriptor != info.descriptor:
                self.engine.forget(info.descriptor)

    def close(self) -> None:
        """Idempotent. The engine owns the handles."""
        self.unreadable.close()

    def _is_resolved(self, place: Placement) -> bool:
        """Return whether an unreadable segment can be read again, or this incarnation of it is gone."""
        try:
            descriptor = self.info(place).descriptor
            remote = self.engine.open(descriptor, timeout_s=_PROBE_TIMEOUT_S)
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

    def _open_handle(self, descriptor: SegmentDescriptor) -> RemoteSegment:
        refusal = self._refusals.get(descriptor.name)
        if refusal is not None and refusal.holds(descriptor.incarnation, self._clock.now_s()):
            raise Unauthorized(refusal.message)
        try:
            return self.engine.open(descriptor, timeout_s=self._open_timeout_s)
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
