"""All that the conductor knows: workers, what was sent to them, the prefix index, cost models and records. Pure.

Every method that needs the time gets it. `owner` is the front end (its connection) that a request came from.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

from moonpool.base.cluster import ReportWorker, WorkerInfo, WorkerLoad, WorkerRole
from moonpool.base.errors import IdentityMismatch, InvalidInput, MoonpoolError, NotFound
from moonpool.conductor.backlog import Backlog
from moonpool.conductor.estimate import CostModels
from moonpool.conductor.messages import Decision, DecisionRecord, RequestEnded, Route, WorkerRef, WorkerStatus
from moonpool.conductor.policy import Choice, DecodeView, Demand, PolicyConfig, PrefillView, choose
from moonpool.conductor.prefix_index import PrefixIndex
from moonpool.conductor.records import RecordRing


@dataclass(eq=False, slots=True)
class Registration:
    """One worker between registering and going, with the requests that were sent to it."""

    info: WorkerInfo
    load: WorkerLoad
    backlog: Backlog = field(default_factory=Backlog)
    decoding: dict[str, OpenRequest] = field(default_factory=dict)

    @property
    def ref(self) -> WorkerRef:
        return WorkerRef(self.info.name, self.info.address, self.info.incarnation)

    @property
    def assigned(self) -> int:
        return len(self.backlog) + len(self.decoding)


@dataclass(eq=False, slots=True)
class OpenRequest:
    """A request on its way. `prefill` is None once that worker was lost."""

    call: Route
    owner: Hashable
    pages: int
    prefill: Registration | None
    decode: Registration


class ConductorState:
    """Registrations are handed out so that a late goodbye of an old one cannot hurt its successor."""

    def __init__(self, policy: PolicyConfig, index: PrefixIndex, num_records: int) -> None:
        self.index = index
        self.costs = CostModels()
        self.records = RecordRing(num_records)
        self.counters: Counter[str] = Counter()
        self._policy = policy
        self._workers: dict[str, Registration] = {}
        self._open: dict[str, OpenRequest] = {}

    @property
    def num_open(self) -> int:
        return len(self._open)

    def status(self) -> tuple[WorkerStatus, ...]:
        return tuple(
            WorkerStatus(info=one.info, load=one.load, indexed_blocks=self._indexed(one), assigned=one.assigned)
            for one in sorted(self._workers.values(), key=lambda one: one.info.name)
        )

    def _indexed(self, worker: Registration) -> int:
        return self.index.worker_blocks(worker.info.name) if worker.info.role is WorkerRole.PREFILL else 0

    # workers

    def register(self, info: WorkerInfo) -> Registration:
        """In place of an earlier registration of that name, whose requests are taken off it."""
        self._check_parity(info)
        earlier = self._workers.get(info.name)
        if earlier is not None:
            self.unregister(earlier)
        worker = Registration(info, WorkerLoad(free_pages=info.num_pages))
        self._workers[info.name] = worker
        if info.role is WorkerRole.PREFILL:
            self.index.add_worker(info.name, info.num_pages)
        self.counters["registered"] += 1
        return worker

    def _check_parity(self, info: WorkerInfo) -> None:
        # All registered workers agree, so any other one speaks for the majority.
        other = next((one.info for one in self._workers.values() if one.info.name != info.name), None)
        if other is None or _parity(other) == _parity(info):
            return
        self.counters["refused_identity"] += 1
        raise IdentityMismatch(
            f"worker {info.name} ({_describe(info)}) cannot share KV with the workers here ({_describe(other)})"
        )

    def unregister(self, worker: Registration) -> None:
        """Ignored when the worker has registered anew meanwhile."""
        name = worker.info.name
        if self._workers.get(name) is not worker:
            return
        del self._workers[name]
        self.index.drop_worker(name)
        for request in self._open.values():
            if request.prefill is worker:
                request.prefill = None
        self.counters["unregistered"] += 1

    def report(self, call: ReportWorker) -> None:
        """Load and samples always count; the content of the pages only as long as no report is missing."""
        worker = self._workers.get(call.name)
        if worker is None or worker.info.incarnation != call.incarnation:
            raise NotFound(f"worker {call.name} is not registered with this incarnation")
        worker.load = call.load
        self.costs.learn(call.prefills, call.decodes, call.pulls)
        if worker.info.role is not WorkerRole.PREFILL:
            return
        if not self.index.report(call.name, call.sequence, call.cached, call.dropped):
            self.counters["report_gaps"] += 1
            raise NotFound(f"reports of {call.name} before {call.sequence} are missing; register again")

    # requests

    def route(self, call: Route, owner: Hashable, now_s: float, wall_s: float) -> Decision:
        """The decision, already entered into the queues; refusals are recorded too."""
        if call.num_tokens < 1 or call.max_tokens < 0:
            raise InvalidInput("a request has at least one token and asks for none or more")
        self._take_out(call.request_id, now_s)
        record = DecisionRecord(
            request_id=call.request_id, routed_at_s=wall_s, num_tokens=call.num_tokens, max_tokens=call.max_tokens
        )
        self.records.add(record)
        try:
            choice, pool_blocks = self._choose(call, now_s)
        except MoonpoolError as error:
            record.outcome = error.code
            self.counters[error.code] += 1
            raise
        decision = self._dispatch(call, owner, choice, pool_blocks, now_s)
        _describe_decision(record, decision)
        self.counters["routed"] += 1
        return decision

    def prefill_ended(self, request_id: str, now_s: float) -> None:
        request = self._open.get(request_id)
        if request is not None and request.prefill is not None:
            request.prefill.backlog.remove(request_id, now_s)

    def request_ended(self, call: RequestEnded, now_s: float) -> None:
        if self._take_out(call.request_id, now_s):
            self.counters["ended"] += 1
        record = self.records.get(call.request_id)
        if record is None:
            return
        record.outcome, record.measured_ttft_s = call.outcome, call.ttft_s
        record.cached_tokens, record.pool_tokens = call.cached_tokens, call.pool_tokens
        record.output_tokens = call.output_tokens

    def owner_gone(self, owner: Hashable, now_s: float) -> None:
        """Takes all requests of a front end out of the queues."""
        for request_id in [one.call.request_id for one in self._open.values() if one.owner == owner]:
            self._take_out(request_id, now_s)
            self.counters["abandoned"] += 1
            record = self.records.get(request_id)
            if record is not None:
                record.outcome = "abandoned"

    def _choose(self, call: Route, now_s: float) -> tuple[Choice, int]:
        ready = [one for one in self._workers.values() if one.info.name not in call.exclude]
        prefills = [one for one in ready if one.info.role is WorkerRole.PREFILL]
        decodes = [one for one in ready if one.info.role is WorkerRole.DECODE]
        leading = self.index.leading_blocks(call.keys)
        demand = Demand(call.num_tokens, call.max_tokens, *_block_shape(ready), leading.pool)
        prefill_views = [_prefill_view(one, leading.workers[one.info.name], now_s) for one in prefills]
        choice = choose(demand, prefill_views, [_decode_view(one) for one in decodes], self.costs, self._policy)
        return choice, leading.pool

    def _dispatch(self, call: Route, owner: Hashable, choice: Choice, pool_blocks: int, now_s: float) -> Decision:
        prefill, decode = self._workers[choice.prefill.worker], self._workers[choice.decode]
        prefill.backlog.add(call.request_id, choice.prefill.prefill_s, now_s)
        self.index.expect(prefill.info.name, call.keys)
        pages = -(-(call.num_tokens + call.max_tokens) // decode.info.block_tokens)
        request = OpenRequest(call, owner, pages, prefill, decode)
        decode.decoding[call.request_id] = self._open[call.request_id] = request
        return Decision(
            request_id=call.request_id,
            prefill=prefill.ref,
            decode=decode.ref,
            pool_blocks=pool_blocks,
            ttft_s=choice.prefill.ttft_s,
            tbt_s=choice.tbt_s,
            candidates=choice.candidates,
        )

    def _take_out(self, request_id: str, now_s: float) -> bool:
        request = self._open.pop(request_id, None)
        if request is None:
            return False
        if request.prefill is not None:
            request.prefill.backlog.remove(request_id, now_s)
            self.index.unexpect(request.prefill.info.name, request.call.keys)
        request.decode.decoding.pop(request_id, None)
        return True


def _parity(info: WorkerInfo) -> tuple[bytes, str, int]:
    return info.identity, info.model, info.block_tokens


def _describe(info: WorkerInfo) -> str:
    return f"model {info.model}, identity {info.identity.hex()[:16]}, {info.block_tokens} tokens a block"


def _block_shape(workers: Iterable[Registration]) -> tuple[int, int]:
    """(tokens, bytes) of a block, the same for all workers; without any, the policy refuses before it matters."""
    return next(((one.info.block_tokens, one.info.page_nbytes) for one in workers), (1, 0))


def _prefill_view(worker: Registration, local_blocks: int, now_s: float) -> PrefillView:
    return PrefillView(worker.info.name, local_blocks, worker.backlog.wait_s(now_s), worker.assigned)


def _decode_view(worker: Registration) -> DecodeView:
    """What was sent there and what it reports, whichever is more: reports lag, and others may use it too."""
    sent = worker.decoding.values()
    return DecodeView(
        name=worker.info.name,
        num_seqs=max(len(sent), worker.load.num_running + worker.load.num_waiting),
        max_num_seqs=worker.info.max_num_seqs,
        kv_tokens=max(sum(one.call.num_tokens for one in sent), worker.load.running_tokens),
        free_pages=min(worker.load.free_pages, worker.info.num_pages - sum(one.pages for one in sent)),
    )


def _describe_decision(record: DecisionRecord, decision: Decision) -> None:
    record.prefill, record.decode = decision.prefill.name, decision.decode.name
    record.pool_blocks, record.candidates = decision.pool_blocks, decision.candidates
    record.predicted_ttft_s, record.predicted_tbt_s = decision.ttft_s, decision.tbt_s
