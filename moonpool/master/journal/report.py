"""What lies in a journal's folder, for `moonpool stat` and `moonpool doctor`. Reads; holds and changes nothing."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

import msgspec

from moonpool.base.errors import ConfigError, Corrupt
from moonpool.master.journal.epoch import read_epoch
from moonpool.master.journal.folder import JournalFolder, read_lock
from moonpool.master.journal.recovery import recover


class FileReport(msgspec.Struct, frozen=True):
    name: str
    nbytes: int
    age_s: float  # since it was last written


class FolderReport(msgspec.Struct, frozen=True):
    """`problem` is why a master would not start here; None when it would, or when it was not looked at."""

    path: str
    files: list[FileReport]
    set_aside: list[str]
    epoch: int | None
    pid: int | None  # of the master that uses it now
    last_error: str | None
    last_error_age_s: float | None
    problem: str | None


def describe(directory: Path, *, check: bool = False) -> FolderReport:
    """What is there; with `check`, all of it is verified too, unless a master is writing to it.

    ConfigError when the folder cannot be read.
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
        *listing.leavings,
        *(folder.journal(number) for number in listing.journals),
    ]
    reports = []
    for path in paths:
        with contextlib.suppress(FileNotFoundError):  # a living master removes what it no longer needs
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
