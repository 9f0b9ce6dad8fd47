"""Arguments and results of the SSD log: locations, records, moves, statistics, configuration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from moonpool.base.errors import ConfigError
from moonpool.base.units import format_nbytes
from moonpool.node.ssd.layout import UNIT_NBYTES, Entry
from moonpool.store.messages import Doubt
from moonpool.transfer.memory.buffers import Buffer

_MIN_FILES = 3  # one to write, one to empty, one to move its objects to
_FILE_STEP_NBYTES = 64 * 1024  # a multiple of every disk's block
_FILES_PER_RESERVED = 16


@dataclass(frozen=True, kw_only=True)
class SsdConfig:
    """ConfigError when the sizes do not fit each other."""

    max_nbytes: int  # of all files; a sixteenth (at least one file) is reserved for compaction
    file_nbytes: int = 256 * 1024 * 1024
    batch_nbytes: int = 16 * 1024 * 1024  # written by one system call if possible
    compact_dead_fraction: float = 0.2  # of a file; below it, moving the live objects is not worth it
    max_open_files: int = 128
    io_timeout_s: float = 30.0  # per read; a running system call is not interrupted

    def __post_init__(self) -> None:
        if self.file_nbytes < _FILE_STEP_NBYTES or self.file_nbytes % _FILE_STEP_NBYTES:
            raise ConfigError(f"file_nbytes must be a multiple of {format_nbytes(_FILE_STEP_NBYTES)}")
        if self.max_nbytes < _MIN_FILES * self.file_nbytes:
            least = format_nbytes(_MIN_FILES * self.file_nbytes)
            raise ConfigError(f"an SSD log takes {_MIN_FILES} files at least: max_nbytes must be {least} or more")
        if self.batch_nbytes < 2 * UNIT_NBYTES or self.batch_nbytes % UNIT_NBYTES:
            raise ConfigError("batch_nbytes must be a multiple of 4 KiB, and 8 KiB at least")
        if not 0 < self.compact_dead_fraction <= 1:
            raise ConfigError("compact_dead_fraction must be above 0 and at most 1")
        if self.max_open_files < 1 or self.io_timeout_s <= 0:
            raise ConfigError("max_open_files and io_timeout_s must be positive")

    @property
    def reserved_nbytes(self) -> int:
        """The space that only compaction and tombstones may use, so that a full log can still be compacted."""
        return max(1, self.max_nbytes // self.file_nbytes // _FILES_PER_RESERVED) * self.file_nbytes


class LogLocation(msgspec.Struct, frozen=True, array_like=True, order=True):
    """The place of an object: header first, `nbytes` without padding; `offset` is a multiple of 4 KiB."""

    file_number: int
    offset: int
    nbytes: int


class LogItem(NamedTuple):
    """An object to append: its bytes as in DRAM, header included, in one or more parts."""

    key: bytes
    generation: int
    parts: Sequence[Buffer]


class StoredRecord(NamedTuple):
    """An object that the log holds, or may hold (`doubt`)."""

    key: bytes
    generation: int
    location: LogLocation
    doubt: Doubt = Doubt.NONE


class LogRead(NamedTuple):
    """An object to read. The buffers together have exactly `location.nbytes` bytes.

    `crc` covers the whole of an object whose header has no checksums; the log fills it in.
    """

    key: bytes
    generation: int
    location: LogLocation
    buffers: Sequence[Buffer]
    crc: int | None = None


class MovedRecord(NamedTuple):
    """A move. `new` is None when the object was found damaged and is lost."""

    key: bytes
    generation: int
    old: LogLocation
    new: LogLocation | None


@dataclass(frozen=True, kw_only=True)
class SsdStats:
    live_nbytes: int  # of objects, padding included
    dead_nbytes: int  # what compaction and release() can free
    free_nbytes: int  # what can be appended before that, framing included
    num_objects: int
    num_files: int  # drained ones included
    num_spare_files: int
    num_drained_files: int  # waiting for release()
    num_pending_tombstones: int  # removed; a crash now would bring these objects back
    num_corrupt: int  # objects that failed a check when they were read, since open()
    num_torn: int  # objects that recovery dropped: half written, or damaged since
    num_unreadable_files: int  # files that recovery could not read
    damaged_nbytes: int  # parts of files, found at the start, whose batch headers are damaged
    num_salvaged: int  # objects found in them that the master has confirmed
    direct: bool


def location_of(entry: Entry) -> LogLocation:
    assert entry.nbytes is not None, "a tombstone lies nowhere"
    return LogLocation(entry.file_number, entry.offset, entry.nbytes)
