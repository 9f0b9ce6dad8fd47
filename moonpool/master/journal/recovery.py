"""Recovery of a folder: which files to replay after the last master ended in any way, and a report of the folder.

The newest complete snapshot is replayed, then every journal from its number on. A crash can damage only what was not
yet on disk: the tail of the last journal, or of the one before if the last was just begun. That tail is cut off and
logged. Anything else (damage before a mark or the end that the snapshot recorded, a missing file) raises Corrupt, and
then nothing is changed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from moonpool.base.errors import ConfigError, Corrupt
from moonpool.master.journal.folder import JournalFiles, JournalFolder, read_epoch, read_lock
from moonpool.master.journal.frames import HEADER_NBYTES, FileKind, LaterFormat, RecordFile, find_mark

ADVICE = (
    "nothing was changed; put a good copy of the folder in place, or start with --forget-journal, "
    "which sets the files aside and begins with an empty pool"
)
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Extent:
    """A journal, and how many of its bytes are good. `closed`: it has an END frame."""

    number: int
    nbytes: int
    closed: bool
    format: int


@dataclass
class RecoveredJournal:
    """What to replay, and what to repair before anything is appended."""

    snapshot: int | None = None
    snapshot_nbytes: int = 0
    journals: list[Extent] = field(default_factory=list)
    cut_nbytes: int = 0  # after the last extent, to be cut off
    unusable: list[Path] = field(default_factory=list)  # journals begun after the place of the cut, broken snapshots

    @property
    def last_number(self) -> int:
        return max([extent.number for extent in self.journals], default=-1)

    def replay(self, folder: JournalFolder) -> Iterator[bytes]:
        """Yield the records, in order. The last journal may be appended to meanwhile."""
        if self.snapshot is not None:
            path = folder.snapshot(self.snapshot)
            yield from _checked(RecordFile(path, FileKind.SNAPSHOT, self.snapshot), self.snapshot_nbytes)
        for extent in self.journals:
            file = RecordFile(folder.journal(extent.number), FileKind.JOURNAL, extent.number)
            yield from _checked(file, extent.nbytes)


def _checked(file: RecordFile, nbytes: int) -> Iterator[bytes]:
    if nbytes >= HEADER_NBYTES:
        yield from file.records(nbytes)
        if file.fault is not None:
            raise Corrupt(f"{file.path} changed since it was checked: {file.fault}; {ADVICE}")


def recover(folder: JournalFolder) -> RecoveredJournal:
    """Read everything and change nothing. Raise Corrupt or OSError."""
    try:
        return _recover(folder)
    except LaterFormat as error:
        note, _ = read_lock(folder)
        writer = f"Moonpool {note.moonpool}" if note is not None and note.moonpool else "the Moonpool that wrote it"
        raise Corrupt(f"{error}; start {writer}, or a later one; {ADVICE}") from error


def _recover(folder: JournalFolder) -> RecoveredJournal:
    listing = folder.listing()
    found = RecoveredJournal()
    floor, faults = _take_snapshot(folder, listing, found)
    numbers = _chain(folder, listing, found.snapshot, faults)
    for number in numbers:
        file = RecordFile(folder.journal(number), FileKind.JOURNAL, number).scan()
        found.journals.append(Extent(number, file.end, file.closing is not None, file.format))
        goes_on = file.whole or (file.fault is None and number == numbers[-1])
        if not goes_on or file.end < floor:
            later = [folder.journal(each) for each in numbers if each > number]
            _check_is_only_a_tail(file, floor, later)
            found.cut_nbytes = file.nbytes - file.end
            found.unusable += later
            break
        floor = 0  # it is about the first journal only
    return found


def _take_snapshot(folder: JournalFolder, listing: JournalFiles, found: RecoveredJournal) -> tuple[int, list[str]]:
    """Find the newest complete snapshot. Return how much of its journal was on disk, and what is wrong with newer
    snapshots.
    """
    faults: list[str] = []
    for number in reversed(listing.snapshots):
        file = RecordFile(folder.snapshot(number), FileKind.SNAPSHOT, number).scan()
        if file.fault is None and file.closing is not None:
            found.snapshot, found.snapshot_nbytes = number, file.nbytes
            return file.closing.value, faults
        faults.append(f"{file.path} is not whole ({file.fault or 'its end is missing'})")
        found.unusable.append(file.path)
        _LOG.warning("%s; looking for an older one", faults[-1])
    return 0, faults


def _chain(folder: JournalFolder, listing: JournalFiles, snapshot: int | None, faults: list[str]) -> list[int]:
    """Return the journals to replay. Raise Corrupt if one is missing."""
    if listing.empty:
        return []
    first = snapshot or 0
    numbers = range(first, max([first, *listing.journals, *listing.snapshots]) + 1)
    missing = [number for number in numbers if number not in listing.journals]
    if missing:
        since = f"snapshot-{snapshot}" if snapshot is not None else "the beginning"
        lacks = f"journal-{missing[0]} is missing in {folder.path}, so it is not known all that happened since {since}"
        raise Corrupt("; ".join([lacks, *faults, ADVICE]))
    return list(numbers)


def _check_is_only_a_tail(file: RecordFile, floor: int, later: list[Path]) -> None:
    """Raise Corrupt unless the damage after `file.end` can be unsynced bytes that a crash lost."""
    fault, proof = file.fault or "its end is missing", None
    if file.end < floor:
        proof = "its snapshot says that it was longer"
    elif file.closing is not None:
        proof = "its writer had closed it"
    else:
        witness = _file_with_mark(file, later)
        proof = f"a mark in {witness.name} says that it was good" if witness is not None else None
    if proof:
        raise Corrupt(f"{file.path} is damaged at byte {file.end} ({fault}), and {proof}; {ADVICE}")


def _file_with_mark(file: RecordFile, later: list[Path]) -> Path | None:
    """Return the file with a mark that covers the damage, None if there is none."""
    if find_mark(file.path, file.end, covers=file.end):
        return file.path
    return next((path for path in later if find_mark(path, 0, covers=0)), None)


def repair(folder: JournalFolder, found: RecoveredJournal, listing: JournalFiles) -> None:
    """Repair what `recover` found, except the truncation, and log what is lost."""
    for path in listing.leftovers:
        _LOG.info("removing %s, which was never finished or was already replaced", path)
        os.unlink(path)
    if found.unusable:
        newest_first = sorted(found.unusable, key=lambda path: int(path.name.rpartition("-")[2]), reverse=True)
        names, nbytes = [path.name for path in newest_first], sum(path.stat().st_size for path in newest_first)
        aside = folder.set_aside(newest_first)
        _LOG.warning("%s (%d bytes) cannot be used and are kept in %s", ", ".join(names), nbytes, aside)
    if found.cut_nbytes:
        path = folder.journal(found.last_number)
        _LOG.warning("%s ends in the middle of a write; its last %d bytes are cut off", path, found.cut_nbytes)


class FileReport(msgspec.Struct, frozen=True):
    name: str
    nbytes: int
    age_s: float  # since it was last written


class FolderReport(msgspec.Struct, frozen=True):
    """The state of a folder. `problem` is why a master would not start here; None if it would, or if it was not
    checked.
    """

    path: str
    files: list[FileReport]
    set_aside: list[str]
    epoch: int | None
    pid: int | None  # of the master that uses it now
    last_error: str | None
    last_error_age_s: float | None
    problem: str | None


def describe(directory: Path, *, check: bool = False) -> FolderReport:
    """Describe a folder for `moonpool stat` and `moonpool doctor`. Changes nothing. With `check`, verify all files too,
    unless a master is writing to them.

    Raise ConfigError if the folder cannot be read.
    """
    folder = JournalFolder(directory)
    try:
        note, held = read_lock(folder)
        names = sorted(os.listdir(directory))
        error_at = note.error_at if note is not None else None
        return FolderReport(
            path=str(directory),
            files=_files(folder),
            set_aside=[name for name in names if name.startswith("aside-")],
            epoch=_epoch(folder),
            pid=note.pid if note is not None and held else None,
            last_error=note.error if note is not None else None,
            last_error_age_s=None if error_at is None else max(0.0, time.time() - error_at),
            problem=_problem(folder) if check and not held else None,
        )
    except OSError as error:
        raise ConfigError(f"cannot read {directory}: {error.strerror or error}", param="data_dir") from error


def _files(folder: JournalFolder) -> list[FileReport]:
    listing = folder.listing()
    paths = [
        *(folder.snapshot(number) for number in listing.snapshots),
        *listing.leftovers,
        *(folder.journal(number) for number in listing.journals),
    ]
    reports = []
    for path in paths:
        with contextlib.suppress(FileNotFoundError):  # a running master removes files that it no longer needs
            info = path.stat()
            reports.append(FileReport(path.name, info.st_size, max(0.0, time.time() - info.st_mtime)))
    return reports


def _epoch(folder: JournalFolder) -> int | None:
    try:
        return read_epoch(folder)
    except ValueError:
        return None


def _problem(folder: JournalFolder) -> str | None:
    try:
        recover(folder)
    except Corrupt as error:
        return str(error)
    return None
