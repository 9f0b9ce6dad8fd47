"""Empties log files that hold little: objects that live, and tombstones that are still needed, are appended again.

A step reads without a lock, and takes the writing lock only to append what is still alive by then.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from moonpool.base.errors import HandleClosed, MoonpoolError, NoSpace, Refused
from moonpool.node.ssd.folder import LogFolder
from moonpool.node.ssd.index import LogIndex
from moonpool.node.ssd.layout import Entry
from moonpool.node.ssd.reading import read_checked
from moonpool.node.ssd.types import LogRead, MovedRecord, SsdConfig, location_of
from moonpool.node.ssd.writer import LogRecord, LogWriter, largest_object_nbytes
from moonpool.transfer.memory.buffers import aligned_buffer


class FileLoad(NamedTuple):
    """A sealed file: bytes of live objects, of all objects ever written, and its capacity."""

    live_nbytes: int
    written_nbytes: int
    capacity_nbytes: int


def choose_victim(loads: Mapping[int, FileLoad], dead_fraction: float) -> int | None:
    """Return the file with the least to move; of equals the oldest, because its tombstones become useless first. None
    when no file is worth compacting.
    """
    worth = [(load.live_nbytes, number) for number, load in loads.items() if _is_worth_it(load, dead_fraction)]
    return min(worth)[1] if worth else None


def _is_worth_it(load: FileLoad, dead_fraction: float) -> bool:
    """Return whether much of the file is dead, or it was sealed half empty (at a restart). A file full of live objects
    is never worth it; otherwise the same objects would be moved for ever.
    """
    dead_nbytes = load.written_nbytes - load.live_nbytes
    half_empty = 2 * load.written_nbytes <= load.capacity_nbytes
    return load.live_nbytes == 0 or half_empty or dead_nbytes >= dead_fraction * load.capacity_nbytes


class Compactor:
    """Shares the parts and the locks of the log (the writing lock is taken before the index lock)."""

    def __init__(
        self,
        folder: LogFolder,
        index: LogIndex,
        writer: LogWriter,
        config: SsdConfig,
        *,
        writing: threading.Lock,
        index_lock: threading.Lock,
    ) -> None:
        self._folder = folder
        self._index = index
        self._writer = writer
        self._config = config
        self._writing = writing
        self._index_lock = index_lock
        self._stepping = threading.Lock()
        self._closed = False
        self._avoided: set[int] = set()  # files where the last step failed
        self._buffer = memoryview(b"")
        self.drained: set[int] = set()  # files without live objects; readers may still use them
        self.num_corrupt = 0

    def step(self, max_nbytes: int) -> list[MovedRecord]:
        """SsdLog.compact()."""
        with self._stepping:
            if self._closed:
                raise HandleClosed(f"the log in {self._folder.path} is closed here")
            moved, error = self._step(max_nbytes)
        if error is not None and not moved:  # moves must be reported; the error will come again
            raise error
        return moved

    def close(self) -> None:
        """Wait for the running step and prevent further ones. Idempotent."""
        with self._stepping:
            self._closed = True

    def _step(self, max_nbytes: int) -> tuple[list[MovedRecord], MoonpoolError | None]:
        moved: list[MovedRecord] = []
        sealed, full = self._sealed(), False  # a step does not empty files that it fills
        while (victim := self._choose(sealed - self._avoided - self.drained, only_empty=full)) is not None:
            chunk = self._next_chunk(victim, max_nbytes, at_least_one=not moved)
            if chunk is None:
                return moved, None
            more, error = self._move(chunk) if chunk else ([], self._drain(victim))
            moved += more
            max_nbytes -= sum(one.old.nbytes for one in more)
            if error is not None:
                self._avoided.add(victim)
                if not isinstance(error, NoSpace):
                    return moved, error
                full = True  # files without live objects can still be drained
        self._avoided.clear()
        return moved, None

    def _sealed(self) -> set[int]:
        with self._writing, self._index_lock:  # both: a file becomes active under one and known under the other
            numbers = {number for number, _ in self._index.uses()} - {self._writer.active_number}
            return numbers - self._index.salvaged_files()

    def _choose(self, numbers: set[int], *, only_empty: bool) -> int | None:
        with self._index_lock:
            loads = {
                number: FileLoad(
                    use.live_nbytes, use.written_nbytes, largest_object_nbytes(self._folder.sizes[number], 0)
                )
                for number, use in self._index.uses()
                if number in numbers and not (only_empty and use.num_live)
            }
        return choose_victim(loads, self._config.compact_dead_fraction)

    def _next_chunk(self, victim: int, max_nbytes: int, *, at_least_one: bool) -> list[Entry] | None:
        """Return the objects to move now; [] when the file has no live ones, None when the step has moved enough."""
        chunk: list[Entry] = []
        left = min(max_nbytes, self._config.batch_nbytes)
        with self._index_lock:
            for entry in self._index.live_of(victim):
                left -= entry.padded_nbytes
                if left < 0 and (chunk or not at_least_one):
                    return chunk or None
                chunk.append(entry)
        return chunk

    def _move(self, chunk: Sequence[Entry]) -> tuple[list[MovedRecord], MoonpoolError | None]:
        """Move objects. A lost object counts as moved, to None. The error is that of objects that stay."""
        views = self._places_for(chunk)
        pairs = zip(chunk, views, strict=True)
        reads = [LogRead(entry.key, entry.generation, location_of(entry), [view], entry.crc) for entry, view in pairs]
        errors = read_checked(self._folder, reads, self._config.io_timeout_s)
        with self._writing:
            with self._index_lock:
                alive = [self._index.is_live(entry) for entry in chunk]
            found = [e for e in zip(chunk, views, errors, alive, strict=True) if e[3]]
            lost = [self._lose(entry) for entry, _, error, _ in found if isinstance(error, Refused)]
            whole = [(entry, view) for entry, view, error, _ in found if error is None]
            moved, refused = self._append(whole)
        unread = next((e for e in errors if e is not None and not isinstance(e, Refused)), None)
        return lost + moved, unread or refused

    def _append(self, whole: Sequence[tuple[Entry, memoryview]]) -> tuple[list[MovedRecord], MoonpoolError | None]:
        records = [LogRecord(entry.key, entry.generation, entry.nbytes, [view], entry.crc) for entry, view in whole]
        moved: list[MovedRecord] = []
        error: MoonpoolError | None = None
        for (entry, _), result in zip(whole, self._writer.append(records, moving=True), strict=True):
            if isinstance(result, MoonpoolError):
                error = result
            else:
                moved.append(MovedRecord(entry.key, entry.generation, location_of(entry), result))
        return moved, error

    def _lose(self, entry: Entry) -> MovedRecord:
        self.num_corrupt += 1
        self._writer.mark_removed(entry.key, entry.generation)
        return MovedRecord(entry.key, entry.generation, location_of(entry), None)

    def _drain(self, victim: int) -> MoonpoolError | None:
        with self._writing:
            with self._index_lock:
                kept = self._index.tombstones_to_keep(victim)
            try:
                if kept:  # else nothing needs to be written, so this works on a full disk
                    self._writer.write_tombstones(kept)
            except MoonpoolError as error:
                return error
            self.drained.add(victim)
        return None

    def _places_for(self, chunk: Sequence[Entry]) -> list[memoryview]:
        """Memory for each object, aligned, good until the next call."""
        nbytes = sum(entry.padded_nbytes for entry in chunk)
        if nbytes > self._buffer.nbytes:
            self._buffer = aligned_buffer(nbytes)
        views, at = [], 0
        for entry in chunk:
            assert entry.nbytes is not None
            views.append(self._buffer[at : at + entry.nbytes])
            at += entry.padded_nbytes
        return views
