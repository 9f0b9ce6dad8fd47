"""Whole objects from a GPU's memory to their replicas.

Where a replica's segment is mapped here and page-locked (transfer/transports/cuda/pinning.py), the GPU writes it
itself: the fence admits the writes, the copies are started, and wait() asks the fence again when they are over.
Elsewhere the bytes go through main memory, a bundle at a time, and are written when the constructor returns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from moonpool.base.errors import MoonpoolError, Unavailable
from moonpool.store.client.put_tools import REPLICA_ERRORS, PutTools
from moonpool.store.client.transfer_window import bundles
from moonpool.store.messages import Placement
from moonpool.transfer.memory.buffers import DeviceSpan
from moonpool.transfer.memory.segment import Borrowed
from moonpool.transfer.transports.base import RemoteSegment
from moonpool.transfer.transports.cuda.copy import in_main_memory
from moonpool.transfer.transports.cuda.copy_stream import CopyStream
from moonpool.transfer.transports.cuda.driver import driver
from moonpool.transfer.transports.cuda.pinning import DeviceCopies, PinnedSegment
from moonpool.transfer.transports.mapped import MappedRemote


class ReplicatedPut(Protocol):
    """The part of a PutSession that is needed here."""

    _session: int
    _replicas: list[Placement]
    _failure: MoonpoolError | None

    def _whole(self, memory: DeviceSpan, checksums: Sequence[int]) -> int: ...
    def _drop_replica(self, placement: Placement, error: MoonpoolError) -> None: ...


class _Replica(NamedTuple):
    """Pieces for one replica: `offset` is theirs in the segment."""

    session: ReplicatedPut
    place: Placement
    offset: int
    span: DeviceSpan


class _Started(NamedTuple):
    """Copies under way to one segment."""

    segment: PinnedSegment
    borrowed: Borrowed
    copies: CopyStream
    event: int
    replicas: list[_Replica]


class PendingPuts:
    """What PiecePuts.start_whole() returns. The caller must call wait()."""

    def __init__(
        self,
        writes: Sequence[tuple[ReplicatedPut, DeviceSpan, Sequence[int]]],
        late: Sequence[MoonpoolError | None],
        tools: PutTools,
    ) -> None:
        """`late` has the error of each session that the master has discarded, None for the others."""
        self._tools = tools
        self._writes = writes
        self._errors = list(late)
        self._started: list[_Started] = []
        by_segment: dict[tuple[str, int, int], list[_Replica]] = {}
        for position, (session, span, checksums) in enumerate(writes):
            if self._errors[position] is not None:
                continue
            try:
                at = session._whole(span, checksums)
            except MoonpoolError as error:
                self._errors[position] = error
                continue
            for place in list(session._replicas):
                each = _Replica(session, place, place.offset + at, span)
                by_segment.setdefault((place.segment, place.incarnation, session._session), []).append(each)
        try:
            for (_, _, number), replicas in by_segment.items():
                self._start_segment(replicas, number)
        except BaseException:
            self.wait()  # the memory is the caller's again
            raise

    def wait(self) -> list[MoonpoolError | None]:
        """Return of each write None, or why its session has no replica left. Its memory is not in use any more."""
        started, self._started = self._started, []
        for each in started:
            self._end(each)
        nbytes = 0
        for position, (session, span, _) in enumerate(self._writes):
            if self._errors[position] is None and not session._replicas:
                self._errors[position] = session._failure
            nbytes += span.nbytes if self._errors[position] is None else 0
        self._tools.counters.add("bytes_written", nbytes)
        return self._errors

    def _start_segment(self, replicas: list[_Replica], number: int) -> None:
        """Write to one segment, for puts that were begun with session `number`."""
        try:
            remote = self._tools.sessions.open_for_writing(replicas[0].place, number)
            segment = self._pinned(remote)
        except REPLICA_ERRORS as error:
            for each in replicas:
                each.session._drop_replica(each.place, error)
            return
        pinned_nbytes = 0 if segment is None else segment.pinned_nbytes
        direct = [each for each in replicas if each.offset + each.span.nbytes <= pinned_nbytes]
        if segment is not None and direct:
            self._start_copies(segment, direct)
        self._write_staged(remote, [each for each in replicas if each.offset + each.span.nbytes > pinned_nbytes])

    def _pinned(self, remote: RemoteSegment) -> PinnedSegment | None:
        pinning = self._tools.engine.pinning
        if pinning is None or not isinstance(remote, MappedRemote):
            return None
        return pinning.add(remote, self._tools.timeout_s)

    def _start_copies(self, segment: PinnedSegment, replicas: list[_Replica]) -> None:
        try:
            borrowed = segment.begin_copies()
        except REPLICA_ERRORS as error:
            for each in replicas:
                each.session._drop_replica(each.place, error)
            return
        admitted: list[_Replica] = []
        for each in replicas:
            try:
                if borrowed.fence is not None:
                    borrowed.fence.admit(each.offset, each.span.nbytes, each.place.generation)
                admitted.append(each)
            except REPLICA_ERRORS as error:
                each.session._drop_replica(each.place, error)
        try:
            copies = self._tools.copies_of(driver().device_of(replicas[0].span.address))
            event = copies.start_writes(
                segment,
                DeviceCopies(
                    np.array([each.offset for each in admitted], np.int64),
                    np.array([each.span.address for each in admitted], np.uint64),
                    np.array([each.span.nbytes for each in admitted], np.int64),
                ),
            )
        except BaseException:
            segment.end_copies()
            raise
        self._started.append(_Started(segment, borrowed, copies, event, admitted))

    def _end(self, started: _Started) -> None:
        """Wait for the copies, and ask the fence and the owner again."""
        segment, (memory, fence), copies, event, replicas = started
        try:
            copies.wait(event)
        finally:
            segment.end_copies()
        lost: MoonpoolError | None = None
        try:
            segment.remote.check_owner_stayed(memory)
        except REPLICA_ERRORS as error:
            lost = error
        for each in replicas:
            try:
                if lost is not None:
                    raise lost
                if fence is not None:
                    fence.confirm(each.offset, each.span.nbytes, each.place.generation)
            except REPLICA_ERRORS as error:
                each.session._drop_replica(each.place, error)

    def _write_staged(self, remote: RemoteSegment, replicas: Sequence[_Replica]) -> None:
        """Write by way of main memory."""
        lost: MoonpoolError | None = None
        for bundle in bundles(replicas, lambda each: each.span.nbytes):
            outcomes: Sequence[MoonpoolError | None] = [lost] * len(bundle)
            if lost is None:
                try:
                    views = in_main_memory([each.span for each in bundle], self._tools.timeout_s)
                    items = [
                        (each.offset, [view], each.place.generation) for each, view in zip(bundle, views, strict=True)
                    ]
                    outcomes = remote.write_each(items, timeout_s=self._tools.timeout_s)
                except REPLICA_ERRORS as error:
                    outcomes = [error] * len(bundle)
                    lost = error if isinstance(error, Unavailable) else None
            for each, outcome in zip(bundle, outcomes, strict=True):
                if outcome is not None:
                    each.session._drop_replica(each.place, outcome)
