"""One journal file that is being appended to. It ends with a whole record, or is cut back before the next write."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from moonpool.master.journal.frames import HEADER_NBYTES, MARK, Control, FileKind, pack_control, pack_header

_FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC


class JournalFile:
    """Not safe for threads, but `sync()` may run while another thread writes. All methods raise OSError."""

    def __init__(self, fd: int | None, path: Path, number: int, nbytes: int) -> None:
        """Owns `fd`, open for appending to a file whose first `nbytes` are good. None: the next write opens it."""
        self.number = number
        self.nbytes = nbytes
        self.synced_nbytes = 0
        self._fd = fd
        self._path = path
        self._torn = False

    @classmethod
    def create(cls, path: Path, number: int) -> JournalFile:
        """A new file with nothing but its header."""
        created = cls(os.open(path, _FLAGS | os.O_CREAT | os.O_EXCL, 0o600), path, number, 0)
        try:
            created.write(b"")
        except OSError:
            created.close()
            path.unlink()
            raise
        return created

    @classmethod
    def reopen(cls, path: Path, number: int, nbytes: int) -> JournalFile:
        """An earlier life's file, cut to its good part; what is left of it is on disk when this returns."""
        fd = os.open(path, _FLAGS)
        opened = cls(fd, path, number, nbytes)
        try:
            os.ftruncate(fd, nbytes)
            if nbytes < HEADER_NBYTES:
                opened.write(b"")
            opened.sync()
        except OSError:
            opened.close()
            raise
        with contextlib.suppress(OSError):  # a full disk: costs certainty after a crash, no record
            opened.mark(opened.nbytes)
        return opened

    def write(self, data: bytes) -> None:
        """All of `data`, in one system call unless the disk fills up, or nothing. A new file gets its header first."""
        if self._fd is None:
            self._fd, self._torn = os.open(self._path, _FLAGS | os.O_CREAT, 0o600), True
        if self._torn:
            self._cut_back(self._fd)
        if self.nbytes < HEADER_NBYTES:
            data = pack_header(FileKind.JOURNAL, self.number) + data
        try:
            written = os.write(self._fd, data)
            while written < len(data):  # the disk filled up in the middle: the next call says so
                written += os.write(self._fd, data[written:])
        except OSError:
            self._torn = True
            with contextlib.suppress(OSError):
                self._cut_back(self._fd)  # otherwise tried again before the next write
            raise
        self.nbytes += len(data)

    def _cut_back(self, fd: int) -> None:
        if self.nbytes < HEADER_NBYTES:
            self.nbytes = 0
        os.ftruncate(fd, self.nbytes)
        self._torn = False

    def write_control(self, what: bytes, value: int) -> None:
        self.write(pack_control(Control(what, max(self.nbytes, HEADER_NBYTES), value)))

    def mark(self, synced_nbytes: int) -> None:
        """Says in the file that this much of it is on disk. The mark itself need not be."""
        caught_up = synced_nbytes == self.nbytes
        self.write_control(MARK, synced_nbytes)
        self.synced_nbytes = self.nbytes if caught_up else synced_nbytes

    def sync(self) -> None:
        """What was written before the call is on disk when it returns."""
        if self._fd is not None:
            os.fdatasync(self._fd)

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
