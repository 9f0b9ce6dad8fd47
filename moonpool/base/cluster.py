"""What workers tell the conductor about themselves. Service name "conductor".

A registration lives as long as the connection it came over: a worker that dies is gone at once. Reports are
numbered from 1 after each registration; the first one's `cached` is the whole content of the worker's pages.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, ClassVar, TypeAlias

import msgspec
from msgspec import Meta

from moonpool.base.ranges import ChainKey, Count, Positive, RequestName, Seconds, Tokens, Weight, Whole
from moonpool.base.rpc import Call, SilenceLimits

# Of connections that a request waits for, so that a machine that is cut off delays it by 3 s and not by 10. The
# conductor's clients all ping at this interval.
REQUEST_LIMITS = SilenceLimits(ping_interval_s=1.0, silence_limit_s=3.0)
CONDUCTOR_SERVICE = "conductor"
WORKER_SERVICE = "worker"
LAUNCHER_SERVICE = "launcher"
FRONTEND_SERVICE = "frontend"  # asked by the other front ends of its port
MAX_REPORTED = 4096  # requests, and samples of a kind, that one report names; further requests are in the next ones


class WorkerRole(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"


class WorkerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Who a worker is and how to reach it."""

    name: str
    role: WorkerRole  # its current one: which requests it gets
    address: str
    incarnation: Whole
    identity: bytes  # digest of its CacheIdentity
    model: str
    block_tokens: Positive
    num_pages: Positive
    max_num_seqs: Positive
    page_nbytes: Whole
    num_layers: Positive = 1  # that are loaded one by one while others are computed; 1: loading comes first
    step_tokens: Whole = 0  # computed in one step, the only one that loading overlaps with; 0: the whole prompt
    pipeline: Positive = 1  # workers that compute a long prompt together, this one included; 1: it is computed alone
    fixed: bool = True  # only a person changes its role; False: the conductor may, as the load moves
    lease: Whole = 0  # of the conductor that last changed its role
    kind: str = ""  # the processor that it computes with; workers of one kind share cost models
    leaves: bool = False  # it drains: it takes nothing new, and its process ends when it has nothing left to do
    host: str = ""  # its machine, as nodes of the pool name theirs; "": not known
    report_every_s: Seconds = 2.0  # a report comes at least this often


class AssignedRole(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker should be from now on. It ends what it has begun in its old role, or lets it go on elsewhere.

    With `leaves` it does so, takes nothing new, and then its process ends. `lease` is the number of the
    lease by which the conductor may change roles: a worker refuses a lower number than it has seen.
    """

    role: WorkerRole
    fixed: bool
    leaves: bool = False
    lease: Whole = 0


class WorkerLoad(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's queues right now."""

    num_waiting: Count = 0
    num_running: Count = 0
    waiting_tokens: Count = 0  # prompt tokens not yet computed
    running_tokens: Count = 0  # tokens whose KV the running batch reads at each step
    free_pages: Count = 0  # free now or by eviction; pages reserved for requests on their way are not
    waiting_pages: Count = 0  # that requests need which wait here for pages, new ones and preempted ones


class PrefillSample(msgspec.Struct, frozen=True, array_like=True):
    """One measured prefill, for the cost model: it computed `num_tokens - prefix_tokens` tokens."""

    num_tokens: Count
    prefix_tokens: Count
    seconds: Seconds


class DecodeSample(msgspec.Struct, frozen=True, array_like=True):
    """One measured decode step."""

    num_seqs: Count
    kv_tokens: Count
    seconds: Seconds


class PullSample(msgspec.Struct, frozen=True, array_like=True):
    """One measured pull from the pool."""

    nbytes: Whole
    seconds: Seconds
    ssd_nbytes: Whole = 0  # of `nbytes`, read from SSD
    node: str = ""  # that all bytes came from; "": several, or not known
    is_near: bool = False  # all bytes came from the worker's own machine


class ReportedRequest(msgspec.Struct, frozen=True, array_like=True):
    """What is left of a request's prompt, at a prefill worker or, until it decodes, at its decode worker.

    The prompt has `reused_tokens + uncomputed_tokens` tokens. The KV of the first ones is here, or will be when the
    prompt is begun. A decode worker computes no prompt: to it all tokens are uncomputed until the request decodes, and
    none afterwards. `tenant` and `weight` are those of a prompt.
    """

    request_id: RequestName
    uncomputed_tokens: Tokens
    reused_tokens: Tokens = 0
    max_tokens: Tokens = 0  # of the answer that is decoded here; 0: another worker decodes it
    tenant: RequestName = ""
    weight: Weight = 1.0


_Requests: TypeAlias = Annotated[tuple[ReportedRequest, ...], Meta(max_length=MAX_REPORTED)]
_RequestNames: TypeAlias = Annotated[tuple[RequestName, ...], Meta(max_length=MAX_REPORTED)]


class RegisterWorker(Call[None]):
    """Replaces an earlier registration of that name. A worker that leaves registers once more, so that every conductor,
    also one that starts later, knows that it drains; it then sends no reports. IdentityMismatch when the other workers
    serve another model, weights, dtype, layout or block size: their KV could not be shared."""

    info: WorkerInfo


class WorkerLeft(Call[None]):
    """The worker was drained and its process ends for good: it is not reported as lost."""

    outlives_caller: ClassVar[bool] = True
    name: str
    incarnation: Whole


class RetiredWorkers(Call[None]):
    """All workers that this launcher has run and does not start again: they were drained, or are told to. It tells each
    conductor so when it connects, and after every change; this replaces what it said before on that connection."""

    names: tuple[str, ...]


class CountOthers(Call[int]):
    """Return how many workers of that role there are, without the one of that name and without those that leave."""

    name: str
    role: WorkerRole


class ReportAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The conductor's answer to a report. `assigned` is the role that the worker should take: it then registers again
    with that role; None: nothing changes."""

    interval_s: Seconds = 0.0  # until the next report, at least: the conductor can read no more from all workers
    assigned: AssignedRole | None = None


class ReportWorker(Call[ReportAnswer]):
    """A key is in at most one of `cached` and `dropped`: what it is after all changes since the last report. `arrived`
    are the requests that came to this decode worker since then: `load` counts their pages, as reserved or as waiting.
    The engine's task under way has taken `step_s` seconds without progress, and is overdue after `step_due_s`; `load`
    and changes are those before it.

    `requests` are those whose numbers have changed since the last report, new ones in the order in which they came, and
    `gone` those that are no longer here. The first report after a registration begins the list. What does not fit into
    one report is in the next ones. A request is in at most one of the two.

    NotFound when this incarnation is not registered or a report is missing: register again and report all.
    """

    name: str
    incarnation: Whole
    sequence: Whole
    load: WorkerLoad
    cached: tuple[ChainKey, ...] = ()
    dropped: tuple[ChainKey, ...] = ()
    prefills: Annotated[tuple[PrefillSample, ...], Meta(max_length=MAX_REPORTED)] = ()
    decodes: Annotated[tuple[DecodeSample, ...], Meta(max_length=MAX_REPORTED)] = ()
    pulls: Annotated[tuple[PullSample, ...], Meta(max_length=MAX_REPORTED)] = ()
    arrived: _RequestNames = ()
    requests: _Requests = ()
    gone: _RequestNames = ()
    step_s: Seconds = 0.0
    step_due_s: Seconds = 0.0

    @property
    def is_overdue(self) -> bool:
        """Whether the engine's task should have gone on by now."""
        return 0 < self.step_due_s <= self.step_s
