"""The answer of GET /v1/status: what the service is doing, as typed JSON. Types only.

Names end in their unit. A rate (`_nbytes_s`) is per second over the last seconds; 0 until two readings exist.
"""

from __future__ import annotations

import msgspec

from moonpool.conductor.messages import FetchOrCompute, PredictionError
from moonpool.frontend.history import HistoryPoint


class HealthSummary(msgspec.Struct, frozen=True):
    """`status` is ok, degraded (requests are served) or unavailable; `sentence` explains it."""

    status: str
    sentence: str
    missing: list[str]


class WorkerRow(msgspec.Struct, frozen=True, kw_only=True):
    """`is_up` False: it is expected, or was there, and is not registered now; its figures are then the last ones.

    Pages: `num_pages` = used + reserved + cached + free. Cached pages hold KV that can be reused or evicted.
    """

    name: str
    role: str
    machine: str
    is_up: bool
    is_late: bool = False  # its engine or its reports do not go on; requests go to others
    is_elastic: bool = False
    num_running: int = 0
    num_waiting: int = 0
    waiting_tokens: int = 0
    max_num_seqs: int = 0
    num_pages: int = 0
    used_pages: int = 0
    reserved_pages: int = 0
    cached_pages: int = 0
    pool_read_nbytes_s: float = 0.0
    pool_written_nbytes_s: float = 0.0
    handoff_nbytes_s: float = 0.0


class SegmentRow(msgspec.Struct, frozen=True, kw_only=True):
    """One tier of one node. Eviction begins above `high_watermark` of the capacity."""

    tier: str  # dram or ssd
    status: str  # ok, away, waiting, draining or drained
    capacity_nbytes: int
    used_nbytes: int
    num_objects: int
    high_watermark: float


class NodeRow(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    machine: str
    is_up: bool
    segments: list[SegmentRow]


class PoolSummary(msgspec.Struct, frozen=True, kw_only=True):
    """`counters` are those of `moonpool stat`, since the master started. `is_up` False: the master does not answer."""

    is_up: bool
    num_objects: int = 0
    counters: dict[str, int] = {}


class RequestTotals(msgspec.Struct, frozen=True, kw_only=True):
    """Since the start of the front ends; `refused`, by cause, since the start of the conductor."""

    by_outcome: dict[str, int]
    refused: dict[str, int]
    num_replans: int
    prompt_tokens: int
    own_tokens: int
    dram_tokens: int
    ssd_tokens: int
    remote_tokens: int
    output_tokens: int


class HistoryReply(msgspec.Struct, frozen=True):
    """`points` are lists with one value per name in `fields`, oldest first, `period_s` apart."""

    period_s: float
    fields: tuple[str, ...]
    points: list[HistoryPoint]


class StatusReply(msgspec.Struct, frozen=True, kw_only=True):
    """All of it. Targets are None if the service has none."""

    at_s: float  # wall clock, seconds since 1970
    version: str
    model: str
    frontend: str
    started_at_s: float
    health: HealthSummary
    policy: str
    block_tokens: int
    ttft_slo_s: float | None
    tbt_slo_s: float | None
    num_running: int
    num_waiting: int
    totals: RequestTotals
    workers: list[WorkerRow]
    nodes: list[NodeRow]
    pool: PoolSummary | None  # None: the service has no pool
    predictions: tuple[PredictionError, ...]
    fetch_or_compute: FetchOrCompute | None
    history: HistoryReply
    has_tour: bool = False  # whether the live page may kill workers and fill the pool (serve --tour)
    tenant: str | None = None  # whose rows this reader may see; None: those of all tenants


def status_schema(ref: str) -> tuple[dict[str, object], dict[str, object]]:
    """Return the schema of the answer, and those of the types that it refers to by `ref`, for OpenAPI."""
    (schema,), types = msgspec.json.schema_components([StatusReply], ref_template=ref.replace("{model}", "{name}"))
    return schema, types
