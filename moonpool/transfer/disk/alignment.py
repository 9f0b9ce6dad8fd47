"""Finds out whether a file can be read and written without the page cache, and in which units."""

from __future__ import annotations

import array
import ctypes
import fcntl
import os
import stat
import struct
from typing import NamedTuple

FALLBACK_NBYTES = 4096  # suits every disk that does not say what it needs

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
    `memory_nbytes` in memory. Both are 1 where there is no direct way (`direct` is false).
    """

    direct: bool
    block_nbytes: int
    memory_nbytes: int


BUFFERED = Alignment(False, 1, 1)


def find_alignment(fd: int) -> Alignment:
    """Of a file or block device opened with O_DIRECT."""
    said = _statx_alignment(fd)
    if said is not None:
        memory_nbytes, block_nbytes = said
        return Alignment(True, block_nbytes, memory_nbytes) if block_nbytes else BUFFERED
    if stat.S_ISBLK(os.fstat(fd).st_mode):
        sector = array.array("i", [0])
        fcntl.ioctl(fd, _BLKSSZGET, sector)
        return Alignment(True, sector[0], sector[0])
    if _filesystem_magic(fd) in _CACHE_ONLY:
        return BUFFERED
    return Alignment(True, FALLBACK_NBYTES, FALLBACK_NBYTES)


def _statx_alignment(fd: int) -> tuple[int, int] | None:
    """(memory, offset) alignment; None where kernel, C library or filesystem cannot tell (before Linux 6.1)."""
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
