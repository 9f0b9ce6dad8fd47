"""One open log file: reads of any place into any memory, writes of whole blocks, past the page cache where it can be.

Where it cannot, written bytes leave the cache again when they are durable. Thread-safe; a read may run beside a write
elsewhere in the file.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from moonpool.base.clock import Deadline
from moonpool.base.errors import DeadlineExceeded, InvalidInput, NotFound, Unavailable
from moonpool.transfer.disk.alignment import Alignment
from moonpool.transfer.disk.bounce import BouncePool
from moonpool.transfer.disk.disk import scatter
from moonpool.transfer.disk.handle import SharedFd, own_errors
from moonpool.transfer.disk.plan import Cursor, FileSpan, plan_spans
from moonpool.transfer.memory.buffers import cut, total_nbytes

_PART_NBYTES = 16 * 1024 * 1024  # one system call; the deadline is looked at between them
_MAX_VIEWS = 1024  # what the kernel takes in one list


@contextmanager
def on_disk(path: str) -> Iterator[None]:
    """System errors as ours. What would be the caller's mistake elsewhere (read-only, no permission, a folder that is
    gone) is a disk in trouble here: Unavailable, and worth another try later. NoSpace stays NoSpace.
    """
    try:
        with own_errors(path):
            yield
    except (InvalidInput, NotFound) as error:
        raise Unavailable(str(error)) from error


class SsdLogFile:
    """Owns its descriptor; borrows the bounce buffers."""

    def __init__(self, path: str, alignment: Alignment, bounces: BouncePool, *, writable: bool) -> None:
        self.path = path
        flags = (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC | (os.O_DIRECT if alignment.direct else 0)
        with on_disk(path):
            self.kept_open = SharedFd(os.open(path, flags), path)
        self._alignment = alignment
        self._bounces = bounces

    def read(self, offset: int, views: Sequence[memoryview], deadline: Deadline) -> None:
        """Fills the views. Unavailable when the file ends before."""
        with on_disk(self.path), self.kept_open as fd:
            for span in plan_spans(offset, views, self._alignment):
                if span.direct:
                    self._move(os.preadv, fd, span.views, span.offset, deadline)
                else:
                    self._read_bounced(fd, span, deadline)

    def write(self, offset: int, views: Sequence[memoryview]) -> None:
        """Whole blocks from aligned memory. There is no deadline: half a batch is worth nothing."""
        with on_disk(self.path), self.kept_open as fd:
            self._move(os.pwritev, fd, views, offset, None)

    def sync(self) -> None:
        """Returns when everything written before is durable."""
        with on_disk(self.path), self.kept_open as fd:
            os.fdatasync(fd)
            if not self._alignment.direct:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def renamed(self, path: str) -> None:
        """What errors call it from now on."""
        self.path = self.kept_open.path = path

    def close(self) -> None:
        """Idempotent; calls under way end first."""
        self.kept_open.close()

    def _move(
        self,
        operation: Callable[[int, list[memoryview], int], int],
        fd: int,
        views: Sequence[memoryview],
        offset: int,
        deadline: Deadline | None,
    ) -> None:
        cursor = Cursor(views)
        while group := cursor.take(_PART_NBYTES, _MAX_VIEWS):
            left = total_nbytes(group)
            while left:
                if deadline is not None and deadline.expired():
                    raise DeadlineExceeded(f"{self.path} was not read in time")
                moved = operation(fd, group, offset)
                offset, left = offset + moved, left - moved
                if moved == 0 or (left and moved % self._alignment.block_nbytes):
                    raise Unavailable(f"{self.path} ends at byte {offset}; it was truncated or is damaged")
                if left:
                    group = cut(group, moved, left)

    def _read_bounced(self, fd: int, span: FileSpan, deadline: Deadline) -> None:
        block, cursor = self._alignment.block_nbytes, Cursor(span.views)
        at, end = span.offset, span.offset + span.nbytes
        while at < end:
            start = at // block * block
            stop = min(start + self._bounces.buffer_nbytes, -(-end // block) * block)
            with self._bounces.borrow(deadline) as buffer:
                self._move(os.preadv, fd, [buffer[: stop - start]], start, deadline)
                upto = min(stop, end)
                scatter(buffer[at - start : upto - start], cursor.take(upto - at))
            at = upto
