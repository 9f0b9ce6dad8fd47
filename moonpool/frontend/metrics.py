"""The metrics of the front end, and the page with the metrics of all roles."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from enum import StrEnum
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from moonpool.base.errors import MoonpoolError, Unavailable
from moonpool.base.metrics import (
    TIME_BUCKETS_S,
    GetMetrics,
    GetReportedMetrics,
    MetricFamily,
    RoleMetrics,
    as_families,
    metrics_text,
    process_metrics,
    snapshot,
)
from moonpool.base.rpc import AsyncClient
from moonpool.base.run_dirs import CONDUCTOR, numbered_name
from moonpool.conductor.messages import ClaimSharedMetrics, WorkerRef, WorkerStatus
from moonpool.frontend.vllm_names import with_vllm_names
from moonpool.frontend.workers import ClusterDirectory, Connections
from moonpool.worker.messages import PrefillReply

SCRAPE_TIMEOUT_S = 1.0
_TTFT_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_TBT_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
COUNTED_PATHS = ("/v1/chat/completions", "/v1/completions")
# Outcomes that are on the page before they happen: Prometheus sees no increase when a counter appears with its first.
_USUAL_OUTCOMES = ("done", "cancelled", "invalid_input", "overloaded", "unavailable", "deadline_exceeded", "internal")


class FrontendMetrics:
    """Has its own registry, so that several front ends can run in one process."""

    def __init__(self) -> None:
        own = self.registry = CollectorRegistry()
        self.requests = Counter(
            "moonpool_requests", "Requests by endpoint and how they ended", ["endpoint", "outcome"], registry=own
        )
        self.running = Gauge("moonpool_requests_running", "Requests that are being answered", registry=own)
        self.request_time = Histogram(
            "moonpool_request_seconds",
            "Duration of whole requests, from the first byte to the last",
            ["endpoint"],
            buckets=TIME_BUCKETS_S,
            registry=own,
        )
        self.answer_time = Histogram(
            "moonpool_answer_seconds",
            "From a choice's start, its prompt in tokens, until its last token; choices that failed are not counted",
            buckets=TIME_BUCKETS_S,
            registry=own,
        )
        self.queue_time = Histogram(
            "moonpool_queue_seconds",
            "How long a choice waited, in the conductor's queue and at the worker, until its prompt was computed",
            buckets=TIME_BUCKETS_S,
            registry=own,
        )
        self.replans = Counter("moonpool_replans", "Attempts beyond a choice's first", registry=own)
        self.moves = Counter("moonpool_moves", "Moves of running choices from a worker that leaves", registry=own)
        self.fatal_requests = Counter(
            "moonpool_fatal_requests", "Choices given up because workers died while they computed them", registry=own
        )
        self.ttft = Histogram("moonpool_ttft_seconds", "Time to first token", buckets=_TTFT_BUCKETS_S, registry=own)
        self.tbt = Histogram("moonpool_tbt_seconds", "Time between tokens", buckets=_TBT_BUCKETS_S, registry=own)
        self.prompt_tokens = Counter("moonpool_prompt_tokens", "Prompt tokens", registry=own)
        self.output_tokens = Counter("moonpool_output_tokens", "Generated tokens", registry=own)
        self.cached_tokens = Counter(
            "moonpool_cached_tokens", "Prompt tokens reused from a worker's pages or the pool", ["source"], registry=own
        )
        self.pulled_tokens = Counter(
            "moonpool_pulled_tokens",
            "Prompt tokens reused from the pool: from memory of the worker's machine, SSD, or memory of other machines",
            ["tier"],
            registry=own,
        )
        self.pool_nbytes = Counter("moonpool_pool_bytes", "KV bytes that prefill pulled from the pool", registry=own)
        self.unanswered = Counter("moonpool_scrapes_unanswered", "Roles that gave no metrics in time", registry=own)
        self.missing_roles = Gauge("moonpool_missing_roles", "Roles that /health misses", registry=own)
        self._begin_at_zero()

    def _begin_at_zero(self) -> None:
        """Make the usual series, and keep those that every request changes: finding one takes longer than counting."""
        self._request_times = {path: self.request_time.labels(path) for path in COUNTED_PATHS}
        self._requests_done = {path: self.requests.labels(path, "done") for path in COUNTED_PATHS}
        for path in COUNTED_PATHS:
            for outcome in _USUAL_OUTCOMES:
                self.requests.labels(path, outcome)
        self._local, self._pool = (self.cached_tokens.labels(source) for source in ("local", "pool"))
        self._dram, self._ssd, self._remote = (self.pulled_tokens.labels(tier) for tier in ("dram", "ssd", "remote"))

    def count_request(self, path: str, outcome: str, seconds: float) -> None:
        """Count a request that has ended; `path` is one of COUNTED_PATHS."""
        self._request_times[path].observe(seconds)
        (self._requests_done[path] if outcome == "done" else self.requests.labels(path, outcome)).inc()

    def families(self) -> list[MetricFamily]:
        """Return the metrics of this front end and of its process."""
        return [*snapshot(self.registry), *process_metrics()]

    def counted(self) -> list[MetricFamily]:
        """Return what the history of the last minutes is made of (history.py), which is asked for more often."""
        metrics = (self.requests, self.prompt_tokens, self.output_tokens, self.cached_tokens, self.pulled_tokens)
        return as_families(each for one in (*metrics, self.replans, self.ttft, self.tbt) for each in one.collect())

    def count_prefill(
        self, num_prompt_tokens: int, reply: PrefillReply, ttft_s: float | None, queue_s: float | None = None
    ) -> None:
        self.prompt_tokens.inc(num_prompt_tokens)
        if reply.local_tokens:
            self._local.inc(reply.local_tokens)
        if reply.pool_tokens:
            self._pool.inc(reply.pool_tokens)
            self._dram.inc(reply.pool_tokens - reply.ssd_tokens - reply.remote_tokens)
            self._ssd.inc(reply.ssd_tokens)
            self._remote.inc(reply.remote_tokens)
        if reply.pool_nbytes:
            self.pool_nbytes.inc(reply.pool_nbytes)
        if ttft_s is not None:
            self.ttft.observe(ttft_s)
        if queue_s is not None:
            self.queue_time.observe(queue_s)


class Roles(StrEnum):
    """Which metrics a page has: only this front end's, those of all roles, or (auto) those of all roles on the page of
    one front end only."""

    AUTO = "auto"
    OWN = "own"
    ALL = "all"


async def metrics_page(
    own: FrontendMetrics,
    connections: Connections,
    cluster: ClusterDirectory,
    *,
    name: str,
    model_name: str,
    roles: Roles = Roles.AUTO,
) -> bytes:
    """Return the Prometheus text of all roles that answer within SCRAPE_TIMEOUT_S; the others are counted. What vLLM
    measures too is there under vLLM's names as well, with the label `model_name`.

    With several front ends and `roles` AUTO, the shared roles are on the page of one front end only, so that no series
    is collected twice. Front ends that share a port count as one: whichever answers shows all of them.
    """
    comment, parts = b"", list[RoleMetrics]()
    if roles is not Roles.OWN:
        parts = await _scrape_siblings(own, connections)
    if roles is Roles.ALL or (roles is Roles.AUTO and await _claims_shared(connections)):
        parts += await _scrape_all(own, connections, cluster)
    elif roles is Roles.AUTO:
        comment = b"# The other roles are on the page of another front end; /metrics?roles=all shows them here too.\n"
    itself = RoleMetrics("frontend", name, own.families())
    return comment + metrics_text(with_vllm_names(part, model_name) for part in (itself, *parts))


async def _claims_shared(connections: Connections) -> bool:
    """Return whether this page shows the shared roles. True without a conductor: the scrape then counts it."""
    try:
        for number in range(connections.num_conductors):  # all front ends ask the first one that answers
            try:
                conductor = await connections.conductor_at(number)
                return await conductor.call(ClaimSharedMetrics(group=connections.group), timeout_s=SCRAPE_TIMEOUT_S)
            except Unavailable:
                continue
    except MoonpoolError:
        return True
    return True


async def _scrape_siblings(own: FrontendMetrics, connections: Connections) -> list[RoleMetrics]:
    answers = await asyncio.gather(*(_ask_sibling(connections, name) for name in connections.siblings))
    own.unanswered.inc(sum(parts is None for parts in answers))
    return [part for parts in answers for part in parts or ()]


async def _ask_sibling(connections: Connections, name: str) -> list[RoleMetrics] | None:
    try:
        async with asyncio.timeout(SCRAPE_TIMEOUT_S):
            client = await connections.sibling(name)
    except (MoonpoolError, TimeoutError):
        return None
    return await _ask(client, "frontend", name)


async def _scrape_all(own: FrontendMetrics, connections: Connections, cluster: ClusterDirectory) -> list[RoleMetrics]:
    master = asyncio.create_task(_ask_master(connections))  # it answers even without a conductor
    asked: list[Coroutine[Any, Any, list[RoleMetrics] | None]] = []
    try:
        workers = (await cluster.status(SCRAPE_TIMEOUT_S)).workers
        asked = [_ask_conductor(connections, number) for number in range(connections.num_conductors)]
        asked += [_ask_worker(connections, each) for each in workers]
    except MoonpoolError:
        own.unanswered.inc()
    answers = await asyncio.gather(master, *asked)
    own.unanswered.inc(sum(parts is None for parts in answers))
    return [part for parts in answers for part in parts or ()]


async def _ask_master(connections: Connections) -> list[RoleMetrics] | None:
    """Return the metrics of the master and of the nodes, which report to it."""
    try:
        async with asyncio.timeout(SCRAPE_TIMEOUT_S):
            client = await connections.master()
            if client is None:
                return []
            nodes = await client.call(GetReportedMetrics(), timeout_s=SCRAPE_TIMEOUT_S)
    except (MoonpoolError, TimeoutError):
        return None
    master = await _ask(client, "master", "master")
    return None if master is None else [*master, *nodes]


async def _ask_conductor(connections: Connections, number: int) -> list[RoleMetrics] | None:
    try:
        async with asyncio.timeout(SCRAPE_TIMEOUT_S):
            client = await connections.conductor_at(number)
    except (MoonpoolError, TimeoutError):
        return None
    return await _ask(client, CONDUCTOR, numbered_name(CONDUCTOR, number))


async def _ask_worker(connections: Connections, worker: WorkerStatus) -> list[RoleMetrics] | None:
    info = worker.info
    try:
        async with asyncio.timeout(SCRAPE_TIMEOUT_S):
            client = await connections.worker(WorkerRef(info.name, info.address, info.incarnation))
    except (MoonpoolError, TimeoutError):
        return None
    return await _ask(client, info.role.value, info.name)


async def _ask(client: AsyncClient, role: str, name: str) -> list[RoleMetrics] | None:
    try:
        return [RoleMetrics(role, name, await client.call(GetMetrics(), timeout_s=SCRAPE_TIMEOUT_S))]
    except MoonpoolError:
        return None
