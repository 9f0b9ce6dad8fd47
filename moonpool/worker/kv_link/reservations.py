"""The decode side of hand-offs: which pages are reserved for which request, and when they may be reused. No I/O.

A reservation has a reader and writers. The reader is the request's stream; it may leave at any time. A writer is a
prefill worker that has opened the reservation, one or, of a pipeline, each stage. Until it commits, aborts, says that
it has written all, or disconnects, its bytes may still arrive, so the pages stay reserved even when the reader has
left. After the last of them the pages get a newer generation, which refuses late writes.

Pages change on the thread that owns the page manager alone. The calls of writers may come from any other thread and
do not wait for that one: they read and mark reservations under a lock that no call holds while it works on pages. A
reservation whose last writer has failed is returned to the caller, who has to call free() on the owner's thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

from moonpool.base.errors import AlreadyExists, StaleGeneration
from moonpool.engine.blocks import PageManager
from moonpool.worker.kv_link.pieces import ReadyPoint

Stamp = Callable[[Sequence[int], int], None]
"""Stamps pages with a generation (in the segment's fence)."""


@dataclass(slots=True, eq=False)
class Incoming:
    request_id: str
    epoch: int
    generation: int
    pages: list[int]  # one per block of the prompt, those that are present already first
    num_present: int
    reserved_at: ReadyPoint | None = None  # what the device was given to do before may still write to the pages
    writers: set[Hashable] = field(default_factory=set)
    broken: bool = False  # a writer ended without a commit; the others are waited for
    reader_left: bool = False
    committing: bool = False

    @property
    def owner(self) -> str:
        """Return the owner name of its references in the page manager."""
        return f"handoff:{self.request_id}:{self.epoch}"


class Reservations:
    """All open hand-offs of one decode worker. `mark` returns the point that the device's work has reached."""

    def __init__(self, pages: PageManager, stamp: Stamp, mark: Callable[[], ReadyPoint | None] = lambda: None) -> None:
        self._pages = pages
        self._stamp, self._mark = stamp, mark
        self._generation = 0
        self._lock = threading.Lock()  # of what follows, and of all fields of Incoming that change
        self._open: dict[str, Incoming] = {}
        self._orphans: list[Incoming] = []  # replaced or left by their reader, and still open for a writer

    @property
    def num_pages(self) -> int:
        with self._lock:
            return sum(len(each.pages) for each in self._all())

    # -- calls of writers, on any thread -------------------------------------------------------------------------

    def open(self, request_id: str, epoch: int, generation: int, writer: Hashable) -> None:
        """Record a writer: from now on its bytes may arrive."""
        with self._lock:
            self._find(request_id, epoch, generation).writers.add(writer)

    def end_writes(self, request_id: str, epoch: int, generation: int, writer: Hashable) -> None:
        """This writer has written its part; another one commits."""
        with self._lock:
            self._find(request_id, epoch, generation).writers.discard(writer)

    def begin_commit(self, request_id: str, epoch: int, generation: int) -> Incoming:
        """All is written. Return the reservation; the caller verifies the pages, then calls `adopt` or `free` on the
        owner's thread."""
        with self._lock:
            found = self._find(request_id, epoch, generation)
            if len(found.writers) > 1:
                raise StaleGeneration(f"the pages of request {request_id} are still being written by another worker")
            found.committing = True
            return found

    def abort(self, request_id: str, epoch: int, generation: int, writer: Hashable) -> list[Incoming]:
        """The writer ends without a commit; idempotent. Return the reservation if it has to be freed."""
        with self._lock:
            name = request_id, epoch, generation
            named = [each for each in self._all() if (each.request_id, each.epoch, each.generation) == name]
            return [each for each in named if _break(each, writer)]

    def writer_gone(self, writer: Hashable) -> list[Incoming]:
        """The writer's connection has ended, and with it all that it had opened. Return what has to be freed."""
        with self._lock:
            return [each for each in self._all() if writer in each.writers and _break(each, writer)]

    # -- on the thread that owns the page manager ----------------------------------------------------------------

    def reserve(self, request_id: str, epoch: int, num_blocks: int, keys: Sequence[bytes]) -> Incoming:
        """Reserve pages for a prompt; leading blocks that are cached here are shared. NoSpace when pages are short now.

        A newer epoch of the same request replaces an older one.
        """
        older = self._open.get(request_id)
        if older is not None and older.epoch >= epoch:
            raise AlreadyExists(f"request {request_id} is reserved in epoch {older.epoch}")
        if older is not None:
            self.leave(request_id, older.epoch)
        made = Incoming(request_id, epoch, self._generation + 1, [], 0)
        granted = self._pages.reserve(made.owner, num_blocks, keys)
        self._generation += 1
        made.pages, made.num_present = granted.pages, granted.num_present_blocks
        made.reserved_at = self._mark()
        self._stamp(made.pages[made.num_present :], made.generation)
        with self._lock:
            self._open[request_id] = made
        return made

    def adopt(self, reservation: Incoming) -> list[int] | None:
        """Return the verified pages, whose references are the caller's now; None when the reader has left meanwhile."""
        with self._lock:
            self._forget(reservation)
        if reservation.reader_left:
            self._release(reservation)
            return None
        self._pages.detach(reservation.owner)
        self._retire(reservation)
        return reservation.pages

    def free(self, reservation: Incoming) -> None:
        """Free the pages: wrong bytes were written, or no writer and no reader is left. Idempotent."""
        with self._lock:
            is_known = self._forget(reservation)
        if is_known:
            self._release(reservation)

    def leave(self, request_id: str, epoch: int) -> None:
        """The reader leaves; idempotent. Pages that a writer has opened stay reserved until the writer ends."""
        with self._lock:
            found = self._open.get(request_id)
            if found is None or found.epoch != epoch:
                return
            found.reader_left = True
            del self._open[request_id]
            if found.writers or found.committing:
                self._orphans.append(found)
                return
        self._release(found)

    def newest_without_writer(self) -> Incoming | None:
        """Return the newest reservation that no writer has opened; None if all have one."""
        with self._lock:
            idle = [each for each in self._open.values() if not (each.writers or each.committing or each.broken)]
        return max(idle, key=lambda found: found.generation, default=None)

    # -- with the lock held --------------------------------------------------------------------------------------

    def _all(self) -> list[Incoming]:
        return [*self._open.values(), *self._orphans]

    def _find(self, request_id: str, epoch: int, generation: int) -> Incoming:
        found = self._open.get(request_id)
        if found is None or (found.epoch, found.generation) != (epoch, generation) or found.committing or found.broken:
            raise StaleGeneration(f"the pages of request {request_id} are no longer reserved for this attempt")
        return found

    def _forget(self, reservation: Incoming) -> bool:
        """Return whether the reservation was known."""
        if self._open.get(reservation.request_id) is reservation:
            del self._open[reservation.request_id]
        elif reservation in self._orphans:
            self._orphans.remove(reservation)
        else:
            return False
        return True

    # -- on the owner's thread, without the lock -----------------------------------------------------------------

    def _release(self, reservation: Incoming) -> None:
        self._retire(reservation)
        self._pages.release(reservation.owner)

    def _retire(self, reservation: Incoming) -> None:
        """Stamp a newer generation, so that writes for this reservation are refused."""
        self._generation += 1
        self._stamp(reservation.pages[reservation.num_present :], self._generation)


def _break(reservation: Incoming, writer: Hashable) -> bool:
    """A writer has ended without a commit: a commit is refused from now on. Return whether no writer is left; then the
    reservation has to be freed. One that is being committed is left to that."""
    if reservation.committing:
        return False
    reservation.writers.discard(writer)
    reservation.broken = True
    return not reservation.writers
