"""What a log's folder holds when its owner starts: the index of all files, found by their own indexes or by search."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, field

from moonpool.base.clock import Deadline
from moonpool.base.errors import MoonpoolError
from moonpool.node.ssd.folder import LogFolder
from moonpool.node.ssd.index import LogIndex
from moonpool.node.ssd.layout import UNIT_NBYTES, Entry, FileHeader, parse_file_header
from moonpool.node.ssd.log_file import SsdLogFile, on_disk
from moonpool.node.ssd.recovery import FoundRecord, Reader, recover
from moonpool.node.ssd.writer import write_footer
from moonpool.transfer.memory.buffers import aligned_buffer

_FIRST_BUFFER_NBYTES = 64 * 1024
_READ_TIMEOUT_S = 600.0  # of one file; recovery has no one waiting with less patience

logger = logging.getLogger(__name__)


@dataclass
class RecoveredLog:
    index: LogIndex = field(default_factory=LogIndex)
    num_torn: int = 0
    damaged_nbytes: int = 0
    doubtful_upto: int = 0  # the newest damaged file: a tombstone may be lost of whatever lies there or in older ones
    num_unreadable_files: int = 0


def recover_folder(folder: LogFolder) -> RecoveredLog:
    """Reads every file's index, or the file. Raises Unavailable when the disk cannot be read: nothing is given up for
    that. A file without a valid header is given up: it never held anything, or nothing in it can be told apart.
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
    """Files with nothing alive and no tombstone that something older needs, the oldest first. Nobody reads them: who
    knew their places knew them of an earlier incarnation. An owner that dies often would have no time to empty and to
    rest them, and run out of files.
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
    """What was found, and whether all of it is durable now."""
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
    """So that the next start need not search again (None: it shall, but what is there is durable); False when it cannot
    be done, and nothing depends on it.
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
    """Reads files into one buffer, which grows."""

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
