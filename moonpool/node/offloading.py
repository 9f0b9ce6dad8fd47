"""OFFLOAD and DROP orders: write objects from this node's memory to its log, and remove records there, in order.

All objects of a batch are checked, written by large writes and made durable by one sync: an order that is answered as
done survives a power failure. The objects of the next write are checked on another thread during the current write, but
no further ahead: an object checked long before it is written has left the processor's cache. The master may give an
object's space to another object at any time, so the fence is checked again after the bytes have been written.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import groupby
from typing import TypeAlias

import msgspec

from moonpool.base.errors import Corrupt, MoonpoolError, NotFound, Unavailable
from moonpool.base.log import RateLimitedLog
from moonpool.node.copying import check_here
from moonpool.node.orders import refused
from moonpool.node.ssd import LogItem, LogLocation, SsdConfig
from moonpool.node.ssd.reading import check_header, check_object
from moonpool.node.ssd_tier import NodeSsd, offset_of
from moonpool.store.messages import Order, OrderKind, OrderResult
from moonpool.transfer.memory.segment import Segment

_LOG = logging.getLogger(__name__)
_FIRST_WRITE_NBYTES = 4 * 1024 * 1024  # soon checked: the disk waits for that; the next ones are larger
_WRITE_NBYTES = SsdConfig.batch_nbytes - 64 * 1024  # of objects: the log's framing goes with them

_Prepared: TypeAlias = LogItem | LogLocation | MoonpoolError


class LogThread:
    """Executes orders that write the log, on one thread. Borrows the memory; `ssd` returns the log, or None while the
    disk is not available.
    """

    def __init__(self, memory: Segment, ssd: Callable[[], NodeSsd | None]) -> None:
        self._memory = memory
        self._ssd = ssd
        self._rare_log = RateLimitedLog(_LOG)
        self._checker = ThreadPoolExecutor(1, thread_name_prefix="check")

    def close(self) -> None:
        """Idempotent."""
        self._checker.shutdown()

    def execute(self, orders: list[Order]) -> list[OrderResult]:
        ssd = self._ssd()
        if ssd is None:
            return [refused(order, Unavailable("this node's disk is not in use")) for order in orders]
        results: list[OrderResult] = []
        for kind, some in groupby(orders, key=lambda order: order.kind):
            execute = self._offload if kind is OrderKind.OFFLOAD else self._drop
            results += execute(ssd, list(some))
        return results

    def _drop(self, ssd: NodeSsd, orders: Sequence[Order]) -> list[OrderResult]:
        """Remove records. If a crash loses the tombstone, the record comes back and the next inventory drops it."""
        ssd.log.remove([(order.key, order.source.generation) for order in orders])
        return [OrderResult(order.order_id) for order in orders]

    def _offload(self, ssd: NodeSsd, orders: Sequence[Order]) -> list[OrderResult]:
        found: list[LogLocation | MoonpoolError] = []
        prepare = partial(self._prepare, ssd)
        batches = list(_batches(orders))
        prepared = self._checker.map(prepare, batches[0])
        for following in (*batches[1:], ()):
            checked = list(prepared)
            prepared = self._checker.map(prepare, following)
            found += self._write(ssd, checked)
        found = [self._recheck(ssd, order, each) for order, each in zip(orders, found, strict=True)]
        try:
            ssd.log.sync()
        except MoonpoolError as error:
            done = [order for order, each in zip(orders, found, strict=True) if isinstance(each, LogLocation)]
            ssd.log.remove([(order.key, _record_generation(order)) for order in done])
            found = [each if isinstance(each, MoonpoolError) else error for each in found]
        return [self._answer(order, each) for order, each in zip(orders, found, strict=True)]

    def _write(self, ssd: NodeSsd, prepared: Sequence[_Prepared]) -> list[LogLocation | MoonpoolError]:
        written = iter(ssd.log.append_many([each for each in prepared if isinstance(each, LogItem)]))
        return [next(written) if isinstance(each, LogItem) else each for each in prepared]

    def _prepare(self, ssd: NodeSsd, order: Order) -> _Prepared:
        """Check the object in memory. Return what to write, or its location if the log has it already, or the error."""
        try:
            check_here(order.source, self._memory, order.nbytes)
            if order.target is not None and order.target.incarnation != ssd.segment.incarnation:
                raise NotFound("the disk was mounted again")
            generation = _record_generation(order)
            there = ssd.log.find(order.key, generation)
            if there is not None:
                return there
            view = self._memory.memory[order.source.offset : order.source.offset + order.nbytes]
            self._check(order, view)
            parts = [view]
            if generation != order.source.generation:
                header = check_header([view], order.key, order.source.generation)
                renamed = msgspec.structs.replace(header, generation=generation).pack()
                parts = [memoryview(renamed), view[header.nbytes :]]
        except MoonpoolError as error:
            return error
        return LogItem(order.key, generation, parts)

    def _check(self, order: Order, view: memoryview) -> None:
        try:
            check_object([view], order.key, order.source.generation, None)
        except Corrupt:
            self._check_fence(order)  # StaleGeneration instead, if the space was given to another object
            raise

    def _recheck(self, ssd: NodeSsd, order: Order, found: LogLocation | MoonpoolError) -> LogLocation | MoonpoolError:
        """Return `found`, or StaleGeneration when the space was given to another object during the write."""
        if isinstance(found, MoonpoolError):
            return found
        try:
            self._check_fence(order)
        except MoonpoolError as error:
            ssd.log.remove([(order.key, _record_generation(order))])
            return error
        return found

    def _check_fence(self, order: Order) -> None:
        """Raise StaleGeneration when a newer generation has begun to write there."""
        fence = self._memory.fence
        assert fence is not None, "the pool's memory is fenced"
        fence.admit(order.source.offset, order.nbytes, order.source.generation)

    def _answer(self, order: Order, found: LogLocation | MoonpoolError) -> OrderResult:
        if isinstance(found, MoonpoolError):
            if not isinstance(found, NotFound):  # an order of an earlier mount
                self._rare_log.warning("objects are not offloaded: %s", found)
            return refused(order, found)
        return OrderResult(order.order_id, offset=offset_of(found))


def _record_generation(order: Order) -> int:
    """Return the generation of the record that an OFFLOAD writes. The master gives it another one than the object has
    in memory when the log knows an older object of the key under a higher generation.
    """
    return order.source.generation if order.target is None else order.target.generation


def _batches(orders: Sequence[Order]) -> Iterator[Sequence[Order]]:
    """Yield the orders whose objects are written by one system call. The first batches are smaller: the disk waits for
    their checks.
    """
    most_nbytes, start, nbytes = _FIRST_WRITE_NBYTES, 0, 0
    for position, order in enumerate(orders):
        if position > start and nbytes + order.nbytes > most_nbytes:
            yield orders[start:position]
            start, nbytes = position, 0
            most_nbytes = min(2 * most_nbytes, _WRITE_NBYTES)
        nbytes += order.nbytes
    if orders:
        yield orders[start:]
