"""Byte-addressable devices (/dev/dax*: CXL or persistent memory): mapped, so a transfer is a copy and a read a view."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from pathlib import Path

from moonpool.base.clock import Deadline
from moonpool.base.errors import InvalidInput, PeerLost
from moonpool.transfer.disk.disk import OpenDisk, gather, scatter
from moonpool.transfer.disk.handle import own_errors

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
