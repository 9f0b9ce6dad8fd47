"""Reads of a client by key: look-ups, whole objects, single objects piece by piece, and views.

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
from moonpool.base.errors import InvalidInput, MoonpoolError, NotFound, StaleGeneration, Unauthorized, Unavailable
from moonpool.base.object_header import HeaderFields
from moonpool.store import messages as m
from moonpool.store.client.cuts import Range, cut_ranges, scatter, without_overlaps
from moonpool.store.client.master_client import MasterClient
from moonpool.store.client.read_session import Failures, ReadSession, ReadTools
from moonpool.store.client.remote_read import DiskRead, RemoteObject, RemoteRead
from moonpool.store.client.session_client import SessionClient
from moonpool.store.client.transfer_window import TransferThreads, for_each, is_large
from moonpool.store.client.verified_read import CopyAndSum, are_right, check_header, has_generation, sum_arrived
from moonpool.store.client.views import HeldPin, ObjectView, VerifiedCache, Viewer, ViewLedger
from moonpool.store.messages import ObjectInfo, Placement
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


def read_pieces(session: ReadSession) -> tuple[memoryview, ...]:
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
        threads: TransferThreads,
        tools: ReadTools,
        recovery: Recovery,
    ) -> None:
        self._keys, self._infos, self._targets = keys, infos, targets
        self._identity = identity
        self._threads, self._tools, self._recovery = threads, tools, recovery
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
        kind = DiskRead if remote.written_once else RemoteRead
        reader = kind(remote, self._threads, self._identity, self._tools.timeout_s)
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

        for_each(self._threads, plans, nbytes, copy)
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
    """All reads of one client. Thread-safe."""

    def __init__(
        self,
        master: MasterClient,
        threads: TransferThreads,
        sessions: SessionClient,
        tools: ReadTools,
        *,
        max_view_nbytes: int,
        max_verified_views: int,
    ) -> None:
        self._master, self._threads, self._sessions, self._tools = master, threads, sessions, tools
        self._ledger = ViewLedger(max_view_nbytes, self._unpin, self._end_session)
        self._viewer = Viewer(self._ledger, VerifiedCache(max_verified_views))

    def close(self) -> None:
        """Idempotent."""
        self._ledger.close()

    def lookup(self, keys: list[bytes], *, prefix: bool = False, reads: bool = True) -> list[ObjectInfo | None]:
        """Return where the objects are, leased. Count misses, and hits if the caller `reads` them now."""
        return self._counted(self._master.call(m.Lookup(keys=keys, prefix=prefix, reads=reads)), reads)

    def _counted(self, found: list[ObjectInfo | None], reads: bool = True) -> list[ObjectInfo | None]:
        num_misses = found.count(None)
        self._tools.counters.add_lookup(len(found) - num_misses if reads else 0, num_misses)
        return found

    def read(self, keys: Sequence[bytes], targets: Sequence[Targets], identity: bytes | None) -> list[Got]:
        """Read whole objects into their targets or into new bytes."""
        got: list[Got] = []
        recovery = self._recovery(identity)
        for start in range(0, len(keys), BATCH_OBJECTS):
            some = list(keys[start : start + BATCH_OBJECTS])
            infos = self._master.call(m.Lookup(keys=some))
            got += BatchRead(
                some,
                infos,
                targets[start : start + BATCH_OBJECTS],
                identity,
                threads=self._threads,
                tools=self._tools,
                recovery=recovery,
            ).run()
        return got

    def read_one(self, key: bytes, identity: bytes | None, read: Callable[[ReadSession], T]) -> T:
        """Return what `read` returns for the open object. Raise NotFound for a miss, and what ReadSession raises."""
        info = self.lookup([key])[0]
        if info is None:
            raise missing(key)
        return self._recovery(identity).read(info, read)

    def view(self, keys: list[bytes], identity: bytes | None, always_verify: bool) -> list[ObjectView | MoonpoolError]:
        """Return views of objects in this machine's memory, which are pinned, and of copies of the others."""
        infos, pins = self._pinning_lookup(keys)
        recovery = self._recovery(identity)
        views: list[ObjectView | MoonpoolError] = []
        for key, info in zip(keys, infos, strict=True):
            if info is None:
                views.append(missing(key))
                continue
            pin = next(pins, None)
            view = None if pin is None else self._view_in_place(info, pin, identity, always_verify)
            views.append(view or self._view_copy(info, recovery))
            if pin is not None and view is None:
                self._ledger.drop(pin)
        in_place = [each.nbytes for each in views if isinstance(each, ObjectView) and not each.is_copy]
        self._tools.counters.add("bytes_viewed", sum(in_place))
        return views

    def _pinning_lookup(self, keys: list[bytes]) -> tuple[list[ObjectInfo | None], Iterator[HeldPin]]:
        """Look the objects up and pin them. Return them with their pins; no pins if no node of this machine would
        notice the end of this process.
        """
        with self._ledger.pinning:
            session = self._sessions.session()
            if session:
                session, infos = self._lookup_for(session, keys)
                found = [info.key for info in self._counted(infos) if info is not None]
                return infos, iter(self._ledger.add_pins(found, session) if session else ())
        return self.lookup(keys), iter(())

    def _lookup_for(self, session: int, keys: list[bytes]) -> tuple[int, list[ObjectInfo | None]]:
        """Look the objects up and pin them for the session, or for a new one. Return the session and the objects."""
        try:
            found, repeated = self._master.call_noting_repeats(m.Lookup(keys=keys, session=session))
        except StaleGeneration:  # the master has ended the session; go on with a new one
            self._retire(session)
            session = self._sessions.session()
            found, repeated = self._master.call_noting_repeats(m.Lookup(keys=keys, session=session))
        except MoonpoolError:
            self._retire(session)
            raise
        if repeated:  # the objects may be pinned twice
            self._retire(session)
        return session, found

    def _retire(self, session: int) -> None:
        """Use another session from now on: it is not known which pins the master holds for this one."""
        self._sessions.renew(session)
        self._ledger.retire(session)

    def _view_in_place(
        self, info: ObjectInfo, pin: HeldPin, identity: bytes | None, always_verify: bool
    ) -> ObjectView | None:
        """Return a view of a replica on this machine; None when no replica can be viewed. A copy then raises what is
        wrong, if anything is.
        """
        for place in self._tools.directory.best_first(info.replicas):
            try:
                segment = self._tools.directory.info(place)
                if self._sessions.holds(segment):
                    remote = self._tools.directory.open_segment(segment)
                    return self._viewer.view(info, pin, place, remote, identity, always_verify)
            except MoonpoolError:
                continue
        return None

    def _view_copy(self, info: ObjectInfo, recovery: Recovery) -> ObjectView | MoonpoolError:
        try:
            return ObjectView(info.key, recovery.read(info, read_pieces), is_copy=True)
        except MoonpoolError as error:
            return error

    def _recovery(self, identity: bytes | None) -> Recovery:
        return Recovery(self._tools, self._look_again, identity)

    def _look_again(self, key: bytes) -> ObjectInfo | None:
        return self._master.call(m.Lookup(keys=[key]))[0]

    def _unpin(self, session: int, keys: list[bytes]) -> None:
        try:
            self._master.call_once(m.Unpin(keys=keys, session=session))
        except MoonpoolError:
            self._retire(session)

    def _end_session(self, session: int) -> None:
        self._master.call(m.SessionsGone(sessions=[session]))


def report_corrupt(master: MasterClient, info: ObjectInfo, place: Placement) -> bool:
    """Report wrong bytes to the master. Return False when the object no longer has this replica: the read was late."""
    call = m.ReportCorrupt(key=info.key, generation=place.generation, segment=place.segment, offset=place.offset)
    return master.call(call)
