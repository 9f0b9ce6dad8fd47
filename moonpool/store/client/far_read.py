"""Reading whole objects from a segment that is not mapped here: over a network, or from a disk.

Header and bytes arrive together, so that it takes one way there and back. Where the owner checks generations itself
(tcp) that is all; elsewhere the header is looked at once more when they have arrived. Two threads, the caller's and one
of the crew, each keep a stream going, and check what has come while the next comes. Objects whose
bytes are not as expected are left out; the caller reads them again and finds out why.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from moonpool.base.errors import MoonpoolError, NotFound, Unauthorized, Unavailable
from moonpool.base.object_header import ALIGN_NBYTES
from moonpool.store.client.cuts import scatter
from moonpool.store.client.transfer_window import BUNDLE_ITEMS, BUNDLE_NBYTES, TransferThreads
from moonpool.store.client.verified_read import PREFIX_NBYTES, are_right, check_header, is_unchanged, sum_arrived
from moonpool.store.messages import ObjectInfo, Placement
from moonpool.transfer.memory.buffers import cut
from moonpool.transfer.transports.base import RemoteSegment

DIRECT_NBYTES = 2 * 1024 * 1024  # a single object up to this size is read by the caller's thread


class FarObject:
    """One object on its way: its header, and memory for its bytes (None: new memory)."""

    __slots__ = (
        "_targets", "header", "info", "is_right", "is_unchanged", "num_arrived", "num_bundles", "place", "position",
        "views",
    )  # fmt: skip

    def __init__(self, position: int, info: ObjectInfo, place: Placement, targets: Sequence[memoryview] | None) -> None:
        self.position, self.info, self.place, self._targets = position, info, place, targets
        self.num_bundles = self.num_arrived = 0  # how many it is spread over, and how many have come
        self.is_right = False  # all of it has come and was checked
        self.is_unchanged: bool | None = None  # its space was its own until the end; None: not known yet
        self.header = memoryview(bytearray(ALIGN_NBYTES))
        nbytes = max(0, info.nbytes - ALIGN_NBYTES)
        self.views = [np.empty(nbytes, np.uint8).data] if targets is None else cut(targets, 0, nbytes)

    @property
    def fits(self) -> bool:
        """Whether there is room for all of it, if its header is the usual single page."""
        return self.nbytes == self.info.nbytes

    @property
    def nbytes(self) -> int:
        return self.header.nbytes + sum([view.nbytes for view in self.views])

    def check(self, identity: bytes | None) -> bool:
        """Whether what has arrived is the object that was asked for, every byte of it."""
        try:
            header = check_header(self.header, 0, self.info, self.place, identity)
        except MoonpoolError:
            return False
        return are_right(header, scatter(header.sizes, self.views), sum_arrived)

    def has_prefix(self, prefix: memoryview) -> bool:
        return is_unchanged(self.header, prefix)

    def got(self) -> int | bytes:
        """The new bytes, or how many there are in the caller's memory."""
        return bytes(self.views[0]) if self._targets is None else self.nbytes - self.header.nbytes


class _Bundle:
    """What is fetched together: parts of objects."""

    def __init__(self) -> None:
        self.items: list[tuple[int, memoryview]] = []
        self.owners: list[FarObject] = []  # of each item
        self.nbytes = 0
        self.objects: list[FarObject] = []

    def add(self, each: FarObject, offset: int, view: memoryview) -> None:
        self.items.append((offset, view))
        self.owners.append(each)
        self.nbytes += view.nbytes
        if not self.objects or self.objects[-1] is not each:
            self.objects.append(each)
            each.num_bundles += 1

    def expecting(self) -> list[tuple[int, memoryview, int]]:
        """The items, each with the generation of its object."""
        return [(*item, owner.place.generation) for item, owner in zip(self.items, self.owners, strict=True)]

    @property
    def is_full(self) -> bool:
        return self.nbytes >= BUNDLE_NBYTES or len(self.items) >= BUNDLE_ITEMS


class FarRead:
    """One segment's objects. `failure` is set when its owner cannot be reached."""

    def __init__(self, remote: RemoteSegment, crew: TransferThreads, identity: bytes | None, timeout_s: float) -> None:
        self._remote, self._crew = remote, crew
        self._identity, self._timeout_s = identity, timeout_s
        self._rest: deque[_Bundle] = deque()
        self._lock = threading.Lock()
        self.failure: MoonpoolError | None = None

    def run(self, objects: Sequence[FarObject]) -> list[FarObject]:
        """Those of the objects that have arrived and are what they should be."""
        fitting = [each for each in objects if each.fits]
        try:
            if len(fitting) == 1 and fitting[0].nbytes <= DIRECT_NBYTES:
                return self._read_one(fitting[0])
            return self._stream(fitting)
        except (Unavailable, NotFound, Unauthorized) as error:
            self.failure = error
            return []

    def _read_one(self, only: FarObject) -> list[FarObject]:
        if self._remote.checks_generation:
            self._rest.extend(_bundles([only]))
            self._take_expecting()
            return [only] if only.is_right and only.is_unchanged else []
        self._remote.read_into(only.place.offset, [only.header, *only.views], timeout_s=self._timeout_s)
        return self._unchanged([only]) if only.check(self._identity) else []

    def _stream(self, objects: Sequence[FarObject]) -> list[FarObject]:
        """By two threads, each of which has a stream of its own and checks what has come while the next comes."""
        self._rest.extend(_bundles(objects))
        if len(self._rest) > 1:
            self._crew.together(self._work, self._rest.clear)
        else:
            self._work()
        doubtful = [each for each in objects if each.is_right and each.is_unchanged is None]
        if doubtful and self.failure is None:
            for each in self._unchanged(doubtful):
                each.is_unchanged = True
        return [each for each in objects if each.is_right and each.is_unchanged]

    def _work(self) -> None:
        while (num_left := len(self._rest)) and self.failure is None:
            try:
                if self._remote.checks_generation:
                    self._take_expecting()
                else:
                    self._take_share()
            except MoonpoolError as error:  # of what did not come others find out why
                if isinstance(error, Unavailable | Unauthorized) or len(self._rest) == num_left:
                    self.failure = error

    def _take_expecting(self) -> None:
        """Bundles as long as there are any; the owner says of each part whether it was of its object to the end."""
        taken: list[_Bundle] = []

        def batches() -> Iterator[Sequence[tuple[int, memoryview, int]]]:
            with contextlib.suppress(IndexError):
                while True:
                    taken.append(self._rest.popleft())
                    yield taken[-1].expecting()

        with contextlib.closing(self._remote.read_expecting(batches(), timeout_s=self._timeout_s)) as arrivals:
            for number, stale in enumerate(arrivals):
                for at in stale:
                    taken[number].owners[at].is_unchanged = False
                for each in self._check(taken[number]):
                    each.is_unchanged = each.is_unchanged is None

    def _take_share(self) -> None:
        """Bundles as long as there are any, then the headers of what has come whole once more."""
        taken: list[_Bundle] = []
        again: list[FarObject] = []
        prefixes: list[memoryview] = []

        def batches() -> Iterator[Sequence[tuple[int, memoryview]]]:
            with contextlib.suppress(IndexError):
                while True:
                    taken.append(self._rest.popleft())
                    yield taken[-1].items
            again.extend([each for bundle in taken for each in bundle.objects if each.num_bundles == 1])
            prefixes.extend(_prefixes(again))
            yield [(each.place.offset, prefix) for each, prefix in zip(again, prefixes, strict=True)]

        with contextlib.closing(self._remote.read_in_turn(batches(), timeout_s=self._timeout_s)) as arrivals:
            for number in arrivals:
                if number < len(taken):
                    self._check(taken[number])
        for each, prefix in zip(again, prefixes, strict=True):
            each.is_unchanged = each.has_prefix(prefix)

    def _check(self, bundle: _Bundle) -> list[FarObject]:
        """Check those that are complete with it, and return them; the parts of a large one come in any order."""
        with self._lock:
            for each in bundle.objects:
                each.num_arrived += 1
            complete = [each for each in bundle.objects if each.num_arrived == each.num_bundles]
        for each in complete:
            each.is_right = each.is_unchanged is not False and each.check(self._identity)
        return complete

    def _unchanged(self, good: list[FarObject]) -> list[FarObject]:
        """Those before which the same header stands after reading as before."""
        prefixes = _prefixes(good)
        items = [(each.place.offset, prefix) for each, prefix in zip(good, prefixes, strict=True)]
        self._remote.read_many(items, timeout_s=self._timeout_s)
        return [each for each, prefix in zip(good, prefixes, strict=True) if each.has_prefix(prefix)]


def _prefixes(objects: Sequence[FarObject]) -> list[memoryview]:
    """Room for the beginning of each header."""
    room = memoryview(bytearray(PREFIX_NBYTES * len(objects)))
    return [room[at : at + PREFIX_NBYTES] for at in range(0, room.nbytes, PREFIX_NBYTES)]


def _bundles(objects: Iterable[FarObject]) -> Iterator[_Bundle]:
    """All parts of all objects in order; a large object spreads over several bundles."""
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
