"""Reads of a client by key: look-ups, whole objects, and single objects piece by piece (PieceReader).

BatchRead reads many whole objects and is fast when nothing is wrong: it copies objects from mapped memory and
checksums each while its bytes are in the processor's cache; remote_read.py reads the others. Recovery reads what failed
a check again with a ReadSession, which reports the replica, tries the others and raises what is wrong. All reads pass
the checks of verified_read.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias, TypeVar

import numpy as np

from moonpool.base.checksum import crc32c_of_array
from moonpool.base.clock import Clock, SystemClock
from moonpool.base.errors import (
    InvalidInput,
    MoonpoolError,
    NotFound,
    Refused,
    StaleGeneration,
    Unauthorized,
    Unavailable,
)
from moonpool.base.object_header import HeaderFields
from moonpool.store import messages as m
from moonpool.store.client.cuts import Range, cut_ranges, scatter, without_overlaps
from moonpool.store.client.master_client import MasterClient
from moonpool.store.client.read_session import Failures, PieceReads, ReadSession, ReadTools
from moonpool.store.client.remote_read import DiskRead, RemoteObject, RemoteRead
from moonpool.store.client.transfer_window import for_each, is_large
from moonpool.store.client.verified_read import CopyAndSum, are_right, check_header, has_generation, sum_arrived
from moonpool.store.messages import ListedObject, ObjectInfo, Placement
from moonpool.transfer.memory.buffers import Buffer
from moonpool.transfer.transports.base import RemoteSegment

T = TypeVar("T")
Targets: TypeAlias = Sequence[memoryview] | None  # the memory for an object's bytes; None: new bytes
Got: TypeAlias = int | bytes | MoonpoolError  # the number of bytes, or the bytes themselves, or the error
BATCH_OBJECTS = 1000  # looked up and read in one round, so that leases do not expire
SMALL_NBYTES = 16 * 1024  # a slice copies these faster than an array
_BYTE = np.uint8
_bytes_of = np.frombuffer
LookAgain = Callable[[bytes], ObjectInfo | None]


class Recovery:
    """Reads objects one by one from any replica; looks an object up again if it was moved or replaced meanwhile.

    `failures` are the segments that could not be reached: the next object does not wait for them again.
    """

    def __init__(self, tools: ReadTools, look_again: LookAgain, identity: bytes | None) -> None:
        self._tools, self._look_again, self._identity = tools, look_again, identity
        self.failures: Failures = {}

    def read(self, info: ObjectInfo, read: Callable[[ReadSession], T]) -> T:
        """Return what `read` returns for the open object. Raise NotFound when the object is gone, and what ReadSession
        raises.
        """
        try:
            return self._read_once(info, read)
        except (StaleGeneration, Unavailable, NotFound):
            fresh = self._look_again(info.key)
        if fresh is None:
            raise missing(info.key)
        return self._read_once(fresh, read)

    def _read_once(self, info: ObjectInfo, read: Callable[[ReadSession], T]) -> T:
        try:
            session = ReadSession(info, self._identity, self._tools, self.failures)
            got = read(session)
            session.finish()
        except MoonpoolError as error:
            self._tools.counters.add_refusal(error)
            raise
        return got


def none_if_missing(got: Got) -> int | bytes | None:
    """Return None for a miss. Raise other errors."""
    if not isinstance(got, MoonpoolError):
        return got
    if isinstance(got, Refused | NotFound):
        return None
    raise got


def missing(key: bytes) -> NotFound:
    return NotFound(f"{key.hex()[:16]} is not in the pool")


def read_whole(session: ReadSession, targets: Targets) -> int | bytes:
    """Read all pieces into the targets, and return how many bytes; or return new bytes. InvalidInput when the targets
    are too small.
    """
    room = [np.empty(session.nbytes, np.uint8).data] if targets is None else targets
    for index, views in enumerate(scatter(_sizes(session), room)):
        session.read_parts(index, [(view.nbytes, view) for view in views])
    return session.nbytes if targets is not None else bytes(room[0])


def read_ranges(session: ReadSession, ranges: Sequence[Range]) -> int:
    """Read every piece that a range touches, whole, and verify it. Return how many bytes the ranges have; InvalidInput
    for a range outside the object.
    """
    for offset, _ in ranges:
        if offset < 0:
            raise InvalidInput(f"a range cannot begin at {offset}")
    for some in without_overlaps(ranges):
        for index, parts in cut_ranges(_sizes(session), some):
            session.read_parts(index, parts)
    return sum(view.nbytes for _, view in ranges)


def copy_pieces(session: ReadSession) -> tuple[memoryview, ...]:
    """Return a private copy of each piece."""
    copy = np.empty(session.nbytes, np.uint8)
    copy_view, pieces, at = copy.data, list[memoryview](), 0
    for index, nbytes in enumerate(_sizes(session)):
        pieces.append(copy_view[at : at + nbytes])
        session.read_piece(index, pieces[-1])
        at += nbytes
    return tuple(piece.toreadonly() for piece in pieces)


def _sizes(session: ReadSession) -> list[int]:
    return [piece.nbytes for piece in session.header.pieces]


class BatchRead:
    """Reads what one look-up found. For one thread."""

    def __init__(
        self,
        keys: Sequence[bytes],
        infos: Sequence[ObjectInfo | None],
        targets: Sequence[Targets],
        identity: bytes | None,
        *,
        tools: ReadTools,
        recovery: Recovery,
    ) -> None:
        self._keys, self._infos, self._targets = keys, infos, targets
        self._identity = identity
        self._tools, self._recovery = tools, recovery
        self._got: list[Got | None] = [None] * len(keys)

    def run(self) -> list[Got]:
        """Read the objects and return the outcome of each; NotFound for a miss."""
        for found in self._by_segment().values():
            place = found[0][2]
            try:
                self._read_segment(self._tools.directory.open(place), found)
            except (Unavailable, NotFound, Unauthorized) as error:
                self._recovery.failures[place.segment, place.incarnation] = error
                self._tools.directory.unreadable.add(place, error)
        self._count()
        return [self._recover(position) if got is None else got for position, got in enumerate(self._got)]

    def _by_segment(self) -> dict[tuple[str, int], list[_Found]]:
        """Group the objects that were found by the segment that is best to read from."""
        by_segment: dict[tuple[str, int], list[_Found]] = {}
        best_first = self._tools.directory.best_first
        for position, info in enumerate(self._infos):
            if info is None:
                self._got[position] = missing(self._keys[position])
            elif info.replicas:
                replicas = info.replicas
                place = replicas[0] if len(replicas) == 1 else best_first(replicas)[0]
                by_segment.setdefault((place.segment, place.incarnation), []).append((position, info, place))
        return by_segment

    def _read_segment(self, remote: RemoteSegment, found: list[_Found]) -> None:
        memory = remote.view(0, remote.nbytes)
        if memory is not None:
            self._read_mapped(memory, found)
            return
        if remote.written_once:
            self._tools.counters.add("disk_reads", len(found))
        kind = DiskRead if remote.written_once else RemoteRead
        reader = kind(remote, self._tools.directory.engine, self._identity, self._tools.timeout_s)
        for each in reader.run([RemoteObject(*one, self._targets[one[0]]) for one in found]):
            self._got[each.position] = each.got()
        if reader.failure is not None:
            raise reader.failure

    def _read_mapped(self, memory: memoryview, found: list[_Found]) -> None:
        for position, place, got in self._copy_all(memory, self._plan(memory, found)):
            if got is not None and has_generation(memory, place.offset, place.generation):
                self._got[position] = got

    def _copy_all(self, memory: memoryview, plans: list[_Plan]) -> list[_Copied]:
        # New bytes are made under Python's lock, so a second thread would not help.
        nbytes = sum([sum(header.sizes) for _, _, header, pieces in plans if pieces is not None])
        copy_and_sum = _copier(memory)
        if not is_large(nbytes, len(plans)):
            return [(at, place, _copy(memory, copy_and_sum, place, header, into)) for at, place, header, into in plans]
        copied: list[_Copied] = []

        def copy(plan: _Plan) -> None:
            position, place, header, pieces = plan
            copied.append((position, place, _copy(memory, copy_and_sum, place, header, pieces)))

        for_each(self._tools.directory.engine, plans, nbytes, copy)
        return copied

    def _plan(self, memory: memoryview, found: list[_Found]) -> list[_Plan]:
        """Check all headers before the first copy: a large copy pushes the code that reads them out of the cache."""
        targets, identity = self._targets, self._identity
        plans: list[_Plan] = []
        for position, info, place in found:
            try:
                header = check_header(memory, place.offset, info, place, identity)
                into = targets[position]
                plans.append((position, place, header, None if into is None else scatter(header.sizes, into)))
            except InvalidInput as error:
                self._got[position] = error
            except MoonpoolError:  # a ReadSession finds out what is wrong
                continue
        return plans

    def _count(self) -> None:
        nbytes = 0
        for got in self._got:
            if isinstance(got, int):
                nbytes += got
            elif isinstance(got, bytes):
                nbytes += len(got)
        num_misses = self._infos.count(None)
        self._tools.counters.add_reads(len(self._infos) - num_misses, num_misses, nbytes)

    def _recover(self, position: int) -> Got:
        info, targets = self._infos[position], self._targets[position]
        assert info is not None, "only objects that were found can be recovered"
        try:
            return self._recovery.read(info, lambda session: read_whole(session, targets))
        except MoonpoolError as error:
            return error


_Found: TypeAlias = tuple[int, ObjectInfo, Placement]  # position, object, the replica to read
# position, the replica, its header, and the memory for each of its pieces (None: new bytes)
_Plan: TypeAlias = tuple[int, Placement, HeaderFields, list[list[memoryview]] | None]
# position, the replica, its bytes or their number (None: a check failed)
_Copied: TypeAlias = tuple[int, Placement, int | bytes | None]


def _copier(memory: memoryview) -> CopyAndSum[memoryview]:
    """Return a copier from mapped memory. It checksums the copy while it is in the processor's cache."""
    array = _bytes_of(memory, _BYTE)

    def copy_and_sum(at: int, view: memoryview, found: int) -> int:
        copied, end = _bytes_of(view, _BYTE), at + view.nbytes
        if end - at <= SMALL_NBYTES:
            view[:] = memory[at:end]
        else:
            copied[...] = array[at:end]
        return crc32c_of_array(copied, found)

    return copy_and_sum


def _copy(
    memory: memoryview,
    copy_and_sum: CopyAndSum[memoryview],
    place: Placement,
    header: HeaderFields,
    pieces: list[list[memoryview]] | None,
) -> int | bytes | None:
    """Copy the object. Return the bytes, or their number; None when a checksum does not match."""
    start = place.offset + header.nbytes
    if pieces is None:
        data = bytes(memory[start : start + sum(header.sizes)])
        return data if are_right(header, scatter(header.sizes, [memoryview(data)]), sum_arrived) else None
    return sum(header.sizes) if are_right(header, pieces, copy_and_sum, start) else None


class ClientReads:
    """All reads of one client. Thread-safe. `pieces` reads many objects piece by piece."""

    def __init__(self, master: MasterClient, tools: ReadTools) -> None:
        self.tools, self.pieces = tools, PieceReads(tools)
        self._master = master

    def exist(self, keys: list[bytes]) -> list[bool]:
        """Return which objects exist, and lease them. Counts neither hits nor misses. Objects that are only on segments
        that this client could not read are misses, until the segments can be read again.
        """
        return self._master.call(m.Exist(keys=keys, without=self.tools.directory.unreadable.listed))

    def find(self, keys: list[bytes]) -> list[ObjectInfo | None]:
        """Return where the objects are, leased, without counting hits and misses."""
        return self._master.call(m.Lookup(keys=keys))

    def lookup(self, keys: list[bytes], *, prefix: bool = False, reads: bool = True) -> list[ObjectInfo | None]:
        """Return where the objects are, leased. Count misses, and hits if the caller `reads` them now."""
        return self.counted(self._master.call(m.Lookup(keys=keys, prefix=prefix, reads=reads)), reads)

    def list_objects(self, pattern: str | None) -> Iterator[ListedObject]:
        """Yield the objects whose key matches the regular expression (None: all), in no order, page by page."""
        cursor: int | None = 0
        while cursor is not None:
            page = self._master.call(m.ListObjects(pattern=pattern, cursor=cursor))
            yield from page.objects
            cursor = page.cursor

    def counted(self, found: list[ObjectInfo | None], reads: bool = True) -> list[ObjectInfo | None]:
        """Count the misses, and the hits if the caller `reads` the objects. Return `found`."""
        num_misses = found.count(None)
        self.tools.counters.add_lookup(len(found) - num_misses if reads else 0, num_misses)
        return found

    def read(self, keys: Sequence[bytes], targets: Sequence[Targets], identity: bytes | None) -> list[Got]:
        """Read whole objects into their targets or into new bytes."""
        got: list[Got] = []
        recovery = self.recovery(identity)
        for start in range(0, len(keys), BATCH_OBJECTS):
            some = list(keys[start : start + BATCH_OBJECTS])
            infos = self._master.call(m.Lookup(keys=some))
            got += BatchRead(
                some,
                infos,
                targets[start : start + BATCH_OBJECTS],
                identity,
                tools=self.tools,
                recovery=recovery,
            ).run()
        return got

    def read_one(self, key: bytes, read: Callable[[ReadSession], int]) -> int | None:
        """Return what `read` returns for the open object; None for a miss. Raise what ReadSession raises."""
        (info,) = self.lookup([key])
        try:
            return None if info is None else self.recovery(None).read(info, read)
        except (Refused, NotFound):
            return None

    def recovery(self, identity: bytes | None) -> Recovery:
        return Recovery(self.tools, lambda key: self.find([key])[0], identity)


class PieceReader:
    """Reads one object, from one thread at a time. Reading renews its lease.

    Every piece is verified as it is read. Leaving the `with` block raises StaleGeneration unless the object was the
    same from the first to the last piece.
    """

    def __init__(self, reads: ClientReads, key: bytes, identity: bytes | None, clock: Clock | None = None) -> None:
        """Raise NotFound for a miss, else as PieceReads.open()."""
        self._reads, self._key = reads, key
        self._clock = clock or SystemClock()
        self._leased_s = self._clock.now_s()
        self._session = self._open(identity)

    @property
    def piece_sizes(self) -> tuple[int, ...]:
        return tuple(_sizes(self._session))

    @property
    def nbytes(self) -> int:
        return self._session.nbytes

    def read_into(self, index: int, buffer: Buffer) -> None:
        """Copy piece `index` into the buffer, which must have its size, and verify the copy."""
        self._renew_lease_if_due()
        self._session.read_piece(index, buffer)

    def finish(self) -> None:
        """Raise StaleGeneration unless the object was the same from the first to the last piece."""
        self._session.finish()

    def __enter__(self) -> PieceReader:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.finish()

    def _open(self, identity: bytes | None) -> ReadSession:
        info = self._lookup()
        try:
            return self._reads.pieces.open(info, identity)
        except (StaleGeneration, Unavailable, NotFound):  # replaced or moved between the look-up and the first byte
            return self._reads.pieces.open(self._lookup(), identity)

    def _lookup(self) -> ObjectInfo:
        (info,) = self._reads.lookup([self._key])
        if info is None:
            raise missing(self._key)
        self._renew_after_s = info.lease_s / 2
        return info

    def _renew_lease_if_due(self) -> None:
        if self._clock.now_s() - self._leased_s > self._renew_after_s:
            self._leased_s = self._clock.now_s()
            self._reads.exist([self._key])


def report_corrupt(master: MasterClient, info: ObjectInfo, place: Placement) -> bool:
    """Report wrong bytes to the master. Return False when the object no longer has this replica: the read was late."""
    call = m.ReportCorrupt(key=info.key, generation=place.generation, segment=place.segment, offset=place.offset)
    return master.call(call)
