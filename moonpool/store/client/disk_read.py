"""Reading whole objects from a disk of this machine, as fast as the disk gives them.

Header and bytes of an object come by one request, small neighbours by one together, straight into their memory where
that is aligned. Three threads, the caller's and two of the crew, each read and check in turn, so that the disk always
has something to do while checksums are taken. Nothing is looked at twice: such a segment's bytes are written once, and
a read that lost its race against their end fails.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from moonpool.base.errors import MoonpoolError, Unavailable
from moonpool.base.object_header import ALIGN_NBYTES
from moonpool.store.client.far_read import FarObject
from moonpool.store.client.transfer_window import TransferThreads
from moonpool.transfer.memory.buffers import aligned_buffer
from moonpool.transfer.transports.base import RemoteSegment

_LEAST_NBYTES, _MOST_NBYTES = 1024 * 1024, 4 * 1024 * 1024 + 64 * 1024  # of neighbours that are read together
_SHARE = 4  # of what is left one request takes so much at most
_NUM_HELPERS = 2


class DiskRead:
    """One segment's objects, as FarRead: `failure` is set when the segment cannot be read."""

    def __init__(self, remote: RemoteSegment, crew: TransferThreads, identity: bytes | None, timeout_s: float) -> None:
        assert remote.written_once, "else headers must be looked at again"
        self._remote, self._crew = remote, crew
        self._identity, self._timeout_s = identity, timeout_s
        self._rest: deque[list[FarObject]] = deque()
        self._good: list[FarObject] = []
        self.failure: MoonpoolError | None = None

    def run(self, objects: Sequence[FarObject]) -> list[FarObject]:
        """Those of the objects that have arrived and are what they should be. PeerLost once the crew is closed."""
        fitting = sorted([each for each in objects if each.fits], key=lambda each: each.place.offset)
        _align_headers(fitting)
        self._rest.extend(_neighbours(fitting))
        if len(self._rest) > 1:
            self._crew.together(self._work, self._rest.clear, _NUM_HELPERS)
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
            except MoonpoolError as error:  # of what is not there any more others find out why
                if isinstance(error, Unavailable):
                    self.failure = error
            else:
                self._good += [each for each in group if each.check(self._identity)]

    def _fetch(self, group: Sequence[FarObject]) -> None:
        views = [view for each in group for view in (each.header, *each.views)]
        self._remote.read_into(group[0].place.offset, views, timeout_s=self._timeout_s)


def _align_headers(objects: Sequence[FarObject]) -> None:
    """So that they are read together with the bytes behind them."""
    headers = aligned_buffer(ALIGN_NBYTES * len(objects))
    for number, each in enumerate(objects):
        each.header = headers[number * ALIGN_NBYTES : (number + 1) * ALIGN_NBYTES]


def _neighbours(objects: Sequence[FarObject]) -> Iterator[list[FarObject]]:
    """Groups whose bytes follow one another without gaps, smaller ones towards the end: the checks of the last one are
    what the disk has to wait for.
    """
    group: list[FarObject] = []
    end = nbytes = 0
    left = sum([each.nbytes for each in objects])
    for each in objects:
        limit = min(max(left // _SHARE, _LEAST_NBYTES), _MOST_NBYTES)
        if group and (each.place.offset != end or nbytes + each.nbytes > limit):
            yield group
            group, left, nbytes = [], left - nbytes, 0
        group.append(each)
        nbytes += each.nbytes
        end = each.place.offset + each.nbytes
    if group:
        yield group
