"""VOID orders: a replica in this node's memory has left its object. Readers that remember it must not take it for one.

The node sets the void mark of its header (base/object_header.py), unless the space belongs to another object already:
then nothing is left to void. Readers that have asked the master do not look at the mark: they read on while their lease
lasts. Should this thread stand still between the check and the write until the space is another object's, the mark is
not that object's; if it falls into its bytes, their checksum fails.
"""

from __future__ import annotations

from moonpool.base.errors import MoonpoolError, NotFound, StaleGeneration
from moonpool.base.object_header import ALIGN_NBYTES, void
from moonpool.node.copying import check_here
from moonpool.node.orders import refused
from moonpool.store.messages import Order, OrderResult
from moonpool.transfer.memory.segment import Segment


class Voider:
    """Borrows the segment."""

    def __init__(self, segment: Segment) -> None:
        self._segment = segment

    def execute(self, orders: list[Order]) -> list[OrderResult]:
        """Return one result per order. Done also means: the replica is not there any more."""
        return [self._answer(order) for order in orders]

    def _answer(self, order: Order) -> OrderResult:
        try:
            self._void(order)
        except (NotFound, StaleGeneration):  # the memory was mounted anew, or the space belongs to another object
            pass
        except MoonpoolError as error:
            return refused(order, error)
        return OrderResult(order.order_id)

    def _void(self, order: Order) -> None:
        place = order.source
        check_here(place, self._segment, order.nbytes)
        memory, fence = self._segment.borrow()
        assert fence is not None, "the pool's memory is fenced"
        fence.check(place.offset, ALIGN_NBYTES, place.generation)
        void(memory, place.offset, place.generation)
