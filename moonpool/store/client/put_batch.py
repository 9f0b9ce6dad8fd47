"""Storing many objects at once: one PutStart, all bytes and headers, one PutEnd per bundle.

Nothing leaks: what was granted is ended or given back, whatever fails. Memory of this machine is written here
(side_by_side.py), one copy per replica with the header in front; other memory by the client's crew (flight.py), while
the caller's thread computes the checksums of what goes next.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from moonpool.base.checksum import crc32c_of_array
from moonpool.base.errors import MoonpoolError, Unauthorized, Unavailable
from moonpool.base.object_header import ObjectKind, header_nbytes, pack_header
from moonpool.store.client.cuts import gather
from moonpool.store.client.put_calls import GrantedPuts, PutCalls
from moonpool.store.client.put_request import MAX_BATCH_NBYTES, Put, bundle
from moonpool.store.client.put_session import REPLICA_ERRORS, PutTools
from moonpool.store.client.runs import SMALL_NBYTES, ObjectRun, ObjectRuns
from moonpool.store.client.side_by_side import side_by_side
from moonpool.store.client.transfer_window import (
    BUNDLE_ITEMS,
    BUNDLE_NBYTES,
    FinishedTransfer,
    TransferThreads,
    TransferWindow,
)
from moonpool.store.messages import GRANULE_NBYTES, Placement, num_granules
from moonpool.transfer.memory.buffers import as_bytes_view
from moonpool.transfer.transports.base import RemoteSegment
from moonpool.transfer.transports.mapped import MappedRemote, MappedWriter

OPAQUE_PIECE_NBYTES = 1024 * 1024
_FIRST_FAR_NBYTES = 1024 * 1024  # of the first bundle for a network, which should not wait for a large one
_NEAR_NBYTES = 64 * 1024 * 1024
_STEP_NBYTES = 256 * 1024  # checksummed before it is looked whether the master has answered
_OPAQUE, _BYTE = ObjectKind.OPAQUE, np.uint8  # looking them up takes longer than what is done with them
_bytes_of = np.frombuffer


class PutBatches:
    """put_many() of a client. Thread-safe."""

    def __init__(self, crew: TransferThreads, calls: PutCalls, tools: PutTools) -> None:
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
            sizes.append(header_nbytes(len(put.key), len(parts)) + data_nbytes)
        wanted = [position for position, error in enumerate(outcomes) if error is None]
        bundles = [
            _Bundle(
                positions,
                [puts[position] for position in positions],
                [pieces[position] for position in positions],
                [sizes[position] for position in positions],
            )
            for positions in bundle(puts, sizes, wanted, self._max_nbytes())
        ]
        for number, each in enumerate(bundles, 1):
            following = bundles[number].checksums.take_some if number < len(bundles) else None
            done = self._put_bundle(each, following)
            for position, outcome in zip(each.positions, done, strict=True):
                outcomes[position] = outcome
        return outcomes

    def _max_nbytes(self) -> int:
        """What is copied to this machine's memory goes in smaller bundles: one is worked on while the master is told
        of another. Sockets are kept busy by larger ones.
        """
        try:
            return _NEAR_NBYTES if self._tools.holder.session() else MAX_BATCH_NBYTES
        except MoonpoolError:  # nobody answers, as each bundle will be told
            return MAX_BATCH_NBYTES

    def _put_bundle(self, bundle: _Bundle, meanwhile: Callable[[], bool] | None) -> list[MoonpoolError | None]:
        puts = bundle.puts
        try:
            granted = self._calls.start(puts, bundle.sizes, bundle.checksums.take_some)
        except MoonpoolError as error:
            return [error] * len(puts)
        writing = _Writing(granted, bundle.checksums, self._tools, self._calls, self._crew)
        try:
            with TransferWindow[_FarBundle](self._crew) as flight:
                writing.write(puts, bundle.pieces, flight)
        except BaseException:
            granted.unsettled.update(range(len(puts)))  # whatever it was, it may have left something on its way
            self._calls.revoke(granted, range(len(puts)))
            raise
        self._calls.end(granted, meanwhile)
        if puts[0].options.num_replicas > 1:  # the same for all of a bundle
            for position in granted.open():
                num_stored = len(granted.replicas[position]) - len(granted.failed.get(position, ()))
                granted.errors[position] = self._tools.counters.note_replicas(num_stored, puts[0].options.num_replicas)
        return granted.errors


class _Bundle:
    """Puts that are begun and ended together."""

    def __init__(self, positions: list[int], puts: list[Put], pieces: list[list[memoryview]], sizes: list[int]) -> None:
        self.positions, self.puts, self.pieces, self.sizes = positions, puts, pieces, sizes
        self.checksums = _Checksums(pieces)


class _Checksums:
    """Of the pieces of one bundle, by position: the first ones in the time that the master takes for its answers."""

    def __init__(self, pieces: Sequence[list[memoryview]]) -> None:
        self._pieces = pieces
        self._known: list[list[int]] = []

    def take_some(self) -> bool:
        """A few more. True when there is more to do."""
        nbytes = 0
        while len(self._known) < len(self._pieces):
            parts = self._pieces[len(self._known)]
            nbytes += sum([part.nbytes for part in parts])
            self._known.append(_checksums(parts))
            if nbytes >= _STEP_NBYTES:
                return True
        return False

    def of(self, position: int) -> list[int]:
        known = self._known
        return known[position] if position < len(known) else _checksums(self._pieces[position])


def _checksums(parts: list[memoryview]) -> list[int]:
    return [crc32c_of_array(_bytes_of(part, _BYTE)) for part in parts]


class _Writing:
    """The bytes of one bundle on their way."""

    def __init__(
        self, granted: GrantedPuts, checksums: _Checksums, tools: PutTools, calls: PutCalls, crew: TransferThreads
    ) -> None:
        self._granted, self._checksums, self._tools, self._calls = granted, checksums, tools, calls
        self._crew = crew
        self._puts: Sequence[Put] = ()
        self._pieces: Sequence[list[memoryview]] = ()
        self._noted: list[tuple[int, Placement, MoonpoolError]] = []  # what went wrong near
        self._far: dict[str, _FarBundle] = {}  # by segment: what is not under way yet
        self._far_nbytes = _FIRST_FAR_NBYTES
        self._remotes: dict[str, RemoteSegment | MappedWriter | MoonpoolError] = {}
        self._renew_at_s = tools.clock.now_s() + tools.renew_after_s

    def write(
        self, puts: Sequence[Put], pieces: Sequence[list[memoryview]], flight: TransferWindow[_FarBundle]
    ) -> None:
        """Every replica, or a note why not."""
        self._puts, self._pieces = puts, pieces
        near: list[int] = []
        runs = ObjectRuns()
        nbytes = near_nbytes = 0
        for position in self._granted.open():
            parts, places = pieces[position], self._granted.replicas[position]
            data_nbytes = parts[0].nbytes if len(parts) == 1 else sum([part.nbytes for part in parts])
            nbytes += data_nbytes
            if not all([isinstance(self._remote(place), MappedWriter) for place in places]):  # noqa: C419 - quicker
                self._write_anywhere(position, flight)
            elif data_nbytes <= SMALL_NBYTES and len(places) == 1:
                runs.add(position, places[0], header_nbytes(len(puts[position].key), len(parts)) + data_nbytes)
            else:
                near.append(position)
                near_nbytes += data_nbytes
        for rest in self._far.values():
            self._take(flight.add(rest.write, rest))
        for run in runs.all():
            self._write_run(run)
        side_by_side(self._crew, near, near_nbytes, self._write_near)
        for position, placement, error in self._noted:
            self._note(position, placement, error)
        self._finish_near()
        self._take(flight.land_all())
        self._tools.counters.add("bytes_written", nbytes)

    def _views(self, position: int) -> list[memoryview]:
        """The object as it is written: its header and its pieces."""
        put, parts = self._puts[position], self._pieces[position]
        header = pack_header(
            put.key,
            self._granted.generations[position],
            [part.nbytes for part in parts],
            self._checksums.of(position),
            kind=put.kind,
            identity=put.identity,
            valid_tokens=put.valid_tokens,
        )
        return [memoryview(header), *parts]

    def _remote(self, placement: Placement) -> RemoteSegment | MappedWriter | MoonpoolError:
        remote = self._remotes.get(placement.segment)
        if remote is None:
            remote = self._remotes[placement.segment] = self._open(placement)
        return remote

    def _write_run(self, run: ObjectRun) -> None:
        """Small objects that lie side by side."""
        remote = self._remotes[run.segment]
        assert isinstance(remote, MappedWriter), "only such objects are near"
        parts: list[bytes | memoryview] = []
        stamps: list[tuple[int, int]] = []
        for position in run.positions:
            views = self._views(position)
            nbytes = sum([view.nbytes for view in views])
            granules = num_granules(nbytes)
            parts += views
            if granules * GRANULE_NBYTES > nbytes:
                parts.append(bytes(granules * GRANULE_NBYTES - nbytes))
            stamps.append((self._granted.generations[position], granules))
        if len(stamps) == 1 or not remote.write_run(run.offset, parts, stamps):
            for position in run.positions:
                self._write_near(position)

    def _write_near(self, position: int) -> None:
        """All replicas of one object, from any thread."""
        views = self._views(position)
        for placement in self._granted.replicas[position]:
            remote = self._remotes[placement.segment]
            assert isinstance(remote, MappedWriter), "only such objects are near"
            try:
                remote.write(placement.offset, views, placement.generation)
            except REPLICA_ERRORS as error:
                self._noted.append((position, placement, error))

    def _write_anywhere(self, position: int, flight: TransferWindow[_FarBundle]) -> None:
        views = self._views(position)
        for placement in self._granted.replicas[position]:
            remote = self._remote(placement)
            if isinstance(remote, MoonpoolError):
                self._granted.fail(position, placement, remote)
            elif isinstance(remote, MappedWriter):
                try:
                    remote.write(placement.offset, views, placement.generation)
                except REPLICA_ERRORS as error:
                    self._note(position, placement, error)
            else:
                self._write_far(position, placement, remote, views, flight)

    def _write_far(
        self,
        position: int,
        placement: Placement,
        remote: RemoteSegment,
        views: list[memoryview],
        flight: TransferWindow[_FarBundle],
    ) -> None:
        far = self._far.get(placement.segment)
        if far is None:
            far = self._far[placement.segment] = _FarBundle(remote, self._tools.timeout_s, self._far_nbytes)
            self._far_nbytes = min(2 * self._far_nbytes, BUNDLE_NBYTES)
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

    def _take(self, landed: Iterable[FinishedTransfer[_FarBundle]]) -> None:
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
    """Replicas in one segment that is not mapped here, written in one go by a thread of the crew."""

    def __init__(self, remote: RemoteSegment, timeout_s: float, full_nbytes: int) -> None:
        self._remote, self._timeout_s, self._full_nbytes = remote, timeout_s, full_nbytes
        self._replicas: list[tuple[int, Placement, list[memoryview]]] = []
        self._nbytes = 0
        self._errors: list[MoonpoolError | None] = []

    def add(self, position: int, placement: Placement, views: list[memoryview]) -> bool:
        """True when it is large enough to go."""
        self._replicas.append((position, placement, views))
        self._nbytes += sum([view.nbytes for view in views])
        return self._nbytes >= self._full_nbytes or len(self._replicas) >= BUNDLE_ITEMS

    def write(self) -> None:
        """Raises when the owner is out of reach; what is wrong with one replica is noted."""
        items = [(placement.offset, views, placement.generation) for _, placement, views in self._replicas]
        self._errors = self._remote.write_each(items, timeout_s=self._timeout_s)

    def outcomes(self, lost: MoonpoolError | None) -> Iterator[tuple[int, Placement, MoonpoolError | None]]:
        """What became of each; `lost` is what ended the bundle early, if anything did."""
        for index, (position, placement, _) in enumerate(self._replicas):
            yield position, placement, self._errors[index] if index < len(self._errors) else lost


def _pieces_of(put: Put) -> list[memoryview]:
    views = [as_bytes_view(buffer, False) for buffer in put.buffers]
    return gather(views, OPAQUE_PIECE_NBYTES) if put.kind is _OPAQUE else views
