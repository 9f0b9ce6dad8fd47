"""The growing end of the log: batches go to the active file; a full file is sealed and the next one begun.

Nothing here is thread-safe; SsdLog holds its writing lock around every call but sync_files(). A write that fails
changes nothing: the index does not know of it, and the next batch goes to another file.

`FileRoom` plans, without I/O, what goes into the next batch and where in the file. It always keeps room for the index
of everything in the file, so that a file can be sealed on a full disk. `BlockStream` turns objects that lie anywhere in
memory into few large writes of whole, aligned blocks: large aligned parts are written from where they lie; everything
else is gathered in a staging buffer first, so that a thousand small objects are one write and not a thousand.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from moonpool.base.errors import MoonpoolError, NoSpace, StaleGeneration, Unavailable
from moonpool.base.units import format_nbytes
from moonpool.node.ssd.folder import LogFolder, SsdLogFile, aligned_copy
from moonpool.node.ssd.index import LogIndex
from moonpool.node.ssd.layout import (
    EMPTY_INDEX_NBYTES,
    UNIT_NBYTES,
    Entry,
    FileHeader,
    batch_header_bound_nbytes,
    entry_bound_nbytes,
    footer_bound_nbytes,
    pack_batch_header,
    pack_footer,
    pad,
)
from moonpool.node.ssd.types import LogLocation, SsdConfig, location_of
from moonpool.transfer.memory.buffers import address_of, aligned_buffer, copy_bytes

_IN_PLACE_NBYTES = 64 * 1024  # below this a copy costs less than another element in the kernel's list
_MAX_VIEWS = 1000
_ZEROS = memoryview(bytes(UNIT_NBYTES))
logger = logging.getLogger(__name__)


class BlockStream:
    """Writes what it is given to a file, from `offset` on. The staging buffer is whole blocks, aligned, borrowed."""

    def __init__(self, file: SsdLogFile, offset: int, staging: memoryview, memory_nbytes: int) -> None:
        self._file = file
        self._staging = staging
        self._memory_nbytes = memory_nbytes
        self._written_to = self._at = offset  # the second runs ahead
        self._group: list[memoryview] = []
        self._staged = self._run_start = 0  # filled part of the staging buffer; where its last run begins

    def add(self, views: Sequence[memoryview]) -> None:
        """Add one object (or header), from a block boundary on, padded with zeros to the next one."""
        for view in views:
            self._add(view)
        self._stage(_ZEROS[: -self._at % UNIT_NBYTES])

    def finish(self) -> None:
        """Write everything that is gathered. The callers' memory is not used after this call."""
        self._end_run()
        if self._group:
            self._file.write(self._written_to, self._group)
        self._written_to, self._group, self._staged, self._run_start = self._at, [], 0, 0

    def _add(self, view: memoryview) -> None:
        in_place = view.nbytes // UNIT_NBYTES * UNIT_NBYTES
        aligned = self._at % UNIT_NBYTES == 0 and view.nbytes >= _IN_PLACE_NBYTES
        if not aligned or address_of(view) % self._memory_nbytes:
            self._stage(view)
            return
        self._end_run()
        self._group.append(view[:in_place])
        self._at += in_place
        if len(self._group) >= _MAX_VIEWS:
            self.finish()
        self._stage(view[in_place:])

    def _stage(self, view: memoryview) -> None:
        while view.nbytes:
            if self._staged == self._staging.nbytes:  # whole blocks, so this is a block boundary
                self.finish()
            part = view[: self._staging.nbytes - self._staged]
            copy_bytes(self._staging[self._staged : self._staged + part.nbytes], part)
            self._staged += part.nbytes
            self._at += part.nbytes
            view = view[part.nbytes :]

    def _end_run(self) -> None:
        if self._staged > self._run_start:
            self._group.append(self._staging[self._run_start : self._staged])
            self._run_start = self._staged


class LogRecord(NamedTuple):
    """A record to write: an object with its memory, or (nbytes is None) a tombstone."""

    key: bytes
    generation: int
    nbytes: int | None
    views: Sequence[memoryview] = ()
    crc: int | None = None


class RecordBatch(NamedTuple):
    """The place of the first `len(entries)` records."""

    offset: int
    header_nbytes: int
    end: int
    entries: list[Entry]


class FileRoom:
    """The free part of the active file."""

    def __init__(self, file_nbytes: int) -> None:
        self._file_nbytes = file_nbytes
        self.tail = UNIT_NBYTES
        self._index_nbytes = EMPTY_INDEX_NBYTES

    @property
    def free_nbytes(self) -> int:
        return max(0, self._file_nbytes - footer_bound_nbytes(self._index_nbytes) - self.tail)

    def plan(self, records: Sequence[LogRecord], max_nbytes: int, file_number: int) -> RecordBatch | None:
        """Plan a batch of as many records as fit the file and `max_nbytes` (the first record may exceed it). Return
        None when no record fits the file.
        """
        count, header_nbytes = self._count(records, max_nbytes)
        if count == 0:
            return None
        at, entries = self.tail + header_nbytes, []
        for record in records[:count]:
            offset = self.tail if record.nbytes is None else at
            entries.append(Entry(record.key, record.generation, file_number, offset, record.nbytes, record.crc))
            at += entries[-1].padded_nbytes
        return RecordBatch(self.tail, header_nbytes, at, entries)

    def advance(self, batch: RecordBatch) -> None:
        """Account for a batch that was written."""
        assert batch.offset == self.tail, "batches follow one another"
        self.tail = batch.end
        self._index_nbytes += sum(entry_bound_nbytes(len(entry.key)) for entry in batch.entries)

    def _count(self, records: Sequence[LogRecord], max_nbytes: int) -> tuple[int, int]:
        count = entries_nbytes = data_nbytes = header_nbytes = 0
        for record in records:
            entries_nbytes += entry_bound_nbytes(len(record.key))
            data_nbytes += pad(record.nbytes or 0)
            wanted = batch_header_bound_nbytes(entries_nbytes)
            footer_nbytes = footer_bound_nbytes(self._index_nbytes + entries_nbytes)
            too_much = count > 0 and wanted + data_nbytes > max_nbytes
            if too_much or self.tail + wanted + data_nbytes + footer_nbytes > self._file_nbytes:
                break
            count, header_nbytes = count + 1, wanted
        return count, header_nbytes


def largest_object_nbytes(file_nbytes: int, key_nbytes: int) -> int:
    """Return the largest size of an object, with such a key, that fits an empty file."""
    entry = entry_bound_nbytes(key_nbytes)
    framing = UNIT_NBYTES + batch_header_bound_nbytes(entry) + footer_bound_nbytes(EMPTY_INDEX_NBYTES + entry)
    return file_nbytes - framing


@dataclass
class ActiveFile:
    header: FileHeader
    file: SsdLogFile
    room: FileRoom
    entries: list[Entry] = field(default_factory=list)


class LogWriter:
    def __init__(self, folder: LogFolder, index: LogIndex, index_lock: threading.Lock, config: SsdConfig) -> None:
        self._folder = folder
        self._index = index
        self._index_lock = index_lock
        self._config = config
        self._active: ActiveFile | None = None
        self._staging: memoryview | None = None  # made when first needed
        self._unsynced: dict[int, int] = {}  # file number -> batches written, until they are known to be durable
        self._pending: dict[bytes, int] = {}  # tombstones to write: key -> generation

    @property
    def active_number(self) -> int | None:
        return None if self._active is None else self._active.header.number

    @property
    def room_nbytes(self) -> int:
        """Free bytes of the active file."""
        return 0 if self._active is None else self._active.room.free_nbytes

    @property
    def pending(self) -> dict[bytes, int]:
        """Removed objects whose tombstones are not on the disk yet: key -> generation."""
        return self._pending

    def append(self, records: Sequence[LogRecord], *, moving: bool = False) -> list[LogLocation | MoonpoolError]:
        """Append records. Return one result per record. Waiting tombstones go first: the order within a batch counts.

        `moving`: may use the space that is reserved for compaction.
        """
        waiting = self._needed_tombstones()
        results = self._append([*waiting, *records], moving)
        for tombstone, result in zip(waiting, results, strict=False):
            if not isinstance(result, MoonpoolError):
                self._pending.pop(tombstone.key, None)
        return [
            result if isinstance(result, MoonpoolError) else location_of(result) for result in results[len(waiting) :]
        ]

    def mark_removed(self, key: bytes, generation: int) -> bool:
        """Remove the object from the index; its tombstone waits for the next write. Return False when there is none."""
        with self._index_lock:
            entry = self._index.mark_removed(key, generation)
        if entry is None:
            return False
        self._pending[key] = entry.generation
        return True

    def write_tombstones(self, carried: Sequence[Entry] = ()) -> None:
        """Write the waiting tombstones, and the `carried` ones again. Raise when one of them could not be written."""
        records = [LogRecord(entry.key, entry.generation, None) for entry in carried]
        waiting = self._needed_tombstones()
        for record, result in zip((*waiting, *records), self._append([*waiting, *records], True), strict=True):
            if isinstance(result, MoonpoolError):
                raise result
            self._pending.pop(record.key, None)

    def unsynced(self) -> dict[int, int]:
        return dict(self._unsynced)

    def sync_files(self, unsynced: dict[int, int]) -> None:
        """Make what unsynced() listed durable. May run concurrently with the other calls."""
        for number in unsynced:
            try:
                with self._folder.borrow(number) as file:
                    file.sync()
            except Unavailable:
                if number in self._folder.sizes:  # otherwise it was released meanwhile, and holds nothing
                    raise

    def mark_synced(self, synced: dict[int, int]) -> None:
        for number, count in synced.items():
            if self._unsynced.get(number) == count:
                del self._unsynced[number]

    def forget(self, number: int) -> None:
        """Forget a file that was released."""
        self._unsynced.pop(number, None)

    def seal(self) -> None:
        """End the active file, if any. A file whose bytes or footer cannot be written stays without a footer: the next
        recovery searches it.
        """
        active, self._active = self._active, None
        if active is None:
            return
        number = active.header.number
        try:
            active.file.sync()
            self._unsynced.pop(number, None)
            write_footer(active.file, active.header, active.entries)
        except MoonpoolError as error:
            logger.warning("log file %d is left without an index: %s", number, error)
        finally:
            active.file.close()

    def _needed_tombstones(self) -> list[LogRecord]:
        with self._index_lock:
            unneeded = [key for key in self._pending if not self._index.is_hidden(key)]
        for key in unneeded:  # the file that held the object was released
            del self._pending[key]
        return [LogRecord(key, generation, None) for key, generation in self._pending.items()]

    def _append(self, records: Sequence[LogRecord], moving: bool) -> list[Entry | MoonpoolError]:
        results: list[Entry | MoonpoolError] = []
        while len(results) < len(records):
            rest = records[len(results) :]
            try:
                active, batch = self._plan(rest, moving)
                self._write(active, batch, rest)
            except MoonpoolError as error:
                return results + [error] * len(rest)
            results += self._publish(active, batch)
        return results

    def _plan(self, records: Sequence[LogRecord], moving: bool) -> tuple[ActiveFile, RecordBatch]:
        self._check_allowed(moving)
        active = self._active or self._begin(moving)
        batch = active.room.plan(records, self._config.batch_nbytes, active.header.number)
        if batch is None:
            self.seal()
            active = self._begin(moving)
            batch = active.room.plan(records, self._config.batch_nbytes, active.header.number)
        assert batch is not None, "objects that do not fit an empty file are refused before"
        return active, batch

    def _begin(self, moving: bool) -> ActiveFile:
        self._check_allowed(moving, self._config.file_nbytes)
        header, file = self._folder.make_file(keep_spare=not moving)
        with self._index_lock:
            self._index.open_file(header.number)
        self._active = ActiveFile(header, file, FileRoom(header.file_nbytes))
        return self._active

    def _check_allowed(self, moving: bool, more_nbytes: int = 0) -> None:
        limit = self._config.max_nbytes - (0 if moving else self._config.reserved_nbytes)
        if self._folder.log_nbytes + more_nbytes > limit:
            size = format_nbytes(self._config.max_nbytes)
            raise NoSpace(f"the log in {self._folder.path} has used its {size}; remove objects, compact, release files")

    def _write(self, active: ActiveFile, batch: RecordBatch, records: Sequence[LogRecord]) -> None:
        if self._staging is None:
            self._staging = aligned_buffer(self._config.batch_nbytes)
        stream = BlockStream(active.file, batch.offset, self._staging, self._folder.alignment.memory_nbytes)
        head = pack_batch_header(batch.entries, batch.offset, batch.header_nbytes, batch.end, active.header.nonce)
        try:
            stream.add([memoryview(head)])
            for record in records[: len(batch.entries)]:
                stream.add(record.views)
            stream.finish()
        except MoonpoolError:
            if active.entries:  # an empty file can be used again
                self.seal()
            raise

    def _publish(self, active: ActiveFile, batch: RecordBatch) -> list[Entry | MoonpoolError]:
        number = active.header.number
        active.room.advance(batch)
        active.entries += batch.entries
        self._unsynced[number] = self._unsynced.get(number, 0) + 1
        with self._index_lock:
            return [self._add(entry) for entry in batch.entries]

    def _add(self, entry: Entry) -> Entry | MoonpoolError:
        self._index.add(entry)
        if entry.nbytes is None or self._index.is_live(entry):
            return entry
        return StaleGeneration(f"a newer {entry.key.hex()[:16]} was appended together with this one")


def write_footer(file: SsdLogFile, header: FileHeader, entries: Sequence[Entry]) -> None:
    """Write index and trailer. Call it only when everything in the file is durable."""
    offset, data = pack_footer(entries, header)
    file.write(offset, [aligned_copy(data)])
