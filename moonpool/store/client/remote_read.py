"""Reading whole objects from a segment that is not mapped here: over a network, or from a disk.

One request of the transfer engine reads an object's header and bytes together, in one round trip. Requests go in
bundles of bounded size, and the caller checks one bundle while the engine's threads fill the next ones; a single bundle
is read on the caller's thread. An object is of one piece, for one of three reasons:

- its owner checks the generation of what it sends (tcp: `checks_generation`);
- its bytes are written once and a read of removed bytes fails (a disk of this machine: `written_once`);
- else the start of its header is read again when the bytes have arrived.

On a disk one request reads several small neighbours, straight into the caller's memory where that is aligned.

Objects whose bytes fail a check are left out. The caller reads these again with a ReadSession, which finds out why.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from moonpool.base.errors import MoonpoolError, NotFound, Unauthorized, Unavailable
from moonpool.base.object_header import ALIGN_NBYTES
from moonpool.store.client.cuts import scatter
from moonpool.store.client.transfer_window import BUNDLE_NBYTES, FinishedBundle, TransferWindow, bundles
from moonpool.store.client.verified_read import PREFIX_NBYTES, are_right, check_header, is_unchanged, sum_arrived
from moonpool.store.messages import ObjectInfo, Placement
from moonpool.transfer import Priority, TransferEngine, TransferOp, TransferRequest
from moonpool.transfer.memory.buffers import aligned_buffer, cut
from moonpool.transfer.transports.base import RemoteSegment

_MIN_NBYTES, _MAX_NBYTES = 1024 * 1024, 4 * 1024 * 1024 + 64 * 1024  # of neighbours read by one request
_SHARE = 4  # one request reads at most this part of what is left
_READ = TransferOp.READ


class RemoteObject:
    """One object to read: memory for its header, and for its bytes (`targets` None: new memory)."""

    __slots__ = ("_targets", "header", "info", "is_lost", "nbytes", "num_missing", "place", "position", "views")

    def __init__(self, position: int, info: ObjectInfo, place: Placement, targets: Sequence[memoryview] | None) -> None:
        self.position, self.info, self.place, self._targets = position, info, place, targets
        self.num_missing = 1  # requests for parts of it that have not ended
        self.is_lost = False  # one of them has failed
        self.header = memoryview(bytearray(ALIGN_NBYTES))
        nbytes = max(0, info.nbytes - ALIGN_NBYTES)
        self.views = [np.empty(nbytes, np.uint8).data] if targets is None else cut(targets, 0, nbytes)
        self.nbytes = ALIGN_NBYTES + sum([view.nbytes for view in self.views])

    @property
    def fits(self) -> bool:
        """Whether the memory has room for all of it, if its header is the usual single page."""
        return self.nbytes == self.info.nbytes

    def check(self, identity: bytes | None) -> bool:
        """Return whether header and bytes are those of the object that was asked for."""
        try:
            header = check_header(self.header, 0, self.info, self.place, identity)
        except MoonpoolError:
            return False
        return are_right(header, scatter(header.sizes, self.views), sum_arrived)

    def got(self) -> int | bytes:
        """Return the bytes, or their number if they are in the caller's memory."""
        return bytes(self.views[0]) if self._targets is None else self.nbytes - ALIGN_NBYTES


class _Part(NamedTuple):
    """One request: neighbouring objects, one object, or a part of a large one."""

    request: TransferRequest
    nbytes: int
    objects: Sequence[RemoteObject]


class RemoteRead:
    """Reads one segment's objects. `failure` is set when the segment cannot be read."""

    def __init__(self, remote: RemoteSegment, engine: TransferEngine, identity: bytes | None, timeout_s: float) -> None:
        self._remote, self._engine = remote, engine
        self._identity, self._timeout_s = identity, timeout_s
        self._good: list[RemoteObject] = []
        self._missing: list[NotFound] = []  # one for each object that its owner does not have
        self.failure: MoonpoolError | None = None

    def run(self, objects: Sequence[RemoteObject]) -> list[RemoteObject]:
        """Read the objects and return those that passed every check."""
        remote, fitting = self._remote, [each for each in objects if each.fits]
        if remote.written_once:
            self._read(list(bundles(_disk_parts(remote, fitting), _nbytes_of, _MIN_NBYTES)))
        else:
            self._read(list(bundles(_parts(remote, fitting), _nbytes_of)))
            if fitting and len(self._missing) == len(fitting):
                self.failure = self.failure or self._missing[0]  # the segment is gone
        if remote.checks_generation or remote.written_once:
            return self._good
        return self._unchanged() if self.failure is None else []

    def _read(self, wanted: Sequence[list[_Part]]) -> None:
        """Read the bundles until all are here or the segment cannot be read."""
        with self._window() as window:
            for bundle in wanted:
                requests = [part.request for part in bundle]
                self._check(window.add(requests, bundle, is_only=len(wanted) == 1))
                if self.failure is not None:
                    return
            self._check(window.wait_all())

    def _window(self) -> TransferWindow[list[_Part]]:
        return TransferWindow(self._engine, timeout_s=self._timeout_s, priority=Priority.PREFETCH)

    def _check(self, finished: Iterable[FinishedBundle[list[_Part]]]) -> None:
        """Check the objects that are complete now."""
        for bundle, errors in finished:
            for part, error in zip(bundle, errors, strict=True):
                if error is not None:
                    self._record(part, error)
                for each in part.objects:
                    each.num_missing -= 1
                    if not each.num_missing and not each.is_lost and each.check(self._identity):
                        self._good.append(each)

    def _record(self, part: _Part, error: MoonpoolError) -> None:
        """Record a request that failed. A ReadSession finds out why its objects cannot be read."""
        for each in part.objects:
            if not each.is_lost and isinstance(error, NotFound):
                self._missing.append(error)
            each.is_lost = True
        if isinstance(error, Unavailable | Unauthorized):
            self.failure = self.failure or error

    def _unchanged(self) -> list[RemoteObject]:
        """Read the start of the headers again. Return the objects whose header is the same as before."""
        room = memoryview(bytearray(PREFIX_NBYTES * len(self._good)))
        prefixes = [room[at : at + PREFIX_NBYTES] for at in range(0, room.nbytes, PREFIX_NBYTES)]
        parts = [
            _Part(TransferRequest(_READ, self._remote, each.place.offset, [prefix]), PREFIX_NBYTES, (each,))
            for each, prefix in zip(self._good, prefixes, strict=True)
        ]
        with self._window() as window:
            finished = [*window.add([part.request for part in parts], parts, is_only=True), *window.wait_all()]
        for part, error in zip(parts, finished[0].errors, strict=True):
            if error is not None:
                self._record(part, error)
        return [
            each
            for each, prefix in zip(self._good, prefixes, strict=True)
            if not each.is_lost and is_unchanged(each.header, prefix)
        ]


def _nbytes_of(part: _Part) -> int:
    return part.nbytes


def _parts(remote: RemoteSegment, objects: Iterable[RemoteObject]) -> Iterator[_Part]:
    """Yield one request per object. A large object has several, which the engine's threads move in parallel."""
    checks = remote.checks_generation
    for each in objects:
        place, views = each.place, [each.header, *each.views]
        expected = place.generation if checks else None
        if each.nbytes <= BUNDLE_NBYTES:
            yield _Part(TransferRequest(_READ, remote, place.offset, views, 0, expected), each.nbytes, (each,))
            continue
        each.num_missing = -(-each.nbytes // BUNDLE_NBYTES)
        for at in range(0, each.nbytes, BUNDLE_NBYTES):
            nbytes = min(BUNDLE_NBYTES, each.nbytes - at)
            request = TransferRequest(_READ, remote, place.offset + at, cut(views, at, nbytes), 0, expected)
            yield _Part(request, nbytes, (each,))


def _disk_parts(remote: RemoteSegment, objects: Sequence[RemoteObject]) -> Iterator[_Part]:
    """Yield one request per group of neighbours. Their headers get aligned memory, so that one system call reads them
    together with the bytes behind them.
    """
    headers = aligned_buffer(ALIGN_NBYTES * len(objects))
    for number, each in enumerate(objects):
        each.header = headers[number * ALIGN_NBYTES : (number + 1) * ALIGN_NBYTES]
    for group in _neighbours(sorted(objects, key=lambda each: each.place.offset)):
        views = [view for each in group for view in (each.header, *each.views)]
        request = TransferRequest(_READ, remote, group[0].place.offset, views)
        yield _Part(request, sum([each.nbytes for each in group]), group)


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
