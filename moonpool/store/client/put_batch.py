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

import numpy as np

from moonpool.base.errors import MoonpoolError, Unauthorized, Unavailable
from moonpool.base.object_header import ObjectKind, header_nbytes, pack_single
from moonpool.store.client.bundle_checksums import BundleChecksums
from moonpool.store.client.cuts import gather
from moonpool.store.client.object_runs import neighbours
from moonpool.store.client.put_calls import GrantedPuts, PutCalls
from moonpool.store.client.put_request import MAX_BATCH_NBYTES, Put, bundle_puts, object_views
from moonpool.store.client.put_tools import REPLICA_ERRORS, PutTools
from moonpool.store.client.small_put import SmallPuts
from moonpool.store.client.transfer_window import (
    BUNDLE_ITEMS,
    BUNDLE_NBYTES,
    MIN_PARALLEL_NBYTES,
    FinishedBundle,
    TransferWindow,
    copy_shared,
    for_each,
)
from moonpool.store.messages import GRANULE_NBYTES, Placement
from moonpool.transfer import RemoteSegment
from moonpool.transfer.memory.buffers import as_bytes_view
from moonpool.transfer.transports.mapped import MappedRemote, MappedWriter

SMALL_NBYTES = 32 * 1024  # larger objects gain nothing: the copy itself takes longer than the work around it
OPAQUE_PIECE_NBYTES = 1024 * 1024
_FIRST_BUNDLE_NBYTES = 1024 * 1024  # the first remote bundle is small, so that the network has work early
_MAPPED_BATCH_NBYTES = 64 * 1024 * 1024
_ZEROS = bytes(GRANULE_NBYTES)
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
        writer = _BundleWriter(granted, bundle, self._tools, self._calls)
        try:
            with TransferWindow[_RemoteBundle](self._tools.engine) as window:
                writer.write(window)
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
        self.positions, self.puts, self.pieces = positions, puts, pieces
        self.sizes = sizes  # of each object, with its header
        self.checksums = BundleChecksums(pieces)


class _BundleWriter:
    """Writes the bytes of one bundle."""

    def __init__(self, granted: GrantedPuts, bundle: _Bundle, tools: PutTools, calls: PutCalls) -> None:
        self._granted, self._tools, self._calls = granted, tools, calls
        self._puts, self._pieces, self._sizes = bundle.puts, bundle.pieces, bundle.sizes
        self._checksums = bundle.checksums
        self._failed: list[tuple[int, Placement, MoonpoolError]] = []  # writes to mapped memory that failed
        self._bundles: dict[str, _RemoteBundle] = {}  # by segment: not submitted yet
        self._bundle_nbytes = _FIRST_BUNDLE_NBYTES
        self._num_started = 0  # remote bundles
        self._is_alone = False  # there is one put, with one replica
        self._remotes: dict[str, RemoteSegment | MappedWriter | MoonpoolError] = {}
        self._renew_at_s = tools.clock.now_s() + tools.renew_after_s

    def write(self, window: TransferWindow[_RemoteBundle]) -> None:
        """Write every replica. Failures are recorded in the GrantedPuts."""
        pieces = self._pieces
        mapped: list[int] = []
        small: list[int] = []
        nbytes = mapped_nbytes = 0
        positions = self._granted.open()
        self._is_alone = len(positions) == 1 and len(self._granted.replicas[positions[0]]) == 1
        if self._are_small_in_one(positions):
            nbytes, small, positions = sum([pieces[position][0].nbytes for position in positions]), positions, []
        for position in positions:
            parts, places = pieces[position], self._granted.replicas[position]
            data_nbytes = parts[0].nbytes if len(parts) == 1 else sum([part.nbytes for part in parts])
            nbytes += data_nbytes
            if not all([isinstance(self._remote(place), MappedWriter) for place in places]):  # noqa: C419 - quicker
                self._write_replicas(position, window)
            elif data_nbytes <= SMALL_NBYTES and len(places) == 1:
                small.append(position)
            else:
                mapped.append(position)
                mapped_nbytes += data_nbytes
        for rest in self._bundles.values():
            # This thread writes a bundle that is alone, unless it has something else to write.
            is_only = not self._num_started and len(self._bundles) == 1 and not mapped and not small
            self._collect(window.add(rest.write, len(rest.replicas), rest, is_only=is_only))
        self._write_small(small)
        for_each(self._tools.engine, mapped, mapped_nbytes, self._write_mapped)
        for position, placement, error in self._failed:
            self._fail(position, placement, error)
        self._finish_mapped()
        self._collect(window.wait_all())
        self._tools.counters.add("bytes_written", nbytes)

    def _views(self, position: int) -> list[memoryview]:
        """Return the object's header and pieces."""
        generation, checksums = self._granted.generations[position], self._checksums.of(position)
        return object_views(self._puts[position], generation, self._pieces[position], checksums)

    def _remote(self, placement: Placement) -> RemoteSegment | MappedWriter | MoonpoolError:
        remote = self._remotes.get(placement.segment)
        if remote is None:
            remote = self._remotes[placement.segment] = self._open(placement)
        return remote

    def _are_small_in_one(self, positions: Sequence[int]) -> bool:
        """Return whether all of these are small objects of one piece with one replica, in one mapped segment."""
        pieces, replicas = self._pieces, self._granted.replicas
        if not positions or any([len(pieces[at]) != 1 or len(replicas[at]) != 1 for at in positions]):  # noqa: C419
            return False
        first = replicas[positions[0]][0]
        return (
            max([pieces[at][0].nbytes for at in positions]) <= SMALL_NBYTES
            and {replicas[at][0].segment for at in positions} == {first.segment}
            and isinstance(self._remote(first), MappedWriter)
        )

    def _write_small(self, positions: Sequence[int]) -> None:
        """Write small objects with one replica each: neighbours with one copy."""
        places = [self._granted.replicas[at][0] for at in positions]
        sizes = [self._sizes[at] for at in positions]
        granules = [-(-nbytes // GRANULE_NBYTES) for nbytes in sizes]
        for run in neighbours(places, granules):
            if run.stop - run.start == 1:
                self._write_mapped(positions[run.start])
            else:
                self._write_run(positions[run], places[run], sizes[run], granules[run])

    def _write_run(
        self, positions: Sequence[int], places: Sequence[Placement], sizes: Sequence[int], granules: Sequence[int]
    ) -> None:
        remote = self._remotes[places[0].segment]
        assert isinstance(remote, MappedWriter), "only objects in mapped segments come here"
        puts, pieces, checksums = self._puts, self._pieces, self._checksums
        parts: list[bytes | memoryview] = []
        generations = [place.generation for place in places]
        for at, generation, nbytes in zip(positions, generations, sizes, strict=True):
            put, data = puts[at], pieces[at]
            if len(data) == 1:
                (checksum,) = checksums.of(at)
                parts += pack_single(
                    put.key, generation, data[0].nbytes, checksum, put.kind, put.identity, put.valid_tokens
                )
                parts.append(data[0])
            else:
                parts += self._views(at)
            parts.append(_ZEROS[: -nbytes % GRANULE_NBYTES])
        stamps = np.repeat(np.array(generations, np.uint64), granules)
        if not remote.write_run(places[0].offset, parts, stamps):
            for at in positions:
                self._write_mapped(at)

    def _write_mapped(self, position: int) -> None:
        """Write all replicas of one object. Any thread may call this."""
        is_shared = self._is_alone and self._sizes[position] >= MIN_PARALLEL_NBYTES
        views = [] if is_shared else self._views(position)
        for placement in self._granted.replicas[position]:
            remote = self._remotes[placement.segment]
            assert isinstance(remote, MappedWriter), "only objects in mapped segments come here"
            try:
                if is_shared:
                    self._write_shared(position, placement, remote)
                else:
                    remote.write(placement.offset, views, placement.generation)
            except REPLICA_ERRORS as error:
                self._failed.append((position, placement, error))

    def _write_shared(self, position: int, placement: Placement, remote: MappedWriter) -> None:
        """Let another thread copy a part of the object: there is no other object for it."""
        parts = self._pieces[position]
        nbytes = sum([part.nbytes for part in parts])

        def fill(memory: memoryview) -> memoryview:
            views: list[memoryview] = []
            copy_shared(self._tools.engine, memory, parts, lambda: views.extend(self._views(position)))
            return views[0]

        remote.write_head_last(placement.offset, self._sizes[position] - nbytes, nbytes, fill, placement.generation)

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
    buffers = put.buffers
    if len(buffers) == 1 and type(buffers[0]) is memoryview:  # mostly: nothing is made of it
        view = buffers[0]
        if 0 < view.nbytes <= OPAQUE_PIECE_NBYTES and view.format == "B" and view.ndim == 1 and view.c_contiguous:
            return [view]
    views = [as_bytes_view(buffer, False) for buffer in buffers]
    return gather(views, OPAQUE_PIECE_NBYTES) if put.kind is _OPAQUE else views
