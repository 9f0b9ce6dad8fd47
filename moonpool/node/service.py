"""The node as a service: allocates the memory, opens the disk, and serves the master until it is closed.

Without a master the node keeps serving what it holds and connects again. An error of its disk never ends the node: it
continues with memory alone and tries the disk again.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from functools import partial

from moonpool.base.backoff import Backoff
from moonpool.base.errors import ConfigError, MoonpoolError, PeerLost, Unavailable
from moonpool.base.metrics import (
    REPORT_EVERY_S,
    MetricFamily,
    ReportMetrics,
    RoleMetrics,
    process_metrics,
)
from moonpool.base.rpc import AsyncClient
from moonpool.base.rpc.reconnect import ReconnectingClient
from moonpool.node.config import NodeConfig
from moonpool.node.copying import Copier, OwnMemory, Readable, RemoteSource, check_here
from moonpool.node.metrics import node_metrics
from moonpool.node.mount import CALL_TIMEOUT_S, DramMount
from moonpool.node.offloading import LogThread
from moonpool.node.orders import OrderLane, OrderRunner
from moonpool.node.session_registry import SessionRegistry
from moonpool.node.ssd_tier import LogMaintenance, NodeSsd, SsdMount
from moonpool.node.voiding import Voider
from moonpool.store.client.directory import SegmentDirectory
from moonpool.store.messages import GRANULE_NBYTES, SERVICE, OrderKind, Placement, SegmentInfo, Segments
from moonpool.transfer.config import TransferConfig, check_numa_node, warn_if_open
from moonpool.transfer.engine import TransferEngine
from moonpool.transfer.memory.segment import Segment

_LOG = logging.getLogger(__name__)
_MAX_LOG_ORDERS = 512  # in one go
_MAX_VOIDS = 1000  # 8 bytes are written for each
_DISK_RETRY_S = 5.0
_POPULATE_WAIT_S = 1.0


class Node:
    """`await start()` returns when the memory is mounted; it stays so until `await close()`."""

    def __init__(self, config: NodeConfig) -> None:
        self.config = config
        self.segment_name = f"{config.name}.dram"
        self.ssd: NodeSsd | None = None
        self._registry: SessionRegistry | None = None
        self._engine: TransferEngine | None = None
        self._segment: Segment | None = None
        self._work: _Work | None = None
        self._serving: asyncio.Task[None] | None = None
        self._finding_disk: asyncio.Task[NodeSsd] | None = None

    @property
    def segment(self) -> Segment:
        """The node's memory."""
        assert self._segment is not None, "the node was not started"
        return self._segment

    @property
    def work(self) -> _Work:
        """The tasks for the master; for tests and for inspection."""
        assert self._work is not None, "the node was not started"
        return self._work

    async def start(self) -> None:
        """Start the node and mount its memory. NoSpace when the memory cannot be allocated, PeerLost when no master
        answers in time, ConfigError for a wrong setting or when another node of this name lives.
        """
        check_numa_node(self.config.numa_node)
        try:
            self._engine = TransferEngine(self._transfer_config())  # first: a wrong setting costs no memory
            warn_if_open(_LOG, self.config, self._engine.addresses)
            self._registry = SessionRegistry(self.config.registry_address, self.config.name, self.metrics)
            await self._registry.start()
            self._segment = await asyncio.to_thread(self._allocate)
            if self.config.ssd_dir is not None:
                await self._open_disk()
            self._work = _Work(self, self._engine, self._registry)
            self._serving = asyncio.get_running_loop().create_task(self._work.link.run())
            await self._first_mount(self._work, self._serving)
        except BaseException:
            await self.close()
            raise

    async def wait(self) -> None:
        """Return after close(). Raise the error that ended the node otherwise."""
        assert self._serving is not None, "the node was not started"
        await asyncio.wait([self._serving])
        if not self._serving.cancelled():
            self._serving.result()

    async def leave(self) -> None:
        """Unmount the segments and stop serving the master. Idempotent. Starts no thread, so it works in a process that
        is exiting; the exit frees everything else.
        """
        for task in (self._finding_disk, self._serving):
            if task is not None:
                task.cancel()
                await asyncio.wait([task])
        if self._work is not None:
            await self._work.leave()

    async def close(self) -> None:
        """Leave the pool and free the memory; the contents of the disk stay. Idempotent."""
        await self.leave()
        if self._registry is not None:
            await self._registry.close()
        if self._engine is not None:
            await asyncio.to_thread(self._engine.close)
        if self._work is not None:
            await self._work.close()
        if self.ssd is not None:
            await asyncio.to_thread(self.ssd.close)
        if self._segment is not None:
            self._segment.close()

    async def metrics(self) -> list[MetricFamily]:
        orders = {} if self._work is None else self._work.orders.counters
        ssd = None if self.ssd is None else await asyncio.to_thread(self.ssd.log.stats)
        sessions = [] if self._registry is None else self._registry.sessions()
        connections = (0, Counter[str]()) if self._engine is None else self._engine.connections()
        num_restamped = 0 if self._work is None else self._work.dram.num_restamped
        population = None if self._segment is None else self._segment.population
        mapped_nbytes = 0 if population is None else population.done_nbytes
        own = node_metrics(
            self.config.dram_nbytes, len(sessions), orders, ssd, connections, num_restamped, mapped_nbytes=mapped_nbytes
        )
        return [*own, *process_metrics()]

    def _transfer_config(self) -> TransferConfig:
        return TransferConfig(run_dir=self.config.run_dir, **self.config.wires())

    def _allocate(self) -> Segment:
        """Return the memory, mapped in if that takes no more than a second; what takes longer goes on meanwhile."""
        segment = Segment.allocate(
            self.segment_name,
            self.config.dram_nbytes,
            granule_nbytes=GRANULE_NBYTES,
            incarnation=0,
            numa_node=self.config.numa_node,
        )
        if not segment.populate().wait(_POPULATE_WAIT_S):
            _LOG.info("%s: its memory is mapped in while it is used already", self.segment_name)
        return segment

    async def _open_disk(self) -> None:
        """Open the log. A disk that fails is tried again later."""
        try:
            self.ssd = await asyncio.to_thread(NodeSsd, self.config)
        except ConfigError:
            raise
        except MoonpoolError as error:
            _LOG.warning("%s starts without its disk: %s", self.config.name, error)
            self._finding_disk = asyncio.get_running_loop().create_task(self._find_disk())

    async def _find_disk(self) -> NodeSsd:
        while self.ssd is None:
            await asyncio.sleep(_DISK_RETRY_S)
            try:
                self.ssd = await asyncio.to_thread(NodeSsd, self.config)
            except MoonpoolError as error:
                _LOG.debug("%s is still without its disk: %s", self.config.name, error)
        return self.ssd

    async def disk(self) -> NodeSsd:
        """Wait until the disk is available and return it."""
        if self.ssd is not None:
            return self.ssd
        assert self._finding_disk is not None, "the node has no disk"
        return await asyncio.shield(self._finding_disk)  # a caller may be cancelled while others wait on

    async def _first_mount(self, work: _Work, serving: asyncio.Task[None]) -> None:
        dram = work.dram
        mounted = asyncio.get_running_loop().create_task(dram.mounted.wait())
        try:
            await asyncio.wait(
                [mounted, serving], timeout=self.config.start_timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            mounted.cancel()
        if serving.done():
            serving.result()
        if dram.mounted.is_set():
            return
        if dram.refusal is not None:
            name = self.config.name
            raise ConfigError(f"another node called {name!r} lives in this pool; each needs its own", param="name")
        if work.failure is not None and not isinstance(work.failure, Unavailable):
            raise work.failure
        raise PeerLost(f"no master took the segment at {self.config.master_address} in time")


class _Work:
    """What a started node does for the master: its mounts, its orders, and the connection that they use."""

    def __init__(self, node: Node, engine: TransferEngine, registry: SessionRegistry) -> None:
        config = node.config
        self._node = node
        self._engine = engine
        self._directory = SegmentDirectory(engine, self._list_segments)
        copies = OrderLane(Copier(node.segment, self._open_source).execute, width=config.copy_threads)
        self._log_thread = LogThread(node.segment, lambda: node.ssd)
        self._log_lane = OrderLane(self._log_thread.execute, max_orders=_MAX_LOG_ORDERS)
        self.orders = OrderRunner(
            config.name,
            {
                OrderKind.COPY: copies,
                OrderKind.OFFLOAD: self._log_lane,
                OrderKind.DROP: self._log_lane,
                OrderKind.VOID: OrderLane(Voider(node.segment).execute, max_orders=_MAX_VOIDS),
            },
        )
        self.dram = DramMount(
            config.name,
            node.segment,
            engine,
            self.orders.paused,
            registry_address=registry.address,
            sessions=registry.sessions,
            fence_check_s=config.fence_check_s,
        )
        self.disk: SsdMount | None = None
        self._maintenance: LogMaintenance | None = None
        duties = [self.dram.run, registry.report, self._run_orders, self._report_metrics]
        if config.ssd_dir is not None:
            duties.append(self._run_disk)
        self.failure: MoonpoolError | None = None  # why the last connection ended, or could not be made
        self.link = ReconnectingClient(
            config.master_address,
            SERVICE,
            duties,
            name=config.name,
            backoff=Backoff(config.retry_s, config.retry_s),
            on_lost=self._on_lost,
        )

    async def leave(self) -> None:
        """Unmount the segments."""
        client = self.link.client
        if client is not None:
            for mount in (self.dram, self.disk):
                if mount is not None and mount.mounted.is_set():
                    await mount.leave(client)
            client.close()

    def _on_lost(self, error: MoonpoolError, was_connected: bool) -> None:
        if was_connected:  # once per outage
            _LOG.warning("%s: lost the connection to the master: %s", self._node.config.name, error)
        self.failure = error

    async def close(self) -> None:
        """Wait for running orders. Idempotent."""
        await self.orders.close()
        self._log_thread.close()

    async def _run_orders(self, client: AsyncClient) -> None:
        await self.dram.mounted.wait()
        await self.orders.run(client)

    async def _report_metrics(self, client: AsyncClient) -> None:
        """Report metrics to the master: front ends on other machines cannot ask the node itself."""
        while True:
            report = RoleMetrics("node", self._node.config.name, await self._node.metrics())
            try:
                await client.call(ReportMetrics(metrics=report), timeout_s=CALL_TIMEOUT_S)
            except MoonpoolError as error:  # nothing depends on the metrics; other tasks notice a lost connection
                _LOG.debug("the master refused the metrics: %s", error)
            await asyncio.sleep(REPORT_EVERY_S)

    async def _run_disk(self, client: AsyncClient) -> None:
        config, ssd = self._node.config, await self._node.disk()
        if self.disk is None or self._maintenance is None:
            self.disk = SsdMount(config.name, ssd, self._engine, self.orders.paused)
            hold_log = partial(self.orders.hold, self._log_lane)
            self._maintenance = LogMaintenance(ssd, self.disk, hold_log, config.ssd_rest_s)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.disk.run(client))
            tasks.create_task(self._maintenance.run(client))

    def _open_source(self, placement: Placement) -> Readable:
        """Return the segment that holds an order's source. Runs on the threads of the lanes."""
        ssd = self._node.ssd
        if placement.segment == self._node.segment_name:
            check_here(placement, self._node.segment, 0)
            return OwnMemory(self._node.segment)
        if ssd is not None and placement.segment == ssd.segment.name:
            check_here(placement, ssd.segment, 0)
            return ssd.segment
        return RemoteSource(self._directory.open(placement), self._engine)

    def _list_segments(self) -> list[SegmentInfo]:
        return self.link.call_from_thread(Segments(), timeout_s=CALL_TIMEOUT_S)
