"""A master without a mind: it takes what a node says, writes it down, and says what the test wants. Real sockets."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from typing import Any

from waiting import HANG_S

from moonpool.base.errors import AlreadyExists
from moonpool.base.rpc import Call, RpcPeer, RpcServer
from moonpool.store import messages as m

FLOOR = 100
_HEARTBEAT_S = 0.02


class ScriptedMaster:
    """Owned by one event loop. `mounts` are by segment; `done` are answers by order."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.mounts: dict[str, m.MountSegment] = {}
        self.num_mounts = 0
        self.num_beats = 0
        self.done: dict[int, m.OrderResult] = {}
        self.num_calls: dict[str, int] = {}
        self.recounts: list[m.Recount] = []
        self.gone: list[int] = []
        self.inventory: list[m.HeldItem] = []
        self.inventory_parts: list[tuple[int, bool]] = []
        self.unwanted: set[bytes] = set()
        self.relocated: list[tuple[bytes, int, int]] = []
        self.corrupt: list[m.ReportCorrupt] = []
        self.recount_above: int | None = None
        self.refuse_up_to = 0
        self.refuse_mounts = False
        self.cut_next_mount = False  # takes it in and hangs up before it answers
        self._streams: dict[str, asyncio.Queue[list[m.Order]]] = {}  # by node
        self._open_orders: dict[int, m.Order] = {}
        self._server: RpcServer | None = None
        self._changed = asyncio.Condition()

    async def start(self) -> None:
        handlers: dict[type[Call[Any]], Any] = {
            m.MountSegment: self._mount,
            m.UnmountSegment: lambda call, _: self.mounts.pop(call.segment, None) and None,
            m.Heartbeat: self._beat,
            m.Recount: self._recount,
            m.SessionsGone: self._gone,
            m.Inventory: self._inventory,
            m.Relocated: self._relocated,
            m.ReportCorrupt: self._report_corrupt,
            m.Orders: self._stream,
            m.OrdersDone: self._orders_done,
            m.Segments: self._segments,
        }
        self._server = RpcServer(m.SERVICE, {call: self._noted(handle) for call, handle in handlers.items()})
        await self._server.listen(self.address)

    async def close(self) -> None:
        """Idempotent; may be started again, and has forgotten nothing."""
        if self._server is not None:
            await self._server.close()

    def give(self, *orders: m.Order) -> None:
        self._open_orders |= {order.order_id: order for order in orders}
        for node, stream in self._streams.items():
            stream.put_nowait([order for order in orders if node_of(order) == node])

    async def answers(self, *orders: m.Order) -> list[m.OrderResult]:
        await self.until(lambda: all(order.order_id in self.done for order in orders))
        return [self.done[order.order_id] for order in orders]

    async def execute(self, *orders: m.Order) -> list[m.OrderResult]:
        self.give(*orders)
        return await self.answers(*orders)

    async def until(self, holds: Callable[[], object]) -> None:
        """Look again whenever the node has said something."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(HANG_S), self._changed:
                await self._changed.wait_for(lambda: bool(holds()))
        assert holds(), f"not within {HANG_S:g} s"

    def _noted(self, handle: Any) -> Any:
        def answer(call: Call[Any], peer: RpcPeer) -> Any:
            name = type(call).__name__
            self.num_calls[name] = self.num_calls.get(name, 0) + 1
            try:
                return handle(call, peer)
            finally:
                asyncio.get_running_loop().create_task(self._notify())

        return answer

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    def _mount(self, call: m.MountSegment, peer: RpcPeer) -> m.MountReply:
        if self.refuse_mounts:
            raise AlreadyExists("somebody else has the name")
        self.mounts[call.descriptor.name] = call
        self.num_mounts += 1
        if self.cut_next_mount:
            self.cut_next_mount = False
            peer.abort()
        return m.MountReply(epoch=1, heartbeat_s=_HEARTBEAT_S, generation_floor=FLOOR)

    def _beat(self, call: m.Heartbeat, _: RpcPeer) -> m.HeartbeatReply:
        self.num_beats += 1
        mount = self.mounts.get(call.segment)
        known = mount is not None and mount.descriptor.incarnation == call.incarnation
        above = self.recount_above if known else None
        return m.HeartbeatReply(known, 1, above, refuse_up_to=0 if above is None else self.refuse_up_to)

    def _recount(self, call: m.Recount, _: RpcPeer) -> None:
        self.recounts.append(call)
        self.recount_above = None

    def _gone(self, call: m.SessionsGone, _: RpcPeer) -> None:
        self.gone += call.sessions

    def _inventory(self, call: m.Inventory, _: RpcPeer) -> list[bool]:
        self.inventory += call.items
        self.inventory_parts.append((len(call.items), call.last))
        return [item.key not in self.unwanted for item in call.items]

    def _relocated(self, call: m.Relocated, _: RpcPeer) -> list[bool]:
        self.relocated += call.items
        return [key not in self.unwanted for key, _, _ in call.items]

    def _report_corrupt(self, call: m.ReportCorrupt, _: RpcPeer) -> bool:
        self.corrupt.append(call)
        return True

    async def _stream(self, call: m.Orders, _: RpcPeer) -> AsyncGenerator[list[m.Order], None]:
        stream = self._streams[call.node] = asyncio.Queue()
        yield [order for order in self._open_orders.values() if node_of(order) == call.node]
        while True:
            yield await stream.get()

    def _orders_done(self, call: m.OrdersDone, _: RpcPeer) -> None:
        for result in call.results:
            self.done[result.order_id] = result
            self._open_orders.pop(result.order_id, None)

    def _segments(self, call: m.Segments, _: RpcPeer) -> list[m.SegmentInfo]:
        return [
            m.SegmentInfo(each.descriptor, each.node, each.tier, each.registry_address) for each in self.mounts.values()
        ]


def node_of(order: m.Order) -> str:
    """Whose order it is."""
    return (order.target or order.source).segment.partition(".")[0]


def refusal_of(result: m.OrderResult) -> str | None:
    return None if result.refusal is None else result.refusal.code
