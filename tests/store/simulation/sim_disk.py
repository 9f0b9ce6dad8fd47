"""Simulated disks: files in memory, seen through the few calls of `os` and `fcntl` that the SSD log makes.

What was written stays when the process that wrote it is killed. When power is lost, blocks written since the last sync
of their file are old, new or torn at a sector, and names changed since the last sync of the folder are old or new.
"""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

BLOCK_NBYTES = 4096
SECTOR_NBYTES = 512


class _File:
    """`dirty` has, by block, what was durable there before it was written."""

    __slots__ = ("data", "dirty", "number")

    def __init__(self, number: int) -> None:
        self.number = number
        self.data = bytearray()
        self.dirty: dict[int, bytes] = {}

    def write(self, offset: int, data: memoryview) -> None:
        end = offset + data.nbytes
        if end > len(self.data):
            self.resize(end)
        for block in range(offset // BLOCK_NBYTES, -(-end // BLOCK_NBYTES)):
            at = block * BLOCK_NBYTES
            self.dirty.setdefault(block, bytes(self.data[at : at + BLOCK_NBYTES]))
        self.data[offset:end] = data

    def resize(self, nbytes: int) -> None:
        del self.data[nbytes:]
        self.data.extend(bytes(nbytes - len(self.data)))

    def lose_power(self, rng: random.Random) -> None:
        for block, old in self.dirty.items():
            at = block * BLOCK_NBYTES
            new = bytes(self.data[at : at + BLOCK_NBYTES])
            fate = rng.randrange(4)
            if fate == 0:
                new = old.ljust(len(new), b"\0")
            elif fate == 1:
                cut = rng.randrange(1, BLOCK_NBYTES // SECTOR_NBYTES) * SECTOR_NBYTES
                new = new[:cut] + old.ljust(len(new), b"\0")[cut:]
            self.data[at : at + BLOCK_NBYTES] = new
        self.dirty.clear()


class Disk:
    """One node's disk: survives its processes. `boot` counts them; handles of an earlier one are void."""

    def __init__(self) -> None:
        self.names: dict[str, _File] = {}
        self.durable_names: dict[str, _File] = {}
        self.locked: set[int] = set()
        self.boot = 0

    def end_process(self) -> None:
        self.boot += 1
        self.locked.clear()

    def lose_power(self, rng: random.Random) -> None:
        if rng.random() < 0.5:
            self.names = dict(self.durable_names)
        for name in sorted(self.names):
            self.names[name].lose_power(rng)
        self.durable_names = dict(self.names)

    def log_files(self) -> dict[int, _File]:
        return {int(name[-10:]): each for name, each in sorted(self.names.items()) if "/log-" in name}


class _Handle(NamedTuple):
    disk: Disk
    file: _File | None  # None: the folder
    boot: int


class _Status(NamedTuple):
    st_size: int
    st_blocks: int


class _Entry(NamedTuple):
    name: str
    status: _Status

    def stat(self) -> _Status:
        return self.status


class _Paths:
    join, dirname, realpath = staticmethod(os.path.join), staticmethod(os.path.dirname), staticmethod(str)

    def __init__(self, disks: SimOs) -> None:
        self._disks = disks

    def exists(self, path: str) -> bool:
        disk, _ = self._disks.find(path)
        return path in disk.names


class SimOs:
    """Stands for `os` in the modules of the SSD log. Paths are /disk/<node>/..."""

    O_RDONLY, O_RDWR, O_CREAT, O_TRUNC = os.O_RDONLY, os.O_RDWR, os.O_CREAT, os.O_TRUNC
    O_CLOEXEC, O_DIRECT, O_DIRECTORY = os.O_CLOEXEC, os.O_DIRECT, os.O_DIRECTORY
    POSIX_FADV_DONTNEED = os.POSIX_FADV_DONTNEED
    stat_result = os.stat_result
    PathLike = os.PathLike
    fspath = staticmethod(os.fspath)

    def __init__(self, rng: random.Random) -> None:
        self.disks: dict[str, Disk] = {}
        self.path = _Paths(self)
        self._rng = rng
        self._handles: dict[int, _Handle] = {}
        self._next_fd = 1000
        self._next_file = 0

    def find(self, path: str) -> tuple[Disk, str]:
        node = path.split("/")[2]
        return self.disks.setdefault(node, Disk()), path

    def urandom(self, nbytes: int) -> bytes:
        return self._rng.randbytes(nbytes)

    # names

    def makedirs(self, path: str, mode: int = 0o777, exist_ok: bool = False) -> None:
        """There always is a folder."""

    def open(self, path: str, flags: int, mode: int = 0o777) -> int:
        disk, _ = self.find(path)
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")  # through the cache, as on tmpfs
        file = None
        if not flags & os.O_DIRECTORY:
            file = disk.names.get(path)
            if file is None and not flags & os.O_CREAT:
                raise FileNotFoundError(errno.ENOENT, "No such file or directory", path)
            if file is None:
                self._next_file += 1
                file = disk.names[path] = _File(self._next_file)
            elif flags & os.O_TRUNC:
                file.resize(0)
        self._next_fd += 1
        self._handles[self._next_fd] = _Handle(disk, file, disk.boot)
        return self._next_fd

    def close(self, fd: int) -> None:
        handle = self._handles.pop(fd, None)
        if handle is not None and handle.boot == handle.disk.boot:
            handle.disk.locked.discard(fd)

    def rename(self, old: str, new: str) -> None:
        disk, _ = self.find(old)
        if old not in disk.names:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", old)
        disk.names[new] = disk.names.pop(old)

    def unlink(self, path: str) -> None:
        disk, _ = self.find(path)
        if disk.names.pop(path, None) is None:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", path)

    def truncate(self, path: str, nbytes: int) -> None:
        self.find(path)[0].names[path].resize(nbytes)

    def scandir(self, path: str) -> Iterator[_Entry]:
        disk, _ = self.find(path)
        for name, file in list(disk.names.items()):
            status = _Status(len(file.data), -(-len(file.data) // 512))
            yield _Entry(os.path.basename(name), status)

    # bytes

    def posix_fallocate(self, fd: int, offset: int, nbytes: int) -> None:
        file = self._file(fd)
        if len(file.data) < offset + nbytes:
            file.resize(offset + nbytes)

    def posix_fadvise(self, *_: Any) -> None:
        """No cache to advise."""

    def fsync(self, fd: int) -> None:
        handle = self._handle(fd)
        if handle.file is None:
            handle.disk.durable_names = dict(handle.disk.names)
        else:
            handle.file.dirty.clear()

    def fdatasync(self, fd: int) -> None:
        self.fsync(fd)

    def pwritev(self, fd: int, views: Sequence[memoryview], offset: int) -> int:
        file, at = self._file(fd), offset
        for view in views:
            file.write(at, memoryview(view).cast("B"))
            at += view.nbytes
        return at - offset

    def preadv(self, fd: int, views: Sequence[memoryview], offset: int) -> int:
        file, at = self._file(fd), offset
        for view in views:
            part = file.data[at : at + view.nbytes]
            view[: len(part)] = part
            at += len(part)
        return at - offset

    def flock(self, fd: int) -> None:
        disk = self._handle(fd).disk
        if disk.locked:
            raise BlockingIOError(errno.EWOULDBLOCK, "Resource temporarily unavailable")
        disk.locked.add(fd)

    def _file(self, fd: int) -> _File:
        file = self._handle(fd).file
        assert file is not None, "a folder has no bytes"
        return file

    def _handle(self, fd: int) -> _Handle:
        handle = self._handles.get(fd)
        if handle is None or handle.boot != handle.disk.boot:
            raise OSError(errno.EIO, "Input/output error")  # of a process that is no more
        return handle


class SimFcntl:
    """Stands for `fcntl` in ssd/folder.py."""

    LOCK_EX = LOCK_NB = 0

    def __init__(self, disks: Callable[[], SimOs]) -> None:
        self._disks = disks

    def flock(self, fd: int, _: int) -> None:
        self._disks().flock(fd)
