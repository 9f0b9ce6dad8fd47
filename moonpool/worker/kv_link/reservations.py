"""The decode side of hand-offs: which pages are reserved for which request, and when they may be reused. No I/O.

A reservation has a reader and writers. The reader is the request's stream; it may leave at any time. A writer is a
prefill worker that has opened the reservation, one or, of a pipeline, each stage. Until it commits, aborts, says that
it has written all, or disconnects, its bytes may still arrive, so the pages stay reserved even when the reader has
left. After the last of them the pages get a newer generation, which refuses late writes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

from moonpool.base.errors import AlreadyExists, StaleGeneration
from moonpool.engine.blocks import PageManager

Stamp = Callable[[Sequence[int], int], None]
"""Stamps pages with a generation (in the segment's fence)."""


@dataclass(slots=True)
class Incoming:
    request_id: str
    epoch: int
    generation: int
    pages: list[int]  # one per block of the prompt, those that are present already first
    num_present: int
    writers: set[Hashable] = field(default_factory=set)
    broken: bool = False  # a writer ended without a commit; the others are waited for
    reader_left: bool = False
    committing: bool = False

    @property
    def owner(self) -> str:
        """Return the owner name of its references in the page manager."""
        return f"handoff:{self.request_id}:{self.epoch}"


class Reservations:
    """All open hand-offs of one decode worker. Every call is from the thread that owns the page manager."""

    def __init__(self, pages: PageManager, stamp: Stamp) -> None:
        self._pages = pages
        self._stamp = stamp
        self._generation = 0
        self._open: dict[str, Incoming] = {}
        self._orphans: list[Incoming] = []  # replaced or left by their reader, and still open for a writer

    @property
    def num_pages(self) -> int:
        return sum(len(r.pages) for r in [*self._open.values(), *self._orphans])

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
        self._stamp(made.pages[made.num_present :], made.generation)
        self._open[request_id] = made
        return made

    def open(self, request_id: str, epoch: int, generation: int, writer: Hashable) -> None:
        """Record a writer: from now on its bytes may arrive."""
        self._find(request_id, epoch, generation).writers.add(writer)

    def end_writes(self, request_id: str, epoch: int, generation: int, writer: Hashable) -> None:
        """This writer has written its part; another one commits."""
        self._find(request_id, epoch, generation).writers.discard(writer)

    def begin_commit(self, request_id: str, epoch: int, generation: int) -> Incoming:
        """All is written. Return the reservation; the caller verifies the pages, then calls `adopt` or `void`."""
        found = self._find(request_id, epoch, generation)
        if len(found.writers) > 1:
            raise StaleGeneration(f"the pages of request {request_id} are still being written by another worker")
        found.committing = True
        return found

    def adopt(self, reservation: Incoming) -> list[int] | None:
        """Return the verified pages, whose references are the caller's now; None when the reader has left meanwhile."""
        reservation.writers, reservation.committing = set(), False
        if reservation.reader_left:
            self._release(reservation)
            return None
        del self._open[reservation.request_id]
        self._pages.detach(reservation.owner)
        self._retire(reservation)
        return reservation.pages

    def void(self, reservation: Incoming) -> None:
        """Free the pages, because wrong bytes were written."""
        self._release(reservation)

    def leave(self, request_id: str, epoch: int) -> None:
        """The reader leaves; idempotent. Pages that a writer has opened stay reserved until the writer ends."""
        found = self._open.get(request_id)
        if found is None or found.epoch != epoch:
            return
        found.reader_left = True
        if not found.writers and not found.committing:
            self._release(found)
        else:
            del self._open[request_id]
            self._orphans.append(found)

    def abort(self, request_id: str, epoch: int, generation: int, writer: Hashable) -> None:
        """The writer ends without a commit; idempotent."""
        for found in [*self._open.values(), *self._orphans]:
            if (found.request_id, found.epoch, found.generation) == (request_id, epoch, generation):
                self._break(found, writer)

    def writer_gone(self, writer: Hashable) -> None:
        """The writer's connection has ended, and with it all that it had opened."""
        for found in [*self._open.values(), *self._orphans]:
            if writer in found.writers:
                self._break(found, writer)

    def _break(self, reservation: Incoming, writer: Hashable) -> None:
        """A writer has ended without a commit: a commit is refused from now on, and the last writer frees the pages."""
        if reservation.committing:
            return
        reservation.writers.discard(writer)
        reservation.broken = True
        if not reservation.writers:
            self._release(reservation)

    def newest_without_writer(self) -> Incoming | None:
        """Return the newest reservation that no writer has opened; None if all have one."""
        idle = [found for found in self._open.values() if not found.writers and not found.committing]
        return max(idle, key=lambda found: found.generation, default=None)

    def _find(self, request_id: str, epoch: int, generation: int) -> Incoming:
        found = self._open.get(request_id)
        if found is None or (found.epoch, found.generation) != (epoch, generation) or found.committing or found.broken:
            raise StaleGeneration(f"the pages of request {request_id} are no longer reserved for this attempt")
        return found

    def _release(self, reservation: Incoming) -> None:
        if self._open.get(reservation.request_id) is reservation:
            del self._open[reservation.request_id]
        elif reservation in self._orphans:
            self._orphans.remove(reservation)
        else:
            return
        self._retire(reservation)
        self._pages.release(reservation.owner)

    def _retire(self, reservation: Incoming) -> None:
        """Stamp a newer generation, so that writes for this reservation are refused."""
        self._generation += 1
        self._stamp(reservation.pages[reservation.num_present :], self._generation)
