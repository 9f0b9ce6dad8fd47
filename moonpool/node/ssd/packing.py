"""What goes into the next batch, and where in the file. No I/O.

A file always keeps room for the index of everything in it, so that it can be sealed on a full disk.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from moonpool.node.ssd.layout import (
    EMPTY_INDEX_NBYTES,
    UNIT_NBYTES,
    Entry,
    batch_header_bound_nbytes,
    entry_bound_nbytes,
    footer_bound_nbytes,
    pad,
)


class LogRecord(NamedTuple):
    """Something to write: an object with the memory it lies in, or (nbytes is None) a tombstone."""

    key: bytes
    generation: int
    nbytes: int | None
    views: Sequence[memoryview] = ()
    crc: int | None = None


class RecordBatch(NamedTuple):
    """Where the first `len(entries)` of the records go."""

    offset: int
    header_nbytes: int
    end: int
    entries: list[Entry]


class FileRoom:
    """What is left of a file that is being written."""

    def __init__(self, file_nbytes: int) -> None:
        self._file_nbytes = file_nbytes
        self.tail = UNIT_NBYTES
        self._index_nbytes = EMPTY_INDEX_NBYTES

    @property
    def free_nbytes(self) -> int:
        return max(0, self._file_nbytes - footer_bound_nbytes(self._index_nbytes) - self.tail)

    def plan(self, records: Sequence[LogRecord], max_nbytes: int, file_number: int) -> RecordBatch | None:
        """As many records as fit the file and, but for the first, `max_nbytes`; None when not even one fits."""
        count, header_nbytes = self._count(records, max_nbytes)
        if count == 0:
            return None
        at, entries = self.tail + header_nbytes, []
        for record in records[:count]:
            offset = self.tail if record.nbytes is None else at
            entries.append(Entry(record.key, record.generation, file_number, offset, record.nbytes, record.crc))
            at += entries[-1].padded_nbytes
        return RecordBatch(self.tail, header_nbytes, at, entries)

    def take(self, batch: RecordBatch) -> None:
        """The batch is written."""
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
    """The most that an object with such a key may take in a file of its own."""
    entry = entry_bound_nbytes(key_nbytes)
    framing = UNIT_NBYTES + batch_header_bound_nbytes(entry) + footer_bound_nbytes(EMPTY_INDEX_NBYTES + entry)
    return file_nbytes - framing
