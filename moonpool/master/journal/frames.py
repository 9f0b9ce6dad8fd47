"""The format of journal and snapshot files (docs/formats.md), reading them and appending to them. Little-endian.

    file    0  magic "MPJL"   4  format u16    6  kind u16   8  number u64   16  CRC-32C of bytes 0..16   20  frames
    frame   0  word u32: body size, top bit set on a control frame   4  CRC-32C u32   8  body, 1 byte to 64 MiB

A frame's CRC covers its word and its body, so a change of either is detected; no run of zeros is a frame.
A control frame's body is {what 8 bytes, its own offset u64, value u64}:

    MARK    all of this file before offset `value`, and all earlier files, were on disk when this was written
    END     nothing follows; in a snapshot, `value` is how much of the journal of its number was on disk before it

So damage before the offset of a later mark is corruption. Other damage is the unsynced tail of a crash.
"""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Iterator, Sequence
from enum import IntEnum
from pathlib import Path
from typing import BinaryIO, NamedTuple

from moonpool import __version__
from moonpool.base.checksum import crc32c
from moonpool.base.errors import Corrupt, InvalidInput

MAX_RECORD_NBYTES = 64 * 1024 * 1024
MARK = b"MPJ-MARK"
END = b"MPJ-END!"
_MAGIC = b"MPJL"
# Of the frames and of the records in them: raise it when records change (tests/master/test_journal_formats.py). Earlier
# ones are read.
FORMAT = 4
_HEADER = struct.Struct("<4sHHQ")
_CRC = struct.Struct("<I")
_FRAME = struct.Struct("<II")
_CONTROL = struct.Struct("<8sQQ")
_CONTROL_BIT = 1 << 31
HEADER_NBYTES = _HEADER.size + _CRC.size
CONTROL_NBYTES = _FRAME.size + _CONTROL.size
_READ_NBYTES = 1024 * 1024


class LaterFormat(Exception):
    """The file was written by a later version of Moonpool."""

    def __init__(self, path: Path, found: int) -> None:
        super().__init__(
            f"{path} has format {found}, and this is Moonpool {__version__}, which reads formats up to {FORMAT}"
        )


class FileKind(IntEnum):
    JOURNAL = 1
    SNAPSHOT = 2


class Control(NamedTuple):
    """The content of a control frame, and its offset."""

    what: bytes
    at: int
    value: int


def pack_header(kind: FileKind, number: int) -> bytes:
    """Return the first HEADER_NBYTES of a file."""
    head = _HEADER.pack(_MAGIC, FORMAT, kind, number)
    return head + _CRC.pack(crc32c(head))


def parse_header(data: bytes, kind: FileKind, number: int, path: Path) -> int | str:
    """Return the format of a file, of which these are the first HEADER_NBYTES; or what is wrong with them, as a crash
    may leave it.

    Raise Corrupt if they are good but of another file, and LaterFormat if this code cannot read the format.
    """
    if len(data) < HEADER_NBYTES:
        return "its header is cut short"
    magic, found_format, found_kind, found_number = _HEADER.unpack_from(data)
    if magic != _MAGIC or _CRC.unpack_from(data, _HEADER.size)[0] != crc32c(data[: _HEADER.size]):
        return "its header is damaged"
    if found_format > FORMAT:
        raise LaterFormat(path, found_format)
    if (found_kind, found_number) != (kind, number):
        raise Corrupt(f"{path} holds what was written under another name (kind {found_kind}, number {found_number})")
    return int(found_format)


def check_size(record: bytes) -> None:
    """Raise InvalidInput if the record is empty or over MAX_RECORD_NBYTES."""
    if not 0 < len(record) <= MAX_RECORD_NBYTES:
        raise InvalidInput(f"a record has 1 to {MAX_RECORD_NBYTES} bytes, not {len(record)}")


def pack_frame_head(record: bytes) -> bytes:
    """Return what precedes `record` in a file. Raise InvalidInput as `check_size`."""
    nbytes = len(record)
    if not 0 < nbytes <= MAX_RECORD_NBYTES:
        check_size(record)
    return _FRAME.pack(nbytes, crc32c(record, nbytes))


def pack_records(records: bytes | Sequence[bytes]) -> bytes:
    """Return the frames of one record or several. Raise InvalidInput as `check_size`."""
    if isinstance(records, bytes):
        return pack_frame_head(records) + records
    if len(records) == 1:  # mostly
        return pack_frame_head(records[0]) + records[0]
    return b"".join([part for record in records for part in (pack_frame_head(record), record)])


def pack_control(control: Control) -> bytes:
    """Return a control frame of CONTROL_NBYTES."""
    body = _CONTROL.pack(*control)
    word = len(body) | _CONTROL_BIT
    return _FRAME.pack(word, crc32c(body, word)) + body


class RecordFile:
    """Reads one file up to the first fault, the END frame or `upto`, whichever comes first.

    After `records()` is exhausted, `end` is the offset after the last good frame, `closing` the END frame if there was
    one, and `fault` what is wrong after `end`, or None. A record that fails its checksum is never yielded.
    """

    def __init__(self, path: Path, kind: FileKind, number: int) -> None:
        self.path = path
        self.end = 0
        self.nbytes = 0
        self.closing: Control | None = None
        self.fault: str | None = None
        self.format = FORMAT
        self._kind = kind
        self._number = number

    @property
    def whole(self) -> bool:
        """Whether its writer has closed the file and every frame is good."""
        return self.fault is None and self.closing is not None

    def scan(self) -> RecordFile:
        """Read the whole file to find its faults. Raise OSError, or Corrupt if it is another file."""
        for _ in self.records():
            pass
        return self

    def records(self, upto: int | None = None) -> Iterator[bytes]:
        """Yield the bodies of the records, in order. Raise as scan()."""
        with open(self.path, "rb", buffering=_READ_NBYTES) as file:
            self.nbytes = file.seek(0, 2) if upto is None else upto
            file.seek(0)
            found = parse_header(file.read(HEADER_NBYTES), self._kind, self._number, self.path)
            if isinstance(found, int):
                self.format, self.end, self.fault = found, HEADER_NBYTES, None
            else:
                self.end, self.fault = 0, found
            while self.fault is None and self.closing is None and self.end < self.nbytes:
                body = self._next_record(file)
                if body is not None:
                    yield body
        if self.closing is not None and self.end < self.nbytes:
            self.fault = "bytes follow its end"

    def _next_record(self, file: BinaryIO) -> bytes | None:
        """Return the next body, None at a control frame or a fault."""
        left = self.nbytes - self.end - _FRAME.size
        word, crc = _FRAME.unpack(file.read(_FRAME.size)) if left > 0 else (0, 0)
        nbytes = word & ~_CONTROL_BIT
        if not 0 < nbytes <= min(left, MAX_RECORD_NBYTES):
            self.fault = "a record is cut short or its size is damaged"
            return None
        body = file.read(nbytes)
        if len(body) < nbytes or crc32c(body, word) != crc:
            self.fault = "a record's checksum does not match"
            return None
        if word & _CONTROL_BIT and not self._take_control(body):
            return None
        self.end += _FRAME.size + nbytes
        return None if word & _CONTROL_BIT else body

    def _take_control(self, body: bytes) -> bool:
        control = _as_control(body)
        if control is None or control.at != self.end:
            self.fault = "a control frame makes no sense"
            return False
        if control.what == END:
            self.closing = control
        return True


def _as_control(body: bytes) -> Control | None:
    control = Control(*_CONTROL.unpack(body)) if len(body) == _CONTROL.size else None
    return control if control is not None and control.what in (MARK, END) else None


def find_mark(path: Path, start: int, covers: int) -> Control | None:
    """Return a MARK at or after `start` that covers the byte `covers`: it was on disk. Skip damaged bytes."""
    with open(path, "rb") as file:
        file.seek(start)
        base, data = start, b""
        while block := file.read(_READ_NBYTES):
            data += block
            for at in _places(data, MARK):
                mark = _mark_at(data, at - _FRAME.size, base)
                if mark is not None and mark.value > covers:
                    return mark
            keep = min(len(data), CONTROL_NBYTES - 1)  # a mark may be in two blocks
            base, data = base + len(data) - keep, data[len(data) - keep :]
    return None


def _places(data: bytes, what: bytes) -> Iterator[int]:
    at = data.find(what)
    while at >= 0:
        yield at
        at = data.find(what, at + 1)


def _mark_at(data: bytes, at: int, base: int) -> Control | None:
    """Return the mark whose frame starts at data[at]. It contains its own offset, so bytes of a record are not taken
    for a mark.
    """
    frame = data[at : at + CONTROL_NBYTES] if at >= 0 else b""
    if len(frame) < CONTROL_NBYTES:
        return None
    control = Control(*_CONTROL.unpack_from(frame, _FRAME.size))
    return control if pack_control(control) == frame and control.at == base + at else None


_FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC


class JournalFile:
    """A journal file that is appended to. It ends with a complete record, or is truncated before the next write.

    Not thread-safe, but `sync()` may run while another thread writes. All methods raise OSError.
    """

    def __init__(self, fd: int | None, path: Path, number: int, nbytes: int) -> None:
        """Own `fd`, open for appending to a file whose first `nbytes` are good. None: the next write opens the file."""
        self.number = number
        self.nbytes = nbytes
        self.synced_nbytes = 0
        self._fd = fd
        self._path = path
        self._torn = False

    @classmethod
    def create(cls, path: Path, number: int) -> JournalFile:
        """Create a file with only its header."""
        created = cls(os.open(path, _FLAGS | os.O_CREAT | os.O_EXCL, 0o600), path, number, 0)
        try:
            created.write(b"")
        except OSError:
            created.close()
            os.unlink(path)
            raise
        return created

    @classmethod
    def reopen(cls, path: Path, number: int, nbytes: int) -> JournalFile:
        """Open an existing file, truncate it to its good part and sync it."""
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
        with contextlib.suppress(OSError):  # a full disk: no record is lost without the mark
            opened.mark(opened.nbytes)
        return opened

    def write(self, data: bytes) -> None:
        """Write all of `data` or nothing, in one system call unless the disk fills up. A new file gets its header
        first.
        """
        if self._fd is None:
            self._fd, self._torn = os.open(self._path, _FLAGS | os.O_CREAT, 0o600), True
        if self._torn:
            self._cut_back(self._fd)
        if self.nbytes < HEADER_NBYTES:
            data = pack_header(FileKind.JOURNAL, self.number) + data
        try:
            written = os.write(self._fd, data)
            while written < len(data):  # the disk is full: the next call raises
                written += os.write(self._fd, data[written:])
        except OSError:
            self._torn = True
            with contextlib.suppress(OSError):
                self._cut_back(self._fd)  # otherwise the next write truncates
            raise
        self.nbytes += len(data)

    def _cut_back(self, fd: int) -> None:
        if self.nbytes < HEADER_NBYTES:
            self.nbytes = 0
        os.ftruncate(fd, self.nbytes)
        self._torn = False

    def clear(self) -> None:
        """Remove all records."""
        self.nbytes = min(self.nbytes, HEADER_NBYTES)
        self.synced_nbytes = min(self.synced_nbytes, self.nbytes)
        self._torn = True
        self.write(b"")

    def write_control(self, what: bytes, value: int) -> None:
        self.write(pack_control(Control(what, max(self.nbytes, HEADER_NBYTES), value)))

    def mark(self, synced_nbytes: int) -> None:
        """Write a mark: this much of the file is on disk. The mark itself need not be."""
        caught_up = synced_nbytes == self.nbytes
        self.write_control(MARK, synced_nbytes)
        self.synced_nbytes = self.nbytes if caught_up else synced_nbytes

    def is_in_place(self) -> bool:
        """Return whether the path still leads to the open file. Where that cannot be found out it counts as there."""
        if self._fd is None:
            return True
        try:
            return os.path.samestat(os.stat(self._path), os.fstat(self._fd))
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:
            return True

    def sync(self) -> None:
        """Sync all that was written before the call to disk."""
        if self._fd is not None:
            os.fdatasync(self._fd)

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
