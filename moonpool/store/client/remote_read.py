"""Reading whole objects from a segment that is not mapped here: over a network, or from a disk.

RemoteRead fetches header and bytes of an object together, in one round trip. Where the owner checks generations itself
(tcp) that is all; elsewhere the header is read again when the bytes have arrived. The caller's thread and one thread of
the transfer engine each read a stream by a direct call of the remote segment, and check one bundle while the next
arrives. They do not use TransferEngine.submit(), with which the engine's threads received and the caller checked: that
took 6 to 9 % longer for 64 objects of 1 MiB over loopback tcp, 2 to 7 % for 1,000 objects of 4 KiB and 4 to 5 % for a
single one (two quiet cores).

DiskRead reads from a disk of this machine. One request reads an object with its header, or several small neighbours,
straight into the caller's memory where that is aligned. The caller's thread and two threads of the engine read and
check in turn, so that the disk always has a request. No header is read again: bytes of such a segment are written once,
and a read of removed bytes fails. With submit() a read of 32 objects of 1 MiB took a tenth longer.

Both leave out objects whose bytes fail a check. The caller reads these again with a ReadSession, which finds out why.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

import numpy as np

from moonpool.base.errors import MoonpoolError, NotFound, StaleGeneration, Unauthorized, Unavailable
from moonpool.base.object_header import ALIGN_NBYTES
from moonpool.store.client.cuts import scatter
from moonpool.store.client.read_tools import TimeFor
from moonpool.store.client.transfer_window import BUNDLE_ITEMS, BUNDLE_NBYTES, run_parallel
from moonpool.store.client.verified_read import (
    PREFIX_NBYTES,
    are_right,
    check_header,
    is_unchanged,
    may_be_remembered,
    sum_arrived,
)
from moonpool.store.messages import ObjectInfo, Placement
from moonpool.transfer import TransferEngine
from moonpool.transfer.memory.buffers import aligned_buffer, cut
from moonpool.transfer.transports.base import RemoteSegment

_MIN_NBYTES, _MAX_NBYTES = 1024 * 1024, 4 * 1024 * 1024 + 64 * 1024  # of neighbours read by one request
_SHARE = 4  # one request reads at most this part of what is left
_NUM_HELPERS = 2
_BUNDLES_UNDER_WAY = 4  # on two streams
DIRECT_NBYTES = 2 * 1024 * 1024  # a single object up to this size is read by the caller's thread


class RemoteObject:
    """One object to read: memory for its header, and for its bytes (`targets` None: new memory)."""

    __slots__ = (
        "_is_remembered", "_targets", "header", "info", "is_right", "is_unchanged", "num_arrived", "num_bundles",
        "place", "position", "views",
    )  # fmt: skip

    def __init__(
        self,
        position: int,
        info: ObjectInfo,
        place: Placement,
        targets: Sequence[memoryview] | None,
        is_remembered: bool = False,
    ) -> None:
        self._is_remembered = is_remembered  # its place is, and the master was not asked
        self.position, self.info, self.place, self._targets = position, info, place, targets
        self.num_bundles = self.num_arrived = 0  # bundles that hold parts of it, and those that have arrived
        self.is_right = False  # all of it has arrived and passed the checks
        self.is_unchanged: bool | None = None  # its space was not reused while it was read; None: not known yet
        self.header = memoryview(bytearray(ALIGN_NBYTES))
        nbytes = max(0, info.nbytes - ALIGN_NBYTES)
        self.views = [np.empty(nbytes, np.uint8).data] if targets is None else cut(targets, 0, nbytes)

    @property
    def fits(self) -> bool:
        """Whether the memory has room for all of it, if its header is the usual single page."""
        return self.nbytes == self.info.nbytes

    @property
    def nbytes(self) -> int:
        return self.header.nbytes + sum([view.nbytes for view in self.views])

    def check(self, identity: bytes | None) -> bool:
        """Return whether header and bytes are those of the object that was asked for."""
        try:
            header = check_header(self.header, 0, self.info, self.place, identity)
        except MoonpoolError:
            return False
        if self._is_remembered and not may_be_remembered(self.header, 0, header):
            return False
        return are_right(header, scatter(header.sizes, self.views), sum_arrived)

    def has_prefix(self, prefix: memoryview) -> bool:
        """Return whether the header that was read again is the same."""
        return is_unchanged(self.header, prefix)

    def got(self) -> int | bytes:
        """Return the bytes, or their number if they are in the caller's memory."""
        return bytes(self.views[0]) if self._targets is None else self.nbytes - self.header.nbytes


class _Bundle:
    """Parts of objects that are read together."""

    def __init__(self) -> None:
        self.items: list[tuple[int, memoryview]] = []
        self.owners: list[RemoteObject] = []  # of each item
        self.nbytes = 0
        self.objects: list[RemoteObject] = []

    def add(self, each: RemoteObject, offset: int, view: memoryview) -> None:
        self.items.append((offset, view))
        self.owners.append(each)
        self.nbytes += view.nbytes
        if not self.objects or self.objects[-1] is not each:
            self.objects.append(each)
            each.num_bundles += 1

    def expecting(self) -> list[tuple[int, memoryview, int]]:
        """Return the items, each with the generation of its object."""
        return [(*item, owner.place.generation) for item, owner in zip(self.items, self.owners, strict=True)]

    @property
    def is_full(self) -> bool:
        return self.nbytes >= BUNDLE_NBYTES or len(self.items) >= BUNDLE_ITEMS


class RemoteRead:
    """Reads one segment's objects. `failure` is set when its owner cannot be reached."""

    def __init__(
        self, remote: RemoteSegment, engine: TransferEngine, identity: bytes | None, time_for: TimeFor
    ) -> None:
        self._remote, self._engine = remote, engine
        self._identity, self._time_for = identity, time_for
        self._bundle_timeout_s = time_for(0)
        self._rest: deque[_Bundle] = deque()
        self._lock = threading.Lock()
        self.failure: MoonpoolError | None = None

    def run(self, objects: Sequence[RemoteObject]) -> list[RemoteObject]:
        """Read the objects and return those that passed every check."""
        fitting = [each for each in objects if each.fits]
        try:
            if len(fitting) == 1 and fitting[0].nbytes <= DIRECT_NBYTES:
                return self._read_one(fitting[0])
            return self._stream(fitting)
        except (Unavailable, NotFound, Unauthorized) as error:
            self.failure = error
            return []

    def _read_one(self, only: RemoteObject) -> list[RemoteObject]:
        memory, offset, generation = [only.header, *only.views], only.place.offset, only.place.generation
        timeout_s = self._time_for(only.nbytes)
        if self._remote.checks_generation:
            try:
                self._remote.read_unchanged(offset, memory, generation=generation, timeout_s=timeout_s)
            except StaleGeneration:  # a ReadSession finds out whether the object was moved
                return []
            return [only] if only.check(self._identity) else []
        self._remote.read_into(offset, memory, timeout_s=timeout_s)
        return self._unchanged([only]) if only.check(self._identity) else []

    def _stream(self, objects: Sequence[RemoteObject]) -> list[RemoteObject]:
        """Read on two threads. Each has its own stream and checks one bundle while the next arrives."""
        self._rest.extend(_bundles(objects))
        # A bundle shares the link with others that are under way.
        nbytes = sum([bundle.nbytes for bundle in islice(self._rest, _BUNDLES_UNDER_WAY)])
        self._bundle_timeout_s = self._time_for(nbytes)
        if len(self._rest) > 1:
            run_parallel(self._engine, self._work, self._rest.clear)
        else:
            self._work()
        unknown = [each for each in objects if each.is_right and each.is_unchanged is None]
        if unknown and self.failure is None:
            for each in self._unchanged(unknown):
                each.is_unchanged = True
        return [each for each in objects if each.is_right and each.is_unchanged]

    def _work(self) -> None:
        while (num_left := len(self._rest)) and self.failure is None:
            try:
                if self._remote.checks_generation:
                    self._read_expecting()
                else:
                    self._read_and_recheck()
            except MoonpoolError as error:  # a ReadSession finds out why these objects cannot be read
                if isinstance(error, Unavailable | Unauthorized) or len(self._rest) == num_left:
                    self.failure = error

    def _read_expecting(self) -> None:
        """Read bundles until none is left. The owner checks the generation of each part after sending it."""
        taken: list[_Bundle] = []

        def batches() -> Iterator[Sequence[tuple[int, memoryview, int]]]:
            with contextlib.suppress(IndexError):
                while True:
                    taken.append(self._rest.popleft())
                    yield taken[-1].expecting()

        with contextlib.closing(self._remote.read_expecting(batches(), timeout_s=self._bundle_timeout_s)) as arrivals:
            for number, stale in enumerate(arrivals):
                for at in stale:
                    taken[number].owners[at].is_unchanged = False
                for each in self._check(taken[number]):
                    each.is_unchanged = each.is_unchanged is None

    def _read_and_recheck(self) -> None:
        """Read bundles until none is left, then again the headers of the objects that lie within one bundle."""
        taken: list[_Bundle] = []
        again: list[RemoteObject] = []
        prefixes: list[memoryview] = []

        def batches() -> Iterator[Sequence[tuple[int, memoryview]]]:
            with contextlib.suppress(IndexError):
                while True:
                    taken.append(self._rest.popleft())
                    yield taken[-1].items
            again.extend([each for bundle in taken for each in bundle.objects if each.num_bundles == 1])
            prefixes.extend(_prefixes(again))
            yield [(each.place.offset, prefix) for each, prefix in zip(again, prefixes, strict=True)]

        with contextlib.closing(self._remote.read_in_turn(batches(), timeout_s=self._bundle_timeout_s)) as arrivals:
            for number in arrivals:
                if number < len(taken):
                    self._check(taken[number])
        for each, prefix in zip(again, prefixes, strict=True):
            each.is_unchanged = each.has_prefix(prefix)

    def _check(self, bundle: _Bundle) -> list[RemoteObject]:
        """Check the objects that are complete with this bundle, and return them. Parts arrive in any order."""
        with self._lock:
            for each in bundle.objects:
                each.num_arrived += 1
            complete = [each for each in bundle.objects if each.num_arrived == each.num_bundles]
        for each in complete:
            each.is_right = each.is_unchanged is not False and each.check(self._identity)
        return complete

    def _unchanged(self, good: list[RemoteObject]) -> list[RemoteObject]:
        """Read the headers again. Return the objects whose header is the same as before."""
        prefixes = _prefixes(good)
        items = [(each.place.offset, prefix) for each, prefix in zip(good, prefixes, strict=True)]
        self._remote.read_many(items, timeout_s=self._time_for(len(items) * PREFIX_NBYTES))
        return [each for each, prefix in zip(good, prefixes, strict=True) if each.has_prefix(prefix)]


def _prefixes(objects: Sequence[RemoteObject]) -> list[memoryview]:
    """Return memory for the start of each header."""
    room = memoryview(bytearray(PREFIX_NBYTES * len(objects)))
    return [room[at : at + PREFIX_NBYTES] for at in range(0, room.nbytes, PREFIX_NBYTES)]


def _bundles(objects: Iterable[RemoteObject]) -> Iterator[_Bundle]:
    """Yield all parts of all objects in order. A large object spreads over several bundles."""
    bundle = _Bundle()
    for each in objects:
        offset = each.place.offset
        for view in (each.header, *each.views):
            for at in range(0, view.nbytes, BUNDLE_NBYTES):
                if bundle.is_full:
                    yield bundle
                    bundle = _Bundle()
                bundle.add(each, offset + at, view[at : at + BUNDLE_NBYTES])
            offset += view.nbytes
    if bundle.items:
        yield bundle


class DiskRead:
    """Reads one segment's objects, as RemoteRead. `failure` is set when the segment cannot be read."""

    def __init__(
        self, remote: RemoteSegment, engine: TransferEngine, identity: bytes | None, time_for: TimeFor
    ) -> None:
        assert remote.written_once, "other segments need a second look at the headers"
        self._remote, self._engine = remote, engine
        self._identity, self._time_for = identity, time_for
        self._rest: deque[list[RemoteObject]] = deque()
        self._good: list[RemoteObject] = []
        self.failure: MoonpoolError | None = None

    def run(self, objects: Sequence[RemoteObject]) -> list[RemoteObject]:
        """Read the objects and return those that passed every check."""
        fitting = sorted([each for each in objects if each.fits], key=lambda each: each.place.offset)
        _align_headers(fitting)
        self._rest.extend(_neighbours(fitting))
        if len(self._rest) > 1:
            run_parallel(self._engine, self._work, self._rest.clear, _NUM_HELPERS)
        else:
            self._work()
        return self._good

    def _work(self) -> None:
        while self.failure is None:
            try:
                group = self._rest.popleft()
            except IndexError:
                return
            try:
                self._fetch(group)
            except MoonpoolError as error:  # a ReadSession finds out why these objects cannot be read
                if isinstance(error, Unavailable):
                    self.failure = error
            else:
                self._good += [each for each in group if each.check(self._identity)]

    def _fetch(self, group: Sequence[RemoteObject]) -> None:
        views = [view for each in group for view in (each.header, *each.views)]
        timeout_s = self._time_for(sum([view.nbytes for view in views]))
        self._remote.read_into(group[0].place.offset, views, timeout_s=timeout_s)


def _align_headers(objects: Sequence[RemoteObject]) -> None:
    """Give the headers aligned memory, so that one request reads them together with the bytes behind them."""
    headers = aligned_buffer(ALIGN_NBYTES * len(objects))
    for number, each in enumerate(objects):
        each.header = headers[number * ALIGN_NBYTES : (number + 1) * ALIGN_NBYTES]


def _neighbours(objects: Sequence[RemoteObject]) -> Iterator[list[RemoteObject]]:
    """Yield groups of objects that follow one another without gaps. The groups become smaller towards the end, because
    the disk is idle while the last one is checked.
    """
    group: list[RemoteObject] = []
    end = nbytes = 0
    left = sum([each.nbytes for each in objects])
    for each in objects:
        limit = min(max(left // _SHARE, _MIN_NBYTES), _MAX_NBYTES)
        if group and (each.place.offset != end or nbytes + each.nbytes > limit):
            yield group
            group, left, nbytes = [], left - nbytes, 0
        group.append(each)
        nbytes += each.nbytes
        end = each.place.offset + each.nbytes
    if group:
        yield group
