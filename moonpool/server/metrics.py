"""What the front end counts, and one page with the numbers of every role."""

from __future__ import annotations

import asyncio

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest

from moonpool.base.errors import MoonpoolError
from moonpool.base.metrics import GetMetrics, MergedCollector, MetricFamily, snapshot
from moonpool.base.rpc import AsyncClient
from moonpool.conductor.messages import WorkerRef, WorkerStatus
from moonpool.engine.messages import PrefillReply
from moonpool.server.workers import Cluster, Connections

disable_created_metrics()  # type: ignore[no-untyped-call]  # a second series per counter that nobody reads
SCRAPE_TIMEOUT_S = 1.0
_TTFT_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_TBT_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
_Part = tuple[str, str, list[MetricFamily]]


class FrontendMetrics:
    """Own registry, so that several front ends may live in one process."""

    def __init__(self) -> None:
        own = self.registry = CollectorRegistry()
        self.requests = Counter(
            "moonpool_requests", "Requests by endpoint and how they ended", ["endpoint", "outcome"], registry=own
        )
        self.running = Gauge("moonpool_requests_running", "Requests that are being answered", registry=own)
        self.replans = Counter("moonpool_replans", "Attempts beyond a choice's first", registry=own)
        self.ttft = Histogram("moonpool_ttft_seconds", "Time to first token", buckets=_TTFT_BUCKETS_S, registry=own)
        self.tbt = Histogram("moonpool_tbt_seconds", "Time between tokens", buckets=_TBT_BUCKETS_S, registry=own)
        self.prompt_tokens = Counter("moonpool_prompt_tokens", "Prompt tokens", registry=own)
        self.output_tokens = Counter("moonpool_output_tokens", "Generated tokens", registry=own)
        self.cached_tokens = Counter(
            "moonpool_cached_tokens", "Prompt tokens reused from a worker's pages or the pool", ["source"], registry=own
        )
        self.pool_nbytes = Counter("moonpool_pool_bytes", "KV bytes that prefill pulled from the pool", registry=own)
        self.unanswered = Counter("moonpool_scrapes_unanswered", "Roles that gave no metrics in time", registry=own)

    def count_prefill(self, num_prompt_tokens: int, reply: PrefillReply, ttft_s: float | None) -> None:
        self.prompt_tokens.inc(num_prompt_tokens)
        self.cached_tokens.labels("local").inc(reply.local_tokens)
        self.cached_tokens.labels("pool").inc(reply.pool_tokens)
        self.pool_nbytes.inc(reply.pool_nbytes)
        if ttft_s is not None:
            self.ttft.observe(ttft_s)


async def metrics_page(own: FrontendMetrics, connections: Connections, cluster: Cluster) -> bytes:
    """Prometheus text of all roles that answer within SCRAPE_TIMEOUT_S; the others are counted."""
    parts = await _scrape_all(own, connections, cluster)
    registry = CollectorRegistry()
    registry.register(MergedCollector([("frontend", "frontend", snapshot(own.registry)), *parts]))
    return generate_latest(registry)


async def _scrape_all(own: FrontendMetrics, connections: Connections, cluster: Cluster) -> list[_Part]:
    try:
        conductor = await connections.conductor()
        workers = (await cluster.status(SCRAPE_TIMEOUT_S)).workers
    except MoonpoolError:
        own.unanswered.inc()
        return []
    asked = [_ask(conductor, "conductor", "conductor"), _ask_master(connections)]
    asked += [_ask_worker(connections, worker) for worker in workers]
    answers = await asyncio.gather(*asked)
    own.unanswered.inc(sum(part is None for part in answers))
    return [part for part in answers if part is not None]


async def _ask_master(connections: Connections) -> _Part | None:
    try:
        async with asyncio.timeout(SCRAPE_TIMEOUT_S):
            client = await connections.master()
    except (MoonpoolError, TimeoutError):
        return None
    return ("master", "master", []) if client is None else await _ask(client, "master", "master")


async def _ask_worker(connections: Connections, worker: WorkerStatus) -> _Part | None:
    info = worker.info
    try:
        async with asyncio.timeout(SCRAPE_TIMEOUT_S):
            client = await connections.worker(WorkerRef(info.name, info.address, info.incarnation))
    except (MoonpoolError, TimeoutError):
        return None
    return await _ask(client, info.role.value, info.name)


async def _ask(client: AsyncClient, role: str, instance: str) -> _Part | None:
    try:
        return role, instance, await client.call(GetMetrics(), timeout_s=SCRAPE_TIMEOUT_S)
    except MoonpoolError:
        return None
