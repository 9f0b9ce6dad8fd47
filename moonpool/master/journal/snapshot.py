"""Writes a snapshot while the master serves: the event loop adds chunks, a thread writes them to disk.

A rename publishes the snapshot after it and the journal of its number are on disk; then older files are removed. So a
crash at any time leaves either the old snapshot with all journals since, or the new one.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from concurrent.futures import Future
from pathlib import Path
from typing import Protocol

from moonpool.base.errors import Cancelled, Internal, MoonpoolError, Overloaded
from moonpool.master.journal.folder import JournalFolder, as_moonpool_error, remove_gently
from moonpool.master.journal.frames import (
    END,
    Control,
    FileKind,
    check_size,
    pack_control,
    pack_frame_head,
    pack_header,
)

_SYNC_NBYTES = 32 * 1024 * 1024  # more dirty pages would make the journal's appends wait for the disk
_LOG = logging.getLogger(__name__)


class SnapshotOwner(Protocol):
    """What a snapshot needs from its journal. Called on the writer's thread."""

    def settle(self, number: int) -> int:
        """Sync journal-<number>. Return how much of it is on disk. Raise if it lacks records."""
        ...

    def snapshot_over(self, number: int, nbytes: int | None, error: MoonpoolError | None) -> None:
        """The writer has ended: `nbytes` is set if the snapshot was published, `error` if it failed, neither if
        aborted.
        """
        ...


class SnapshotWriter:
    """`add` chunks while `ready`, then `finish_soon`; or `abort`. Exactly one thread calls these, and none of them
    waits.
    """

    def __init__(self, folder: JournalFolder, number: int, owner: SnapshotOwner, max_queued_nbytes: int) -> None:
        self.number = number
        self._folder = folder
        self._owner = owner
        self._max_queued_nbytes = max_queued_nbytes
        self._queue: deque[bytes] = deque()
        self._queued_nbytes = 0
        self._finishing = False
        self._aborted = False
        self._stop_early = threading.Event()  # leave the removal of old files to the next master
        self._changed = threading.Condition()
        self._nbytes = 0
        self._done: Future[int] = Future()
        self._done.set_running_or_notify_cancel()  # a waiter that is cancelled does not cancel the snapshot
        self._thread = threading.Thread(target=self._run, name=f"snapshot-{number}", daemon=True)
        self._thread.start()

    @property
    def ready(self) -> bool:
        """Whether `add` accepts a chunk now. Also True after a failure, so that `add` can raise it."""
        return self._done.done() or self._queued_nbytes < self._max_queued_nbytes

    def add(self, chunk: bytes) -> None:
        """Add one chunk, which is replayed as one record. Chunks of about 1 MB are written fastest.

        Raise the error that ended the writing; Overloaded if not ready; InvalidInput if the chunk is empty or too large
        for a record.
        """
        check_size(chunk)
        if self._done.done():
            self._done.result()
        if not self.ready:
            raise Overloaded(f"snapshot-{self.number} is behind by {self._queued_nbytes} bytes", retry_after_s=0.01)
        with self._changed:
            assert not self._finishing, "a snapshot takes nothing after finish()"
            self._queue.append(chunk)
            self._queued_nbytes += len(chunk)
            self._changed.notify()

    def finish_soon(self) -> Future[int]:
        """End the snapshot. Return a future of its size, which is set after it is published and older files are
        removed; the future raises if the snapshot fails. Idempotent.
        """
        with self._changed:
            self._finishing = True
            self._changed.notify()
        return self._done

    def abort(self) -> None:
        """Abort the snapshot, unless it is published already. Idempotent. The journal stays in its new file."""
        with self._changed:
            self._aborted = True
            self._changed.notify()

    def join(self) -> None:
        """Wait for the end of the thread, after finish_soon() or abort()."""
        self._thread.join()

    def leave(self) -> None:
        """Abort and return soon: the next master removes old files."""
        self._stop_early.set()
        self.abort()
        self.join()

    # on the writer's thread

    def _run(self) -> None:
        nbytes, error = None, None
        unfinished = self._folder.unfinished(self.number)
        try:
            self._write(unfinished)
            self._publish(unfinished)
            nbytes = self._nbytes
        except OSError as caught:
            error = as_moonpool_error(caught, f"cannot write {unfinished}")
        except MoonpoolError as caught:
            error = caught
        finally:
            self._end(nbytes, error)

    def _write(self, path: Path) -> None:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            self._write_all(fd, pack_header(FileKind.SNAPSHOT, self.number))
            synced = 0
            while (chunk := self._next_chunk()) is not None:
                self._write_all(fd, pack_frame_head(chunk), chunk)
                if self._nbytes - synced >= _SYNC_NBYTES:
                    os.fdatasync(fd)
                    synced = self._nbytes
            floor = self._owner.settle(self.number)
            self._write_all(fd, pack_control(Control(END, self._nbytes, floor)))
            os.fsync(fd)
        finally:
            os.close(fd)

    def _next_chunk(self) -> bytes | None:
        """Return the next chunk, None after the last."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._finishing or self._aborted)
            if self._aborted:
                raise Cancelled(f"snapshot-{self.number} was aborted")
            if not self._queue:
                return None
            chunk = self._queue.popleft()
            self._queued_nbytes -= len(chunk)
            return chunk

    def _write_all(self, fd: int, *parts: bytes) -> None:
        written = os.writev(fd, parts)
        nbytes = sum(map(len, parts))
        if written < nbytes:
            rest = memoryview(b"".join(parts))
            while written < nbytes:
                written += os.write(fd, rest[written:])
        self._nbytes += nbytes

    def _publish(self, unfinished: Path) -> None:
        if self._aborted:
            raise Cancelled(f"snapshot-{self.number} was aborted")
        os.rename(unfinished, self._folder.snapshot(self.number))
        self._folder.sync()

    def _end(self, nbytes: int | None, error: MoonpoolError | None) -> None:
        if nbytes is None and error is None:
            error = Internal(f"a bug ended the writing of snapshot-{self.number}; the log says where")
        try:
            if error is None:
                self._folder.remove_before(self.number, self._stop_early)
            else:
                remove_gently(self._folder.unfinished(self.number), self._stop_early)
        except FileNotFoundError:
            pass  # it was never created
        except OSError as caught:
            _LOG.warning("files that are not needed stay in %s: %s", self._folder.path, caught)
        self._owner.snapshot_over(self.number, nbytes, None if isinstance(error, Cancelled) else error)
        if error is not None:
            self._done.set_exception(error)
        else:
            assert nbytes is not None
            self._done.set_result(nbytes)
