"""Reads of a client by key: look-ups and whole objects.

BatchRead reads many whole objects and is fast when nothing is wrong: it copies objects from mapped memory and
checksums each while its bytes are in the processor's cache; remote_read.py reads the others, and recovery.py once more
what failed a check. All reads pass the checks of verified_read.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import cast

from moonpool.base.errors import (
    InvalidInput,
    MoonpoolError,
    NotFound,
    Refused,
    Unauthorized,
    Unavailable,
)
from moonpool.store import messages as m
from moonpool.store.client.cuts import scatter
from moonpool.store.client.exist_calls import ExistCalls
from moonpool.store.client.mapped_copy import PlannedCopy, copy_planned
from moonpool.store.client.master_client import MasterClient
from moonpool.store.client.read_session import PieceReads, ReadSession
from moonpool.store.client.read_tools import ReadTools
from moonpool.store.client.recovery import Got, Recovery, Targets, missing, read_whole
from moonpool.store.client.remembered import MAX_OBJECTS, RememberedPlaces
from moonpool.store.client.remote_read import DiskRead, RemoteObject, RemoteRead
from moonpool.store.client.small_read import FoundObject, SmallReads, copy_small, fetch_small, has_room
from moonpool.store.client.transfer_window import MIN_PARALLEL_NBYTES, run_parallel
from moonpool.store.client.verified_read import check_header, has_generation, may_be_remembered
from moonpool.store.messages import ListedObject, ObjectInfo, Placement
from moonpool.transfer.transports.base import RemoteSegment

BATCH_OBJECTS = 1000  # looked up and read in one round, so that leases do not expire
SMALL_NBYTES = 16 * 1024  # a slice copies these faster than an array
_CANNOT_READ = (Unavailable, NotFound, Unauthorized)  # errors of a whole segment


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
        recovery: Recovery | None,
    ) -> None:
        """`recovery` None: the places are remembered. Use read() then."""
        self._keys, self._infos, self._targets = keys, infos, targets
        self._identity = identity
        self._tools, self._recovery = tools, recovery
        self._got: list[Got | None] = [None] * len(keys)

    def run(self) -> list[Got]:
        """Read the objects and return the outcome of each; NotFound for a miss."""
        self.read()
        self.count()
        return [self._recover(position) if got is None else got for position, got in enumerate(self._got)]

    def read(self) -> list[Got | None]:
        """Read the objects. Return the outcome of each; None where a check failed."""
        unmapped: deque[tuple[RemoteSegment, list[FoundObject]]] = deque()
        for found in self._by_segment().values():
            place = found[0][2]
            try:
                remote = self._tools.directory.open(place)
                memory = remote.view(0, remote.nbytes)
                if memory is None:
                    unmapped.append((remote, found))
                else:
                    self._read_mapped(memory, found)
            except _CANNOT_READ as error:
                self._add_failure(place, error)
        if unmapped:
            self._read_unmapped(unmapped)
        return self._got

    def _add_failure(self, place: Placement, error: MoonpoolError) -> None:
        if self._recovery is not None:
            self._recovery.failures[place.segment, place.incarnation] = error
        self._tools.directory.unreadable.add(place, error)

    def _read_unmapped(self, segments: deque[tuple[RemoteSegment, list[FoundObject]]]) -> None:
        """Read much data from several segments at the same time: each node has a link of its own, and readers that all
        went from one node to the next would wait for one link while the others idle.
        """

        def work_off() -> None:
            while segments:
                try:
                    remote, found = segments.popleft()
                except IndexError:  # another thread took the last one
                    return
                try:
                    self._read_segment(remote, found)
                except _CANNOT_READ as error:
                    self._add_failure(found[0][2], error)

        num_helpers = len(segments) - 1
        if num_helpers and sum([info.nbytes for _, found in segments for _, info, _ in found]) >= MIN_PARALLEL_NBYTES:
            run_parallel(self._tools.directory.engine, work_off, segments.clear, num_helpers)
        else:
            work_off()

    def _by_segment(self) -> dict[tuple[str, int], list[FoundObject]]:
        """Group the objects that were found by the segment that is best to read from."""
        by_segment: dict[tuple[str, int], list[FoundObject]] = {}
        best_first = self._tools.directory.best_first
        for position, info in enumerate(self._infos):
            if info is None:
                self._got[position] = missing(self._keys[position])
            elif info.replicas:
                replicas = info.replicas
                place = replicas[0] if len(replicas) == 1 else best_first(replicas)[0]
                by_segment.setdefault((place.segment, place.incarnation), []).append((position, info, place))
        return by_segment

    def _read_segment(self, remote: RemoteSegment, found: list[FoundObject]) -> None:
        """Read objects of one segment that is not mapped here."""
        if remote.written_once:
            self._tools.counters.add("disk_reads", len(found))
        elif remote.checks_generation and len(found) > 1:
            found = self._fetch_small(remote, found)
        kind = DiskRead if remote.written_once else RemoteRead
        time_for = self._tools.time_for_disk if remote.written_once else self._tools.time_for
        reader = kind(remote, self._tools.directory.engine, self._identity, time_for)
        for each in reader.run([RemoteObject(*one, self._targets[one[0]], self._recovery is None) for one in found]):
            self._got[each.position] = each.got()
        if reader.failure is not None:
            raise reader.failure

    def _fetch_small(self, remote: RemoteSegment, found: list[FoundObject]) -> list[FoundObject]:
        """Read the small objects of a segment that is not mapped. Return the others."""
        small, others = list[FoundObject](), list[FoundObject]()
        for each in found:
            (small if has_room(each[1], self._targets[each[0]], SMALL_NBYTES) else others).append(each)
        is_remembered, time_for = self._recovery is None, self._tools.time_for
        try:
            for position, got in fetch_small(
                remote, small, self._targets, self._identity, is_remembered=is_remembered, time_for=time_for
            ):
                self._got[position] = got
        except _CANNOT_READ:
            raise
        except MoonpoolError:  # a ReadSession finds out which object is at fault
            pass
        return others

    def _read_mapped(self, memory: memoryview, found: list[FoundObject]) -> None:
        others = self._read_small(memory, found)
        for position, place, got in copy_planned(memory, self._plan(memory, others), self._tools.directory.engine):
            if has_generation(memory, place.offset, place.generation):
                self._got[position] = got

    def _read_small(self, memory: memoryview, found: list[FoundObject]) -> list[FoundObject]:
        """Read the small objects. Return the others."""
        targets, identity, is_remembered = self._targets, self._identity, self._recovery is None
        others: list[FoundObject] = []
        for each in found:
            position, info, place = each
            into = targets[position]
            if not has_room(info, into, SMALL_NBYTES):
                others.append(each)
                continue
            try:
                view = None if into is None else into[0]
                self._got[position] = copy_small(memory, place.offset, info, place, identity, view, is_remembered)
            except MoonpoolError:  # a ReadSession finds out what is wrong
                continue
        return others

    def _plan(self, memory: memoryview, found: list[FoundObject]) -> list[PlannedCopy]:
        """Check all headers before the first copy: a large copy pushes the code that reads them out of the cache."""
        targets, identity = self._targets, self._identity
        plans: list[PlannedCopy] = []
        for position, info, place in found:
            try:
                header = check_header(memory, place.offset, info, place, identity)
                if self._recovery is None and not may_be_remembered(memory, place.offset, header):
                    continue
                into = targets[position]
                plans.append((position, place, header, None if into is None else scatter(header.sizes, into)))
            except InvalidInput as error:
                self._got[position] = error
            except MoonpoolError:  # a ReadSession finds out what is wrong
                continue
        return plans

    def count(self) -> None:
        """Count hits, misses and bytes."""
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
        assert self._recovery is not None, "only objects that were looked up can be recovered"
        try:
            return self._recovery.read(info, lambda session: read_whole(session, targets))
        except MoonpoolError as error:
            return error


class ClientReads:
    """All reads of one client. Thread-safe. `pieces` reads objects piece by piece; `remembered` is where they were."""

    def __init__(self, master: MasterClient, tools: ReadTools, *, max_remembered: int = MAX_OBJECTS) -> None:
        self.tools, self.pieces = tools, PieceReads(tools)
        self._master = master
        self.remembered = RememberedPlaces(master, tools.directory.is_memory, max_objects=max_remembered)
        self._small = SmallReads(tools, self.remembered)
        self._exists = ExistCalls(master, tools.directory, self.remembered)

    def close(self) -> None:
        """Report the last uses of remembered objects. Idempotent; an absent master is no error."""
        self.remembered.close()

    def exist(self, keys: list[bytes]) -> list[bool]:
        """ExistCalls.exist()."""
        return self._exists.exist(keys)

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
        if len(keys) == 1 and (targets[0] is None or len(targets[0]) == 1):
            view = None if targets[0] is None else targets[0][0]
            got = self._small.read(keys[0], view, identity)
            if got is None and self._exists.bring_places(keys[0]):
                got = self._small.read(keys[0], view, identity)
            if got is not None:
                return [got]
        known = self._read_remembered(keys, targets, identity)
        unknown = [position for position, got in enumerate(known) if got is None]
        recovery = self.recovery(identity)
        for start in range(0, len(unknown), BATCH_OBJECTS):
            some = unknown[start : start + BATCH_OBJECTS]
            wanted, into = [keys[position] for position in some], [targets[position] for position in some]
            asked_s = self.remembered.now_s()
            infos = self._master.call(m.Lookup(keys=wanted))
            self.remembered.add(infos, asked_s)
            outcomes = BatchRead(wanted, infos, into, identity, tools=self.tools, recovery=recovery).run()
            for position, each in zip(some, outcomes, strict=True):
                known[position] = each
        return cast("list[Got]", known)

    def read_remembered(self, key: bytes, into: memoryview) -> int | None:
        """Read a small value whose place is remembered into memory of bytes. None: read() has to read it."""
        return cast("int | None", self._small.read(key, into, None))

    def _read_remembered(
        self, keys: Sequence[bytes], targets: Sequence[Targets], identity: bytes | None
    ) -> list[Got | None]:
        """Read the objects whose places are remembered. None where nothing is, or the object may have left its place:
        then it is not remembered any more.
        """
        remembered = self.remembered
        infos = remembered.find(keys, remembered.now_s())
        known = [position for position, info in enumerate(infos) if info is not None]
        result: list[Got | None] = [None] * len(keys)
        if not known:
            return result
        found = [infos[position] for position in known]
        into = [targets[position] for position in known]
        read = BatchRead(
            [keys[position] for position in known],
            found,
            into,
            identity,
            tools=self.tools,
            recovery=None,
        )
        got, now_s = read.read(), remembered.now_s()
        used, nbytes = list[ObjectInfo](), 0
        for position, info, each in zip(known, found, got, strict=True):
            assert info is not None, "these are known"
            if not isinstance(each, int | bytes) or not remembered.is_valid(info, now_s):
                remembered.forget(info.key)
                continue
            result[position] = each
            used.append(info)
            nbytes += each if isinstance(each, int) else len(each)
        if used:
            self.tools.counters.add_reads(len(used), 0, nbytes)
            remembered.used(used)
        return result

    def read_one(self, key: bytes, read: Callable[[ReadSession], int]) -> int | None:
        """Return what `read` returns for the open object; None for a miss. Raise what ReadSession raises."""
        (info,) = self.lookup([key])
        try:
            return None if info is None else self.recovery(None).read(info, read)
        except (Refused, NotFound):
            return None

    def recovery(self, identity: bytes | None) -> Recovery:
        return Recovery(self.tools, lambda key: self.find([key])[0], identity)


def report_corrupt(master: MasterClient, info: ObjectInfo, place: Placement) -> bool:
    """Report wrong bytes to the master. Return False when the object no longer has this replica: the read was late."""
    call = m.ReportCorrupt(key=info.key, generation=place.generation, segment=place.segment, offset=place.offset)
    return master.call(call)
