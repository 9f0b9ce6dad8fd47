"""COPY: brings an object from wherever it lies into this node's memory, as a replica with a generation of its own.

The bytes go straight to their place and are checked there. Until then the header there is the source's, whose
generation is not that of the space: nobody takes it for an object. The fence is asked before the first byte and after
the last one.
"""

from __future__ import annotations

import msgspec

from moonpool.base.clock import Deadline
from moonpool.base.errors import (
    Corrupt,
    DeadlineExceeded,
    InvalidInput,
    MoonpoolError,
    PeerLost,
    StaleGeneration,
    Unavailable,
)
from moonpool.node.orders import refused
from moonpool.node.replicas import OpenSource, Readable, check_here
from moonpool.node.ssd.checks import check_header, check_object
from moonpool.store.messages import Order, OrderResult
from moonpool.transfer.memory.segment import Segment

_LEAST_TIMEOUT_S = 5.0
_LEAST_NBYTES_PER_S = 100e6
_MOST_TIMEOUT_S = 20.0  # with the time it may have waited: less than the master waits for an answer
_PREFIX_NBYTES = 64  # enough of a header to see whose it is: magic to identity


class Copier:
    """Borrows the segment; `open_source` finds the memory or disk of a placement. Used by several threads."""

    def __init__(self, segment: Segment, open_source: OpenSource) -> None:
        self._segment = segment
        self._open_source = open_source

    def carry_out(self, orders: list[Order]) -> list[OrderResult]:
        return [self._answer(order) for order in orders]

    def _answer(self, order: Order) -> OrderResult:
        try:
            self.copy(order)
        except (PeerLost, DeadlineExceeded) as error:
            # That is what the master calls a node that may still be writing. This one has stopped.
            return refused(order, Unavailable(str(error)))
        except MoonpoolError as error:
            return refused(order, error)
        return OrderResult(order.order_id)

    def copy(self, order: Order) -> None:
        """Corrupt: the source is damaged. StaleGeneration: source or target belong to something else by now."""
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
    """The whole object, checked where it lies now; and the source was that object all the time."""
    deadline = Deadline(min(_MOST_TIMEOUT_S, _LEAST_TIMEOUT_S + order.nbytes / _LEAST_NBYTES_PER_S))
    source.read_into(order.source.offset, [place], timeout_s=deadline.remaining_s())
    prefix, again = bytes(place[:_PREFIX_NBYTES]), bytearray(_PREFIX_NBYTES)
    failure: Corrupt | None = None
    try:
        check_object([place], order.key, order.source.generation, None)
    except Corrupt as error:
        failure = error
    source.read_into(order.source.offset, [again], timeout_s=deadline.remaining_s())
    if again != prefix:
        raise StaleGeneration(f"the space of {order.key.hex()[:16]} was given to another object meanwhile")
    if failure is not None:
        raise failure
