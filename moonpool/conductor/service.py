"""The conductor as a service: sockets around conductor/state.py. It promises nothing beyond its process's life:
after a restart, workers register and the pool's events are read again.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import CollectorRegistry

from moonpool.base.clock import Clock, SystemClock
from moonpool.base.cluster import CONDUCTOR_SERVICE, RegisterWorker, ReportWorker
from moonpool.base.metrics import GetMetrics, MetricFamily, process_metrics, snapshot
from moonpool.base.rpc import Call, RpcPeer, RpcServer, SilenceLimits
from moonpool.conductor.messages import (
    BeforeDecode,
    ClaimSharedMetrics,
    ConductorStatus,
    Decision,
    DecisionRecord,
    ExplainedRecord,
    ExplainRequest,
    ExportTrace,
    PrefillEnded,
    Records,
    RequestEnded,
    Route,
    Status,
)
from moonpool.conductor.metrics import ConductorCollector
from moonpool.conductor.placement.policy import PolicyConfig
from moonpool.conductor.placement.prefix_index import MAX_POOL_BLOCKS, PrefixIndex
from moonpool.conductor.pool_feed import PoolFeed
from moonpool.conductor.queue_service import RequestQueueService
from moonpool.conductor.record_keeper import RecordKeeper
from moonpool.conductor.registration import Registration
from moonpool.conductor.request_queue import RequestQueue
from moonpool.conductor.state import ConductorState

_SHARED_METRICS_S = 150.0  # two of Prometheus' usual intervals, and some


@dataclass(frozen=True, slots=True)
class ConductorConfig:
    address: str = "tcp:127.0.0.1:0"  # address to listen on; port 0: any free port
    store_address: str | None = None  # address of the pool's master; default: no pool
    name: str = "conductor"  # name in logs and metrics
    num_records: int = 10_000  # decision records that are kept, for `moonpool why`
    max_pool_blocks: int = MAX_POOL_BLOCKS  # most pool blocks in the prefix index
    policy: PolicyConfig = field(default_factory=PolicyConfig)


class Conductor:
    """`await start()`, then it serves until `await close()`."""

    def __init__(
        self, config: ConductorConfig, *, clock: Clock | None = None, silence_limits: SilenceLimits | None = None
    ) -> None:
        self.config = config
        self.registry = CollectorRegistry()
        self._clock: Clock = clock or SystemClock()
        self._state = ConductorState(
            config.policy, PrefixIndex(max_pool_blocks=config.max_pool_blocks), config.num_records
        )
        self._feed = (
            PoolFeed(config.store_address, self._state.index, self._state.set_pool_nodes, name=config.name)
            if config.store_address
            else None
        )
        self._feeding: asyncio.Task[None] | None = None
        room = RequestQueue(self._state, config.policy)
        self._desk = RequestQueueService(room, self._clock)
        self._clerk = RecordKeeper(self._state, self._feed)
        self._front_ends: set[RpcPeer] = set()
        self._shared_metrics: tuple[RpcPeer, float] | None = None  # whose page has them, and when it was last read
        self._server = self._make_server(silence_limits or SilenceLimits())
        self.registry.register(ConductorCollector(self._state, room, lambda: self.pool_connected))

    @property
    def pool_connected(self) -> bool:
        return self._feed is not None and self._feed.connected

    async def start(self) -> str:
        """Listens and follows the pool; the address with the real port. ConfigError when it is taken."""
        address = await self._server.listen(self.config.address)
        if self._feed is not None:
            self._feeding = asyncio.create_task(self._feed.run(), name="pool feed")
        return address

    async def close(self) -> None:
        """Idempotent."""
        self._desk.close()
        feeding, self._feeding = self._feeding, None
        if feeding is not None:
            feeding.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await feeding
        await self._server.close()

    def _make_server(self, silence_limits: SilenceLimits) -> RpcServer:
        handlers: dict[type[Call[Any]], Callable[[Any, RpcPeer], Any]] = {
            RegisterWorker: self._register,
            ReportWorker: self._report,
            Route: self._route,
            PrefillEnded: self._prefill_ended,
            BeforeDecode: self._before_decode,
            RequestEnded: self._request_ended,
            Status: self._status,
            Records: self._records,
            ExplainRequest: self._explain,
            ExportTrace: self._export,
            GetMetrics: self._metrics,
            ClaimSharedMetrics: self._claim_shared_metrics,
        }
        return RpcServer(
            CONDUCTOR_SERVICE,
            handlers,
            name=self.config.name,
            incarnation=time.time_ns(),
            silence_limits=silence_limits,
        )

    # handlers

    def _register(self, call: RegisterWorker, peer: RpcPeer) -> None:
        worker = self._state.register(call.info)
        peer.on_close(lambda: self._unregister(worker))
        self._desk.changed()

    def _unregister(self, worker: Registration) -> None:
        self._state.unregister(worker)
        self._desk.changed()

    def _report(self, call: ReportWorker, peer: RpcPeer) -> None:
        self._state.report(call)
        self._desk.changed()

    def _route(self, call: Route, peer: RpcPeer) -> Decision | Awaitable[Decision]:
        if peer not in self._front_ends:
            self._front_ends.add(peer)
            peer.on_close(lambda: self._front_end_gone(peer))
        return self._desk.ask(call, peer)

    def _front_end_gone(self, peer: RpcPeer) -> None:
        self._front_ends.discard(peer)
        self._desk.owner_gone(peer)
        self._state.owner_gone(peer, self._clock.now_s())
        self._desk.changed()

    def _prefill_ended(self, call: PrefillEnded, peer: RpcPeer) -> None:
        self._state.prefill_ended(call.request_id, self._clock.now_s())
        self._desk.changed()

    def _before_decode(self, call: BeforeDecode, peer: RpcPeer) -> None:
        try:
            self._state.before_decode(call.request_id, self._clock.now_s())
        finally:
            self._prefill_ended(PrefillEnded(request_id=call.request_id), peer)

    def _request_ended(self, call: RequestEnded, peer: RpcPeer) -> None:
        self._desk.cancel(call.request_id)
        self._state.request_ended(call, self._clock.now_s())
        self._desk.changed()

    def _status(self, call: Status, peer: RpcPeer) -> ConductorStatus:
        return ConductorStatus(
            workers=self._state.status(),
            pool_blocks=self._state.index.pool_blocks,
            pool_connected=self.pool_connected,
            counters=dict(self._state.counters),
            policy=self._state.policy,
            num_waiting=self._desk.num_waiting,
            predictions=self._state.predictions(),
            fetch_or_compute=self._state.fetch_or_compute(),
        )

    def _records(self, call: Records, peer: RpcPeer) -> list[DecisionRecord]:
        return self._clerk.find(call)

    def _explain(self, call: ExplainRequest, peer: RpcPeer) -> Awaitable[list[ExplainedRecord]]:
        return self._clerk.explain(call)

    def _export(self, call: ExportTrace, peer: RpcPeer) -> AsyncIterator[bytes]:
        return self._clerk.export(call)

    def _metrics(self, call: GetMetrics, peer: RpcPeer) -> list[MetricFamily]:
        return [*snapshot(self.registry), *process_metrics()]

    def _claim_shared_metrics(self, call: ClaimSharedMetrics, peer: RpcPeer) -> bool:
        """The claim lasts from one reading of the page to the next, and falls to another when it is not renewed."""
        now_s, claimant = self._clock.now_s(), self._shared_metrics
        if claimant is None or claimant[0].closed or now_s - claimant[1] > _SHARED_METRICS_S:
            claimant = (peer, now_s)
        if claimant[0] is peer:
            self._shared_metrics = (peer, now_s)
        return claimant[0] is peer
