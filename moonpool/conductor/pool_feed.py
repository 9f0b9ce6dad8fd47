"""Keeps the pool's part of the prefix index true to the store: snapshot, then changes, anew after every break.

While the store cannot be reached the pool counts as empty; requests still run, they reuse less.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

from moonpool.base.errors import MoonpoolError, ProtocolError
from moonpool.base.rpc import AsyncClient
from moonpool.conductor.placement.prefix_index import PrefixIndex
from moonpool.store.messages import SERVICE, EventBatch, Segments, Subscribe, Tier, Why

_LOG = logging.getLogger(__name__)
_MIN_RETRY_S = 0.05
_MAX_RETRY_S = 2.0
_ASK_S = 1.0
_COUNT_EVERY_S = 5.0


class PoolFeed:
    """Run it as a task; cancel it to stop. `connected` is true from a snapshot until the stream breaks.

    `on_nodes` hears how many nodes hold blocks in memory, at the beginning and every few seconds.
    """

    def __init__(
        self,
        store_address: str,
        index: PrefixIndex,
        on_nodes: Callable[[int], None] = lambda num_nodes: None,
        *,
        name: str = "conductor",
    ) -> None:
        self.connected = False
        self._address = store_address
        self._index = index
        self._on_nodes = on_nodes
        self._name = name
        self._client: AsyncClient | None = None

    async def run(self) -> None:
        """Never returns; errors of the store lead to another attempt after a growing pause."""
        retry_s = _MIN_RETRY_S
        while True:
            try:
                await self._follow()
            except MoonpoolError as error:
                _LOG.log(logging.WARNING if self.connected else logging.DEBUG, "the pool's events: %s", error)
            retry_s = _MIN_RETRY_S if self.connected else min(2 * retry_s, _MAX_RETRY_S)
            self._lost()
            await asyncio.sleep(retry_s)

    async def why(self, key: bytes) -> str | None:
        """What the pool says became of that object; None when it cannot be asked."""
        if self._client is None:
            return None
        try:
            return await self._client.call(Why(key=key), timeout_s=_ASK_S)
        except MoonpoolError as error:
            _LOG.debug("the pool was asked about a key: %s", error)
            return None

    async def _follow(self) -> None:
        client = self._client = await AsyncClient.connect(self._address, SERVICE, name=self._name)
        counting = asyncio.create_task(self._count_nodes(client), name="pool nodes")
        try:
            async with contextlib.aclosing(client.stream(Subscribe())) as batches:  # type: ignore[type-var]
                last: int | None = None
                async for batch in batches:
                    self._apply(batch, last)
                    last = batch.sequence
        finally:
            self._client = None
            counting.cancel()
            client.close()

    async def _count_nodes(self, client: AsyncClient) -> None:
        """Until cancelled. A store that does not answer changes nothing."""
        while True:
            try:
                segments = await client.call(Segments(), timeout_s=_ASK_S)
                self._on_nodes(len({each.node for each in segments if each.tier is Tier.DRAM}))
            except MoonpoolError as error:
                _LOG.debug("the pool was asked about its nodes: %s", error)
            await asyncio.sleep(_COUNT_EVERY_S)

    def _apply(self, batch: EventBatch, last: int | None) -> None:
        """`last` is the sequence of the batch before. The parts of a snapshot have one sequence together."""
        if batch.snapshot:
            self._index.replace_pool(batch.stored, batch.tiers)
            self.connected = True
            _LOG.info("the pool holds %d blocks", self._index.pool_blocks)
        elif last is not None and batch.sequence in (last, last + 1):
            self._index.update_pool(batch.stored, batch.removed, batch.tiers)
        else:
            raise ProtocolError(f"batch {batch.sequence} came after {last}; the snapshot comes first")

    def _lost(self) -> None:
        self.connected = False
        self._index.replace_pool(())
