"""Reads of a client by key: look-ups and whole objects, by a look-up or where they are remembered to be."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar, cast

from moonpool.base.errors import NotFound, Refused
from moonpool.store import messages as m
from moonpool.store.client.batch_read import BatchRead, num_read
from moonpool.store.client.exist_calls import ExistCalls
from moonpool.store.client.master_client import MasterClient
from moonpool.store.client.read_session import PieceReads, ReadSession
from moonpool.store.client.read_tools import ReadTools
from moonpool.store.client.recovery import Got, Recovery, Targets
from moonpool.store.client.remembered import MAX_OBJECTS, RememberedPlaces
from moonpool.store.client.small_read import SmallReads
from moonpool.store.messages import ListedObject, ObjectInfo, Placement

T = TypeVar("T")
BATCH_OBJECTS = 1000  # looked up and read in one round, so that leases do not expire
_READ = {int, bytes}


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
            wanted, into = _picked(keys, some), _picked(targets, some)
            asked_s = self.remembered.now_s()
            infos = self._master.call(m.Lookup(keys=wanted))
            self.remembered.add(infos, asked_s)
            outcomes = BatchRead(wanted, infos, into, identity, tools=self.tools, recovery=recovery).run()
            if len(some) == len(keys):
                return outcomes
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
        found = cast("list[ObjectInfo]", _picked(infos, known))
        read = BatchRead(
            _picked(keys, known), found, _picked(targets, known), identity, tools=self.tools, recovery=None
        )
        got = self._still_right(found, read.read())
        if len(got) == len(keys):
            result = got
        else:
            for position, each in zip(known, got, strict=True):
                result[position] = each
        used = _picked(found, [at for at, each in enumerate(got) if each is not None])
        if used:
            self.tools.counters.add_reads(len(used), 0, num_read(got))
            remembered.used(used)
        return result

    def _still_right(self, found: list[ObjectInfo], got: list[Got | None]) -> list[Got | None]:
        """Return what was read at remembered places that counted until the bytes were here; None for the others, which
        are not remembered any more.
        """
        remembered = self.remembered
        now_s = remembered.now_s()
        if set(map(type, got)) <= _READ and remembered.are_valid(found, now_s):
            return got
        right = list[Got | None]()
        for info, each in zip(found, got, strict=True):
            is_right = type(each) in _READ and remembered.is_valid(info, now_s)
            right.append(each if is_right else None)
            if not is_right:
                remembered.forget(info.key)
        return right

    def read_one(self, key: bytes, read: Callable[[ReadSession], int]) -> int | None:
        """Return what `read` returns for the open object; None for a miss. Raise what ReadSession raises."""
        (info,) = self.lookup([key])
        try:
            return None if info is None else self.recovery(None).read(info, read)
        except (Refused, NotFound):
            return None

    def recovery(self, identity: bytes | None) -> Recovery:
        return Recovery(self.tools, lambda key: self.find([key])[0], identity)


def _picked(items: Sequence[T], positions: Sequence[int]) -> list[T]:
    """Return the items at some positions, or at all."""
    return list(items) if len(positions) == len(items) else [items[at] for at in positions]


def report_corrupt(master: MasterClient, info: ObjectInfo, place: Placement) -> bool:
    """Report wrong bytes to the master. Return False when the object no longer has this replica: the read was late."""
    call = m.ReportCorrupt(key=info.key, generation=place.generation, segment=place.segment, offset=place.offset)
    return master.call(call)
