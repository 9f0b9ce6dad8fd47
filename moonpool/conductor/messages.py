"""What the front end asks the conductor. Workers speak base/cluster.py to the same service."""

from __future__ import annotations

import msgspec

from moonpool.base.cluster import WorkerInfo, WorkerLoad
from moonpool.base.ranges import ChainKey, Count, Positive, Seconds, Signed, Tokens
from moonpool.base.rpc import Call, StreamCall


class WorkerRef(msgspec.Struct, frozen=True, array_like=True):
    name: str
    address: str
    incarnation: int


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """One prefill worker as it was weighed: all in seconds and blocks, kept in the decision record.

    `congestion_s` is the part of `transfer_s` that others cause; in `overlap_s` loading and computing go on together.
    """

    worker: str
    local_blocks: int
    pulled_blocks: int
    transfer_s: float
    queue_s: float
    prefill_s: float
    ssd_blocks: int = 0  # of the pulled ones, on SSD alone
    congestion_s: float = 0.0
    overlap_s: float = 0.0

    @property
    def service_s(self) -> float:
        """How long the worker is busy with it."""
        return self.transfer_s + self.prefill_s - self.overlap_s

    @property
    def ttft_s(self) -> float:
        return self.queue_s + self.service_s


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """Where a request goes, and what was expected of it.

    `max_pool_blocks`: of the pool's leading blocks the prefill worker takes no more than this many, the rest is
    computed faster than it is fetched; None where nothing speaks against what it finds.
    """

    request_id: str
    prefill: WorkerRef
    decode: WorkerRef
    pool_blocks: int  # leading blocks that the index believes to be in the pool
    ttft_s: float
    tbt_s: float
    candidates: tuple[Candidate, ...]  # the best few, the chosen one first
    max_pool_blocks: int | None = None
    waited_s: float = 0.0  # for its turn, in the conductor; part of ttft_s
    asks_before_decode: bool = False  # the front end asks BeforeDecode instead of saying PrefillEnded


class Route(Call[Decision]):
    """Raises Overloaded when no pair meets the targets, Unavailable when there are no workers, PromptTooLong when the
    prompt is longer than the KV memory of every worker.

    It may be answered late: a request that does not fit now waits for its turn, higher priorities first and tenants in
    fair turns (waiting_room.py). Cancelling the call takes it out. Routing a request again takes its earlier assignment
    back first.
    """

    request_id: str
    keys: list[ChainKey]
    num_tokens: Tokens
    max_tokens: Tokens
    exclude: tuple[str, ...] = ()  # workers that just failed this request
    tenant: str = ""
    priority: Signed = 0  # the highest first


class PrefillEnded(Call[None]):
    """Takes the request out of its prefill worker's queue, done or not. Unknown requests are ignored."""

    request_id: str


class BeforeDecode(Call[None]):
    """As PrefillEnded, and asks whether the answer may be written: Overloaded when tokens would come too far apart by
    now, so that the prefill was for nothing."""

    request_id: str


class RequestEnded(Call[None]):
    """Takes the request out of both queues and completes its decision record. Unknown requests are ignored.

    A request whose front end's connection ends is taken out as well, as "abandoned".
    """

    request_id: str
    ttft_s: Seconds | None = None
    cached_tokens: Count = 0
    pool_tokens: Count = 0
    output_tokens: Count = 0
    outcome: str = "done"
    tbt_s: Seconds | None = None  # mean time between its tokens


class WorkerStatus(msgspec.Struct, frozen=True, kw_only=True):
    info: WorkerInfo
    load: WorkerLoad
    indexed_blocks: int
    assigned: int


class PredictionError(msgspec.Struct, frozen=True, kw_only=True):
    """Relative errors (predicted / measured - 1) of one model's last predictions: of their size, and their mean."""

    model: str  # prefill, decode, transfer, transfer_ssd; ttft and tbt of whole requests; decode_load: sequences
    count: int = 0
    p50: float = 0.0
    p90: float = 0.0
    bias: float = 0.0


class FetchOrCompute(msgspec.Struct, frozen=True, kw_only=True):
    """Where fetching KV begins to beat computing it, by what was measured (costs/crossover.py)."""

    min_tokens: int | None  # shortest prefix worth fetching; None: none is
    at_tokens: int
    break_even_nbytes_s: float  # for a prefix of `at_tokens`; infinite where nothing would do
    measured_nbytes_s: float
    num_prefills: int  # samples behind it
    num_pulls: int


class ConductorStatus(msgspec.Struct, frozen=True, kw_only=True):
    workers: tuple[WorkerStatus, ...]
    pool_blocks: int
    pool_connected: bool
    counters: dict[str, int]
    policy: str = ""
    num_waiting: int = 0  # requests that wait for their turn
    predictions: tuple[PredictionError, ...] = ()
    fetch_or_compute: FetchOrCompute | None = None  # None without workers


class Status(Call[ConductorStatus]):
    pass


class ClaimSharedMetrics(Call[bool]):
    """Whether the page of this front end shall have the metrics of the roles that all front ends share.

    True for the one that was asked for its page first, until it is gone or was not asked for a while.
    """


class DecisionRecord(msgspec.Struct, kw_only=True):
    """What became of one request: decided, predicted and measured. None is what is not (or never) known."""

    request_id: str
    routed_at_s: float  # wall clock, seconds since 1970
    num_tokens: int
    max_tokens: int
    attempt: int = 1  # 2 and more: routed again after a worker failed it
    prefill: str | None = None
    decode: str | None = None
    pool_blocks: int = 0
    candidates: tuple[Candidate, ...] = ()
    predicted_ttft_s: float | None = None
    predicted_tbt_s: float | None = None
    measured_ttft_s: float | None = None
    measured_tbt_s: float | None = None
    cached_tokens: int = 0
    pool_tokens: int = 0
    output_tokens: int = 0
    outcome: str = "open"  # then what RequestEnded says, an error's code when refused, or "abandoned"
    priority: int = 0
    waited_s: float = 0.0  # for its turn, before it was sent or refused
    reason: str | None = None  # why it was refused: a sentence


class Records(Call[list[DecisionRecord]]):
    """The newest decision records that match, newest last. What is None does not matter."""

    limit: Positive = 100
    outcome: str | None = None
    tenant: str | None = None
    worker: str | None = None


class ExplainedRecord(msgspec.Struct, frozen=True):
    """`lines` are sentences (records/explain.py)."""

    record: DecisionRecord
    lines: tuple[str, ...]


class ExplainRequest(Call[list[ExplainedRecord]]):
    """What became of a request, by its own id or by that of the client's request, which has one for each choice.

    Empty when there is no such record, or it is another tenant's than the one asked for.
    """

    request_id: str
    tenant: str | None = None


class ExportTrace(StreamCall[bytes]):
    """The records as lines of Mooncake's JSONL, oldest first (records/export.py), many lines an item.

    By default with the pool's own blocks, so that a replay finds what was found.
    """

    tenant: str | None = None
    trace_block_tokens: Positive | None = None
