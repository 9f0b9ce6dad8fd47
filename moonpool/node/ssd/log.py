"""The SSD log of a node: objects in files of one folder, found again after any crash.

Blocking and thread-safe. One process owns the folder. An object is there when append() returns, and stays there after a
power loss when sync() has returned since. Bytes come back right or not at all. A full, read-only or failing disk makes
calls raise NoSpace or Unavailable; nothing that was there is lost by that, and the next call tries again.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from types import TracebackType

from moonpool.base.checksum import ChecksumKind
from moonpool.base.errors import Corrupt, HandleClosed, InvalidInput, MoonpoolError, NoSpace, Unavailable
from moonpool.base.units import format_nbytes
from moonpool.node.ssd.compactor import Compactor
from moonpool.node.ssd.folder import LogFolder
from moonpool.node.ssd.layout import Entry
from moonpool.node.ssd.reading import check_header, object_crc, read_checked
from moonpool.node.ssd.recovery import recover_folder
from moonpool.node.ssd.types import (
    LogItem,
    LogLocation,
    LogRead,
    MovedRecord,
    SsdConfig,
    SsdStats,
    StoredRecord,
    location_of,
)
from moonpool.node.ssd.writer import LogRecord, LogWriter, largest_object_nbytes
from moonpool.store.messages import Doubt
from moonpool.transfer.memory.buffers import Buffer, as_bytes_views, total_nbytes

logger = logging.getLogger(__name__)


class SsdLog:
    """Make one with open(). Lock order: compaction step, writing, index."""

    def __init__(self, folder: LogFolder, config: SsdConfig) -> None:
        recovered = recover_folder(folder)
        self._config = config
        self._folder = folder
        self._index = recovered.index
        self._num_torn = recovered.num_torn
        self._num_unreadable_files = recovered.num_unreadable_files
        self._damaged_nbytes, self._doubtful_upto = recovered.damaged_nbytes, recovered.doubtful_upto
        self._num_salvaged = 0
        self._num_corrupt = 0
        self._closed = False
        self._writing = threading.Lock()
        self._index_lock = threading.Lock()
        self._writer = LogWriter(folder, self._index, self._index_lock, config)
        self._compactor = Compactor(
            folder, self._index, self._writer, config, writing=self._writing, index_lock=self._index_lock
        )

    @classmethod
    def open(cls, path: str | os.PathLike[str], config: SsdConfig) -> SsdLog:
        """Open the folder, or make it, and recover its log. ConfigError when another process uses it, Unavailable when
        the disk cannot be read.
        """
        folder = LogFolder(os.fspath(path), config.file_nbytes, config.max_nbytes, config.max_open_files)
        try:
            return cls(folder, config)
        except BaseException:
            folder.close()
            raise

    def append(self, key: bytes, generation: int, parts: Sequence[Buffer]) -> LogLocation:
        """Append one object. Return its location or raise the error (append_many)."""
        (result,) = self.append_many([LogItem(key, generation, parts)])
        if isinstance(result, MoonpoolError):
            raise result
        return result

    def append_many(self, items: Sequence[LogItem]) -> list[LogLocation | MoonpoolError]:
        """Write objects. The buffers are not used after the call. Return one result per item:

        InvalidInput when its size is not the one its header says or does not fit a file, Corrupt or StaleGeneration
        when its header is damaged or another one's, StaleGeneration when the log knows a newer generation, NoSpace when
        the log or the disk is full, Unavailable when the disk cannot be written.
        """
        prepared = [self._prepare(item) for item in items]
        with self._writing:
            self._check_open()
            admitted = [self._admit(record) if isinstance(record, LogRecord) else record for record in prepared]
            records = [record for record in admitted if isinstance(record, LogRecord)]
            results = iter(self._writer.append(records) if records else [])
        return [next(results) if isinstance(one, LogRecord) else one for one in admitted]

    def sync(self) -> None:
        """Make everything durable that was appended and removed before. After a failure a later success covers only
        what was written after the failure: the disk does not report what it lost.
        """
        with self._writing:
            self._check_open()
            if self._writer.pending:
                self._writer.write_tombstones()
        self._sync_files()

    def find(self, key: bytes, generation: int) -> LogLocation | None:
        with self._index_lock:
            entry = self._index.find(key)
        return location_of(entry) if entry is not None and entry.generation == generation else None

    def items(self) -> Iterator[StoredRecord]:
        """Return all objects, as of the call. A damaged part of the log may have contained tombstones: objects that are
        not newer than that part are in doubt.
        """
        with self._index_lock:
            entries = self._index.live()
        return (self._stored(entry) for entry in entries)

    def salvaged(self) -> list[StoredRecord]:
        """Return the objects that were found in damaged parts and wait for confirm()."""
        with self._index_lock:
            entries = self._index.salvaged()
        return [StoredRecord(entry.key, entry.generation, location_of(entry), Doubt.SALVAGED) for entry in entries]

    def confirm(self, items: Iterable[tuple[bytes, int]]) -> int:
        """Make salvaged objects (key, generation) count, because the master knows them. Return how many."""
        with self._index_lock:
            num_confirmed = sum(self._index.confirm(key, generation) for key, generation in items)
            self._num_salvaged += num_confirmed
        return num_confirmed

    def refuse(self, items: Iterable[tuple[bytes, int]]) -> None:
        """Forget salvaged objects (key, generation) that the master does not know. Other objects of these keys stay.
        The files of salvaged objects are kept until all of these are confirmed or refused.
        """
        with self._index_lock:
            for key, generation in items:
                self._index.refuse(key, generation)

    def read_into(
        self,
        location: LogLocation,
        buffers: Sequence[Buffer],
        *,
        key: bytes,
        generation: int,
        timeout_s: float | None = None,
    ) -> None:
        """Read one object, or raise the error (read_many)."""
        (error,) = self.read_many([LogRead(key, generation, location, buffers)], timeout_s=timeout_s)
        if error is not None:
            raise error

    def read_many(self, reads: Sequence[LogRead], *, timeout_s: float | None = None) -> list[MoonpoolError | None]:
        """Fill the buffers. Return None per read where the object was read and checked, else Corrupt (counted),
        StaleGeneration when another object is there, or Unavailable; those buffers must not be used. Raise InvalidInput
        when a read's buffers differ in size from its object. Fastest for neighbours, into aligned memory.
        """
        self._check_open()
        with self._index_lock:
            known = [read._replace(crc=self._crc_of(read)) for read in reads]
        results = read_checked(self._folder, known, self._config.io_timeout_s if timeout_s is None else timeout_s)
        num_corrupt = sum(isinstance(result, Corrupt) for result in results)
        if num_corrupt:
            with self._index_lock:
                self._num_corrupt += num_corrupt
        return results

    def path_of(self, file_number: int) -> str:
        """Return the path of a log file, for readers that open the file themselves."""
        return self._folder.path_of(file_number)

    def file_nbytes(self, file_number: int) -> int:
        """Return the size of a log file. Unavailable when it does not exist any more."""
        nbytes = self._folder.sizes.get(file_number)
        if nbytes is None:
            raise Unavailable(f"{self._folder.path} has no log file {file_number} any more")
        return nbytes

    def remove(self, items: Iterable[tuple[bytes, int]]) -> int:
        """Remove objects (key, generation), unless newer ones exist. Return how many. The removal takes effect at once.
        On a disk that cannot be written the tombstones wait for the next write that succeeds.
        """
        with self._writing:
            self._check_open()
            gone = list(items)
            num_removed = sum(self._writer.mark_removed(key, generation) for key, generation in gone)
            self.refuse(gone)
            self._try_tombstones()
        return num_removed

    def compact(self, max_nbytes_moved: int) -> list[MovedRecord]:
        """Move objects out of files that are mostly dead, about `max_nbytes_moved` bytes and at least one object.
        Return the moves; [] when nothing is worth moving or there is no room now. drained() lists files that have
        become empty. Unavailable when a file cannot be read; the next call begins with another file.
        """
        return self._compactor.step(max_nbytes_moved)

    def drained(self) -> list[int]:
        """Return the files without live objects. Call release() when their last readers have ended."""
        with self._writing:
            return sorted(self._compactor.drained)

    def release(self, file_number: int) -> None:
        """Reuse or remove a drained file that has no readers any more. Unavailable, without a change, when objects that
        were moved out of it cannot be made durable first.
        """
        if file_number not in self.drained():
            raise InvalidInput(f"log file {file_number} is not drained: compact() decides which can be given up")
        self._sync_files()
        with self._writing:
            self._check_open()
            if file_number in self._compactor.drained:
                self._folder.retire(file_number)
                with self._index_lock:
                    self._index.drop_file(file_number)
                self._writer.forget(file_number)
                self._compactor.drained.discard(file_number)

    def stats(self) -> SsdStats:
        with self._writing, self._index_lock:
            live_nbytes, room_nbytes = self._index.live_nbytes, self._writer.room_nbytes
            log_nbytes, usable_nbytes = self._folder.log_nbytes, self._config.max_nbytes - self._config.reserved_nbytes
            in_reserve = log_nbytes > usable_nbytes
            return SsdStats(
                live_nbytes=live_nbytes,
                dead_nbytes=log_nbytes - room_nbytes - live_nbytes,
                free_nbytes=0 if in_reserve else usable_nbytes - log_nbytes + room_nbytes,
                num_objects=len(self._index),
                num_files=len(self._folder.sizes),
                num_spare_files=self._folder.num_spares,
                num_drained_files=len(self._compactor.drained),
                num_pending_tombstones=len(self._writer.pending),
                num_corrupt=self._num_corrupt + self._compactor.num_corrupt,
                num_torn=self._num_torn,
                num_unreadable_files=self._num_unreadable_files,
                damaged_nbytes=self._damaged_nbytes,
                num_salvaged=self._num_salvaged,
                direct=self._folder.alignment.direct,
            )

    def check_integrity(self) -> None:
        """Raise AssertionError when the tables of the log do not agree with each other."""
        with self._writing, self._index_lock:
            self._index.check_integrity(self._writer.pending)
            assert {number for number, _ in self._index.uses()} == set(self._folder.sizes), "a file is in no table"
            for number in self._compactor.drained:
                assert not any(self._index.live_of(number)), "something lives in a drained file"
            assert self._folder.log_nbytes <= self._config.max_nbytes, "the log is too large"

    def close(self) -> None:
        """Close the log when running calls have ended. Seal the active file, so that the next start is quick; appended
        objects are durable then, if the disk works. Idempotent.
        """
        self._compactor.close()
        with self._writing:
            if self._closed:
                return
            self._closed = True
            self._try_tombstones()
            self._writer.seal()
        self._folder.close()

    def __enter__(self) -> SsdLog:
        return self

    def __exit__(self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None) -> None:
        self.close()

    def _try_tombstones(self) -> None:
        try:
            if self._writer.pending:
                self._writer.write_tombstones()
        except (NoSpace, Unavailable) as error:
            logger.warning("%d tombstones wait until they can be written: %s", len(self._writer.pending), error)

    def _sync_files(self) -> None:
        with self._writing:
            unsynced = self._writer.unsynced()
        self._writer.sync_files(unsynced)
        with self._writing:
            self._writer.mark_synced(unsynced)

    def _prepare(self, item: LogItem) -> LogRecord | MoonpoolError:
        try:
            views = as_bytes_views(item.parts, writable=False)
            header = check_header(views, item.key, item.generation)
        except MoonpoolError as error:
            return error
        nbytes, most = total_nbytes(views), largest_object_nbytes(self._config.file_nbytes, len(item.key))
        if nbytes > most:
            return InvalidInput(f"an object of {format_nbytes(nbytes)} does not fit a log file ({format_nbytes(most)})")
        crc = object_crc(views) if header.checksum_kind is ChecksumKind.NONE else None
        return LogRecord(item.key, item.generation, nbytes, views, crc)

    def _admit(self, record: LogRecord) -> LogRecord | MoonpoolError:
        try:
            with self._index_lock:
                self._index.admit(record.key, record.generation)
        except MoonpoolError as error:
            return error
        return record

    def _stored(self, entry: Entry) -> StoredRecord:
        doubt = Doubt.REMOVED if entry.file_number <= self._doubtful_upto else Doubt.NONE
        return StoredRecord(entry.key, entry.generation, location_of(entry), doubt)

    def _crc_of(self, read: LogRead) -> int | None:
        entry: Entry | None = self._index.find(read.key)
        return entry.crc if entry is not None and location_of(entry) == read.location else None

    def _check_open(self) -> None:
        if self._closed:
            raise HandleClosed(f"the log in {self._folder.path} is closed here")
