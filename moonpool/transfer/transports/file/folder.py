"""A folder of numbered files as one read-only segment: what a log on disk offers to readers.

Byte `at` of file `number` has the address `number << 32 | at`; a read stays within one file. The owner writes its files
by itself; it adds, removes and renames them as it likes, and gives no number twice. A file that is gone, or was gone
before the read had ended, is NotFound. Readers of the same machine open the files themselves. That the owner lives, and
in which incarnation, stands in the folder's `.fence` (file/sidecar.py).
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import ClassVar

from moonpool.base.clock import Deadline
from moonpool.base.descriptor import SegmentDescriptor
from moonpool.base.errors import Corrupt, HandleClosed, InvalidInput, NotFound, PeerLost, Unavailable
from moonpool.transfer.disk.disk import FileDisk
from moonpool.transfer.disk.handle import own_errors
from moonpool.transfer.disk.sidecar import Sidecar, pack_grant
from moonpool.transfer.memory.buffers import Buffer, as_bytes_views, total_nbytes
from moonpool.transfer.memory.segment import Segment
from moonpool.transfer.transports.base import RemoteSegment

FILE_BITS = 32
MAX_FILE_NBYTES = 1 << FILE_BITS
FOLDER_NBYTES = 1 << 63  # of addresses
_MAX_OPEN_FILES = 64


def file_name(number: int) -> str:
    """What file `number` is called in its folder."""
    return f"log-{number:010d}"


def address_of_byte(number: int, at: int) -> int:
    return number << FILE_BITS | at


class FolderFiles:
    """The files as a reader sees them, each opened when first needed; the one unused for longest is closed when there
    are too many. Thread-safe.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._files: OrderedDict[int, _OpenFile] = OrderedDict()
        self._closed = False

    def read_into(self, offset: int, buffers: Sequence[Buffer], deadline: Deadline) -> None:
        views = as_bytes_views(buffers, writable=True)
        nbytes, (number, at) = total_nbytes(views), divmod(offset, MAX_FILE_NBYTES)
        if not 0 <= offset <= FOLDER_NBYTES - nbytes or at + nbytes > MAX_FILE_NBYTES:
            raise InvalidInput(f"bytes {offset} to {offset + nbytes} are not within one file of {self.path}")
        while nbytes:
            file = self._file(number)
            try:
                file.disk.read(at, views, deadline)
            except PeerLost:
                continue  # another thread needed the room and closed this file
            except Unavailable:
                self._check_there(number, file)
                raise
            self._check_there(number, file)
            return

    def close(self) -> None:
        """Idempotent; reads under way end first, later ones raise PeerLost."""
        with self._lock:
            self._closed = True
            files = list(self._files.values())
            self._files.clear()
        for file in files:
            file.disk.close()

    def _file(self, number: int) -> _OpenFile:
        with self._lock:
            if self._closed:
                raise HandleClosed(f"{self.path} is closed here")
            file = self._files.get(number)
            if file is None:
                self._make_room()
                file = self._files[number] = _OpenFile(os.path.join(self.path, file_name(number)))
            self._files.move_to_end(number)
            return file

    def _make_room(self) -> None:
        """Files that are gone go first: an open one keeps its space on the disk."""
        unused = [number for number, file in self._files.items() if not file.is_there()]
        num_over = max(0, len(self._files) - _MAX_OPEN_FILES + 1)
        for number in unused or list(self._files)[:num_over]:
            self._files.pop(number).disk.close()

    def _check_there(self, number: int, file: _OpenFile) -> None:
        if file.is_there():
            return
        with self._lock:
            self._files.pop(number, None)
        file.disk.close()
        raise NotFound(f"{file.disk.path} is gone")


class _OpenFile:
    """A file and what it was called when it was opened. NotFound when there is none."""

    def __init__(self, path: str) -> None:
        self.disk = FileDisk(path, 0, writable=False)
        try:
            with own_errors(path):
                self._inode = os.stat(path).st_ino
        except BaseException:
            self.disk.close()
            raise

    def is_there(self) -> bool:
        """Return whether the name still refers to this file: its owner may have renamed it to write it again."""
        try:
            return os.stat(self.disk.path).st_ino == self._inode
        except OSError:
            return False


class FolderSegment(Segment):
    """Its `nbytes` are all addresses there may be, not what the folder holds. Make one with open()."""

    in_memory: ClassVar[bool] = False

    def __init__(self, name: str, path: str, sidecar: Sidecar, *, incarnation: int) -> None:
        super().__init__(name, memoryview(b""), incarnation=incarnation, location=f"ssd:{path.rstrip('/') or '/'}")
        pack_grant(name, incarnation)  # refuses what could not be served
        self.nbytes = FOLDER_NBYTES
        self.path = path
        self.sidecar = sidecar
        self._files = FolderFiles(path)

    @classmethod
    def open(cls, name: str, folder: str | os.PathLike[str], *, incarnation: int) -> FolderSegment:
        """Of a folder that is there."""
        path = _as_folder(os.path.realpath(folder))
        try:
            sidecar = Sidecar.open(path)  # that of an earlier life: a full disk has no room for another
        except (NotFound, Corrupt):
            sidecar = Sidecar.create(path, FOLDER_NBYTES, None)
        try:
            return cls(name, path, sidecar, incarnation=incarnation)
        except BaseException:
            sidecar.close()
            raise

    @property
    def memory(self) -> memoryview:
        raise InvalidInput(f"segment {self.name!r} lies in {self.path} and has no memory; read_into() reads it")

    def read_into(self, offset: int, buffers: Sequence[Buffer], *, timeout_s: float) -> None:
        """As RemoteSegment's, for the owner. NotFound when the file is gone."""
        self._files.read_into(offset, buffers, Deadline(timeout_s))

    def write_from(self, offset: int, buffers: Sequence[Buffer], *, generation: int, timeout_s: float) -> None:
        raise _read_only(self.name)

    def close(self) -> None:
        """Idempotent. The files stay; peers find the owner gone."""
        super().close()
        self._files.close()
        self.sidecar.close()


class FolderRemote(RemoteSegment):
    """A peer's own descriptors of the files; reads run on the caller's thread."""

    transport = "file"
    written_once = True  # no number is given twice, and a file that changed its name meanwhile is NotFound

    def __init__(self, path: str, descriptor: SegmentDescriptor) -> None:
        self.nbytes = FOLDER_NBYTES
        self._name = descriptor.name
        self._grant = pack_grant(descriptor.name, descriptor.incarnation)
        self._sidecar = Sidecar.open(path, writable=False)
        self._files = FolderFiles(path)
        try:
            self._sidecar.check(self._grant)
        except BaseException:
            self.close()
            raise

    def read_into(self, offset: int, buffers: Sequence[Buffer], *, timeout_s: float) -> None:
        self._sidecar.check(self._grant)
        self._files.read_into(offset, buffers, Deadline(timeout_s))

    def write_from(self, offset: int, buffers: Sequence[Buffer], *, generation: int, timeout_s: float) -> None:
        raise _read_only(self._name)

    def close(self) -> None:
        self._files.close()
        self._sidecar.close()


def is_folder(path: str) -> bool:
    """Whether an endpoint's path is that of a folder: it ends so."""
    return path.endswith("/")


def _as_folder(path: str) -> str:
    return path if is_folder(path) else f"{path}/"


def _read_only(name: str) -> InvalidInput:
    return InvalidInput(f"segment {name!r} is a folder that only its owner writes to")
