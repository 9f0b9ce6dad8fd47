"""The journal's folder: the names of its files, the lock that excludes a second master, and the epoch.

snapshot-<n>        the whole state, at the beginning of journal-<n>
snapshot-<n>.new    a snapshot that is being written
journal-<n>         the records since snapshot-<n> was begun
epoch               the epoch of the last master
lock                locked while a master runs; contains its pid and its last error
aside-<time>/       files that are no longer used; only the operator deletes them

The epoch is higher for each start of the master than for all before. Generations are made from it, so an epoch that
came twice would let a late reader take new bytes for old ones. It is the last epoch plus one, or the seconds since 2020
if these are more, and is on disk before it is used. A disk that accepts no writes (full, read-only, broken) does not
keep the master from starting: then the epoch comes from the clock, and is used only after its second has passed. The
next master, with or without the file, starts in a later second and has a higher epoch.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from moonpool import __version__
from moonpool.base.errors import ConfigError, MoonpoolError, NoSpace, Unavailable

UNFINISHED = ".new"
GONE = ".gone"
_LOCK = "lock"
_LOCK_NBYTES = 4096  # written whole at the start, so that an error can be recorded on a full disk
_MAX_ERROR = 1000  # characters
_NAME = re.compile(r"(snapshot|journal)-(0|[1-9][0-9]*)")
_SHRINK_NBYTES = 8 * 1024 * 1024
_SHRINK_PAUSE_S = 0.02
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class JournalFiles(msgspec.Struct, frozen=True):
    """Numbers of the existing files, ascending. `leftovers`: files of unfinished or replaced snapshots and journals."""

    snapshots: list[int]
    journals: list[int]
    leftovers: list[Path]

    @property
    def empty(self) -> bool:
        return not (self.snapshots or self.journals)


class JournalFolder:
    """Paths and names; holds nothing open."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def snapshot(self, number: int) -> Path:
        return self.path / f"snapshot-{number}"

    def unfinished(self, number: int) -> Path:
        return self.path / f"snapshot-{number}{UNFINISHED}"

    def journal(self, number: int) -> Path:
        return self.path / f"journal-{number}"

    def listing(self) -> JournalFiles:
        numbers: dict[str, list[int]] = {"snapshot": [], "journal": []}
        leftovers = []
        for name in sorted(os.listdir(self.path)):
            stem = name.removesuffix(UNFINISHED).removesuffix(GONE)
            match = _NAME.fullmatch(stem)
            if match is not None and name == stem:
                numbers[match[1]].append(int(match[2]))
            elif match is not None:
                leftovers.append(self.path / name)
        return JournalFiles(sorted(numbers["snapshot"]), sorted(numbers["journal"]), leftovers)

    def sync(self) -> None:
        """Sync created, renamed and removed names to disk."""
        fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def set_aside(self, paths: Iterable[Path]) -> Path:
        """Move files into a new folder inside this one. Return the new folder. If the disk is too full for a folder,
        rename the files instead, to names that begin with the returned path.
        """
        aside = self.path / f"aside-{time.time_ns()}"
        try:
            os.mkdir(aside, 0o700)
        except OSError as error:
            if error.errno not in _FULL:
                raise
            for path in paths:
                os.rename(path, aside.with_name(f"{aside.name}-{path.name}"))
        else:
            for path in paths:
                os.rename(path, aside / path.name)
        self.sync()
        return aside

    def remove_before(self, number: int, stop_early: threading.Event) -> None:
        """Remove every snapshot and journal older than the complete snapshot `number`. Raise OSError.

        First rename them: snapshots, then journals from the oldest on, so that a recovery after a crash never takes the
        remaining files for a shorter history. After `stop_early` is set, the rest is left to the next master.
        """
        listing = self.listing()
        old = [self.snapshot(each) for each in listing.snapshots if each < number]
        old += [self.journal(each) for each in listing.journals if each < number]
        gone = [path.with_name(path.name + GONE) for path in old]
        for path, new_path in zip(old, gone, strict=True):
            os.rename(path, new_path)
        for path in gone:
            remove_gently(path, stop_early)


def remove_gently(path: Path, stop_early: threading.Event) -> None:
    """Remove a file in steps: freeing 1 GB at once stalls all writes to the disk (130 ms seen on ext4 with discard)."""
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        nbytes = os.fstat(fd).st_size
        while nbytes > _SHRINK_NBYTES:
            nbytes -= _SHRINK_NBYTES
            os.ftruncate(fd, nbytes)
            if stop_early.wait(_SHRINK_PAUSE_S):
                return
    finally:
        os.close(fd)
    os.unlink(path)


class LockNote(msgspec.Struct, frozen=True):
    """The content of the lock file. `since` and `error_at` are Unix times; `moonpool` is the version that last wrote to
    the folder."""

    pid: int
    since: float
    error: str | None = None
    error_at: float | None = None
    moonpool: str = ""


class FolderLock:
    """Locked until `release()`, or until the process ends: then the kernel releases the lock."""

    def __init__(self, folder: JournalFolder) -> None:
        """Raise ConfigError if another process has the lock, with its pid if that is known."""
        self._folder = folder
        fd = os.open(folder.path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            earlier, self._note = _read_note(fd), LockNote(os.getpid(), time.time())
            if earlier is not None:
                self._note = msgspec.structs.replace(
                    self._note, error=earlier.error, error_at=earlier.error_at, moonpool=earlier.moonpool
                )
            self._fd: int | None = fd
            with contextlib.suppress(OSError):  # a full disk; the lock itself is held
                self._write()
        except BlockingIOError:
            holder = _read_note(fd)
            os.close(fd)
            who = f"pid {holder.pid}" if holder is not None else "pid unknown"
            raise ConfigError(f"another master ({who}) is using {folder.path}", param="data_dir") from None
        except BaseException:
            os.close(fd)
            raise

    def take_again(self) -> None:
        """Take the lock again if its file was removed. Raise ConfigError if another process has it, OSError if there is
        no folder."""
        assert self._fd is not None, "the lock is held"
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.stat(self._folder.path / _LOCK), os.fstat(self._fd)):
                return
        fresh = FolderLock(self._folder)
        os.close(self._fd)
        self._fd, fresh._fd = fresh._fd, None
        self._store()

    def record_error(self, sentence: str) -> None:
        """Store the last error for `describe`, if the disk allows it."""
        self._store(error=sentence[:_MAX_ERROR], error_at=time.time())

    def record_writer(self) -> None:
        """Store that this version writes to the folder, if the disk allows it."""
        self._store(moonpool=__version__)

    def _store(self, **changes: Any) -> None:
        self._note = msgspec.structs.replace(self._note, **changes)
        with contextlib.suppress(OSError):
            self._write()

    def release(self) -> None:
        """Release the lock. Idempotent."""
        if self._fd is not None:
            fd, self._fd = self._fd, None
            os.close(fd)

    def _write(self) -> None:
        if self._fd is not None:
            os.pwrite(self._fd, msgspec.json.encode(self._note).ljust(_LOCK_NBYTES), 0)


def read_lock(folder: JournalFolder) -> tuple[LockNote | None, bool]:
    """Return the content of the lock file, and whether a process has the lock now. Takes a shared
    lock for an instant.
    """
    try:
        fd = os.open(folder.path / _LOCK, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None, False
    try:
        return _read_note(fd), _is_held(fd)
    finally:
        os.close(fd)


def _is_held(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False


def _read_note(fd: int) -> LockNote | None:
    try:
        return msgspec.json.decode(os.pread(fd, _LOCK_NBYTES, 0), type=LockNote)
    except msgspec.MsgspecError:
        return None  # it is being written, or was edited


def as_moonpool_error(error: OSError, what: str) -> MoonpoolError:
    """Return NoSpace or Unavailable, with a message that begins with `what`."""
    sentence = f"{what}: {error.strerror or error}"
    return NoSpace(sentence) if error.errno in _FULL else Unavailable(sentence)


def forget(directory: Path) -> Path | None:
    """Set snapshots and journals aside, so that the next master begins with an empty pool and a new epoch.

    Return the folder where they are now, None if there were none. Raise ConfigError if the folder cannot be used or
    another master uses it.
    """
    folder = JournalFolder(directory)
    try:
        lock = FolderLock(folder)
        try:
            listing = folder.listing()
            paths = [folder.snapshot(n) for n in listing.snapshots] + [folder.journal(n) for n in listing.journals]
            return folder.set_aside(paths) if paths else None
        finally:
            lock.release()
    except OSError as error:
        raise ConfigError(f"cannot set the journal in {directory} aside: {error}", param="data_dir") from error


EPOCH_BITS = 32
CLOCK_STARTS_S = 1_577_836_800  # 2020-01-01 UTC, as Unix time
MAX_EPOCH = 2 ** (EPOCH_BITS - 1) - 2  # all generations, of the next range too, are below 2**63
_MAX_WAIT_S = 5
_FILE = "epoch"


class WallClock(NamedTuple):
    """Unix time, and how to wait."""

    now_s: Callable[[], float] = time.time
    sleep: Callable[[float], None] = time.sleep


class Epoch(NamedTuple):
    """`write_error` is why the number is not on disk; None if it is."""

    number: int
    write_error: OSError | None


def next_epoch(folder: JournalFolder, *, has_journals: bool, clock: WallClock | None = None) -> Epoch:
    """Return the epoch of a master that starts now. `has_journals`: there are journals, so there must be an epoch file.

    Raise ConfigError if the last epoch cannot be read, or the new one can neither be written nor taken from the clock.
    The caller has the folder's lock. May wait a second for the clock.
    """
    clock = clock or WallClock()
    try:
        last = read_epoch(folder)
        if last is None and has_journals:
            raise ValueError("it is missing, though there is a journal; write a number above every earlier epoch to it")
        number = max((last or 0) + 1, _seconds(clock))
        if number > MAX_EPOCH:
            raise ValueError(f"{last} is the last that there can be")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"cannot read the master's epoch in {folder.path / _FILE}: {error}", param="data_dir"
        ) from error
    try:
        write_epoch(folder, number)
    except OSError as error:
        if last is None:  # the next master could not tell this folder from one that has lost its epoch
            raise ConfigError(
                f"cannot write the master's first epoch to {folder.path / _FILE}: {error.strerror or error}",
                param="data_dir",
            ) from error
        _wait_for_next_second(number, clock, folder, error)
        return Epoch(number, error)
    return Epoch(number, None)


def write_epoch(folder: JournalFolder, number: int) -> None:
    """Write the epoch to its file and sync it. Raise OSError."""
    try:
        _replace_file(folder, number)
    except OSError:
        _overwrite(folder, number)


def read_epoch(folder: JournalFolder) -> int | None:
    """Return the epoch in the file, None if there is no file. Raise OSError, or ValueError if it is not an epoch."""
    try:
        text = (folder.path / _FILE).read_text()
    except FileNotFoundError:
        return None
    if not (text.strip().isdecimal() and text.isascii()):
        raise ValueError(f"{text[:40]!r} is not an epoch")
    return int(text)


def epoch_now() -> int:
    """Return the epoch of a new pool's master that started now, 0 if the clock cannot be right."""
    return _seconds(WallClock())


def _seconds(clock: WallClock) -> int:
    """Return the seconds since 2020, 0 if the clock cannot be right."""
    seconds = int(clock.now_s()) - CLOCK_STARTS_S
    return seconds if 0 < seconds < 2 ** (EPOCH_BITS - 1) else 0


def _wait_for_next_second(number: int, clock: WallClock, folder: JournalFolder, write_error: OSError) -> None:
    wait_s = number + 1 + CLOCK_STARTS_S - clock.now_s()
    if wait_s > _MAX_WAIT_S:
        raise ConfigError(
            f"cannot write the master's epoch to {folder.path / _FILE} ({write_error.strerror or write_error}), and the"
            f" clock is {wait_s:.0f} s behind what an earlier master has used; make room on the disk or set the clock",
            param="data_dir",
        ) from write_error
    while wait_s > 0:
        clock.sleep(wait_s)
        wait_s = number + 1 + CLOCK_STARTS_S - clock.now_s()


def _replace_file(folder: JournalFolder, number: int) -> None:
    path = folder.path / _FILE
    fresh = path.with_suffix(".new")
    with open(fresh, "w") as file:
        file.write(f"{number}\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(fresh, path)
    folder.sync()


def _overwrite(folder: JournalFolder, number: int) -> None:
    """Write the epoch without new disk space: numbers only grow, and all digits are in one sector."""
    fd = os.open(folder.path / _FILE, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.pwrite(fd, f"{number}\n".encode(), 0)
        os.fsync(fd)
    finally:
        os.close(fd)
