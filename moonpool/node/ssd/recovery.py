"""What a log's folder holds when its owner starts: the index of all files, from their own indexes or by search.

A sealed file has an index; everything in the file was durable before the index was written. Any other file is searched
batch by batch, and an object counts only if it is complete and its checksums match. Where a batch's header is damaged,
the search continues at every 4 KiB, for the next batch and for objects whose own header and checksums are good. Such an
object is salvaged: it may stem from an earlier use of the file, be part of another object's bytes, or have been removed
since, so it counts only once the master has confirmed it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import numpy as np

from moonpool.base import object_header
from moonpool.base.checksum import ChecksumKind
from moonpool.base.clock import Deadline
from moonpool.base.errors import InvalidInput, MoonpoolError, Refused
from moonpool.node.ssd.folder import LogFolder, SsdLogFile, on_disk
from moonpool.node.ssd.index import LogIndex
from moonpool.node.ssd.layout import (
    BATCH_MAGIC,
    UNIT_NBYTES,
    Entry,
    FileHeader,
    pad,
    parse_batch,
    parse_file_header,
    parse_index,
    parse_trailer,
    peek_batch,
)
from moonpool.node.ssd.reading import check_object
from moonpool.node.ssd.writer import write_footer
from moonpool.transfer.memory.buffers import aligned_buffer

Reader: TypeAlias = Callable[[int, int], memoryview]  # (offset, nbytes): valid until the next call
_SEARCH_NBYTES = 4 * 1024 * 1024
_MAGIC = np.frombuffer(BATCH_MAGIC, np.uint8)
_OBJECT = np.frombuffer(object_header.MAGIC, np.uint8)
_FIRST_BUFFER_NBYTES = 64 * 1024
_READ_TIMEOUT_S = 600.0  # of one file; no caller with a shorter timeout waits for recovery
logger = logging.getLogger(__name__)


class FoundRecord(NamedTuple):
    entries: list[Entry]
    num_torn: int  # objects that are incomplete or damaged
    sealed: bool
    salvaged: Sequence[Entry] = ()
    damaged_nbytes: int = 0  # where a batch must have been, salvaged objects included
    lost_batches: bool = False  # tombstones may have been among them


def recover(read: Reader, header: FileHeader) -> FoundRecord:
    entries = _read_index(read, header)
    return FoundRecord(entries, 0, sealed=True) if entries is not None else _scan(read, header)


def _read_index(read: Reader, header: FileHeader) -> list[Entry] | None:
    trailer = parse_trailer(read(header.file_nbytes - UNIT_NBYTES, UNIT_NBYTES), header)
    if trailer is None:
        return None
    return parse_index(read(trailer.index_offset, trailer.index_nbytes), trailer, header)


def _scan(read: Reader, header: FileHeader) -> FoundRecord:
    found: list[Entry] = []
    salvaged: list[Entry] = []
    num_torn = damaged_nbytes = 0
    lost_batches = False
    at = UNIT_NBYTES
    while at < header.file_nbytes:
        start, entries, end = _next_whole_batch(read, at, header)
        if start > at:
            has_remains = header.nonce in bytes(read(at, UNIT_NBYTES))  # of a batch's header
            more = _salvage(read, at, start, header)
            salvaged += more
            if entries:  # a batch was before it
                damaged_nbytes, lost_batches = damaged_nbytes + start - at, True
            elif has_remains:  # as after a crash in the middle of a write, whose tombstones were not acknowledged
                damaged_nbytes += max([at + UNIT_NBYTES, *(each.offset + each.padded_nbytes for each in more)]) - at
        whole = [entry for entry in entries if _is_whole(read, entry)]
        found += whole
        num_torn += len(entries) - len(whole)
        at = end
    return FoundRecord(found, num_torn, False, salvaged, damaged_nbytes, lost_batches)


def _next_whole_batch(read: Reader, start: int, header: FileHeader) -> tuple[int, list[Entry], int]:
    """Return start, entries and end of the next batch with a good header; no entries at the end of the file."""
    at = _next_batch(read, start, header)
    while at is not None:
        entries, end = _read_batch(read, at, header)
        if entries:
            return at, entries, end
        at = _next_batch(read, end, header)
    return header.file_nbytes, [], header.file_nbytes


def _salvage(read: Reader, start: int, end: int, header: FileHeader) -> list[Entry]:
    """Return the objects between two offsets whose own header and checksums are good."""
    found: list[Entry] = []
    at = start
    while at < end:
        nbytes = min(_SEARCH_NBYTES, end - at)
        blocks = np.frombuffer(read(at, nbytes), np.uint8).reshape(-1, UNIT_NBYTES)
        begins = np.flatnonzero((blocks[:, : len(_OBJECT)] == _OBJECT).all(axis=1)) * UNIT_NBYTES + at
        for offset in begins.tolist():
            if not found or offset >= found[-1].offset + found[-1].padded_nbytes:
                entry = _object_at(read, offset, end, header)
                found += [] if entry is None else [entry]
        at += nbytes
    return found


def _object_at(read: Reader, offset: int, end: int, header: FileHeader) -> Entry | None:
    """Return the object that begins at `offset`; None when it is damaged or has no checksums."""
    try:
        head_nbytes = object_header.announced_nbytes(read(offset, UNIT_NBYTES))
        if head_nbytes > end - offset:
            return None
        head = object_header.unpack(bytes(read(offset, pad(head_nbytes))))
        nbytes = head.nbytes + sum(piece.nbytes for piece in head.pieces)
        if nbytes > end - offset or head.checksum_kind is ChecksumKind.NONE:
            return None
        check_object([read(offset, nbytes)], head.key, head.generation, None)
    except (Refused, InvalidInput):
        return None
    return Entry(head.key, head.generation, header.number, offset, nbytes)


def _next_batch(read: Reader, start: int, header: FileHeader) -> int | None:
    """Return the offset of the next batch from `start` on, by its first block; None when there is none."""
    at, nbytes = start, UNIT_NBYTES  # mostly it follows at once
    while at < header.file_nbytes:
        nbytes = min(nbytes, header.file_nbytes - at)
        blocks = np.frombuffer(read(at, nbytes), np.uint8).reshape(-1, UNIT_NBYTES)
        for block in np.flatnonzero((blocks[:, : len(_MAGIC)] == _MAGIC).all(axis=1)):
            if peek_batch(blocks[block].data, at + int(block) * UNIT_NBYTES, header) is not None:
                return at + int(block) * UNIT_NBYTES
        at, nbytes = at + nbytes, _SEARCH_NBYTES
    return None


def _read_batch(read: Reader, at: int, header: FileHeader) -> tuple[list[Entry], int]:
    """Return the entries, and the offset where the search continues."""
    head = peek_batch(read(at, UNIT_NBYTES), at, header)
    entries = None if head is None else parse_batch(read(at, head.header_nbytes), at, header)
    if head is None or entries is None:
        return [], at + UNIT_NBYTES
    return entries, at + head.batch_nbytes


def _is_whole(read: Reader, entry: Entry) -> bool:
    if entry.nbytes is None:
        return True
    try:
        check_object([read(entry.offset, entry.nbytes)], entry.key, entry.generation, entry.crc)
    except (Refused, InvalidInput):
        return False
    return True


@dataclass
class RecoveredLog:
    index: LogIndex = field(default_factory=LogIndex)
    num_torn: int = 0
    damaged_nbytes: int = 0
    doubtful_upto: int = 0  # the newest damaged file: a tombstone may be lost of whatever lies there or in older ones
    num_unreadable_files: int = 0


def recover_folder(folder: LogFolder) -> RecoveredLog:
    """Read every file's index, or search the file. Unavailable when the disk cannot be read; no file is dropped then. A
    file without a valid header is dropped: it never held anything, or its records cannot be identified.
    """
    recovered = RecoveredLog()
    reader = _Reader()
    is_durable = True
    for number in sorted(folder.sizes):
        with folder.borrow(number) as file:
            found, is_sealed = _recover_file(folder, number, reader.of(file))
        is_durable = is_durable and is_sealed
        if found is None:
            recovered.num_unreadable_files += 1
            logger.warning("%s has no valid header and is given up", folder.path_of(number))
        entries = [] if found is None else found.entries
        recovered.num_torn += 0 if found is None else found.num_torn
        salvaged = () if found is None else found.salvaged
        if entries or salvaged or not _retired(folder, number):
            recovered.index.open_file(number)
        for entry in entries:
            recovered.index.add(entry)
        for entry in salvaged:
            recovered.index.salvage(entry)
        if found is not None:
            recovered.damaged_nbytes += found.damaged_nbytes
            recovered.doubtful_upto = number if found.lost_batches else recovered.doubtful_upto
    recovered.index.drop_beaten_salvage()
    if is_durable:
        _retire_useless(folder, recovered.index)
    return recovered


def _retire_useless(folder: LogFolder, index: LogIndex) -> None:
    """Release files without live objects and needed tombstones, the oldest first. They have no readers: locations of an
    earlier incarnation are void. An owner that crashes often would never drain and release them, and run out of files.
    """
    for number in sorted(folder.sizes):
        is_useless = not (any(index.live_of(number)) or index.tombstones_to_keep(number))
        if is_useless and number not in index.salvaged_files() and _retired(folder, number):
            index.drop_file(number)


def _retired(folder: LogFolder, number: int) -> bool:
    try:
        folder.retire(number)
    except MoonpoolError as error:
        logger.warning("log file %d is empty and stays until it is compacted: %s", number, error)
        return False
    return True


def _recover_file(folder: LogFolder, number: int, read: Reader) -> tuple[FoundRecord | None, bool]:
    """Return what was found, and whether all of it is durable now."""
    header = parse_file_header(read(0, UNIT_NBYTES), number) if folder.sizes[number] >= UNIT_NBYTES else None
    if header is None:
        return None, True
    if folder.sizes[number] < header.file_nbytes:
        _restore_size(folder, header)
    found = recover(read, header)
    if found.sealed or not (found.entries or found.salvaged):
        return found, True
    logger.info("log file %d was searched: %d records, %d torn", number, len(found.entries), found.num_torn)
    if not found.damaged_nbytes and not found.salvaged:
        return found, _seal(folder, header, found.entries)
    if found.damaged_nbytes:
        logger.warning(
            "log file %d is damaged: in %d bytes without a good batch header %d objects were found by their own"
            " headers; they count when the master has confirmed them, others that were there are lost",
            number,
            found.damaged_nbytes,
            len(found.salvaged),
        )
    return found, _seal(folder, header, None)  # without an index: the next start must learn of the damage too


def _restore_size(folder: LogFolder, header: FileHeader) -> None:
    path = folder.path_of(header.number)
    logger.warning("%s was cut short; what is left of it is searched", path)
    with on_disk(path):
        os.truncate(path, header.file_nbytes)
    folder.sizes[header.number] = header.file_nbytes


def _seal(folder: LogFolder, header: FileHeader, entries: list[Entry] | None) -> bool:
    """Make the file durable and write its index, so that the next start need not search it (`entries` None: write no
    index, the next start must search it). Return False when that fails; nothing depends on it.
    """
    try:
        file = folder.open_to_write(header.number)
        try:
            file.sync()
            if entries is not None:
                write_footer(file, header, entries)
        finally:
            file.close()
    except MoonpoolError as error:
        logger.warning("log file %d is left without an index: %s", header.number, error)
        return False
    return True


class _Reader:
    """Reads files into one growing buffer."""

    def __init__(self) -> None:
        self._buffer = aligned_buffer(_FIRST_BUFFER_NBYTES)

    def of(self, file: SsdLogFile) -> Reader:
        deadline = Deadline(_READ_TIMEOUT_S)

        def read(offset: int, nbytes: int) -> memoryview:
            if nbytes > self._buffer.nbytes:
                self._buffer = aligned_buffer(nbytes)
            view = self._buffer[:nbytes]
            file.read(offset, [view], deadline)
            return view

        return read
