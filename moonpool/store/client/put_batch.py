"""Storing many objects at once: one PutStart, all bytes and headers, one PutEnd per bundle.

Nothing leaks: what was granted is ended or given back, whatever fails. Memory of this machine is written by the
caller's thread, one copy per replica with the header in front; other memory by the client's crew (flight.py), while the
caller's thread computes the checksums of what goes next.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence

import google_crc32c
import numpy as np

from moonpool.base.errors import MoonpoolError, NotFound, StaleGeneration, Unauthorized, Unavailable
from moonpool.base.object_header import ObjectKind
from moonpool.store.client.cuts import gather
from moonpool.store.client.flight import BUNDLE_ITEMS, BUNDLE_NBYTES, Flight, FlightCrew, Landed
from moonpool.store.client.headers import pack_header, padded_nbytes
from moonpool.store.client.put_calls import Granted, PutCalls
from moonpool.store.client.put_request import Put, bundle
from moonpool.store.client.put_session import REPLICA_ERRORS, PutTools
from moonpool.store.messages import Placement
from moonpool.transfer.buffers import as_bytes_view
from moonpool.transfer.transports.base import RemoteSegment
from moonpool.transfer.transports.mapped import MappedRemote, MappedWriter

OPAQUE_PIECE_NBYTES = 1024 * 1024
_OPAQUE, _BYTE = ObjectKind.OPAQUE, np.uint8  # looking them up takes longer than what is done with them
_extend, _bytes_of = google_crc32c.extend, np.frombuffer


class PutBatches:
    """put_many() of a client. Thread-safe."""

    def __init__(self, crew: FlightCrew, calls: PutCalls, tools: PutTools) -> None:
        self._crew, self._calls, self._tools = crew, calls, tools

    def put_many(self, puts: Sequence[Put]) -> list[MoonpoolError | None]:
        outcomes: list[MoonpoolError | None] = [None] * len(puts)
        pieces: list[list[memoryview]] = []
        sizes: list[int] = []
        for position, put in enumerate(puts):
            try:
                parts = _pieces_of(put)
            except MoonpoolError as error:
                outcomes[position], parts = error, []
            pieces.append(parts)
            data_nbytes = parts[0].nbytes if len(parts) == 1 else sum([part.nbytes for part in parts])
            sizes.append(padded_nbytes(len(put.key), len(parts)) + data_nbytes)
        wanted = [position for position, error in enumerate(outcomes) if error is None]
        for positions in bundle(puts, sizes, wanted):
            chosen = [puts[position] for position in positions]
            part = [pieces[position] for position in positions]
            done = self._put_bundle(chosen, part, [sizes[position] for position in positions])
            for position, outcome in zip(positions, done, strict=True):
                outcomes[position] = outcome
        return outcomes

    def _put_bundle(
        self, puts: Sequence[Put], pieces: Sequence[list[memoryview]], sizes: Sequence[int]
    ) -> list[MoonpoolError | None]:
        try:
            granted = self._calls.start(puts, sizes)
        except MoonpoolError as error:
            return [error] * len(puts)
        writing = _Writing(granted, self._tools, self._calls)
        try:
            with Flight[_FarBundle](self._crew) as flight:
                writing.write(puts, pieces, flight)
        except BaseException:
            granted.unsettled.update(range(len(puts)))  # whatever it was, it may have left something on its way
            self._calls.revoke(granted, range(len(puts)))
            raise
        self._calls.end(granted)
        return granted.errors


class _Writing:
    """The bytes of one bundle on their way."""

    def __init__(self, granted: Granted, tools: PutTools, calls: PutCalls) -> None:
        self._granted, self._tools, self._calls = granted, tools, calls
        self._far: dict[str, _FarBundle] = {}  # by segment: what is not under way yet
        self._remotes: dict[str, RemoteSegment | MappedWriter | MoonpoolError] = {}
        self._renew_at_s = tools.clock.now_s() + tools.renew_after_s

    def write(self, puts: Sequence[Put], pieces: Sequence[list[memoryview]], flight: Flight[_FarBundle]) -> None:
        """Every replica, or a note why not."""
        nbytes = 0
        generations, replicas, write_replica = self._granted.generations, self._granted.replicas, self._write_replica
        for position in self._granted.open():
            put, parts = puts[position], pieces[position]
            sizes = [part.nbytes for part in parts]
            checksums = [_extend(0, _bytes_of(part, _BYTE)) for part in parts]
            header = pack_header(
                put.key,
                generations[position],
                sizes,
                checksums,
                kind=put.kind,
                identity=put.identity,
                valid_tokens=put.valid_tokens,
            )
            views = [memoryview(header), *parts]
            for placement in replicas[position]:
                write_replica(position, placement, views, flight)
            nbytes += sum(sizes)
        for rest in self._far.values():
            self._take(flight.add(rest.write, rest))
        self._finish_near()
        self._take(flight.land_all())
        self._tools.counters.add("bytes_written", nbytes)

    def _write_replica(
        self, position: int, placement: Placement, views: list[memoryview], flight: Flight[_FarBundle]
    ) -> None:
        remote = self._remotes.get(placement.segment)
        if remote is None:
            remote = self._remotes[placement.segment] = self._open(placement)
        if isinstance(remote, MoonpoolError):
            self._granted.fail(position, placement, remote)
        elif isinstance(remote, MappedWriter):
            try:
                remote.write(placement.offset, views, placement.generation)
            except REPLICA_ERRORS as error:
                self._note(position, placement, error)
        else:
            far = self._far.get(placement.segment)
            if far is None:
                far = self._far[placement.segment] = _FarBundle(remote, self._tools.timeout_s)
            if far.add(position, placement, views):
                del self._far[placement.segment]
                self._take(flight.add(far.write, far))
                self._stay()

    def _finish_near(self) -> None:
        """A node that left while its memory was written took everything with it."""
        for segment, remote in self._remotes.items():
            if isinstance(remote, MappedWriter):
                try:
                    remote.finish()
                except REPLICA_ERRORS as error:
                    for position in self._granted.open():
                        for placement in self._granted.replicas[position]:
                            if placement.segment == segment not in self._granted.failed.get(position, ()):
                                self._granted.fail(position, placement, error)

    def _open(self, placement: Placement) -> RemoteSegment | MappedWriter | MoonpoolError:
        try:
            remote = self._tools.holder.open_for_writing(placement, self._granted.session)
            return remote.writer(self._tools.timeout_s) if isinstance(remote, MappedRemote) else remote
        except REPLICA_ERRORS as error:
            if isinstance(error, Unauthorized):
                self._tools.counters.add_refusal(error)
            return error

    def _take(self, landed: Iterable[Landed[_FarBundle]]) -> None:
        for far, lost in landed:
            for position, placement, error in far.outcomes(lost):
                if error is not None:
                    self._note(position, placement, error)

    def _note(self, position: int, placement: Placement, error: MoonpoolError) -> None:
        self._granted.fail(position, placement, error)
        if isinstance(error, Unavailable):
            self._remotes[placement.segment] = error  # not asked again for each of the other objects

    def _stay(self) -> None:
        """On a slow network the bundle is told to go on, long before it would be discarded."""
        if self._tools.clock.now_s() >= self._renew_at_s:
            self._renew_at_s += self._tools.renew_after_s
            going_on = self._granted.open()
            with contextlib.suppress(MoonpoolError):  # those that are gone by now will be refused when they end
                self._calls.renew(
                    [self._granted.keys[position] for position in going_on],
                    [self._granted.generations[position] for position in going_on],
                )


class _FarBundle:
    """Replicas in one segment that is not mapped here, written one after the other by a thread of the crew."""

    def __init__(self, remote: RemoteSegment, timeout_s: float) -> None:
        self._remote, self._timeout_s = remote, timeout_s
        self._replicas: list[tuple[int, Placement, list[memoryview]]] = []
        self._nbytes = 0
        self._errors: list[MoonpoolError | None] = []

    def add(self, position: int, placement: Placement, views: list[memoryview]) -> bool:
        """True when it is large enough to go."""
        self._replicas.append((position, placement, views))
        self._nbytes += sum([view.nbytes for view in views])
        return self._nbytes >= BUNDLE_NBYTES or len(self._replicas) >= BUNDLE_ITEMS

    def write(self) -> None:
        """Raises when the owner is out of reach; what is wrong with one replica is noted."""
        for _, placement, views in self._replicas:
            try:
                self._remote.write_from(
                    placement.offset, views, generation=placement.generation, timeout_s=self._timeout_s
                )
                self._errors.append(None)
            except (NotFound, StaleGeneration, Unauthorized) as error:
                self._errors.append(error)

    def outcomes(self, lost: MoonpoolError | None) -> Iterator[tuple[int, Placement, MoonpoolError | None]]:
        """What became of each; `lost` is what ended the bundle early, if anything did."""
        for index, (position, placement, _) in enumerate(self._replicas):
            yield position, placement, self._errors[index] if index < len(self._errors) else lost


def _pieces_of(put: Put) -> list[memoryview]:
    views = [as_bytes_view(buffer, False) for buffer in put.buffers]
    return gather(views, OPAQUE_PIECE_NBYTES) if put.kind is _OPAQUE else views
