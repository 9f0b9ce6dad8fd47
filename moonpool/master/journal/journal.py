"""The master's journal: outcome records that survive a restart, and snapshots that shorten it.

The journal does not interpret the records: replaying them in order, over a snapshot taken meanwhile, restores the
state. A record is in the page cache when `append` returns, so the master's death loses nothing; it is on disk within
`sync_s`, so a power failure loses at most that time. Disk errors never end the journal: `health` reports them, the
journal retries what it could not write, and the next snapshot makes it complete again (`should_snapshot`). This holds
for a disk that accepts no writes when the journal is opened, too.

No record is replayed after a gap, because that could give a wrong state. So while the journal lacks records, the file
before a snapshot gets no END, which a reader needs to go on with the next file, and what is written meanwhile counts
only with the snapshot: appending raises until that is published.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from moonpool.base.backoff import backoff_s
from moonpool.base.clock import Clock, SystemClock
from moonpool.base.errors import AlreadyExists, ConfigError, MoonpoolError, Unavailable
from moonpool.master.journal.folder import Epoch, FolderLock, JournalFolder, as_moonpool_error, next_epoch, write_epoch
from moonpool.master.journal.frames import END, FORMAT, JournalFile, pack_records
from moonpool.master.journal.recovery import RecoveredJournal, recover, repair
from moonpool.master.journal.snapshot import SnapshotWriter
from moonpool.master.journal.sync_thread import SyncThread

_LOG = logging.getLogger(__name__)
MAX_UNWRITTEN_NBYTES = 1024 * 1024  # records kept in memory for a retry
EPOCH_RETRY_S = 1.0
LOOK_S = 1.0  # between looks for the file that is appended to
MOST_PAUSE_S = 600.0  # between snapshots that fail while the journal lacks nothing
_REMOVED = "it was removed or moved away; make the folder again"
_EPOCH_UNWRITTEN = "the master's epoch could not be written and was taken from the clock"


@dataclass(frozen=True, kw_only=True)
class JournalConfig:
    """When records are synced, and when snapshots are written."""

    sync_s: float = 0.1  # records are on disk after this long at most; 0: before append returns
    snapshot_min_nbytes: int = 64 * 1024 * 1024  # no snapshot for a journal shorter than this
    snapshot_retry_s: float = 10.0  # pause after a failed snapshot
    snapshot_queue_nbytes: int = 16 * 1024 * 1024  # the most bytes of a snapshot that wait to be written


class JournalHealth(msgspec.Struct, frozen=True):
    """The journal's state, for metrics and reports."""

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
    num_failures: int = 0,
) -> bool:
    """Return whether a snapshot is due: the journal lacks records, or replaying it would take longer than a snapshot.

    Each failure leaves a journal file if records were added meanwhile. So where nothing is lacking, the pause after a
    failure grows with their number.
    """
    pause_s = config.snapshot_retry_s
    if durable:
        pause_s = backoff_s(max(0, num_failures - 1), pause_s, max(pause_s, MOST_PAUSE_S))
    if since_failure_s is not None and since_failure_s < pause_s:
        return False
    return not durable or journal_nbytes > max(config.snapshot_min_nbytes, snapshot_nbytes)


class Journal:
    """One thread appends (the master's event loop), another one syncs. Made by `open`, ended by `close`."""

    def __init__(
        self,
        folder: JournalFolder,
        lock: FolderLock,
        config: JournalConfig,
        found: RecoveredJournal,
        clock: Clock,
        epoch: Epoch,
    ) -> None:
        """Use `open` instead."""
        self.epoch = epoch.number
        self._last_epoch = epoch.number  # the next master has a higher one
        self._epoch_is_unwritten = epoch.write_error is not None
        self._epoch_tried_s = clock.now_s()
        self._folder, self._lock_file, self._config, self._clock = folder, lock, config, clock
        self._file, unopened = _file_to_append_to(folder, found)
        self._older_nbytes = sum(extent.nbytes for extent in found.journals if extent.number != self._file.number)
        self._snapshot_nbytes = found.snapshot_nbytes
        self._num_appended = 1  # calls of append(), and one for what was found
        self.num_synced = 0  # so many of these are on disk, in order and without a gap
        self._retired: list[JournalFile] = []  # full journal files that may not be on disk yet
        self._names_changed = True
        self._lost_at: int | None = None  # number of the journal file in use when a write or sync failed
        self._error: str | None = None
        self._unwritten = b""  # written before the next record
        self._unwritten_s = 0.0  # since when there is something
        self._has_gap = False  # records were dropped: what is appended counts with the next snapshot alone
        self._is_void = False  # so it is with the whole present file
        self._has_records = True  # the present file may have some
        self._snapshot: SnapshotWriter | None = None
        self._snapshot_failed_s: float | None = None
        self._num_failures = 0  # of snapshots, one after the other
        self._looked_s = clock.now_s()  # for the file
        self._closed = False
        self._lock = threading.RLock()  # the fields above, and the order of writes
        self._syncing = threading.Lock()  # one sync at a time; taken before _lock
        self._report_start_errors(epoch.write_error, unopened)
        self._sync_thread = SyncThread(self._sync_quietly, config.sync_s)
        self._sync_thread.appended()  # what was found may not be on disk yet

    @classmethod
    def open(
        cls, directory: Path, config: JournalConfig | None = None, clock: Clock | None = None
    ) -> tuple[Journal, Iterator[bytes]]:
        """Return the journal, with a new epoch, and the records to replay. All records have been checked.

        Raise ConfigError if the folder cannot be used or another master uses it, Corrupt if records are damaged or
        missing.
        """
        folder = JournalFolder(directory)
        try:
            directory.mkdir(parents=True, exist_ok=True)
            lock = FolderLock(folder)
            try:
                found, listing = recover(folder), folder.listing()
                epoch = next_epoch(folder, has_journals=not listing.empty)
                lock.record_writer()
                repair(folder, found, listing)
                opened = cls(folder, lock, config or JournalConfig(), found, clock or SystemClock(), epoch)
            except BaseException:
                lock.release()
                raise
        except OSError as error:
            raise ConfigError(f"cannot keep a journal in {directory}: {error}", param="data_dir") from error
        return opened, found.replay(folder)

    def close(self) -> None:
        """Abort a snapshot under way, and sync all records if the disk allows it. Idempotent."""
        if self._closed:
            return
        with self._lock:
            snapshot = self._snapshot
        if snapshot is not None:
            snapshot.leave()
        self._sync_thread.close()
        with contextlib.suppress(MoonpoolError):
            self.retry_unwritten()
        self._sync_quietly()
        self._closed = True
        for file in (*self._retired, self._file):
            file.close()
        self._lock_file.release()

    # appending

    def append(self, records: bytes | Sequence[bytes]) -> None:
        """Write records with one system call. They are in the page cache when this returns; with `sync_s` 0, on disk.

        Raise NoSpace or Unavailable if the disk refuses them: then none of them is in the journal yet, `health` reports
        it until the next successful snapshot, and the next append writes them first. Raise InvalidInput as
        `pack_records`.
        """
        self._append(pack_records(records))

    @property
    def has_unwritten(self) -> bool:
        """Whether there are records, or an epoch, to write again."""
        return bool(self._unwritten) or self._epoch_is_unwritten

    def retry_unwritten(self) -> None:
        """Write again what the disk refused. Raise as append()."""
        if self._epoch_is_unwritten:
            self._keep_epoch()
        if self._unwritten:
            self._append(b"")

    def rise_to(self, epoch: int) -> None:
        """Give the next master a higher epoch than this one, which generations of other masters have required."""
        if epoch > self._last_epoch:
            _LOG.warning("generations are issued from epoch %d on: a node has later ones than this master", epoch)
            self._last_epoch, self._epoch_is_unwritten, self._epoch_tried_s = epoch, True, 0.0
            self._keep_epoch()

    def _keep_epoch(self) -> None:
        now_s = self._clock.now_s()
        if now_s - self._epoch_tried_s >= EPOCH_RETRY_S:
            self._epoch_tried_s = now_s
            with contextlib.suppress(OSError, ConfigError):
                self._lock_file.take_again()
                write_epoch(self._folder, self._last_epoch)
                self._epoch_is_unwritten = False
                _LOG.info("epoch %d is on disk now", self._last_epoch)

    def look_for_file(self) -> None:
        """Look now and then whether the file that is appended to is still in its folder. Without it nothing would be
        replayed. That is reported until the folder is there again, with a snapshot in it."""
        now_s = self._clock.now_s()
        if now_s - self._looked_s < LOOK_S:
            return
        self._looked_s = now_s
        with self._lock:
            if not self._closed and not self._file.is_in_place():
                self._epoch_is_unwritten = True
                self._lost(OSError(errno.ENOENT, _REMOVED))

    def _append(self, data: bytes) -> None:
        with self._lock:
            if self._closed:
                raise Unavailable("the journal is closed")
            self._num_appended += 1 if data else 0
            if self._has_gap and self._snapshot is None:
                raise self._gap()
            try:
                self._file.write(self._unwritten + data if self._unwritten else data)
            except OSError as error:
                raise self._keep(data, error) from error
            if self._unwritten:
                self._caught_up()
            self._has_records = True
            if self._has_gap:
                raise self._gap()
        if self._config.sync_s == 0:
            self.sync()
        else:
            self._sync_thread.appended()

    def _gap(self) -> Unavailable:
        return Unavailable(f"{self._error}; nothing can be added before the next snapshot")

    def _keep(self, data: bytes, error: OSError) -> MoonpoolError:
        """Keep what the disk refused, to write it before anything else. Return the error to raise."""
        self._has_gap |= len(self._unwritten) + len(data) > MAX_UNWRITTEN_NBYTES
        if self._has_gap:
            self._unwritten = b""
            return self._lost(error)
        if not self._unwritten:
            self._unwritten_s = self._clock.now_s()
        self._unwritten += data
        return self._told(error)

    def _caught_up(self) -> None:
        """All that the disk had refused is written now."""
        self._unwritten = b""
        if self._lost_at is None:
            _LOG.info("what could not be written to journal-%d is written now", self._file.number)
            self._error = None

    def sync(self) -> None:
        """Sync all records appended before the call to disk. Raise NoSpace or Unavailable."""
        with self._syncing:
            with self._lock:
                retired, file, nbytes, names_changed = (
                    list(self._retired),
                    self._file,
                    self._file.nbytes,
                    self._names_changed,
                )
                num_appended = self._num_appended
                if self._closed:
                    raise Unavailable("the journal is closed")
                if not retired and not names_changed and file.synced_nbytes == nbytes:
                    self._count_synced(num_appended)
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
                self._count_synced(num_appended)

    def sync_soon(self) -> None:
        """Let the other thread sync within some milliseconds. After a loss do nothing: syncing proves nothing then."""
        if self._lost_at is None:
            self._sync_thread.hurry()

    def _count_synced(self, num_appended: int) -> None:
        if self._lost_at is None and not self._unwritten:
            self.num_synced = num_appended

    def _synced(self, retired: list[JournalFile], file: JournalFile, nbytes: int) -> None:
        for each in retired:
            self._retired.remove(each)
            each.close()
        if file is not self._file:
            return
        self._names_changed = False
        file.synced_nbytes = nbytes
        if self._lost_at is None:  # a mark covers all earlier bytes, so none is written after a loss
            try:
                file.mark(nbytes)
            except OSError as error:
                _LOG.info("no mark in journal-%d: %s", file.number, error)

    def _sync_quietly(self) -> None:
        try:
            self.sync()
        except MoonpoolError as error:
            # Not retried: after a failed sync the kernel marks the pages as clean, so a second sync that succeeds would
            # prove nothing. The next snapshot writes everything again.
            _LOG.debug("sync: %s", error)

    def _report_start_errors(self, write_error: OSError | None, unopened: OSError | None) -> None:
        """Log the errors once; `health` reports them while they last. The master serves in spite of them."""
        if write_error is not None:
            _LOG.error(
                "epoch %d could not be written to %s (%s) and was taken from the clock; it is written when the disk"
                " allows it, and until then no clock of this machine may be set back",
                self.epoch,
                self._folder.path,
                write_error.strerror or write_error,
            )
        if unopened is not None:
            self._lost(unopened)

    def _lost(self, error: OSError) -> MoonpoolError:
        """Remember that the journal lacks records. Return the error to raise."""
        with self._lock:
            self._lost_at = self._file.number
        return self._told(error)

    def _told(self, error: OSError) -> MoonpoolError:
        """Log the error once, and let health() report it. Return the error to raise."""
        if error.errno == errno.ENOENT:  # whichever call comes upon it first
            error = OSError(errno.ENOENT, _REMOVED)
        mapped = as_moonpool_error(error, f"the journal in {self._folder.path} cannot be written")
        with self._lock:
            if self._error != str(mapped):
                self._error = str(mapped)
                self._lock_file.record_error(self._error)
                _LOG.error(
                    "%s; until it can, or a snapshot succeeds, a restart may not know what happened since", mapped
                )
        return mapped

    # snapshots

    @property
    def should_snapshot(self) -> bool:
        """Whether to begin a snapshot now."""
        health, failed_s = self.health(), self._snapshot_failed_s
        return not health.snapshot_running and snapshot_due(
            self._config,
            journal_nbytes=health.journal_nbytes,
            snapshot_nbytes=health.snapshot_nbytes,
            durable=self._lost_at is None and not self._is_behind_for_long,
            since_failure_s=None if failed_s is None else self._clock.now_s() - failed_s,
            num_failures=self._num_failures,
        )

    @property
    def _is_behind_for_long(self) -> bool:
        """What the disk refuses may be written soon; then no snapshot is needed, which takes far more space."""
        return bool(self._unwritten) and self._clock.now_s() - self._unwritten_s >= self._config.snapshot_retry_s

    def begin_snapshot(self) -> SnapshotWriter:
        """Start a new journal file and a snapshot. The caller adds the state in chunks; it may change meanwhile.

        Raise AlreadyExists while a snapshot is being written, NoSpace or Unavailable if no new file can be created.
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
        """Begin the file that goes with a snapshot: a new one, unless no record of the present one counts."""
        number = self._file.number
        if self._unwritten and self._lost_at is None:
            self._lost_at = number
        try:
            if self._lost_at is not None:
                self._lock_file.take_again()
            # A file of 0 bytes could not be created: a later one may not be the first.
            if self._is_void or not self._file.nbytes:
                self._file.clear()
                self._lost_at = number - 1
            elif self._has_records or self._lost_at is not None:
                self._begin_file(number + 1)
        except OSError as error:
            self._snapshot_failed_s = self._clock.now_s()
            raise as_moonpool_error(error, f"cannot begin a journal in {self._folder.path}") from error
        except ConfigError:
            self._snapshot_failed_s = self._clock.now_s()
            raise
        self._unwritten, self._has_records = b"", False  # the snapshot contains what is unwritten
        self._has_gap = self._is_void = self._lost_at is not None
        self._sync_thread.appended()

    def _begin_file(self, number: int) -> None:
        old, fresh = self._file, JournalFile.create(self._folder.journal(number), number)
        if self._lost_at is None:
            try:
                old.write_control(END, 0)
            except OSError as error:
                self._lost(error)
        self._retired.append(old)
        self._older_nbytes += old.nbytes
        self._file, self._names_changed = fresh, True

    def settle(self, number: int) -> int:
        """Sync journal-<number>, and return up to which offset it is on disk. The snapshot's thread calls this."""
        with self._lock:
            nbytes = self._file.nbytes
        self.sync()
        with self._lock:
            if self._unwritten or (self._lost_at is not None and self._lost_at >= number):
                raise Unavailable(f"records were lost while snapshot-{number} was written: {self._error}")
        return nbytes

    def snapshot_over(self, number: int, nbytes: int | None, error: MoonpoolError | None) -> None:
        """Handle the end of a snapshot. The snapshot's thread calls this."""
        with self._lock:
            self._snapshot = None
            if error is not None:
                self._snapshot_failed_s = self._clock.now_s()
                self._num_failures += 1
                self._lock_file.record_error(str(error))
                _LOG.error("snapshot-%d failed: %s", number, error)
            if nbytes is not None:
                self._snapshot_nbytes, self._older_nbytes, self._snapshot_failed_s = nbytes, 0, None
                self._num_failures = 0
                if self._lost_at is not None and self._lost_at < number:
                    self._lost_at, self._error = None, None
                    self._has_gap = self._is_void = False
                    _LOG.info("snapshot-%d contains what the journal had lost", number)

    def health(self) -> JournalHealth:
        with self._lock:
            unsynced = sum(file.nbytes - file.synced_nbytes for file in (*self._retired, self._file))
            return JournalHealth(
                durable=self._lost_at is None and not self._unwritten and not self._epoch_is_unwritten,
                error=self._error or (_EPOCH_UNWRITTEN if self._epoch_is_unwritten else None),
                number=self._file.number,
                journal_nbytes=self._older_nbytes + self._file.nbytes,
                snapshot_nbytes=self._snapshot_nbytes,
                unsynced_nbytes=unsynced,
                snapshot_running=self._snapshot is not None,
            )


def _file_to_append_to(folder: JournalFolder, found: RecoveredJournal) -> tuple[JournalFile, OSError | None]:
    """Return the last journal, truncated to its good part, or a new one if there is none, or if the last is closed or
    of an earlier format: the Moonpool that wrote it must not find records there that it cannot read.

    The second value is the error if the file could not be opened or created; then the next write tries again.
    """
    last = found.journals[-1] if found.journals else None
    number, nbytes = (found.last_number + 1, 0) if last is None or last.closed else (last.number, last.nbytes)
    path = folder.journal(number)
    try:
        if last is None or last.closed:
            return JournalFile.create(path, number), None
        reopened = JournalFile.reopen(path, number, nbytes)
        if last.format == FORMAT:
            return reopened, None
        reopened.write_control(END, 0)
        reopened.sync()
        reopened.close()
        return JournalFile.create(folder.journal(number + 1), number + 1), None
    except FileExistsError:
        raise  # never overwrite a file
    except OSError as error:
        return JournalFile(None, path, number, nbytes), error
