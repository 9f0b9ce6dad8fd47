"""What keeps the master's state across its lives: a journal of outcome records, and snapshots that shorten it.

It knows nothing of what the records mean, only that replaying them in order, over a snapshot taken meanwhile, gives
the state back. A record is in the page cache when `append` returns, so the master's death loses nothing; it is on
disk within `sync_s`, so the machine's death loses no more than that. Errors of the disk never end the journal: it
says so (`health`), writes what it could not when the disk lets it, and is made whole by the next snapshot
(`should_snapshot`). A disk that takes nothing when the journal is opened is such an error too. No record is ever behind
a gap of its file: replaying that would be a guess.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from moonpool.base.clock import Clock, SystemClock
from moonpool.base.errors import AlreadyExists, ConfigError, MoonpoolError, Unavailable
from moonpool.master.journal.folder import Epoch, FolderLock, JournalFolder, as_moonpool_error, keep_epoch, next_epoch
from moonpool.master.journal.frames import END, JournalFile, pack_records
from moonpool.master.journal.recovery import RecoveredJournal, put_right, recover
from moonpool.master.journal.snapshot import SnapshotWriter

_LOG = logging.getLogger(__name__)
MAX_UNWRITTEN_NBYTES = 1024 * 1024  # of records that the disk did not take
EPOCH_RETRY_S = 1.0
_UNKEPT_EPOCH = "the master's epoch could not be written and was taken from the clock"


@dataclass(frozen=True, kw_only=True)
class JournalConfig:
    """How safe, and how often a snapshot."""

    sync_s: float = 0.1  # records are on disk after this long at most; 0: before append returns
    snapshot_min_nbytes: int = 64 * 1024 * 1024  # a journal shorter than this is no reason for a snapshot
    snapshot_retry_s: float = 10.0  # after a snapshot failed, the next is due no sooner
    snapshot_queue_nbytes: int = 16 * 1024 * 1024  # of a snapshot, handed over and not yet written


class JournalHealth(msgspec.Struct, frozen=True):
    """For metrics and for people."""

    durable: bool  # False: something appended since the last snapshot may not survive
    error: str | None  # why not
    number: int
    journal_nbytes: int  # to be replayed after the snapshot
    snapshot_nbytes: int
    unsynced_nbytes: int
    snapshot_running: bool


def snapshot_due(
    config: JournalConfig,
    *,
    journal_nbytes: int,
    snapshot_nbytes: int,
    durable: bool,
    since_failure_s: float | None,
) -> bool:
    """The rule: to be made whole, or when replaying the journal would take longer than the snapshot itself."""
    if since_failure_s is not None and since_failure_s < config.snapshot_retry_s:
        return False
    return not durable or journal_nbytes > max(config.snapshot_min_nbytes, snapshot_nbytes)


class Journal:
    """Appended to by one thread (the master's event loop); synced by another. Made by `open`, ended by `close`."""

    def __init__(
        self,
        folder: JournalFolder,
        lock: FolderLock,
        config: JournalConfig,
        found: RecoveredJournal,
        clock: Clock,
        epoch: Epoch,
    ) -> None:
        """Not for callers; see `open`."""
        self.epoch = epoch.number
        self._unkept_epoch = epoch.unkept is not None
        self._epoch_tried_s = clock.now_s()
        self._folder, self._lock_file, self._config, self._clock = folder, lock, config, clock
        self._file, unopened = _file_to_append_to(folder, found)
        self._older_nbytes = sum(extent.nbytes for extent in found.journals if extent.number != self._file.number)
        self._snapshot_nbytes = found.snapshot_nbytes
        self._retired: list[JournalFile] = []  # rotated away, and not yet known to be on disk
        self._names_changed = True
        self._lost_at: int | None = None  # the journal in use when a record or a sync failed
        self._error: str | None = None
        self._unwritten = b""  # to be written before anything else
        self._has_gap = False  # there were too many of them
        self._snapshot: SnapshotWriter | None = None
        self._snapshot_failed_s: float | None = None
        self._closed = False
        self._lock = threading.RLock()  # the fields above, and the order of writes
        self._syncing = threading.Lock()  # one sync at a time; taken before _lock
        self._dirty = threading.Event()
        self._stopping = threading.Event()
        self._note_trouble_at_start(epoch.unkept, unopened)
        self._thread = threading.Thread(target=self._sync_forever, name="journal-sync", daemon=True)
        self._thread.start()

    @classmethod
    def open(
        cls, directory: Path, config: JournalConfig | None = None, clock: Clock | None = None
    ) -> tuple[Journal, Iterator[bytes]]:
        """The journal, with a new epoch, and the records to replay. All of them have been checked when this returns.

        ConfigError when the folder cannot be used or another master uses it; Corrupt when replaying would be a guess.
        """
        folder = JournalFolder(directory)
        try:
            directory.mkdir(parents=True, exist_ok=True)
            lock = FolderLock(folder)
            try:
                found, listing = recover(folder), folder.listing()
                epoch = next_epoch(folder, had_lives=not listing.empty)
                put_right(folder, found, listing)
                opened = cls(folder, lock, config or JournalConfig(), found, clock or SystemClock(), epoch)
            except BaseException:
                lock.release()
                raise
        except OSError as error:
            raise ConfigError(f"cannot keep a journal in {directory}: {error}", param="data_dir") from error
        return opened, found.replay(folder)

    def close(self) -> None:
        """Idempotent. Gives up a snapshot under way; all that was appended is on disk, if the disk lets us."""
        if self._closed:
            return
        with self._lock:
            snapshot = self._snapshot
        if snapshot is not None:
            snapshot.leave()
        self._stopping.set()
        self._dirty.set()
        self._thread.join()
        with contextlib.suppress(MoonpoolError):
            self.write_again()
        self._sync_quietly()
        self._closed = True
        for file in (*self._retired, self._file):
            file.close()
        self._lock_file.release()

    # appending

    def append(self, records: bytes | Sequence[bytes]) -> None:
        """Records are in the page cache, in one write, when this returns; with `sync_s` 0, on disk.

        NoSpace or Unavailable when the disk does not take them: then none of them is in the journal yet, `health` says
        so until a snapshot has made up for it, and the next append writes them first. InvalidInput as in
        `pack_records`.
        """
        self._append(pack_records(records))

    @property
    def has_unwritten(self) -> bool:
        """Whether write_again() has anything to do."""
        return bool(self._unwritten) or self._unkept_epoch

    def write_again(self) -> None:
        """Tries anew to write what the disk did not take; raises as append()."""
        if self._unkept_epoch:
            self._keep_epoch()
        if self._unwritten:
            self._append(b"")

    def _keep_epoch(self) -> None:
        now_s = self._clock.now_s()
        if now_s - self._epoch_tried_s >= EPOCH_RETRY_S:
            self._epoch_tried_s = now_s
            with contextlib.suppress(OSError):
                keep_epoch(self._folder, self.epoch)
                self._unkept_epoch = False
                _LOG.info("epoch %d is on disk now", self.epoch)

    def _append(self, data: bytes) -> None:
        with self._lock:
            if self._closed:
                raise Unavailable("the journal is closed")
            if self._has_gap:
                raise Unavailable(f"{self._error}; nothing can be added before the next snapshot")
            try:
                self._file.write(self._unwritten + data if self._unwritten else data)
            except OSError as error:
                self._keep(data)
                raise self._lost(error) from error
            self._unwritten = b""
        if self._config.sync_s == 0:
            self.sync()
        elif not self._dirty.is_set():
            self._dirty.set()

    def _keep(self, data: bytes) -> None:
        self._has_gap = len(self._unwritten) + len(data) > MAX_UNWRITTEN_NBYTES
        self._unwritten = b"" if self._has_gap else self._unwritten + data

    def sync(self) -> None:
        """All that was appended before the call is on disk when it returns; NoSpace or Unavailable."""
        with self._syncing:
            with self._lock:
                retired, file, nbytes, names_changed = (
                    list(self._retired),
                    self._file,
                    self._file.nbytes,
                    self._names_changed,
                )
                self._dirty.clear()
                if self._closed:
                    raise Unavailable("the journal is closed")
            if not retired and not names_changed and file.synced_nbytes == nbytes:
                return
            try:
                for each in (*retired, file):
                    each.sync()
                if names_changed:
                    self._folder.sync()
            except OSError as error:
                raise self._lost(error) from error
            with self._lock:
                self._synced(retired, file, nbytes)

    def _synced(self, retired: list[JournalFile], file: JournalFile, nbytes: int) -> None:
        for each in retired:
            self._retired.remove(each)
            each.close()
        if file is not self._file:
            return
        self._names_changed = False
        file.synced_nbytes = nbytes
        if self._lost_at is None:  # a mark speaks for all earlier bytes, so none after a loss
            try:
                file.mark(nbytes)
            except OSError as error:
                _LOG.info("no mark in journal-%d: %s", file.number, error)  # costs certainty after a crash, no record

    def _sync_forever(self) -> None:
        while not self._stopping.is_set():
            self._dirty.wait()
            self._stopping.wait(self._config.sync_s)
            self._sync_quietly()

    def _sync_quietly(self) -> None:
        try:
            self.sync()
        except MoonpoolError as error:
            # Not repeated for its own sake: after a failed sync the kernel takes the pages for clean, and a second
            # one that succeeds would prove nothing. The next snapshot does.
            _LOG.debug("sync: %s", error)

    def _note_trouble_at_start(self, unkept: OSError | None, unopened: OSError | None) -> None:
        """Neither keeps the master from serving what it knows; the log says it once, `health` while it lasts."""
        if unkept is not None:
            _LOG.error(
                "epoch %d could not be written to %s (%s) and was taken from the clock; it is written when the disk"
                " allows it, and until then no clock of this machine may be set back",
                self.epoch,
                self._folder.path,
                unkept.strerror or unkept,
            )
        if unopened is not None:
            self._lost(unopened)

    def _lost(self, error: OSError) -> MoonpoolError:
        """Takes note that the journal lacks something; the error to raise."""
        told = as_moonpool_error(error, f"the journal in {self._folder.path} cannot be written")
        with self._lock:
            self._lost_at = self._file.number
            if self._error != str(told):
                self._error = str(told)
                self._lock_file.note_error(self._error)
                _LOG.error("%s; until a snapshot succeeds, a restart may not know what happened since", told)
        return told

    # snapshots

    @property
    def should_snapshot(self) -> bool:
        """Whether to begin one now."""
        health, failed_s = self.health(), self._snapshot_failed_s
        return not health.snapshot_running and snapshot_due(
            self._config,
            journal_nbytes=health.journal_nbytes,
            snapshot_nbytes=health.snapshot_nbytes,
            durable=self._lost_at is None,
            since_failure_s=None if failed_s is None else self._clock.now_s() - failed_s,
        )

    def begin_snapshot(self) -> SnapshotWriter:
        """From here on records go to a new journal; the caller adds the state in chunks, which may change meanwhile.

        AlreadyExists while one is being written; NoSpace or Unavailable when no new file can be begun.
        """
        with self._lock:
            if self._closed:
                raise Unavailable("the journal is closed")
            if self._snapshot is not None:
                raise AlreadyExists(f"snapshot-{self._snapshot.number} is being written")
            self._rotate()
            self._snapshot = SnapshotWriter(self._folder, self._file.number, self, self._config.snapshot_queue_nbytes)
            return self._snapshot

    def _rotate(self) -> None:
        old, number = self._file, self._file.number + 1
        try:
            fresh = JournalFile.create(self._folder.journal(number), number)
        except OSError as error:
            self._snapshot_failed_s = self._clock.now_s()
            raise as_moonpool_error(error, f"cannot begin journal-{number} in {self._folder.path}") from error
        try:
            old.write_control(END, 0)
        except OSError as error:
            self._lost(error)  # without it nobody can tell that the old file is whole
        self._retired.append(old)
        self._older_nbytes += old.nbytes
        self._file, self._names_changed = fresh, True
        self._unwritten, self._has_gap = b"", False  # the snapshot has what they said
        self._dirty.set()

    def settle(self, number: int) -> int:
        """For the snapshot's thread: journal-<number> is on disk up to the returned offset."""
        with self._lock:
            nbytes = self._file.nbytes
        self.sync()
        with self._lock:
            if self._lost_at is not None and self._lost_at >= number:
                raise Unavailable(f"records were lost while snapshot-{number} was written: {self._error}")
        return nbytes

    def snapshot_over(self, number: int, nbytes: int | None, error: MoonpoolError | None) -> None:
        """For the snapshot's thread."""
        with self._lock:
            self._snapshot = None
            if error is not None:
                self._snapshot_failed_s = self._clock.now_s()
                self._lock_file.note_error(str(error))
                _LOG.error("snapshot-%d failed: %s", number, error)
            if nbytes is not None:
                self._snapshot_nbytes, self._older_nbytes, self._snapshot_failed_s = nbytes, 0, None
                if self._lost_at is not None and self._lost_at < number:
                    self._lost_at = self._error = None
                    _LOG.info("snapshot-%d makes up for what the journal had lost", number)

    def health(self) -> JournalHealth:
        with self._lock:
            unsynced = sum(file.nbytes - file.synced_nbytes for file in (*self._retired, self._file))
            return JournalHealth(
                durable=self._lost_at is None and not self._unkept_epoch,
                error=self._error or (_UNKEPT_EPOCH if self._unkept_epoch else None),
                number=self._file.number,
                journal_nbytes=self._older_nbytes + self._file.nbytes,
                snapshot_nbytes=self._snapshot_nbytes,
                unsynced_nbytes=unsynced,
                snapshot_running=self._snapshot is not None,
            )


def _file_to_append_to(folder: JournalFolder, found: RecoveredJournal) -> tuple[JournalFile, OSError | None]:
    """The last journal, cut to its good part, or a new one when there is none or the last is closed.

    With an error the file could not be opened or begun, and the next write tries again.
    """
    last = found.journals[-1] if found.journals else None
    number, nbytes = (found.last_number + 1, 0) if last is None or last.closed else (last.number, last.nbytes)
    path = folder.journal(number)
    try:
        if last is None or last.closed:
            return JournalFile.create(path, number), None
        return JournalFile.reopen(path, number, nbytes), None
    except FileExistsError:
        raise  # not ours to overwrite
    except OSError as error:
        return JournalFile(None, path, number, nbytes), error


def forget(directory: Path) -> Path | None:
    """Sets snapshots and journals aside, so that the next master begins with an empty pool and a new epoch.

    The folder where they are now; None when there were none. ConfigError as in `Journal.open`.
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
