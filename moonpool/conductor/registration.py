"""What the conductor keeps about a registered worker and about an open request. Pure."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from moonpool.base.cluster import ReportWorker, WorkerInfo, WorkerLoad, WorkerRole
from moonpool.base.errors import IdentityMismatch
from moonpool.conductor.admission.forms import DecodeNow, Verdict
from moonpool.conductor.demand import UnmetWork
from moonpool.conductor.messages import WorkerRef, WorkerStatus
from moonpool.conductor.other_requests import OtherRequests
from moonpool.conductor.placement.policy import PlacementChoice, PlacementInput
from moonpool.conductor.placement.tables import Backlog

LOOK_S = 0.5  # between two looks at the age of reports
_SILENT_TIMES = 3  # as long as a report may take to come: no report is on its way any more
_LEAST_SILENT_S = 3.0  # a host that is busy for a moment is no reason


class DecodeBatch(NamedTuple):
    """A decode worker's batch, including requests that are still at their prefill worker. `free_pages` is below 0 if
    requests wait for some."""

    num_seqs: int
    kv_tokens: int
    free_pages: int


@dataclass(eq=False, slots=True)
class Registration:
    """A registered worker, with the requests that were sent to it. Of the requests sent to a decode worker, some are
    still at their prefill worker; the others have joined. `others` are those that other conductors have sent."""

    info: WorkerInfo
    load: WorkerLoad
    slot: int  # its row in the table of its role
    ref: WorkerRef
    backlog: Backlog = field(default_factory=Backlog)
    num_decoding: int = 0
    decoding_tokens: int = 0
    unreported_pages: int = 0  # of prompts that were sent here and were not here yet at the last report
    num_joined: int = 0
    joined_tokens: int = 0
    others: OtherRequests = field(default_factory=OtherRequests)
    is_overdue: bool = False  # its engine, by its last report
    num_looks: int = 0  # of this conductor since the last report
    asked_s: float = 0.0  # the interval that this conductor asks for

    @property
    def is_late(self) -> bool:
        """Whether the engine or the reports do not go on. Looks are counted, not seconds: while this process stands
        still it does not look, and that time does not count."""
        silent_s = max(_LEAST_SILENT_S, _SILENT_TIMES * self.info.report_every_s) + self.asked_s
        return self.is_overdue or self.num_looks * LOOK_S > silent_s

    def reported(self, call: ReportWorker, asked_s: float) -> None:
        self.load, self.is_overdue, self.num_looks, self.asked_s = call.load, call.is_overdue, 0, asked_s

    @property
    def is_prefill(self) -> bool:
        return self.info.role is WorkerRole.PREFILL

    @property
    def assigned(self) -> int:
        return len(self.backlog) + self.num_decoding

    @property
    def decode_now(self) -> DecodeNow:
        """The larger of the requests known to have joined and the batch that the worker reports: reports lag, and
        answers have grown beyond their prompts."""
        load, others = self.load, self.others
        return DecodeNow(
            max(self.num_joined + others.num_decoding, load.num_running),
            max(self.joined_tokens + others.decoding_tokens, load.running_tokens),
        )

    @property
    def decode_load(self) -> DecodeBatch:
        """The larger of the requests known to be sent to the worker and the batch that it reports, as above. Free pages
        are those that the worker reports, less those that requests wait for there, less those of prompts that it has
        not reported yet."""
        load, others = self.load, self.others
        return DecodeBatch(
            num_seqs=max(self.num_decoding + len(others.answers), load.num_running + load.num_waiting),
            kv_tokens=max(self.decoding_tokens + others.answer_tokens, load.running_tokens),
            free_pages=load.free_pages - load.waiting_pages - self.unreported_pages,
        )

    @property
    def decode_pages(self) -> tuple[int, int]:
        """The free pages and all pages."""
        return self.decode_load.free_pages, self.info.num_pages

    def status(self, indexed_blocks: int) -> WorkerStatus:
        return WorkerStatus(
            info=self.info,
            load=self.load,
            indexed_blocks=indexed_blocks,
            assigned=self.assigned,
            is_late=self.is_late,
        )

    def count_decoding(self, sign: int, num_tokens: int, unreported_pages: int) -> None:
        """Count one more (+1) or one less (-1) request that was sent to this decode worker."""
        self.num_decoding += sign
        self.decoding_tokens += sign * num_tokens
        self.unreported_pages += sign * unreported_pages

    def count_joined(self, sign: int, num_tokens: int) -> None:
        """Count one more (+1) or one less (-1) request that has joined this decode worker's batch."""
        self.num_joined += sign
        self.joined_tokens += sign * num_tokens


@dataclass(eq=False, slots=True)
class OpenRequest:
    """A request that was sent to workers. `prefill` is None once that worker was lost; `stages` are the other workers
    of its pipeline. `unreported_pages` are those of its prompt until its decode worker reports that it is there."""

    request_id: str
    owner: Hashable
    tenant: str
    keys: list[bytes]
    prints: list[int]
    num_tokens: int
    unreported_pages: int
    prefill: Registration | None
    decode: Registration
    stages: Sequence[Registration] = ()
    weight: float = 1.0  # of the tenant
    has_joined: bool = False


class WeighedRequest(NamedTuple):
    """A request with the workers chosen for it and the verdict of admission."""

    prints: list[int]
    inputs: PlacementInput
    choice: PlacementChoice
    verdict: Verdict
    resumes: bool = False  # an answer that goes on at its decode worker, with its KV from the pool

    @property
    def work(self) -> UnmetWork:
        """What the workers would have to do for it."""
        return UnmetWork(self.choice.prefill.service_s, 1, self.inputs.request.num_tokens)

    def on_ssd(self, keys: Sequence[bytes]) -> list[bytes]:
        """Return the keys of the blocks on SSD that its worker would pull if they were in memory."""
        local, leading = self.choice.plan.local, self.inputs.leading
        end = local + self.inputs.prices.in_memory().best_plan(local, None).pulled
        return [keys[at] for at in leading.on_ssd if local <= at < end]


def check_parity(info: WorkerInfo, registered: Sequence[WorkerInfo]) -> None:
    """Raise IdentityMismatch if the worker cannot share KV with those of other names, which agree with each other."""
    other = next((one for one in registered if one.name != info.name), info)
    if _parity(other) != _parity(info):
        raise IdentityMismatch(
            f"worker {info.name} ({_describe(info)}) cannot share KV with the workers here ({_describe(other)})"
        )


def _parity(info: WorkerInfo) -> tuple[bytes, str, int]:
    return info.identity, info.model, info.block_tokens


def _describe(info: WorkerInfo) -> str:
    return f"model {info.model}, identity {info.identity.hex()[:16]}, {info.block_tokens} tokens a block"
