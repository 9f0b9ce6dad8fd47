"""Storing many objects at once: one PutStart, all bytes and headers, one PutEnd per bundle.

Every granted put is ended or given back, whatever fails. Mapped memory is written with one copy per replica, header and
pieces together. Other segments are written on threads of the transfer engine while the caller's thread computes the
checksums of the next objects. These are direct calls: with TransferEngine.submit() a batch over loopback tcp took 5 to
10 % longer (64 objects of 1 MiB, or 1,000 of 4 KiB; two quiet cores).

Most small objects of a batch are neighbours (object_runs.py), and one copy writes them all. A single small object goes
to space that was granted ahead (small_put.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence

from moonpool.base.checksum import crc32c
from moonpool.base.errors import MoonpoolError, Unauthorized, Unavailable
from moonpool.base.object_header import ObjectKind, header_nbytes, pack_header
from moonpool.store.client.cuts import gather
from moonpool.store.client.object_runs import ObjectRun, ObjectRuns
from moonpool.store.client.put_calls import GrantedPuts, PutCalls
from moonpool.store.client.put_request import MAX_BATCH_NBYTES, Put, bundle_puts
from moonpool.store.client.put_tools import REPLICA_ERRORS, PutTools
from moonpool.store.client.small_put import SmallPuts
from moonpool.store.client.transfer_window import (
    BUNDLE_ITEMS,
    BUNDLE_NBYTES,
    FinishedBundle,
    TransferWindow,
    for_each,
)
from moonpool.store.messages import GRANULE_NBYTES, Placement, num_granules
from moonpool.transfer import RemoteSegment
from moonpool.transfer.memory.buffers import as_bytes_view
from moonpool.transfer.transports.mapped import MappedRemote, MappedWriter

SMALL_NBYTES = 32 * 1024  # larger objects gain nothing: the copy itself takes longer than the work around it
OPAQUE_PIECE_NBYTES = 1024 * 1024
_FIRST_BUNDLE_NBYTES = 1024 * 1024  # the first remote bundle is small, so that the network has work early
_MAPPED_BATCH_NBYTES = 64 * 1024 * 1024
_STEP_NBYTES = 256 * 1024  # checksum this much, then look whether the master has answered
_OPAQUE = ObjectKind.OPAQUE  # looking an attribute up takes longer than using it


class PutBatches:
    """put_many() of a client. Thread-safe."""

    def __init__(self, tools: PutTools) -> None:
        self._calls, self._tools = tools.calls, tools
        self._small = SmallPuts(tools)

    def put_one(self, put: Put) -> MoonpoolError | None:
        stored = self._put_small(put)
        return self._put_all([put])[0] if stored is None else stored[0]

    def put_many(self, puts: Sequence[Put]) -> list[MoonpoolError | None]:
        return [self.put_one(puts[0])] if len(puts) == 1 else self._put_all(puts)

    def _put_all(self, puts: Sequence[Put]) -> list[MoonpoolError | None]:
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
            for positions in bundle_puts(puts, sizes, wanted, self._max_nbytes())
        ]
        for number, each in enumerate(bundles, 1):
            following = bundles[number].checksums.compute_some if number < len(bundles) else None
            done = self._put_bundle(each, following)
            for position, outcome in zip(each.positions, done, strict=True):
                outcomes[position] = outcome
        return outcomes

    def _put_small(self, put: Put) -> tuple[MoonpoolError | None] | None:
        """SmallPuts.put(); None also for a put that is wrong."""
        try:
            parts = _pieces_of(put)
        except MoonpoolError:
            return None
        nbytes = parts[0].nbytes if len(parts) == 1 else sum([part.nbytes for part in parts])
        return self._small.put(put, parts, header_nbytes(len(put.key), len(parts)) + nbytes)

    def _max_nbytes(self) -> int:
        """Return the size of a bundle. Puts to mapped memory go in smaller ones: the client writes one while the master
        answers for another. Larger ones keep sockets busy.
        """
        try:
            return _MAPPED_BATCH_NBYTES if self._tools.sessions.session() else MAX_BATCH_NBYTES
        except MoonpoolError:  # each bundle will fail with that error
            return MAX_BATCH_NBYTES

    def _put_bundle(self, bundle: _Bundle, meanwhile: Callable[[], bool] | None) -> list[MoonpoolError | None]:
        puts = bundle.puts
        try:
            granted = self._calls.start(puts, bundle.sizes, bundle.checksums.compute_some)
        except MoonpoolError as error:
            return [error] * len(puts)
        writer = _BundleWriter(granted, bundle.checksums, self._tools, self._calls)
        try:
            with TransferWindow[_RemoteBundle](self._tools.engine) as window:
                writer.write(puts, bundle.pieces, window)
        except BaseException:
            granted.unsettled.update(range(len(puts)))  # a write may still arrive
            self._calls.revoke(granted, range(len(puts)))
            raise
        self._calls.end(granted, meanwhile)
        if puts[0].options.num_replicas > 1:  # the same for all of a bundle
            for position in granted.open():
                num_stored = len(granted.replicas[position]) - len(granted.failed.get(position, ()))
                granted.errors[position] = self._tools.counters.check_replicas(num_stored, puts[0].options.num_replicas)
        return granted.errors


class _Bundle:
    """Puts that share one PutStart and one PutEnd."""

    def __init__(self, positions: list[int], puts: list[Put], pieces: list[list[memoryview]], sizes: list[int]) -> None:
        self.positions, self.puts, self.pieces, self.sizes = positions, puts, pieces, sizes
        self.checksums = _Checksums(pieces)


class _Checksums:
    """Checksums of the pieces of one bundle, by position. The first ones are computed while the master answers."""

    def __init__(self, pieces: Sequence[list[memoryview]]) -> None:
        self._pieces = pieces
        self._known: list[list[int]] = []

    def compute_some(self) -> bool:
        """Compute a few more. Return True if some are left."""
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
    return [crc32c(part) for part in parts]


class _BundleWriter:
    """Writes the bytes of one bundle."""

    def __init__(self, granted: GrantedPuts, checksums: _Checksums, tools: PutTools, calls: PutCalls) -> None:
        self._granted, self._checksums, self._tools, self._calls = granted, checksums, tools, calls
        self._puts: Sequence[Put] = ()
        self._pieces: Sequence[list[memoryview]] = ()
        self._failed: list[tuple[int, Placement, MoonpoolError]] = []  # writes to mapped memory that failed
        self._bundles: dict[str, _RemoteBundle] = {}  # by segment: not submitted yet
        self._bundle_nbytes = _FIRST_BUNDLE_NBYTES
        self._num_started = 0  # remote bundles
        self._is_alone = False  # there is one put, with one replica: a thread of the engine would have nothing to gain
        self._remotes: dict[str, RemoteSegment | MappedWriter | MoonpoolError] = {}
        self._renew_at_s = tools.clock.now_s() + tools.renew_after_s

    def write(
        self, puts: Sequence[Put], pieces: Sequence[list[memoryview]], window: TransferWindow[_RemoteBundle]
    ) -> None:
        """Write every replica. Failures are recorded in the GrantedPuts."""
        self._puts, self._pieces = puts, pieces
        mapped: list[int] = []
        runs = ObjectRuns()
        nbytes = mapped_nbytes = 0
        positions = self._granted.open()
        self._is_alone = len(positions) == 1 and len(self._granted.replicas[positions[0]]) == 1
        for position in positions:
            parts, places = pieces[position], self._granted.replicas[position]
            data_nbytes = parts[0].nbytes if len(parts) == 1 else sum([part.nbytes for part in parts])
            nbytes += data_nbytes
            if not all([isinstance(self._remote(place), MappedWriter) for place in places]):  # noqa: C419 - quicker
                self._write_replicas(position, window)
            elif data_nbytes <= SMALL_NBYTES and len(places) == 1:
                runs.add(position, places[0], header_nbytes(len(puts[position].key), len(parts)) + data_nbytes)
            else:
                mapped.append(position)
                mapped_nbytes += data_nbytes
        for rest in self._bundles.values():
            # This thread writes a bundle that is alone, unless it has something else to write.
            is_only = not self._num_started and len(self._bundles) == 1 and not mapped and not runs
            self._collect(window.add(rest.write, len(rest.replicas), rest, is_only=is_only))
        for run in runs.all():
            self._write_run(run)
        for_each(self._tools.engine, mapped, mapped_nbytes, self._write_mapped)
        for position, placement, error in self._failed:
            self._fail(position, placement, error)
        self._finish_mapped()
        self._collect(window.wait_all())
        self._tools.counters.add("bytes_written", nbytes)

    def _views(self, position: int) -> list[memoryview]:
        """Return the object's header and pieces."""
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
        """Write neighbouring small objects with one copy."""
        if len(run.positions) == 1:
            self._write_mapped(run.positions[0])
            return
        remote = self._remotes[run.segment]
        assert isinstance(remote, MappedWriter), "only objects in mapped segments come here"
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
        if not remote.write_run(run.offset, parts, stamps):
            for position in run.positions:
                self._write_mapped(position)

    def _write_mapped(self, position: int) -> None:
        """Write all replicas of one object. Any thread may call this."""
        views = self._views(position)
        for placement in self._granted.replicas[position]:
            remote = self._remotes[placement.segment]
            assert isinstance(remote, MappedWriter), "only objects in mapped segments come here"
            try:
                remote.write(placement.offset, views, placement.generation)
            except REPLICA_ERRORS as error:
                self._failed.append((position, placement, error))

    def _write_replicas(self, position: int, window: TransferWindow[_RemoteBundle]) -> None:
        views = self._views(position)
        for placement in self._granted.replicas[position]:
            remote = self._remote(placement)
            if isinstance(remote, MoonpoolError):
                self._granted.fail(position, placement, remote)
            elif isinstance(remote, MappedWriter):
                try:
                    remote.write(placement.offset, views, placement.generation)
                except REPLICA_ERRORS as error:
                    self._fail(position, placement, error)
            else:
                self._write_remote(position, placement, remote, views, window)

    def _write_remote(
        self,
        position: int,
        placement: Placement,
        remote: RemoteSegment,
        views: list[memoryview],
        window: TransferWindow[_RemoteBundle],
    ) -> None:
        bundle = self._bundles.get(placement.segment)
        if bundle is None:
            bundle = self._bundles[placement.segment] = _RemoteBundle(
                remote, self._tools.timeout_s, self._bundle_nbytes
            )
            self._bundle_nbytes = min(2 * self._bundle_nbytes, BUNDLE_NBYTES)
        if bundle.add(position, placement, views) and not self._is_alone:
            del self._bundles[placement.segment]
            self._num_started += 1
            self._collect(window.add(bundle.write, len(bundle.replicas), bundle))
            self._renew_if_due()

    def _finish_mapped(self) -> None:
        """Fail the writes to segments whose node left meanwhile."""
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
            remote = self._tools.sessions.open_for_writing(placement, self._granted.session)
            return remote.writer(self._tools.timeout_s) if isinstance(remote, MappedRemote) else remote
        except REPLICA_ERRORS as error:
            if isinstance(error, Unauthorized):
                self._tools.counters.add_refusal(error)
            return error

    def _collect(self, finished: Iterable[FinishedBundle[_RemoteBundle]]) -> None:
        for bundle, errors in finished:
            for (position, placement), error in zip(bundle.replicas, errors, strict=True):
                if error is not None:
                    self._fail(position, placement, error)

    def _fail(self, position: int, placement: Placement, error: MoonpoolError) -> None:
        self._granted.fail(position, placement, error)
        if isinstance(error, Unavailable):
            self._remotes[placement.segment] = error  # the other objects do not try this segment again

    def _renew_if_due(self) -> None:
        """Renew the puts on a slow network, long before the master would discard them."""
        if self._tools.clock.now_s() >= self._renew_at_s:
            self._renew_at_s += self._tools.renew_after_s
            going_on = self._granted.open()
            with contextlib.suppress(MoonpoolError):  # the PutEnd of a discarded put is refused
                self._calls.renew(
                    [self._granted.keys[position] for position in going_on],
                    [self._granted.generations[position] for position in going_on],
                )


class _RemoteBundle:
    """Replicas in one segment that is not mapped here, written together."""

    def __init__(self, remote: RemoteSegment, timeout_s: float, full_nbytes: int) -> None:
        self._remote, self._timeout_s, self._full_nbytes = remote, timeout_s, full_nbytes
        self._nbytes = 0
        self._items: list[tuple[int, list[memoryview], int]] = []
        self.replicas: list[tuple[int, Placement]] = []  # position of the object, and place

    def add(self, position: int, placement: Placement, views: list[memoryview]) -> bool:
        """Add a replica. Return True when the bundle is large enough to write."""
        self.replicas.append((position, placement))
        self._items.append((placement.offset, views, placement.generation))
        self._nbytes += sum([view.nbytes for view in views])
        return self._nbytes >= self._full_nbytes or len(self._items) >= BUNDLE_ITEMS

    def write(self) -> list[MoonpoolError | None]:
        """Write all replicas and return the error of each. Raise when the owner is out of reach."""
        return self._remote.write_each(self._items, timeout_s=self._timeout_s)


def _pieces_of(put: Put) -> list[memoryview]:
    views = [as_bytes_view(buffer, False) for buffer in put.buffers]
    return gather(views, OPAQUE_PIECE_NBYTES) if put.kind is _OPAQUE else views
