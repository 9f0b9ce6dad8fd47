"""A machine's part of the pool: owns the memory, serves it, and keeps it mounted at the master.

Whenever the master does not know the segment (its first hello, a master that restarted, a node silent for too
long) it is mounted anew: empty, as a new incarnation, and with every generation granted before fenced off. Handles
opened for an earlier incarnation are void from then on.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from dataclasses import dataclass

from moonpool.base.errors import ConfigError, MoonpoolError, PeerLost, Unavailable
from moonpool.base.rpc import AsyncClient
from moonpool.store.allocator import GRANULE_NBYTES
from moonpool.store.messages import SERVICE, Heartbeat, MountSegment, UnmountSegment
from moonpool.store.reach import check_numa_node, in_words, warn_if_open
from moonpool.transfer.config import TransferConfig, WireConfig
from moonpool.transfer.engine import TransferEngine
from moonpool.transfer.segment import Segment

_LOG = logging.getLogger(__name__)
_CALL_TIMEOUT_S = 5.0
_GOODBYE_TIMEOUT_S = 1.0


@dataclass(frozen=True, kw_only=True)
class NodeConfig(WireConfig):
    """What a node offers, and where. The name is unique in the pool and stays the same across restarts."""

    name: str  # unique in the pool, the same after a restart
    master_address: str
    dram_nbytes: int  # memory for the pool, taken at start
    run_dir: str  # where processes of this machine find its socket
    numa_node: int | None = None  # takes the memory there, as far as that node has some
    start_timeout_s: float = 10.0  # for the master to answer
    retry_s: float = 0.2  # between attempts to reach a lost master

    def __post_init__(self) -> None:
        if self.dram_nbytes < GRANULE_NBYTES:
            raise ConfigError(f"a node offers at least {GRANULE_NBYTES} bytes", param="dram_nbytes")


class Node:
    """`await start()` returns when the segment is mounted; it stays so until `await close()`."""

    def __init__(self, config: NodeConfig) -> None:
        self.config = config
        self.segment_name = f"{config.name}.dram"
        self._segment: Segment | None = None
        self._engine: TransferEngine | None = None
        self._client: AsyncClient | None = None
        self._attending: asyncio.Task[None] | None = None
        self._mounted = asyncio.Event()
        self._heartbeat_s = 1.0

    @property
    def segment(self) -> Segment:
        """The memory it owns."""
        assert self._segment is not None, "the node was not started"
        return self._segment

    async def start(self) -> None:
        """NoSpace when the memory is not there, PeerLost when no master answers in time, ConfigError."""
        check_numa_node(self.config.numa_node)
        try:
            self._engine = TransferEngine(self._transfer_config())  # first: a wrong setting costs no memory
            warn_if_open(_LOG, self.config, self._engine.addresses)
            self._segment = await asyncio.to_thread(self._allocate)
            self._attending = asyncio.get_running_loop().create_task(self._attend_forever())
            await self._first_mount(self._attending)
        except BaseException:
            await self.close()
            raise

    async def wait(self) -> None:
        """Returns after close(); raises what ended the node otherwise."""
        assert self._attending is not None, "the node was not started"
        await asyncio.wait([self._attending])
        if not self._attending.cancelled():
            self._attending.result()

    async def close(self) -> None:
        """Idempotent. Takes the memory back from the pool and from the machine."""
        if self._attending is not None:
            self._attending.cancel()
            await asyncio.wait([self._attending])
        client, self._client = self._client, None
        if client is not None:
            await self._say_goodbye(client)
        if self._engine is not None:
            await asyncio.to_thread(self._engine.close)
        if self._segment is not None:
            self._segment.close()

    def _transfer_config(self) -> TransferConfig:
        # One thread: it moves nothing by itself.
        return TransferConfig(run_dir=self.config.run_dir, num_threads=1, **self.config.wires())

    def _allocate(self) -> Segment:
        return Segment.allocate(
            self.segment_name,
            self.config.dram_nbytes,
            granule_nbytes=GRANULE_NBYTES,
            incarnation=0,
            numa_node=self.config.numa_node,
        )

    async def _first_mount(self, attending: asyncio.Task[None]) -> None:
        mounted = asyncio.get_running_loop().create_task(self._mounted.wait())
        try:
            await asyncio.wait(
                [mounted, attending], timeout=self.config.start_timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            mounted.cancel()
        if attending.done():
            attending.result()
        if not self._mounted.is_set():
            raise PeerLost(f"no master took the segment at {self.config.master_address} in time")

    # the life of the mount

    async def _attend_forever(self) -> None:
        while True:
            try:
                self._client = await AsyncClient.connect(self.config.master_address, SERVICE, name=self.config.name)
                await self._attend(self._client)
            except Unavailable as error:
                if self._mounted.is_set():  # once per outage
                    _LOG.warning("%s: the master is out of reach: %s", self.segment_name, error)
                    self._mounted.clear()
            if self._client is not None:
                self._client.close()
            await asyncio.sleep(self.config.retry_s)

    async def _attend(self, client: AsyncClient) -> None:
        """Beats until the connection is lost. A master that knows the segment goes on as before."""
        while not client.closed.is_set():
            if await self._beat(client):
                self._mounted.set()
            else:
                await self._mount(client)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._heartbeat_s):
                    await client.closed.wait()

    async def _beat(self, client: AsyncClient) -> bool:
        beat = Heartbeat(segment=self.segment_name, incarnation=self.segment.incarnation)
        return await client.call(beat, timeout_s=_CALL_TIMEOUT_S)

    async def _mount(self, client: AsyncClient) -> None:
        """Serves the memory as a new incarnation, fences the past off, and only then says so by a heartbeat."""
        assert self._engine is not None
        self._engine.unserve(self.segment_name)
        self.segment.incarnation = time.time_ns()
        descriptor = self._engine.serve(self.segment)
        mount = MountSegment(node=self.config.name, descriptor=descriptor)
        reply = await client.call(mount, timeout_s=_CALL_TIMEOUT_S)
        assert self.segment.fence is not None
        await asyncio.to_thread(self.segment.fence.stamp, 0, self.segment.nbytes, reply.generation_floor)
        self._heartbeat_s = reply.heartbeat_s
        if await self._beat(client):
            _LOG.info("mounted %s", in_words(descriptor))
            self._mounted.set()

    async def _say_goodbye(self, client: AsyncClient) -> None:
        call = UnmountSegment(segment=self.segment_name, incarnation=self.segment.incarnation)
        try:
            await client.call(call, timeout_s=_GOODBYE_TIMEOUT_S)
        except MoonpoolError as error:
            _LOG.info("%s: could not say goodbye to the master: %s", self.segment_name, error)
        client.close()
