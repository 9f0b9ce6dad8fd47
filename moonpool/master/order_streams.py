"""Orders on their way to nodes: one stream per node that listens, woken when there is something to do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable

from moonpool.master.state.orders import OrderBook
from moonpool.store.messages import Order


class OrderStreams:
    """All methods belong to the event loop's thread."""

    def __init__(self) -> None:
        self._listening: dict[str, asyncio.Event] = {}

    def wake(self, nodes: Iterable[str]) -> None:
        for node in nodes:
            event = self._listening.get(node)
            if event is not None:
                event.set()

    async def serve(self, node: str, book: OrderBook) -> AsyncGenerator[list[Order], None]:
        """Every open order first, then new ones. A node that listens anew ends its earlier stream's turn."""
        event = self._listening[node] = asyncio.Event()
        try:
            orders = book.take_all(node)
            while self._listening.get(node) is event:
                if orders:
                    yield orders
                await event.wait()
                event.clear()
                orders = book.take(node)
        finally:
            if self._listening.get(node) is event:
                del self._listening[node]
