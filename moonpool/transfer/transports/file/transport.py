"""Between processes that can open one path on one machine: local NVMe, an NVMe-oF namespace, a DAX or CXL device.

The owner does nothing for a transfer. The sidecar file (disk/sidecar.py) says that the owner lives and what it serves;
a peer looks there before each transfer, and after each write.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence

from moonpool.base.clock import Deadline
from moonpool.base.descriptor import SegmentDescriptor
from moonpool.base.errors import AlreadyExists, InvalidInput, PeerLost
from moonpool.transfer.disk.sidecar import pack_grant
from moonpool.transfer.memory.buffers import Buffer
from moonpool.transfer.memory.location import host_id
from moonpool.transfer.memory.segment import Segment
from moonpool.transfer.transports.base import RemoteSegment, Transport, check_bounds, rest_of
from moonpool.transfer.transports.file.folder import FolderRemote, FolderSegment, is_folder
from moonpool.transfer.transports.file.segment import FencedFile, FileSegment


class FileTransport(Transport):
    scheme = "file"

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._served: dict[str, FileSegment | FolderSegment] = {}
        self._closed = False

    def can_serve(self, segment: Segment) -> bool:
        return isinstance(segment, FileSegment | FolderSegment)

    def serve(self, segment: Segment) -> str:
        """AlreadyExists when the name or the file is taken, by another process too."""
        if not isinstance(segment, FileSegment | FolderSegment):
            raise InvalidInput(f"segment {segment.name!r} lies in memory, not in a file")
        with self._lock:
            if self._closed:
                raise PeerLost("this transport is closed")
            if segment.name in self._served:
                raise AlreadyExists(f"segment {segment.name!r} is already served")
            segment.sidecar.serve(segment.name, segment.incarnation)
            self._served[segment.name] = segment
        return f"{self.scheme}:{segment.path}"

    def unserve(self, name: str) -> None:
        with self._lock:
            segment = self._served.pop(name, None)
            if segment is not None:
                segment.sidecar.withdraw()

    def usable(self, descriptor: SegmentDescriptor, endpoint: str) -> bool:
        return descriptor.host == host_id() and os.path.exists(rest_of(endpoint, self.scheme))

    def open(self, descriptor: SegmentDescriptor, endpoint: str, *, timeout_s: float) -> FileRemote | FolderRemote:
        path = rest_of(endpoint, self.scheme)
        return FolderRemote(path, descriptor) if is_folder(path) else FileRemote(path, descriptor)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            served, self._served = list(self._served.values()), {}
        for segment in served:
            segment.sidecar.abandon()


class FileRemote(RemoteSegment):
    """A peer's own descriptor of the file; transfers run on the caller's thread."""

    transport = FileTransport.scheme

    def __init__(self, path: str, descriptor: SegmentDescriptor) -> None:
        self.nbytes = descriptor.nbytes
        self._grant = pack_grant(descriptor.name, descriptor.incarnation)
        self._file = FencedFile(path, descriptor.nbytes)
        try:
            self._check_granted()
        except BaseException:
            self.close()
            raise

    @property
    def direct(self) -> bool:
        """Whether transfers go past the page cache; false on filesystems that cannot (tmpfs)."""
        return self._file.disk.direct

    @property
    def num_bounces(self) -> int:
        """How often bytes of this handle were copied because something was not aligned."""
        return self._file.disk.num_bounces

    def read_into(self, offset: int, buffers: Sequence[Buffer], *, timeout_s: float) -> None:
        self._check_granted()
        self._file.read_into(offset, buffers, Deadline(timeout_s))

    def write_from(self, offset: int, buffers: Sequence[Buffer], *, generation: int, timeout_s: float) -> None:
        """The bytes are with the device; sync() makes them durable."""
        self._check_granted()
        self._file.write_from(offset, buffers, generation, Deadline(timeout_s))
        self._check_granted()

    def sync(self) -> None:
        """Returns when everything written before, by whomever, is durable."""
        self._file.disk.sync()

    def view(self, offset: int, nbytes: int) -> memoryview | None:
        check_bounds(offset, nbytes, self.nbytes)
        self._check_granted()
        return self._file.disk.view(offset, nbytes)

    def close(self) -> None:
        self._file.close()

    def _check_granted(self) -> None:
        self._file.sidecar.check(self._grant)
