"""The calls of front ends to the conductor. Workers use the calls of base/cluster.py with the same service."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from moonpool.base.cluster import WorkerInfo, WorkerLoad, WorkerRole
from moonpool.base.ranges import ChainKey, Count, Positive, Seconds, Signed, Tokens, Weight
from moonpool.base.rpc import Call, StreamCall

# Callers that change workers ask again for this long: when the conductor that may change them ends, another one gets
# the right some seconds later (role_lease.py).
TAKEOVER_S = 10.0


class WorkerRef(msgspec.Struct, frozen=True, array_like=True):
    name: str
    address: str
    incarnation: int


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """The predicted terms of one prefill worker, in seconds and blocks, kept in the decision record.

    `congestion_s` is the part of `transfer_s` that other pulls cause; during `overlap_s` the worker loads and computes
    at the same time. `pages_s` depends on the decode worker and is the same for all candidates. So is `handoff_s`: the
    client has its first token by then.
    """

    worker: str
    local_blocks: int
    pulled_blocks: int
    transfer_s: float
    queue_s: float
    prefill_s: float
    ssd_blocks: int = 0  # pulled blocks that are on SSD only
    congestion_s: float = 0.0
    overlap_s: float = 0.0
    stages: tuple[str, ...] = ()  # workers that compute the first layers, before `worker`, which computes the last ones
    chunk_tokens: int = 0  # of a prompt that passes `stages`
    pages_s: float = 0.0  # until the decode worker has pages for the request; before that no worker begins with it
    handoff_s: float = 0.0  # from the first token until the decode worker has the KV; not part of `ttft_s`

    @property
    def service_s(self) -> float:
        """How long the worker is busy with the request."""
        return self.transfer_s + self.prefill_s - self.overlap_s

    @property
    def ttft_s(self) -> float:
        return max(self.pages_s, self.queue_s) + self.service_s


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """Where a request goes, and the predictions for it.

    `max_pool_blocks`: the prefill worker takes at most this many of the pool's leading blocks, because computing the
    rest is predicted to be faster; None: no limit.
    """

    request_id: str
    prefill: WorkerRef
    decode: WorkerRef
    pool_blocks: int  # leading blocks in the pool, by the prefix index
    ttft_s: float
    tbt_s: float
    candidates: tuple[Candidate, ...]  # the best few, the chosen one first
    max_pool_blocks: int | None = None
    waited_s: float = 0.0  # in the conductor's queue; part of ttft_s
    asks_before_decode: bool = False  # the front end calls BeforeDecode instead of PrefillEnded
    # prefill workers that compute the first layers, chunk by chunk, before `prefill`, which computes the last ones
    stages: tuple[WorkerRef, ...] = ()
    chunk_tokens: int = 0
    reused_tokens: int = 0  # of the prompt, which `prefill` is predicted not to compute
    # the decode worker, which is also `prefill`, brings the KV from the pool itself and goes on
    resumes: bool = False


class Route(Call[Decision]):
    """Raises Overloaded when no pair of workers meets the targets, Unavailable when there are no workers, PromptTooLong
    when the prompt is longer than the KV memory of every worker.

    The answer may come late: a request that does not fit now waits in the queue, in fair turns of the tenants and by
    the priorities of each tenant's own requests (request_queue.py). Cancelling the call removes the request from the
    queue. Routing a request again first undoes its earlier assignment.
    """

    request_id: str
    keys: list[ChainKey]
    num_tokens: Tokens
    max_tokens: Tokens
    exclude: tuple[str, ...] = ()  # workers that just failed this request
    tenant: str = ""
    weight: Weight = 1.0  # of the tenant: its share relative to those of others
    priority: Signed = 0  # among the tenant's own requests, the highest first
    has_output: bool = False  # the last tokens are those of an answer that goes on
    is_stored: bool = False  # the pool has all full blocks: the last decode worker has put them there


class PrefillEnded(Call[None]):
    """Removes the request from its prefill worker's queue, done or not. Unknown requests are ignored."""

    outlives_caller: ClassVar[bool] = True
    request_id: str


class BeforeDecode(Call[None]):
    """As PrefillEnded, and asks whether the request may decode. Raises Overloaded when the time between tokens would
    miss its target now; the prefill was then wasted."""

    request_id: str


class PrefillParts(msgspec.Struct, frozen=True, kw_only=True):
    """Where the time of a prompt went, as its prefill worker measured it. Loading overlaps with computing, so the parts
    may add up to more than the time to first token; the hand-off follows it."""

    queue_s: Seconds  # at the worker
    pull_s: Seconds = 0.0  # part of `compute_s` or beside it
    compute_s: Seconds  # waits for pulls included
    handoff_s: Seconds | None = None  # from the first token until the decode worker had the KV; None: it had not
    # Seconds after the start of the pull at which each of as many equal parts of the layers was in place: of each layer
    # with up to 32 layers; empty without a pull, and on a GPU, which copies what the host does not wait for.
    pull_layers_s: tuple[Seconds, ...] = ()


class RequestEnded(Call[None]):
    """Removes the request from both queues and completes its decision record. Unknown requests are ignored.

    When a front end's connection ends, its requests are removed as "abandoned".
    """

    outlives_caller: ClassVar[bool] = True
    request_id: str
    ttft_s: Seconds | None = None
    cached_tokens: Count = 0
    pool_tokens: Count = 0
    output_tokens: Count = 0
    outcome: str = "done"
    tbt_s: Seconds | None = None  # mean time between its tokens
    ssd_tokens: Count = 0  # of `pool_tokens`, read from SSD
    remote_tokens: Count = 0  # of `pool_tokens`, read from the memory of another machine
    parts: PrefillParts | None = None


class WorkerStatus(msgspec.Struct, frozen=True, kw_only=True):
    info: WorkerInfo
    load: WorkerLoad
    indexed_blocks: int
    assigned: int
    is_late: bool = False  # its engine or its reports do not go on, so it gets no requests while others of its role do


class PredictionError(msgspec.Struct, frozen=True, kw_only=True):
    """Relative errors (predicted / measured - 1) of one model's last predictions: quantiles of their size, and the
    mean."""

    model: str  # prefill, decode, transfer, transfer_ssd; ttft and tbt of whole requests; decode_load: sequences
    count: int = 0
    p50: float = 0.0
    p90: float = 0.0
    bias: float = 0.0


class FetchOrCompute(msgspec.Struct, frozen=True, kw_only=True):
    """From which prefix length on fetching KV is faster than computing it, by measurements (crossover.py)."""

    min_tokens: int | None  # the shortest prefix worth fetching; None: no prefix is
    at_tokens: int
    computed_tokens_s: float = 0.0  # tokens per second that a worker computes of a prefix of `at_tokens`
    pulled_tokens_s: float = 0.0  # tokens per second of the same prefix that a worker pulls from the pool
    break_even_nbytes_s: float  # for a prefix of `at_tokens`; infinite: no bandwidth suffices
    measured_nbytes_s: float
    num_prefills: int  # samples of the prefill model
    num_pulls: int


class ConductorStatus(msgspec.Struct, frozen=True, kw_only=True):
    workers: tuple[WorkerStatus, ...]
    pool_blocks: int
    pool_connected: bool
    counters: dict[str, int]
    policy: str = ""
    num_waiting: int = 0  # requests in the queue
    predictions: tuple[PredictionError, ...] = ()
    fetch_or_compute: FetchOrCompute | None = None  # None without workers
    leaving: tuple[WorkerInfo, ...] = ()  # workers that drain: they get no requests
    # Workers that were told to leave and have ended, or that are not started again: none of them is missing.
    left: tuple[str, ...] = ()
    refused: dict[str, int] = {}  # requests refused since the conductor started, by cause
    num_open: int = 0  # requests that were sent to workers and have not ended
    ttft_slo_s: float | None = None  # targets; None: there is none
    tbt_slo_s: float | None = None


class Status(Call[ConductorStatus]):
    pass


class SetRole(Call[None]):
    """Ask a worker to take a role and keep it; None: the elastic rule may change its role from now on.

    The worker follows with its next report, within about a second; Status shows it. It ends what it has begun in its
    old role. NotFound for an unknown worker, InvalidInput for the last worker of a role.
    """

    worker: str
    role: WorkerRole | None


class DrainWorker(Call[None]):
    """Tell a worker to leave: it takes no new requests, ends those that it has, and then its process ends. A launcher
    does not start it again.

    NotFound for an unknown worker; InvalidInput, without `force`, for the last worker of a role.
    """

    worker: str
    force: bool = False


class ClaimSharedMetrics(Call[bool]):
    """Whether the metrics page of this front end includes the roles that all front ends share.

    True for the first front end that asks, until it disconnects or has not asked for a while. Front ends that share a
    port give the same `group` and count as one: a reader of the port cannot choose between them.
    """

    group: str = ""


class EarlierAttempt(msgspec.Struct, frozen=True, kw_only=True):
    """An attempt at a request before the one in its DecisionRecord."""

    routed_at_s: float  # wall clock, as in DecisionRecord
    ended_at_s: float
    prefill: str | None
    decode: str | None
    outcome: str  # "rerouted" if the conductor was not told how it ended
    reason: str | None = None
    predicted_ttft_s: float | None = None
    waited_s: float = 0.0
    output_tokens: int = 0


class DecisionRecord(msgspec.Struct, kw_only=True):
    """What was decided, predicted and measured for one request. None: not known (yet)."""

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
    outcome: str = "open"  # then the outcome of RequestEnded, an error's code if refused, or "abandoned"
    priority: int = 0
    waited_s: float = 0.0  # in the queue, before it was sent or refused
    reason: str | None = None  # why it was refused, a sentence
    ended_at_s: float | None = None  # wall clock; None: it is still on its way
    ssd_tokens: int = 0  # of `pool_tokens`, as in RequestEnded
    remote_tokens: int = 0
    parts: PrefillParts | None = None
    earlier: tuple[EarlierAttempt, ...] = ()  # the attempts before this one, oldest first; the newest few


DEFAULT_RECORDS = 100


class Records(Call[list[DecisionRecord]]):
    """The newest decision records that match, newest last. A field that is None matches everything."""

    limit: Positive = DEFAULT_RECORDS
    outcome: str | None = None
    tenant: str | None = None
    worker: str | None = None


class RecordRow(msgspec.Struct, frozen=True, array_like=True):
    """A DecisionRecord as JSON."""

    routed_at_s: float
    json: bytes


class RecordRows(Call[list[RecordRow]]):
    """As Records. A front end passes the rows on as they are, a thousand every two seconds for an open page: it answers
    requests meanwhile, and would otherwise decode all of them and encode them again."""

    wanted: Records


class ExplainedRecord(msgspec.Struct, frozen=True):
    """`lines` are sentences (records/explain.py)."""

    record: DecisionRecord
    lines: tuple[str, ...]


class ExplainRequest(Call[list[ExplainedRecord]]):
    """What happened to a request, by its own id or by the id of the client's request, which has one for each choice.

    Empty if there is no such record, or if it belongs to another tenant.
    """

    request_id: str
    tenant: str | None = None


class ExportTrace(StreamCall[bytes]):
    """The records as lines of Mooncake's JSONL, oldest first (records/export.py), many lines per item.

    By default with the pool's own block size, so that a replay reuses what was reused.
    """

    tenant: str | None = None
    trace_block_tokens: Positive | None = None
