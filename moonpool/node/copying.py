"""COPY orders: copy an object from any replica into this node's memory, as a replica with its own generation.

The bytes are read directly to their final place and are checked there. Until then the header at that place is the
source's, whose generation differs from that of the space, so no reader takes it for an object. The fence is checked
before the first byte and after the last one. A source is this node's memory, its disk, or another node; the transfer
engine reads from other nodes, with its lowest priority.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from moonpool.base.clock import Deadline
from moonpool.base.errors import (
    Corrupt,
    DeadlineExceeded,
    InvalidInput,
    MoonpoolError,
    NotFound,
    PeerLost,
    StaleGeneration,
    Unavailable,
)
from moonpool.node.orders import refused
from moonpool.node.ssd.reading import check_header, check_object
from moonpool.store.messages import Order, OrderResult, Placement
from moonpool.transfer import Priority, RemoteSegment, TransferEngine, TransferOp, TransferRequest
from moonpool.transfer.memory.buffers import Buffer, as_bytes_views, copy_bytes
from moonpool.transfer.memory.segment import Segment
from moonpool.transfer.transports.base import check_bounds

_LEAST_TIMEOUT_S = 5.0
_LEAST_NBYTES_PER_S = 100e6
_MOST_TIMEOUT_S = 20.0  # with the time an order may have waited: less than the master waits for its result
_PREFIX_NBYTES = 64  # enough of a header to identify the object: magic to identity


class Readable(Protocol):
    """This node's memory, its disk, or another node's segment."""

    def read_into(self, offset: int, buffers: Sequence[Buffer], *, timeout_s: float) -> None: ...


class RemoteSource:
    """Another node's segment as a Readable. `checks_generation`: its owner checks the generation of what it sends."""

    def __init__(self, remote: RemoteSegment, engine: TransferEngine) -> None:
        self._remote, self._engine = remote, engine
        self.checks_generation = remote.checks_generation

    def read_into(
        self, offset: int, buffers: Sequence[Buffer], *, timeout_s: float, generation: int | None = None
    ) -> None:
        """Raise StaleGeneration unless the space carried `generation`, if given, until the last byte was taken."""
        request = TransferRequest(TransferOp.READ, self._remote, offset, buffers, expected_generation=generation)
        self._engine.submit([request], timeout_s=timeout_s, priority=Priority.REPLICATION).wait()


OpenSource = Callable[[Placement], Readable]


class OwnMemory:
    """This node's memory as a Readable."""

    def __init__(self, segment: Segment) -> None:
        self._segment = segment

    def read_into(self, offset: int, buffers: Sequence[Buffer], *, timeout_s: float) -> None:
        memory = self._segment.memory
        for view in as_bytes_views(buffers, writable=True):
            check_bounds(offset, view.nbytes, memory.nbytes)
            copy_bytes(view, memory[offset : offset + view.nbytes])
            offset += view.nbytes


def check_here(placement: Placement, segment: Segment, nbytes: int) -> None:
    """Raise NotFound unless the placement is in this segment and of its current incarnation."""
    if placement.segment != segment.name or placement.incarnation != segment.incarnation:
        raise NotFound(f"segment {placement.segment!r} was mounted anew or is not here")
    check_bounds(placement.offset, nbytes, segment.nbytes)


class Copier:
    """Borrows the segment; `open_source` finds the memory or disk of a placement. Used by several threads."""

    def __init__(self, segment: Segment, open_source: OpenSource) -> None:
        self._segment = segment
        self._open_source = open_source

    def execute(self, orders: list[Order]) -> list[OrderResult]:
        return [self._answer(order) for order in orders]

    def _answer(self, order: Order) -> OrderResult:
        try:
            self.copy(order)
        except (PeerLost, DeadlineExceeded) as error:
            # The master takes these errors for a node that may still be writing. This node has stopped.
            return refused(order, Unavailable(str(error)))
        except MoonpoolError as error:
            return refused(order, error)
        return OrderResult(order.order_id)

    def copy(self, order: Order) -> None:
        """Copy one object. Corrupt when the source is damaged, StaleGeneration when the space of source or target was
        given to another object.
        """
        target = order.target
        if target is None:
            raise InvalidInput("a copy needs a target")
        check_here(target, self._segment, order.nbytes)
        source = self._open_source(order.source)
        memory, fence = self._segment.borrow()
        assert fence is not None, "the pool's memory is fenced"
        place = memory[target.offset : target.offset + order.nbytes]
        fence.admit(target.offset, order.nbytes, target.generation)
        _read_checked(order, source, place)
        header = check_header([place], order.key, order.source.generation)
        fence.confirm(target.offset, order.nbytes, target.generation)
        place[: header.nbytes] = msgspec.structs.replace(header, generation=target.generation).pack()
        fence.confirm(target.offset, order.nbytes, target.generation)


def _read_checked(order: Order, source: Readable, place: memoryview) -> None:
    """Read the whole object to `place` and check it there, and that the source held that object all the time."""
    deadline = Deadline(min(_MOST_TIMEOUT_S, _LEAST_TIMEOUT_S + order.nbytes / _LEAST_NBYTES_PER_S))
    generation = order.source.generation
    if isinstance(source, RemoteSource) and source.checks_generation:
        source.read_into(order.source.offset, [place], timeout_s=deadline.remaining_s(), generation=generation)
        check_object([place], order.key, generation, None)
        return
    source.read_into(order.source.offset, [place], timeout_s=deadline.remaining_s())
    prefix, again = bytes(place[:_PREFIX_NBYTES]), bytearray(_PREFIX_NBYTES)
    failure: Corrupt | None = None
    try:
        check_object([place], order.key, generation, None)
    except Corrupt as error:
        failure = error
    source.read_into(order.source.offset, [again], timeout_s=deadline.remaining_s())
    if again != prefix:
        raise StaleGeneration(f"the space of {order.key.hex()[:16]} was given to another object meanwhile")
    if failure is not None:
        raise failure
