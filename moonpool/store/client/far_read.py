"""Reading whole objects from a segment that is not mapped here: over a network, or from a disk.

Header and bytes arrive together, so that it takes one way there and back; the header is looked at once more when all
have arrived. What is not as expected is left out, and somebody else finds out why.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial

import google_crc32c
import numpy as np

from moonpool.base.errors import MoonpoolError, NotFound, Unauthorized, Unavailable
from moonpool.base.object_header import ALIGN_NBYTES
from moonpool.store.client.cuts import scatter
from moonpool.store.client.flight import BUNDLE_ITEMS, BUNDLE_NBYTES, Flight, FlightCrew, Landed
from moonpool.store.client.headers import Glance, glance
from moonpool.store.messages import ObjectInfo, Placement
from moonpool.transfer.buffers import cut
from moonpool.transfer.transports.base import RemoteSegment

PREFIX_NBYTES = 64  # enough of the header to see whose it is: magic to identity
DIRECT_NBYTES = 2 * 1024 * 1024  # a single object up to this size is read by the caller's thread
_extend, _bytes_of = google_crc32c.extend, np.frombuffer


class FarObject:
    """One object on its way: its header, and memory for its bytes (None: new memory)."""

    __slots__ = ("_targets", "header", "info", "is_lost", "place", "position", "views")

    def __init__(self, position: int, info: ObjectInfo, place: Placement, targets: Sequence[memoryview] | None) -> None:
        self.position, self.info, self.place, self._targets = position, info, place, targets
        self.is_lost = False  # a part of it did not arrive
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
        seen = glance(self.header, 0, self.info.nbytes, self.info.key, self.place.generation, identity)
        return seen is not None and is_verified(scatter(seen.sizes, self.views), seen)

    def got(self) -> int | bytes:
        """The new bytes, or how many there are in the caller's memory."""
        return bytes(self.views[0]) if self._targets is None else self.nbytes - self.header.nbytes


class _Bundle:
    """What is fetched together: parts of objects, and those of the objects that are complete with it."""

    def __init__(self) -> None:
        self.items: list[tuple[int, memoryview]] = []
        self.nbytes = 0
        self.touched: list[FarObject] = []
        self.complete: list[FarObject] = []

    def add(self, each: FarObject, offset: int, view: memoryview) -> None:
        self.items.append((offset, view))
        self.nbytes += view.nbytes
        if not self.touched or self.touched[-1] is not each:
            self.touched.append(each)

    @property
    def is_full(self) -> bool:
        return self.nbytes >= BUNDLE_NBYTES or len(self.items) >= BUNDLE_ITEMS


class FarRead:
    """One segment's objects. `failure` is set when its owner cannot be reached."""

    def __init__(self, remote: RemoteSegment, crew: FlightCrew, identity: bytes | None, timeout_s: float) -> None:
        self._remote, self._crew = remote, crew
        self._identity, self._timeout_s = identity, timeout_s
        self.failure: MoonpoolError | None = None

    def run(self, objects: Sequence[FarObject]) -> list[FarObject]:
        """Those of the objects that have arrived and are what they should be."""
        fitting = [each for each in objects if each.fits]
        try:
            if len(fitting) == 1 and fitting[0].nbytes <= DIRECT_NBYTES:
                return self._unchanged(self._read_now(fitting[0]))
            return self._unchanged(self._fly(fitting))
        except (Unavailable, NotFound, Unauthorized) as error:
            self.failure = error
            return []

    def _read_now(self, only: FarObject) -> list[FarObject]:
        self._remote.read_into(only.place.offset, [only.header, *only.views], timeout_s=self._timeout_s)
        return [only] if only.check(self._identity) else []

    def _fly(self, objects: Iterable[FarObject]) -> list[FarObject]:
        good: list[FarObject] = []
        with Flight[_Bundle](self._crew) as flight:
            for bundle in _bundles(objects):
                good += self._good(flight.add(partial(self._fetch, bundle), bundle))
                if self.failure is not None:
                    break
            good += self._good(flight.land_all())
        return good

    def _fetch(self, bundle: _Bundle) -> None:
        self._remote.read_many(bundle.items, timeout_s=self._timeout_s)

    def _good(self, landed: Iterable[Landed[_Bundle]]) -> list[FarObject]:
        good: list[FarObject] = []
        for bundle, error in landed:
            if error is not None:
                for each in bundle.touched:
                    each.is_lost = True
                if isinstance(error, Unavailable):
                    self.failure = error
            good += [each for each in bundle.complete if not each.is_lost and each.check(self._identity)]
        return good

    def _unchanged(self, good: list[FarObject]) -> list[FarObject]:
        """Those before which the same header stands after reading as before."""
        prefixes = memoryview(bytearray(PREFIX_NBYTES * len(good)))
        parts = [prefixes[at : at + PREFIX_NBYTES] for at in range(0, prefixes.nbytes, PREFIX_NBYTES)]
        items = [(each.place.offset, part) for each, part in zip(good, parts, strict=True)]
        self._remote.read_many(items, timeout_s=self._timeout_s)
        pairs = zip(good, parts, strict=True)
        return [each for each, part in pairs if bytes(part) == bytes(each.header[:PREFIX_NBYTES])]


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
        bundle.complete.append(each)
    if bundle.items:
        yield bundle


def is_verified(pieces: Sequence[Sequence[memoryview]], seen: Glance) -> bool:
    """Whether the pieces' bytes have the checksums that the header states."""
    for views, checksum in zip(pieces, seen.checksums, strict=True):
        found = 0
        for view in views:
            found = _extend(found, _bytes_of(view, np.uint8))
        if found != checksum:
            return False
    return True
