"""Keeps the pool's part of the prefix index up to date: a snapshot, then changes; a new snapshot after every break.

While the master cannot be reached the pool counts as empty; requests still run, with less reuse.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence

from moonpool.base.backoff import Backoff
from moonpool.base.errors import MoonpoolError, ProtocolError
from moonpool.base.keys import object_key
from moonpool.base.rpc import AsyncClient
from moonpool.base.rpc.reconnect import Duty, ReconnectingClient
from moonpool.conductor.placement.prefix_index import PrefixIndex
from moonpool.store.messages import SERVICE, EventBatch, Promote, Segments, Subscribe, Tier, Why

_LOG = logging.getLogger(__name__)
_MIN_RETRY_S = 0.05
_MAX_RETRY_S = 2.0
_CALL_TIMEOUT_S = 1.0
_COUNT_EVERY_S = 5.0


class PoolFeed:
    """`run` is a task that is cancelled to stop. `connected` is true from a snapshot until the stream breaks.

    `on_nodes` is called with the nodes that hold blocks in memory and the machine of each, at the start and every few
    seconds. `duties` run on the same connection.
    """

    def __init__(
        self,
        store_address: str,
        index: PrefixIndex,
        on_nodes: Callable[[Mapping[str, str]], None],
        *,
        name: str,
        duties: Sequence[Duty] = (),
    ) -> None:
        self.connected = False
        self._index = index
        self._on_nodes = on_nodes
        self._promotions: set[asyncio.Task[None]] = set()  # asyncio itself keeps no reference to a task
        self._store = ReconnectingClient(
            store_address,
            SERVICE,
            [self._follow, self._count_nodes, *duties],
            name=name,
            backoff=Backoff(_MIN_RETRY_S, _MAX_RETRY_S),
            on_lost=self._on_lost,
        )

    async def run(self) -> None:
        """Run until cancelled. After an error of the master, connect again after a growing pause."""
        with contextlib.closing(self._store):
            await self._store.run()

    async def why(self, key: bytes) -> str | None:
        """Return what the master says happened to that object; None if the master cannot be reached."""
        client = self._store.client
        if client is None:
            return None
        try:
            return await client.call(Why(key=key), timeout_s=_CALL_TIMEOUT_S)
        except MoonpoolError as error:
            _LOG.debug("asking the master about a key failed: %s", error)
            return None

    def promote(self, keys: Sequence[bytes]) -> None:
        """Ask the master to bring these blocks from SSD to memory, because a request that waits will pull them. Nothing
        waits for the answer: whatever does not come is read from SSD."""
        client = self._store.client
        if client is not None:
            task = asyncio.get_running_loop().create_task(_promote(client, [object_key(key) for key in keys]))
            self._promotions.add(task)
            task.add_done_callback(self._promotions.discard)

    async def _follow(self, client: AsyncClient) -> None:
        async with contextlib.aclosing(client.stream(Subscribe())) as batches:
            last: int | None = None
            async for batch in batches:
                self._apply(batch, last)
                last = batch.sequence

    async def _count_nodes(self, client: AsyncClient) -> None:
        """Report the number of nodes until cancelled. A master that does not answer changes nothing."""
        while True:
            try:
                segments = await client.call(Segments(), timeout_s=_CALL_TIMEOUT_S)
                self._on_nodes({each.node: each.descriptor.host for each in segments if each.tier is Tier.DRAM})
            except MoonpoolError as error:
                _LOG.debug("asking the master about its nodes failed: %s", error)
            await asyncio.sleep(_COUNT_EVERY_S)

    def _apply(self, batch: EventBatch, last: int | None) -> None:
        """Apply a batch. `last` is the sequence number of the batch before; the parts of a snapshot share one."""
        if batch.snapshot:
            self._index.replace_pool(batch.stored, batch.tiers, batch.nodes)
            self.connected = True
            _LOG.info("the pool holds %d blocks", self._index.pool_blocks)
        elif last is not None and batch.sequence in (last, last + 1):
            self._index.update_pool(batch.stored, batch.removed, batch.tiers, batch.nodes)
        else:
            raise ProtocolError(f"batch {batch.sequence} came after {last}; the snapshot comes first")

    def _on_lost(self, error: MoonpoolError, was_connected: bool) -> None:
        _LOG.log(logging.WARNING if self.connected else logging.DEBUG, "the pool's events: %s", error)
        if self.connected:
            self._store.backoff.reset()
        self.connected = False
        self._index.replace_pool(())


async def _promote(client: AsyncClient, keys: list[bytes]) -> None:
    try:
        await client.call(Promote(keys=keys), timeout_s=_CALL_TIMEOUT_S)
    except MoonpoolError as error:
        _LOG.debug("asking the master to bring blocks to memory failed: %s", error)
