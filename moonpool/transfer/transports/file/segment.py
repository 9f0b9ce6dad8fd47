"""A segment in a file, on a block device or on a DAX device (/dev/dax*: CXL or persistent memory).

A file has no memory to show: its bytes are read and written by offset. A DAX device is mapped, so a transfer is a copy
and a read can be a view. The segment outlives its owner; the next owner opens it and finds the bytes that were synced.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from moonpool.base.clock import Deadline
from moonpool.base.errors import AlreadyExists, InvalidInput, NoSpace, PeerLost
from moonpool.base.units import format_nbytes
from moonpool.transfer.disk.disk import FileDisk, OpenDisk, allocate_file, gather, scatter
from moonpool.transfer.disk.handle import own_errors
from moonpool.transfer.disk.sidecar import Sidecar, pack_grant, sidecar_path
from moonpool.transfer.memory.buffers import Buffer, as_bytes_views, total_nbytes
from moonpool.transfer.memory.segment import Segment, check_sizes
from moonpool.transfer.transports.base import check_bounds

_ALIGN_NBYTES = 2 * 1024 * 1024  # the driver's default, where sysfs does not say


class DaxDisk(OpenDisk):
    """The first `nbytes` of the device. Never for files that may shrink: touching what is gone kills the process."""

    direct = True

    def __init__(self, path: str, nbytes: int) -> None:
        self.path = path
        capacity, align = dax_geometry(path)
        if nbytes > capacity:
            raise InvalidInput(f"{path} has {capacity} bytes, not {nbytes}")
        with own_errors(path):
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                # The driver maps multiples of its alignment only.
                self._mapping = mmap.mmap(fd, min(-(-nbytes // align) * align, capacity), mmap.MAP_SHARED)
            finally:
                os.close(fd)
        self._memory: memoryview | None = memoryview(self._mapping)[:nbytes]

    def read(self, offset: int, views: Sequence[memoryview], deadline: Deadline) -> None:
        scatter(self._bytes()[offset:], views)

    def write(self, offset: int, views: Sequence[memoryview], deadline: Deadline) -> None:
        gather(self._bytes()[offset:], views)

    def sync(self) -> None:
        self._bytes()
        with own_errors(self.path):
            self._mapping.flush()

    def view(self, offset: int, nbytes: int) -> memoryview:
        return self._bytes()[offset : offset + nbytes].toreadonly()

    def close(self) -> None:
        """Views given out stay readable; the last one to go unmaps the device."""
        self._memory = None

    def _bytes(self) -> memoryview:
        memory = self._memory
        if memory is None:
            raise PeerLost(f"{self.path} is closed here")
        return memory


def dax_geometry(path: str, sysfs: Path = Path("/sys/dev/char")) -> tuple[int, int]:
    """(size, alignment) of the device, from sysfs."""
    with own_errors(path):
        status = os.stat(path)
        device = sysfs / f"{os.major(status.st_rdev)}:{os.minor(status.st_rdev)}"
        if not (device / "size").exists():
            raise InvalidInput(f"{path} is a character device and no DAX device")
        nbytes = int((device / "size").read_text())
        align = device / "align"
        return nbytes, int(align.read_text()) if align.exists() else _ALIGN_NBYTES


_FILE_UNIT_NBYTES = 64 * 1024  # a multiple of every block size


class FencedFile:
    """An open file and its sidecar, as owner and peers use it: bounds and generations are checked. Owns both."""

    def __init__(self, path: str, nbytes: int | None = None) -> None:
        """The first `nbytes` of it (None: all). NotFound when file or sidecar is missing, Unavailable when the file
        has become shorter.
        """
        self.path = os.path.realpath(path)
        self.sidecar = Sidecar.open(self.path)
        self.nbytes = self.sidecar.nbytes if nbytes is None else nbytes
        try:
            check_bounds(0, self.nbytes, self.sidecar.nbytes)
            self.disk = open_disk(self.path, self.nbytes)
        except BaseException:
            self.sidecar.close()
            raise

    def read_into(self, offset: int, buffers: Sequence[Buffer], deadline: Deadline) -> None:
        views = as_bytes_views(buffers, writable=True)
        check_bounds(offset, total_nbytes(views), self.nbytes)
        self.disk.read(offset, views, deadline)

    def write_from(self, offset: int, buffers: Sequence[Buffer], generation: int, deadline: Deadline) -> None:
        views, fence = as_bytes_views(buffers, writable=False), self.sidecar.fence
        nbytes = total_nbytes(views)
        check_bounds(offset, nbytes, self.nbytes)
        if fence is not None:
            fence.admit(offset, nbytes, generation)
        self.disk.write(offset, views, deadline)
        if fence is not None:
            fence.confirm(offset, nbytes, generation)

    def close(self) -> None:
        """Idempotent; calls under way end first."""
        self.disk.close()  # first: no write may begin once the fence is gone
        self.sidecar.close()


class FileSegment(Segment):
    """Make one with create() or open(). Paths are made absolute and free of links, so that all see one name."""

    in_memory: ClassVar[bool] = False

    def __init__(self, name: str, file: FencedFile, *, incarnation: int) -> None:
        where = f"ssd:{file.path}"
        super().__init__(name, memoryview(b""), incarnation=incarnation, fence=file.sidecar.fence, location=where)
        pack_grant(name, incarnation)  # refuses what could not be served
        self.nbytes = file.nbytes
        self.path = file.path
        self.sidecar = file.sidecar
        self._file = file

    @classmethod
    def create(
        cls,
        path: str | os.PathLike[str],
        nbytes: int,
        *,
        name: str | None = None,
        granule_nbytes: int | None = None,
        incarnation: int,
    ) -> FileSegment:
        """A new file of zeros with all its space taken, or an existing device, whose bytes stay as they are.

        `name` is the file's own unless given. AlreadyExists when there is a file or a living process serves the
        device, NoSpace when the disk has not that much, InvalidInput when the device is in use (mounted).
        """
        where = os.path.realpath(path)
        check_sizes(nbytes, granule_nbytes)
        with own_errors(where):
            made = _take_space(where, nbytes)
        try:
            Sidecar.create(where, nbytes, granule_nbytes).close()
            return cls.open(where, name=name, incarnation=incarnation)
        except BaseException:
            if made:
                cls.remove(where)
            raise

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, name: str | None = None, incarnation: int) -> FileSegment:
        """What create() made, by this or an earlier process. NotFound when it is not there, Unavailable when it
        has become shorter.
        """
        file = FencedFile(os.fspath(path))
        try:
            return cls(name or os.path.basename(file.path), file, incarnation=incarnation)
        except BaseException:
            file.close()
            raise

    @staticmethod
    def remove(path: str | os.PathLike[str]) -> None:
        """Deletes the file (never a device) and what belongs to it; nothing happens where there is none."""
        where = os.path.realpath(path)
        with own_errors(where), contextlib.suppress(FileNotFoundError):
            os.unlink(sidecar_path(where))
        with own_errors(where), contextlib.suppress(FileNotFoundError):
            if stat.S_ISREG(os.stat(where).st_mode):
                os.unlink(where)

    @property
    def direct(self) -> bool:
        """Whether transfers go past the page cache; false on filesystems that cannot (tmpfs)."""
        return self._file.disk.direct

    @property
    def num_bounces(self) -> int:
        """How often bytes of this handle were copied because something was not aligned."""
        return self._file.disk.num_bounces

    @property
    def memory(self) -> memoryview:
        raise InvalidInput(f"segment {self.name!r} lies in {self.path} and has no memory; read_into() reads it")

    def read_into(self, offset: int, buffers: Sequence[Buffer], *, timeout_s: float) -> None:
        """As RemoteSegment's, for the owner."""
        self._file.read_into(offset, buffers, Deadline(timeout_s))

    def write_from(self, offset: int, buffers: Sequence[Buffer], *, generation: int, timeout_s: float) -> None:
        """As RemoteSegment's, for the owner."""
        self._file.write_from(offset, buffers, generation, Deadline(timeout_s))

    def sync(self) -> None:
        """Returns when everything written before, by whomever, is durable."""
        self._file.disk.sync()

    def close(self) -> None:
        """Idempotent. The file stays; calls under way end first; peers find the owner gone."""
        super().close()
        self._file.close()


def open_disk(path: str, nbytes: int) -> OpenDisk:
    """The way to read and write what lies at `path`."""
    with own_errors(path):
        mode = os.stat(path).st_mode
    return DaxDisk(path, nbytes) if stat.S_ISCHR(mode) else FileDisk(path, nbytes)


def _take_space(path: str, nbytes: int) -> bool:
    """True when it made a new file; a device is only checked."""
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        # Whole blocks, so that the last one can be read and written directly too.
        allocate_file(path, -(-nbytes // _FILE_UNIT_NBYTES) * _FILE_UNIT_NBYTES)
        return True
    if not (stat.S_ISBLK(mode) or stat.S_ISCHR(mode)):
        raise AlreadyExists(f"{path} exists")
    capacity = dax_geometry(path)[0] if stat.S_ISCHR(mode) else _device_nbytes(path)
    if nbytes > capacity:
        raise NoSpace(f"{path} has {format_nbytes(capacity)}, not {format_nbytes(nbytes)}")
    return False


def _device_nbytes(path: str) -> int:
    """Asks for the device alone for a moment: one that is mounted or belongs to a RAID is not ours to write on."""
    fd = os.open(path, os.O_RDWR | os.O_EXCL | os.O_CLOEXEC)
    try:
        return os.lseek(fd, 0, os.SEEK_END)
    finally:
        os.close(fd)
