"""Reads and writes of a file or block device, past the page cache where that is possible.

plan_spans() cuts a request, without I/O. Aligned parts go straight between the disk and the caller's memory; the rest
passes through an aligned bounce buffer. The spans cover the request exactly and in order, and a bounce span touches a
part of a block only at the first and the last byte of the request.

A write never changes a byte outside its request: a block that the request fills only in part is read, changed and
written back under a lock, which excludes all other writers that use this module, in any process.

Every wait has a deadline except one inside a system call: a disk that does not answer holds its caller, because the
caller's memory must not be reused while the disk may still write to it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple

from moonpool.base.clock import Deadline
from moonpool.base.errors import DeadlineExceeded, Unavailable
from moonpool.transfer.disk.alignment import BUFFERED, Alignment, BlockLocks, BouncePool, find_alignment
from moonpool.transfer.disk.handle import SharedFd, lock, own_errors, unlock
from moonpool.transfer.memory.buffers import address_of, copy_bytes, cut, total_nbytes


class FileSpan(NamedTuple):
    """Bytes `offset` .. `offset + nbytes` of the file, which are those of the views."""

    direct: bool
    offset: int
    nbytes: int
    views: list[memoryview]


def plan_spans(offset: int, views: Sequence[memoryview], alignment: Alignment) -> list[FileSpan]:
    if len(views) == 1 and _is_aligned(offset, views[0], alignment):
        return [FileSpan(True, offset, views[0].nbytes, list(views))]  # the usual request, at a third of the price
    spans: list[FileSpan] = []
    for view in views:
        for direct, part in _split(offset, view, alignment):
            if spans and spans[-1].direct is direct:
                last = spans[-1]
                last.views.append(part)
                spans[-1] = last._replace(nbytes=last.nbytes + part.nbytes)
            else:
                spans.append(FileSpan(direct, offset, part.nbytes, [part]))
            offset += part.nbytes
    return spans


def _split(offset: int, view: memoryview, alignment: Alignment) -> list[tuple[bool, memoryview]]:
    """Return the unaligned head, the aligned middle and the unaligned tail of one view, without empty parts."""
    block = alignment.block_nbytes
    head = -offset % block
    end = head + (view.nbytes - head) // block * block
    if end <= head or (address_of(view) + head) % alignment.memory_nbytes:
        return [(False, view)]
    parts = [(False, view[:head]), (True, view[head:end]), (False, view[end:])]
    return [part for part in parts if part[1].nbytes]


def _is_aligned(offset: int, view: memoryview, alignment: Alignment) -> bool:
    block = alignment.block_nbytes
    return not (offset % block or view.nbytes % block or address_of(view) % alignment.memory_nbytes)


class Cursor:
    """Reads a list of views from front to back, in time proportional to its length."""

    def __init__(self, views: Sequence[memoryview]) -> None:
        self._views = views
        self._index = 0
        self._start = 0  # bytes already returned of the view at _index

    def take(self, nbytes: int, max_views: int | None = None) -> list[memoryview]:
        """Return the next views, the last one cut, of `nbytes` in all; fewer bytes at the end, or if `max_views` is
        reached.
        """
        taken: list[memoryview] = []
        while nbytes and self._index < len(self._views) and (max_views is None or len(taken) < max_views):
            part = self._views[self._index][self._start : self._start + nbytes]
            taken.append(part)
            nbytes -= part.nbytes
            self._start += part.nbytes
            if self._start == self._views[self._index].nbytes:
                self._index, self._start = self._index + 1, 0
        return taken


_PART_NBYTES = 16 * 1024 * 1024  # one system call; the deadline is checked between two of them
_MAX_VIEWS = 1024  # the most that the kernel accepts in one list
BOUNCE_NBYTES = 1024 * 1024
MAX_BOUNCE_BUFFERS = 4

VectoredCall = Callable[[int, list[memoryview], int], int]  # os.preadv or os.pwritev


def move_blocks(
    operation: VectoredCall,
    fd: int,
    views: Sequence[memoryview],
    offset: int,
    path: str,
    block_nbytes: int,
    deadline: Deadline | None,
) -> None:
    """Read or write whole blocks from `offset` on, by as many system calls as needed. Python repeats interrupted calls.

    Raise DeadlineExceeded between two calls, Unavailable if the file is too short; both name `path`.
    """
    cursor = Cursor(views)
    while group := cursor.take(_PART_NBYTES, _MAX_VIEWS):
        left = total_nbytes(group)
        while left:
            if deadline is not None and deadline.expired():
                raise DeadlineExceeded(f"{path} was not read or written in time")
            moved = operation(fd, group, offset)
            offset, left = offset + moved, left - moved
            if moved == 0 or (left and moved % block_nbytes):
                raise Unavailable(f"{path} ends at byte {offset}; it was truncated or is damaged")
            if left:
                group = cut(group, moved, left)


def read_spans(
    fd: int,
    offset: int,
    views: Sequence[memoryview],
    path: str,
    alignment: Alignment,
    bounces: BouncePool,
    deadline: Deadline,
) -> None:
    """Fill the views from any offset. What is not aligned passes through a bounce buffer. Raise as move_blocks()."""
    block = alignment.block_nbytes
    for span in plan_spans(offset, views, alignment):
        if span.direct:
            move_blocks(os.preadv, fd, span.views, span.offset, path, block, deadline)
            continue
        cursor, at, end = Cursor(span.views), span.offset, span.offset + span.nbytes
        while at < end:
            start = at // block * block
            stop = min(start + bounces.buffer_nbytes, -(-end // block) * block)
            with bounces.borrow(deadline) as buffer:
                move_blocks(os.preadv, fd, [buffer[: stop - start]], start, path, block, deadline)
                part_end = min(stop, end)
                scatter(buffer[at - start : part_end - start], cursor.take(part_end - at))
            at = part_end


class OpenDisk(ABC):
    """A file or device whose bytes are addressed by offset. Thread-safe. The caller checks bounds."""

    path: str
    direct: bool

    @abstractmethod
    def read(self, offset: int, views: Sequence[memoryview], deadline: Deadline) -> None:
        """Fill the views. Raise Unavailable if the file has become too short."""

    @abstractmethod
    def write(self, offset: int, views: Sequence[memoryview], deadline: Deadline) -> None:
        """Write the bytes to the device; sync() makes them durable."""

    @abstractmethod
    def sync(self) -> None:
        """Return when everything written before is durable."""

    def view(self, offset: int, nbytes: int) -> memoryview | None:
        return None

    @property
    def num_bounces(self) -> int:
        """How often bytes were copied through a bounce buffer, since the start."""
        return 0

    @abstractmethod
    def close(self) -> None:
        """Close the file after running calls have ended. Idempotent."""


class FileDisk(OpenDisk):
    """A regular file or a block device of at least `nbytes` (rounded up to whole blocks)."""

    def __init__(self, path: str, nbytes: int, *, writable: bool = True) -> None:
        with own_errors(path):
            fd, self._alignment = _open(path, os.O_RDWR if writable else os.O_RDONLY)
        self.path = path
        self.direct = self._alignment.direct
        self._fd = SharedFd(fd, path)
        block = self._alignment.block_nbytes
        self._needed_nbytes = -(-nbytes // block) * block
        self._bounces = BouncePool(
            max(BOUNCE_NBYTES, block), MAX_BOUNCE_BUFFERS, alignment=max(block, self._alignment.memory_nbytes)
        )
        self._block_locks = BlockLocks()
        try:
            with self._fd:
                self._is_regular = stat.S_ISREG(os.fstat(fd).st_mode)
                self._check_whole(fd)
        except BaseException:
            self.close()
            raise

    @property
    def num_bounces(self) -> int:
        return self._bounces.num_borrowed

    def read(self, offset: int, views: Sequence[memoryview], deadline: Deadline) -> None:
        with self._fd as fd:
            self._check_whole(fd)
            read_spans(fd, offset, views, self.path, self._alignment, self._bounces, deadline)

    def write(self, offset: int, views: Sequence[memoryview], deadline: Deadline) -> None:
        with self._fd as fd:
            self._check_whole(fd)
            for span in plan_spans(offset, views, self._alignment):
                if span.direct:
                    self._move(os.pwritev, fd, span.views, span.offset, deadline)
                else:
                    self._write_bounced(fd, span, deadline)
            self._check_whole(fd)

    def sync(self) -> None:
        with self._fd as fd:
            os.fdatasync(fd)

    def close(self) -> None:
        self._fd.close()

    def _move(
        self, operation: VectoredCall, fd: int, views: Sequence[memoryview], offset: int, deadline: Deadline
    ) -> None:
        move_blocks(operation, fd, views, offset, self.path, self._alignment.block_nbytes, deadline)

    def _write_bounced(self, fd: int, span: FileSpan, deadline: Deadline) -> None:
        block, cursor = self._alignment.block_nbytes, Cursor(span.views)
        at, end = span.offset, span.offset + span.nbytes
        while at < end:
            start = at // block * block
            if at != start or end - at < block:
                stop = min(end, start + block)
                self._patch_block(fd, start, at - start, cursor.take(stop - at), deadline)
            else:
                stop = min(at + self._bounces.buffer_nbytes, end // block * block)
                with self._bounces.borrow(deadline) as buffer:
                    gather(buffer, cursor.take(stop - at))
                    self._move(os.pwritev, fd, [buffer[: stop - at]], at, deadline)
            at = stop

    def _patch_block(self, fd: int, start: int, at: int, views: Sequence[memoryview], deadline: Deadline) -> None:
        """Change part of one block. Hold two locks, because the file's lock does not exclude threads of this handle. A
        request holds one block at a time, so no two requests wait for each other.
        """
        block = self._alignment.block_nbytes
        with self._block_locks.hold(start, deadline):
            lock(fd, start, block, deadline)
            try:
                with self._bounces.borrow(deadline) as buffer:
                    self._move(os.preadv, fd, [buffer[:block]], start, deadline)
                    gather(buffer[at:], views)
                    self._move(os.pwritev, fd, [buffer[:block]], start, deadline)
            finally:
                unlock(fd, start, block)

    def _check_whole(self, fd: int) -> None:
        """Raise Unavailable if the file was removed or truncated."""
        if not self._is_regular:
            return
        status = os.fstat(fd)
        if status.st_nlink == 0:
            raise Unavailable(f"{self.path} was removed")
        if status.st_size < self._needed_nbytes:
            raise Unavailable(f"{self.path} has {status.st_size} bytes and should have {self._needed_nbytes}")


def allocate_file(path: str, nbytes: int, flag: int = os.O_EXCL) -> None:
    """Make a file with allocated space, durably. If it exists: with O_EXCL raise FileExistsError, with O_TRUNC replace
    it. Remove the file if there is no space.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | flag | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, nbytes)
        os.fsync(fd)
    except BaseException:
        os.unlink(path)
        raise
    finally:
        os.close(fd)


def gather(target: memoryview, views: Sequence[memoryview]) -> None:
    """Copy the views, one after the other, to the beginning of `target`."""
    at = 0
    for view in views:
        copy_bytes(target[at : at + view.nbytes], view)
        at += view.nbytes


def scatter(source: memoryview, views: Sequence[memoryview]) -> None:
    """Fill the views, one after the other, from the beginning of `source`."""
    at = 0
    for view in views:
        copy_bytes(view, source[at : at + view.nbytes])
        at += view.nbytes


def _open(path: str, access: int) -> tuple[int, Alignment]:
    try:
        fd = os.open(path, access | os.O_CLOEXEC | os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.open(path, access | os.O_CLOEXEC), BUFFERED
    try:
        alignment = find_alignment(fd)
        if not alignment.direct:
            fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_DIRECT)
    except BaseException:
        os.close(fd)
        raise
    return fd, alignment
