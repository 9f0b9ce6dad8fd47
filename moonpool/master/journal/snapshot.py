"""Writes a snapshot while the master goes on: chunks come from the event loop, a thread of its own puts them on disk.

It is published by a rename once it and the journal beside it are on disk, and only then are older files removed. So a
crash at any moment leaves either the old snapshot with all journals since, or the new one.
"""

from __future__ import annotations

import asyncio
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

_SYNC_NBYTES = 32 * 1024 * 1024  # dirty pages beyond this would make the journal's appends wait for the disk
_LOG = logging.getLogger(__name__)


class SnapshotOwner(Protocol):
    """What a snapshot needs of its journal. Called on the writer's thread."""

    def settle(self, number: int) -> int:
        """Syncs journal-<number>; returns how much of it is on disk. Raises when it lacks records."""
        ...

    def snapshot_over(self, number: int, nbytes: int | None, error: MoonpoolError | None) -> None:
        """The writer is done; `nbytes` when it was published, `error` when it failed, neither when it was aborted."""
        ...


class SnapshotWriter:
    """`add` chunks while `ready`, then `finish`; or `abort`. Exactly one thread calls these, and none of them waits."""

    def __init__(self, folder: JournalFolder, number: int, owner: SnapshotOwner, max_queued_nbytes: int) -> None:
        self.number = number
        self._folder = folder
        self._owner = owner
        self._max_queued_nbytes = max_queued_nbytes
        self._queue: deque[bytes] = deque()
        self._queued_nbytes = 0
        self._finishing = False
        self._aborted = False
        self._hurry = threading.Event()  # no time to tidy up
        self._changed = threading.Condition()
        self._nbytes = 0
        self._done: Future[int] = Future()
        self._done.set_running_or_notify_cancel()  # who waits for it can give up, the snapshot goes on
        self._thread = threading.Thread(target=self._run, name=f"snapshot-{number}", daemon=True)
        self._thread.start()

    @property
    def ready(self) -> bool:
        """Whether `add` takes a chunk now. Also True after a failure, so that `add` can tell of it."""
        return self._done.done() or self._queued_nbytes < self._max_queued_nbytes

    def add(self, chunk: bytes) -> None:
        """Hands over one chunk, replayed later as one record. Raises what ended the writing; Overloaded when not ready.

        Chunks of about 1 MB are written fastest. InvalidInput when it is empty or larger than a record may be.
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
        """The snapshot's size, once it is published and older files are gone; or what went wrong. Idempotent."""
        with self._changed:
            self._finishing = True
            self._changed.notify()
        return self._done

    async def finish(self) -> int:
        """As finish_soon(). Cancelling the wait does not cancel the snapshot."""
        return await asyncio.wrap_future(self.finish_soon())

    def abort(self) -> None:
        """Gives it up, unless it is published by now. Idempotent. The journal goes on in its new file."""
        with self._changed:
            self._aborted = True
            self._changed.notify()

    def join(self) -> None:
        """Waits for the thread's end; after finish_soon() or abort()."""
        self._thread.join()

    def leave(self) -> None:
        """Gives it up and returns soon: what there is to remove is left to the next master."""
        self._hurry.set()
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
        """None when there will be no more."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._finishing or self._aborted)
            if self._aborted:
                raise Cancelled(f"snapshot-{self.number} was given up")
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
            raise Cancelled(f"snapshot-{self.number} was given up")
        os.rename(unfinished, self._folder.snapshot(self.number))
        self._folder.sync()

    def _end(self, nbytes: int | None, error: MoonpoolError | None) -> None:
        if nbytes is None and error is None:
            error = Internal(f"a bug ended the writing of snapshot-{self.number}; the log says where")
        try:
            if error is None:
                self._folder.remove_before(self.number, self._hurry)
            else:
                remove_gently(self._folder.unfinished(self.number), self._hurry)
        except FileNotFoundError:
            pass  # it was never begun
        except OSError as caught:
            _LOG.warning("files that are not needed stay in %s: %s", self._folder.path, caught)
        self._owner.snapshot_over(self.number, nbytes, None if isinstance(error, Cancelled) else error)
        if error is not None:
            self._done.set_exception(error)
        else:
            assert nbytes is not None
            self._done.set_result(nbytes)
