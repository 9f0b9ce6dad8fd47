"""Finds out whether a file can be read and written past the page cache, and in which units. Unaligned requests then
need aligned bounce buffers, and a lock for each block that a request writes only in part.
"""

from __future__ import annotations

import array
import ctypes
import fcntl
import os
import stat
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from moonpool.base.clock import Deadline
from moonpool.base.errors import DeadlineExceeded
from moonpool.transfer.memory.buffers import aligned_buffer


class BouncePool:
    """Aligned buffers, made when first needed, never more than `max_buffers`."""

    def __init__(self, buffer_nbytes: int, max_buffers: int, alignment: int) -> None:
        self.buffer_nbytes = buffer_nbytes
        self._alignment = alignment
        self._lock = threading.Lock()
        self._room = threading.Semaphore(max_buffers)
        self._free: list[memoryview] = []
        self.num_borrowed = 0  # how often, since the start

    @contextmanager
    def borrow(self, deadline: Deadline) -> Iterator[memoryview]:
        if not self._room.acquire(timeout=deadline.remaining_s()):
            raise DeadlineExceeded("no bounce buffer became free in time")
        try:
            buffer = self._take()
            try:
                yield buffer
            finally:
                self._free.append(buffer)
        finally:
            self._room.release()

    def _take(self) -> memoryview:
        with self._lock:
            self.num_borrowed += 1
            if self._free:
                return self._free.pop()
        return aligned_buffer(self.buffer_nbytes, self._alignment)


class BlockLocks:
    """Excludes threads from each other, block by block."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._held: set[int] = set()

    @contextmanager
    def hold(self, block: int, deadline: Deadline) -> Iterator[None]:
        with self._changed:
            if not self._changed.wait_for(lambda: block not in self._held, deadline.remaining_s()):
                raise DeadlineExceeded(f"the block at {block} was being written for too long")
            self._held.add(block)
        try:
            yield
        finally:
            with self._changed:
                self._held.discard(block)
                self._changed.notify_all()


FALLBACK_NBYTES = 4096  # for disks that do not report their alignment

_AT_EMPTY_PATH = 0x1000
_STATX_DIOALIGN = 0x2000
_STATX_NBYTES = 256
_DIOALIGN = struct.Struct("II")  # memory and offset alignment
_DIOALIGN_AT = 0x98
_BLKSSZGET = 0x1268
# Filesystems that live in the page cache. New kernels let them be opened with O_DIRECT and ignore it.
_CACHE_ONLY = frozenset({0x01021994, 0x858458F6, 0x958458F6})  # tmpfs, ramfs, hugetlbfs


class Alignment(NamedTuple):
    """Direct transfers start and end at multiples of `block_nbytes` in the file and start at multiples of
    `memory_nbytes` in memory. Both are 1 if there is no direct I/O (`direct` is False).
    """

    direct: bool
    block_nbytes: int
    memory_nbytes: int


BUFFERED = Alignment(False, 1, 1)


def find_alignment(fd: int) -> Alignment:
    """Return the alignment of a file or block device that was opened with O_DIRECT."""
    reported = _statx_alignment(fd)
    if reported is not None:
        memory_nbytes, block_nbytes = reported
        return Alignment(True, block_nbytes, memory_nbytes) if block_nbytes else BUFFERED
    if stat.S_ISBLK(os.fstat(fd).st_mode):
        sector = array.array("i", [0])
        fcntl.ioctl(fd, _BLKSSZGET, sector)
        return Alignment(True, sector[0], sector[0])
    if _filesystem_magic(fd) in _CACHE_ONLY:
        return BUFFERED
    return Alignment(True, FALLBACK_NBYTES, FALLBACK_NBYTES)


def _statx_alignment(fd: int) -> tuple[int, int] | None:
    """Return the (memory, offset) alignment, None if the kernel, C library or file system does not report it (before
    Linux 6.1).
    """
    statx = getattr(ctypes.CDLL(None), "statx", None)
    found = ctypes.create_string_buffer(_STATX_NBYTES)
    if statx is None or statx(fd, b"", _AT_EMPTY_PATH, _STATX_DIOALIGN, found) != 0:
        return None
    (mask,) = struct.unpack_from("I", found)
    if not mask & _STATX_DIOALIGN:
        return None
    memory_nbytes, block_nbytes = _DIOALIGN.unpack_from(found, _DIOALIGN_AT)
    return memory_nbytes, block_nbytes


def _filesystem_magic(fd: int) -> int | None:
    found = ctypes.create_string_buffer(256)
    if ctypes.CDLL(None).fstatfs(fd, found) != 0:
        return None
    magic: int = struct.unpack_from("l", found)[0]
    return magic & 0xFFFFFFFF
