"""The interface every transport implements (tests/conformance/test_transports.py holds them to it).

Errors, the same for all:
    InvalidInput        outside the segment, or a buffer that cannot be used; checked on both sides
    NotFound            the owner lives and does not serve that name, or serves another incarnation of it
    StaleGeneration     a write came too late: the space belongs to a newer generation
    PeerLost            the owner is gone; waiting callers learn it at once
    DeadlineExceeded    the owner did not answer in time
After PeerLost or DeadlineExceeded the next call connects again, if the owner lives. A read that failed may have
filled part of the buffers, a write that failed part of the space.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Hashable, Iterable, Sequence
from typing import ClassVar, TypeVar

from moonpool.base.clock import Deadline
from moonpool.base.descriptor import SegmentDescriptor
from moonpool.base.errors import AlreadyExists, InvalidInput, MoonpoolError, NotFound, StaleGeneration, Unauthorized
from moonpool.transfer.memory.buffers import Buffer, as_bytes_view, as_bytes_views
from moonpool.transfer.memory.segment import Segment

T = TypeVar("T")


class RemoteSegment(ABC):
    """Another process's segment, opened for one incarnation. Safe to use from several threads at once."""

    transport: ClassVar[str]
    # Whether a byte that was read has never been, and will never be, another one at that offset: what a read returns is
    # of one piece then, and need not be looked at again. A read of bytes that are gone, or went meanwhile, raises.
    written_once: ClassVar[bool] = False
    # Whether read_expecting() can be used: the owner itself checks the generation of what it sends.
    checks_generation: bool = False
    # Whether write_each() has all of its items under way at once; elsewhere it is one write_from() after the other.
    pipelines_writes: ClassVar[bool] = False
    # Whether buffers may be DeviceSpans; elsewhere they are InvalidInput, and the caller copies to main memory first.
    takes_gpu_memory: ClassVar[bool] = False
    run_nbytes: ClassVar[int] = 0  # worth moving with one call, where a call costs much; 0: as the engine is configured
    num_paths: int = 1  # that lead to the owner and are used together
    nbytes: int

    @property
    def peer(self) -> Hashable:
        """What a transfer may have to wait for: requests with an equal value share a number of threads. By default all
        segments of one transport.
        """
        return self.transport

    def on_path(self, path: int | None, act: Callable[[RemoteSegment, float], T], timeout_s: float) -> T:
        """Return what `act` returns for the handle of this path. A segment with one path has one handle."""
        return act(self, timeout_s)

    @abstractmethod
    def read_into(self, offset: int, buffers: Sequence[Buffer], *, timeout_s: float) -> None:
        """Fill the buffers, one after the other, with the bytes from `offset` on. They are the caller's again
        when this returns or raises.
        """

    @abstractmethod
    def write_from(self, offset: int, buffers: Sequence[Buffer], *, generation: int, timeout_s: float) -> None:
        """Puts the buffers' bytes, one after the other, at `offset`. When this returns the owner's memory holds
        them. `generation` is checked and stamped where the segment is fenced, and ignored where it is not.
        """

    def write_views(self, offset: int, views: list[memoryview], generation: int, timeout_s: float) -> None:
        """write_from() of flat views of bytes, none of them empty: nothing is looked at to find out what they are."""
        self.write_from(offset, views, generation=generation, timeout_s=timeout_s)

    def read_many(self, items: Sequence[tuple[int, Buffer]], *, timeout_s: float) -> None:
        """read_into() for each (offset, buffer), under one deadline and in no promised order: the fast way to move
        many small pieces. InvalidInput, with nothing moved, when an item cannot be used; else the first error there
        was, and any of the other items may have been moved.
        """
        deadline = Deadline(timeout_s)
        for offset, view in place_items(items, self.nbytes, writable=True):
            self.read_into(offset, [view], timeout_s=deadline.remaining_s())

    def write_many(self, items: Sequence[tuple[int, Buffer]], *, generation: int, timeout_s: float) -> None:
        """write_from() for each (offset, buffer), as read_many(). Items must not overlap."""
        deadline = Deadline(timeout_s)
        for offset, view in place_items(items, self.nbytes, writable=False):
            self.write_from(offset, [view], generation=generation, timeout_s=deadline.remaining_s())

    def read_in_turn(
        self, batches: Iterable[Sequence[tuple[int, Buffer]]], *, timeout_s: float
    ) -> Generator[int, None, None]:
        """read_many() of each batch, which has `timeout_s` to itself; gives its number, from 0 on, when it is here. The
        owner's memory is read in this order. The next batch may be taken, and asked for, before the last is here: the
        caller works on one while the other comes. Raises the first error; then, and once closed, no buffer is in use.
        """
        for number, items in enumerate(batches):
            self.read_many(items, timeout_s=timeout_s)
            yield number

    def read_expecting(
        self, batches: Iterable[Sequence[tuple[int, Buffer, int]]], *, timeout_s: float
    ) -> Generator[set[int], None, None]:
        """As read_in_turn(), of items (offset, buffer, generation); for remotes with `checks_generation`.

        Gives, for each batch that is here, the positions of stale items: their space does not carry the generation
        expected, or lost it before the last byte was taken, so that what lies in their buffers must not be used.
        """
        raise InvalidInput(f"a segment reached by {self.transport} is read without generations")

    def read_unchanged(self, offset: int, buffers: Sequence[Buffer], *, generation: int, timeout_s: float) -> None:
        """As read_into(), of space that carries `generation` (1 or more); for remotes with `checks_generation`.
        StaleGeneration when it does not, or lost it before the last byte was taken: the buffers must not be used then.
        """
        if generation < 1:
            raise InvalidInput(f"a read expects generation 1 or greater, not {generation}")
        items: list[tuple[int, Buffer, int]] = []
        at = offset
        for view in as_bytes_views(buffers, writable=True):
            items.append((at, view, generation))
            at += view.nbytes
        for stale in self.read_expecting([items], timeout_s=timeout_s):
            if stale:
                raise StaleGeneration(
                    f"space at offset {offset} does not carry generation {generation}, or lost it while it was read"
                )

    def write_each(
        self, items: Sequence[tuple[int, Sequence[Buffer], int]], *, timeout_s: float
    ) -> list[MoonpoolError | None]:
        """write_from() for each (offset, buffers, generation), under one deadline; for each None, or how the owner
        refused it. Raises when the owner is out of reach: then any of them may have been written. No overlaps.
        """
        deadline = Deadline(timeout_s)
        outcomes: list[MoonpoolError | None] = []
        for offset, buffers, generation in items:
            try:
                self.write_from(offset, buffers, generation=generation, timeout_s=deadline.remaining_s())
                outcomes.append(None)
            except (NotFound, StaleGeneration, Unauthorized) as refusal:
                outcomes.append(refusal)
        return outcomes

    def notify(self, message: bytes, *, timeout_s: float) -> None:
        """Leaves a message with the segment's owner, who has it when this returns. Writes that ended before are in
        place by the time the owner reads it. Overloaded when the owner takes no messages, InvalidInput when there is
        no owner to take them (a file) or it is over 32 KiB.
        """
        raise InvalidInput(f"a segment reached by {self.transport} cannot be sent messages")

    def view(self, offset: int, nbytes: int) -> memoryview | None:
        """The bytes themselves, read-only and without a copy; None where the transport cannot. The view stays
        readable after close(), but nothing stops the owner from changing what it shows.
        """
        check_bounds(offset, nbytes, self.nbytes)
        return None

    @abstractmethod
    def close(self) -> None:
        """Idempotent; a later call raises PeerLost."""


class Transport(ABC):
    """Serves local segments and opens remote ones. `scheme` is the first word of its endpoints."""

    scheme: ClassVar[str]

    @abstractmethod
    def can_serve(self, segment: Segment) -> bool:
        """Whether this kind of memory can be offered here at all."""

    @abstractmethod
    def serve(self, segment: Segment) -> str:
        """Offers the segment and returns the endpoint to publish. Borrows it until unserve() or close().
        AlreadyExists when the name is taken.
        """

    @abstractmethod
    def unserve(self, name: str) -> None:
        """Withdraws a segment; unknown names are ignored."""

    @abstractmethod
    def usable(self, descriptor: SegmentDescriptor, endpoint: str) -> bool:
        """Return whether open() may work from here. Does no I/O."""

    @abstractmethod
    def open(self, descriptor: SegmentDescriptor, endpoint: str, *, timeout_s: float) -> RemoteSegment:
        """Connects, and makes sure that the owner serves this very incarnation."""

    @abstractmethod
    def close(self) -> None:
        """Idempotent. Ends all threads and sockets; callers still waiting get PeerLost."""


class ServedSegments:
    """What an owner offers, by name; its transports may share one. Thread-safe."""

    def __init__(self) -> None:
        self._segments: dict[str, Segment] = {}
        self._lock = threading.Lock()

    def add(self, segment: Segment) -> None:
        """AlreadyExists when another segment has that name."""
        with self._lock:
            if self._segments.setdefault(segment.name, segment) is not segment:
                raise AlreadyExists(f"segment {segment.name!r} is already served")

    def remove(self, name: str) -> None:
        with self._lock:
            self._segments.pop(name, None)

    def find(self, name: str, incarnation: int) -> Segment:
        """NotFound when it is not served, or not in this incarnation."""
        segment = self._segments.get(name)
        if segment is None:
            raise NotFound(f"no segment {name!r} is served here")
        if segment.incarnation != incarnation:
            raise NotFound(f"segment {name!r} is of incarnation {segment.incarnation} now, {incarnation} is gone")
        return segment

    def clear(self) -> None:
        with self._lock:
            self._segments.clear()


def check_bounds(offset: int, nbytes: int, segment_nbytes: int) -> None:
    """InvalidInput unless offset .. offset + nbytes lies inside the segment."""
    if offset < 0 or nbytes < 0 or offset + nbytes > segment_nbytes:
        raise InvalidInput(f"bytes {offset} to {offset + nbytes} are outside the segment of {segment_nbytes} bytes")


def place_items(
    items: Sequence[tuple[int, Buffer]], segment_nbytes: int, writable: bool
) -> list[tuple[int, memoryview]]:
    """Each item's offset and memory; InvalidInput unless all of them are usable and inside the segment."""
    placed: list[tuple[int, memoryview]] = []
    for offset, buffer in items:
        view = as_bytes_view(buffer, writable)
        if offset < 0 or offset + view.nbytes > segment_nbytes:
            check_bounds(offset, view.nbytes, segment_nbytes)
        placed.append((offset, view))
    return placed


def rest_of(endpoint: str, scheme: str) -> str:
    """What follows "scheme:"; InvalidInput for another scheme."""
    found, _, rest = endpoint.partition(":")
    if found != scheme or not rest:
        raise InvalidInput(f"{endpoint!r} is not a {scheme} endpoint")
    return rest
