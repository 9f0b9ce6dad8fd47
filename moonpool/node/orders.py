"""Receives the master's orders and answers every one of them.

Orders wait in lanes and are executed on threads: in order where a lane has one thread, in batches where a lane allows
more than one order at a time. An order belongs to the connection on which it came: when the connection ends, waiting
orders are forgotten (the master sends them again), and running orders end before a new order begins.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager

from moonpool.base.errors import MoonpoolError, Overloaded, PeerLost, Unavailable
from moonpool.base.rpc import AsyncClient
from moonpool.base.rpc.protocol import as_moonpool_error
from moonpool.store.messages import Order, OrderKind, OrderResult, Orders, OrdersDone, Refusal

_LOG = logging.getLogger(__name__)
_CALL_TIMEOUT_S = 5.0
_RESULTS_PER_CALL = 1000
# An order that waited longer is not begun: the master gives it up soon, and gives its target to another object.
MAX_WAIT_S = 20.0

ExecuteOrders = Callable[[list[Order]], list[OrderResult]]


def refused(order: Order, error: MoonpoolError) -> OrderResult:
    return OrderResult(order.order_id, Refusal(error.code, str(error)))


class OrderLane:
    """A queue of orders that one function executes. `execute` runs on a thread, gets up to `max_orders` orders (of up
    to `max_nbytes`, unless it is a single order) and returns one result per order.
    """

    def __init__(
        self, execute: ExecuteOrders, *, width: int = 1, max_orders: int = 1, max_nbytes: int = 64 * 1024 * 1024
    ) -> None:
        self.width = width
        self.num_holds = 0  # while above 0 no order of this lane is begun
        self._execute = execute
        self._max_orders, self._max_nbytes = max_orders, max_nbytes
        self._waiting: deque[tuple[float, Order]] = deque()

    def add(self, order: Order) -> None:
        self._waiting.append((time.monotonic(), order))

    def clear(self) -> None:
        self._waiting.clear()

    def pop_batch(self) -> list[Order]:
        """Remove and return the next batch."""
        taken: list[Order] = []
        nbytes = 0
        while self._waiting and len(taken) < self._max_orders:
            nbytes += self._waiting[0][1].nbytes
            if taken and nbytes > self._max_nbytes:
                break
            taken.append(self._waiting.popleft()[1])
        return taken

    def pop_expired(self) -> list[Order]:
        """Remove and return the orders that waited too long."""
        late: list[Order] = []
        while self._waiting and self._waiting[0][0] < time.monotonic() - MAX_WAIT_S:
            late.append(self._waiting.popleft()[1])
        return late

    def run(self, orders: list[Order]) -> list[OrderResult]:
        """Execute the orders. Return one result per order, also when `execute` raises."""
        try:
            return self._execute(orders)
        except Exception as error:  # noqa: BLE001 - every order gets an answer, a bug's included
            if not isinstance(error, MoonpoolError):
                _LOG.exception("a bug while orders were executed")
            return [refused(order, as_moonpool_error(error)) for order in orders]


class OrderRunner:
    """Keeps the stream of orders open and the lanes busy. `counters` counts orders by (kind, outcome)."""

    def __init__(self, node: str, lanes: Mapping[OrderKind, OrderLane]) -> None:
        self.counters: Counter[tuple[OrderKind, str]] = Counter()
        self._node = node
        self._lanes = dict(lanes)
        num_threads = sum(lane.width for lane in set(lanes.values()))
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="orders")
        self._running: dict[asyncio.Task[None], OrderLane] = {}
        self._results: list[OrderResult] = []
        self._has_results = asyncio.Event()
        self._num_results = self._num_sent = 0  # sent: the master has them, or does not need them any more
        self._more_sent = asyncio.Event()
        self._streaming: asyncio.Task[None] | None = None
        self._num_pauses = 0
        self._may_run = asyncio.Event()
        self._may_run.set()

    async def run(self, client: AsyncClient) -> None:
        """Receive and execute orders until the connection is lost."""
        while not client.closed.is_set():
            await self._may_run.wait()
            await self._idle()
            self._forget_results()
            stream = self._streaming = asyncio.get_running_loop().create_task(self._stream(client))
            try:
                await asyncio.wait([stream])
            finally:
                stream.cancel()
                await asyncio.gather(stream, return_exceptions=True)
            if not stream.cancelled():  # else it was paused
                stream.result()

    @asynccontextmanager
    async def paused(self) -> AsyncIterator[None]:
        """Execute no order inside the context. The master sends the forgotten orders again afterwards."""
        self._num_pauses += 1
        self._may_run.clear()
        try:
            if self._streaming is not None:
                self._streaming.cancel()
                await asyncio.wait([self._streaming])
            await self._idle()
            yield
        finally:
            self._num_pauses -= 1
            if self._num_pauses == 0:
                self._may_run.set()

    @asynccontextmanager
    async def hold(self, lane: OrderLane) -> AsyncIterator[None]:
        """Execute no order of this lane inside the context, which begins when the master has all earlier results."""
        lane.num_holds += 1
        try:
            while running := [task for task, its in self._running.items() if its is lane]:
                await asyncio.wait(running)
            num_answers = self._num_results
            while self._num_sent < num_answers:
                await self._more_sent.wait()
            yield
        finally:
            lane.num_holds -= 1
            self._start(lane)

    async def close(self) -> None:
        """Wait for running orders. Idempotent."""
        await self._idle()
        self._pool.shutdown(wait=False)

    async def _idle(self) -> None:
        for lane in self._lanes.values():
            lane.clear()
        while self._running:
            await asyncio.wait(self._running)

    def _forget_results(self) -> None:
        """Forget results of orders that the master sends again."""
        self._results.clear()
        self._has_results.clear()
        self._count_sent(self._num_results - self._num_sent)

    def _count_sent(self, count: int) -> None:
        self._num_sent += count
        self._more_sent.set()
        self._more_sent = asyncio.Event()

    async def _stream(self, client: AsyncClient) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._send_results(client))
            async with aclosing(client.stream(Orders(node=self._node))) as batches:
                async for orders in batches:
                    self._enqueue(orders)
            raise PeerLost("the master ended the stream of orders")

    def _enqueue(self, orders: Sequence[Order]) -> None:
        for order in orders:
            self._lanes[order.kind].add(order)
        for lane in dict.fromkeys(self._lanes[order.kind] for order in orders):  # in the order of their first orders
            self._start(lane)

    def _start(self, lane: OrderLane) -> None:
        if lane.num_holds:
            return
        late = lane.pop_expired()
        self._done(late, [refused(order, Overloaded("the node had too much to do")) for order in late])
        while sum(each is lane for each in self._running.values()) < lane.width and (orders := lane.pop_batch()):
            task = asyncio.get_running_loop().create_task(self._execute(lane, orders))
            self._running[task] = lane
            task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._start(self._running.pop(task))

    async def _execute(self, lane: OrderLane, orders: list[Order]) -> None:
        self._done(orders, await asyncio.get_running_loop().run_in_executor(self._pool, lane.run, orders))

    def _done(self, orders: list[Order], results: list[OrderResult]) -> None:
        for order, result in zip(orders, results, strict=True):
            self.counters[order.kind, "done" if result.refusal is None else result.refusal.code] += 1
        if results:
            self._results += results
            self._num_results += len(results)
            self._has_results.set()

    async def _send_results(self, client: AsyncClient) -> None:
        """Send results. Those that arrive during a call go with the next call: few calls, and no delay."""
        while True:
            await self._has_results.wait()
            some, self._results = self._results[:_RESULTS_PER_CALL], self._results[_RESULTS_PER_CALL:]
            if not self._results:
                self._has_results.clear()
            try:
                await client.call(OrdersDone(results=some), timeout_s=_CALL_TIMEOUT_S)
            except Unavailable:
                raise
            except MoonpoolError as error:
                _LOG.warning("the master refused %d results: %s", len(some), error)
            self._count_sent(len(some))
