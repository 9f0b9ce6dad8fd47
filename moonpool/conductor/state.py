"""All state of the conductor: workers, the requests sent to them, prefix index, cost models and records. Pure.

Methods that need the time take it as an argument. `owner` is the front end (its connection) that a request came from.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Mapping

from moonpool.base.cluster import AssignedRole, ReportWorker, WorkerInfo, WorkerLoad, WorkerRole
from moonpool.base.errors import IdentityMismatch, InvalidInput, MoonpoolError, NotFound, PromptTooLong
from moonpool.conductor.admission.controller import AdmissionController
from moonpool.conductor.admission.forms import AdmittedRequest, Cause, DecodeNow, RefusedRequest
from moonpool.conductor.admission.request_forecast import OutputLengths
from moonpool.conductor.costs import RequestErrors, SampleThinning
from moonpool.conductor.crossover import crossover
from moonpool.conductor.demand import UnmetDemand, UnmetWork
from moonpool.conductor.elastic import ElasticRule, aimed_ttft_s
from moonpool.conductor.messages import (
    Decision,
    FetchOrCompute,
    PredictionError,
    RequestEnded,
    Route,
    WorkerRef,
    WorkerStatus,
)
from moonpool.conductor.other_requests import ReportedRequests
from moonpool.conductor.placement.decode_side import DecodeSide, prompt_nbytes
from moonpool.conductor.placement.kinds import WorkerKinds
from moonpool.conductor.placement.paths import PoolPaths
from moonpool.conductor.placement.pipelines import choose_pipeline
from moonpool.conductor.placement.policy import Chooser, PlacementChoice, PlacementInput, PolicyConfig, make_policy
from moonpool.conductor.placement.prefix_index import PrefixIndex, fingerprints
from moonpool.conductor.placement.pricing import PlacementRequest, replicated
from moonpool.conductor.placement.resuming import may_resume, resumed
from moonpool.conductor.placement.tables import DecodeTable, PrefillTable, Slots
from moonpool.conductor.placement.traffic import Traffic
from moonpool.conductor.records.store import (
    RecordStore,
    first_missed,
    open_record,
    record_decision,
    record_end,
    record_refusal,
)
from moonpool.conductor.registration import OpenRequest, Registration, WeighedRequest, check_parity
from moonpool.conductor.roles import RoleAssignments

_NO_SHARE = 1e-6  # what is left of a tenant's share by rounding
_WHOLE = ("done", "cancelled")  # how an answer ends that would not have become longer


class ConductorState:
    """`register` returns a Registration, which `unregister` takes: a late disconnect of an old registration then does
    not remove the new one of the same name."""

    def __init__(self, policy: PolicyConfig, index: PrefixIndex, num_records: int) -> None:
        self.index = index
        self._kinds = WorkerKinds()
        self.costs = self._kinds.first  # of the kind of worker that registered first, usually the only one
        self.records = RecordStore(num_records)
        self.counters: Counter[str] = Counter()
        self.refused: Counter[Cause] = Counter()
        self.traffic = Traffic()
        self.paths = PoolPaths()
        self.unmet = UnmetDemand(aimed_ttft_s(policy.targets))
        self.roles = RoleAssignments(ElasticRule(policy.targets, self._kinds.decode_step_s), self.unmet)
        self.prefills, self.decodes = PrefillTable(), DecodeTable()
        self._chooser = Chooser(make_policy(policy, random.Random(policy.seed)))
        self._lengths = OutputLengths()
        self._admission = AdmissionController(policy.targets, self._kinds.decode_step_s, self._lengths)
        self._pool_sources = policy.pool_sources
        self._pipeline_min_tokens = policy.pipeline_min_tokens
        self.set_pool_nodes({})
        self._decode_slots = Slots()
        self._request_errors = RequestErrors()
        self._thinning = SampleThinning(), SampleThinning(), SampleThinning()  # of prefills, decode steps and pulls
        self._decode_side = DecodeSide(self.costs, self._lengths)
        self._max_tokens = 0  # the tokens that the largest worker can hold
        self._block_shape = (1, 0, 1)  # tokens, bytes and layers of a block; the same on all workers
        self._step_tokens = 0  # of the prefill worker that registered last
        self._workers: dict[str, Registration] = {}
        self._stages: dict[str, Registration] = {}  # prefill workers that may be part of a pipeline
        self.late: frozenset[str] = frozenset()  # workers whose engine or reports do not go on
        self._avoided: list[Registration] = []  # those of them that get no requests
        self.report_interval_s = 0.0  # that workers are asked for
        self._decode_now: dict[str, DecodeNow] = {}  # each decode worker's batch, for admission
        self._open: dict[str, OpenRequest] = {}
        self._others = ReportedRequests(self._open, self._admission)
        self._shares: dict[str, float] = {}  # the tokens of each tenant's open prompts, over its weight
        self._num_joined = 0

    def set_pool_nodes(self, hosts: Mapping[str, str]) -> None:
        """Set the nodes that pulls come from, with their machines. The policy may have a fixed number of sources."""
        self.paths.set_nodes(hosts)
        self.traffic.num_sources = self._pool_sources or max(1, len(hosts))

    @property
    def num_open(self) -> int:
        return len(self._open)

    @property
    def block_tokens(self) -> int:
        return self._block_shape[0]

    def has_room(self, most_s: float, now_s: float) -> bool:
        """Return whether some prefill worker has at most `most_s` of predicted work ahead of a new request, or is one
        of a pipeline with fewer prompts than stages: its first stage is idle before a prompt has passed the last."""
        waits_s = self.prefills.wait_s(now_s)
        waits_s[[worker.slot for worker in self._avoided if worker.is_prefill]] = math.inf
        assigned = self.prefills.assigned
        return bool(waits_s.min() <= most_s) or any(
            assigned.item(one.slot) < one.info.pipeline for one in self._stages.values() if one not in self._avoided
        )

    def take_served_by_others(self) -> dict[str, float]:
        """Return the predicted seconds, over their weights, of the prompts of each tenant that other conductors have
        sent since the last call."""
        found, self._others.served = self._others.served, {}
        return found

    @property
    def lacks_pages(self) -> bool:
        """Whether requests wait for pages at every decode worker."""
        free_pages = self.decodes.free_pages
        return all(free_pages.item(slot) <= 0 for slot in self.decodes.names)

    def has_smaller_share(self, call: Route) -> bool:
        """Return whether the workers have more tokens over its weight of some other tenant than they would then have of
        this request's."""
        own = self._shares.get(call.tenant, 0.0) + call.num_tokens / call.weight
        return any(share > own for tenant, share in self._shares.items() if tenant != call.tenant)

    @property
    def pace(self) -> float:
        """Measured / predicted time to the end of a prefill."""
        return self._admission.pace

    def status(self) -> tuple[WorkerStatus, ...]:
        return tuple(
            one.status(self.index.worker_blocks(one.info.name) if one.is_prefill else 0)
            for one in sorted(self._workers.values(), key=lambda one: one.info.name)
        )

    @property
    def policy(self) -> str:
        return self._chooser.policy.name

    @property
    def pulls(self) -> bool:
        """Whether workers may take blocks from the pool."""
        return self._chooser.policy.pulls

    def predictions(self) -> tuple[PredictionError, ...]:
        """Return the errors of each cost model, of whole requests, and of the forecast."""
        windows = (*self._kinds.errors(), *self._request_errors.windows.values(), self._admission.errors)
        return tuple(window.summary() for window in windows)

    def fetch_or_compute(self) -> FetchOrCompute | None:
        if not self._workers:
            return None
        block_tokens, block_nbytes, _ = self._block_shape
        return crossover(self.costs, block_nbytes / block_tokens)

    def register(self, info: WorkerInfo) -> Registration:
        """Add a worker. An earlier registration of that name is removed first, and its requests leave its queues. Raise
        IdentityMismatch if its KV differs from that of the other workers."""
        try:
            check_parity(info, [one.info for one in self._workers.values()])
        except IdentityMismatch:
            self.counters["refused_identity"] += 1
            raise
        earlier = self._workers.get(info.name)
        if earlier is not None:
            self.unregister(earlier)
        worker = self._workers[info.name] = self._add_worker(info)
        self._block_shape = info.block_tokens, info.page_nbytes, info.num_layers
        if worker.is_prefill:
            self._step_tokens = info.step_tokens
        self._update_max_tokens()
        self._find_late()
        self.counters["registered"] += 1
        return worker

    def _update_max_tokens(self) -> None:
        infos = [worker.info for worker in self._workers.values()]
        self._max_tokens = max((info.num_pages * info.block_tokens for info in infos), default=0)

    def _add_worker(self, info: WorkerInfo) -> Registration:
        is_prefill = info.role is WorkerRole.PREFILL
        slot = self.index.add_worker(info.name, info.num_pages) if is_prefill else self._decode_slots.allocate()
        ref = WorkerRef(info.name, info.address, info.incarnation)
        worker = Registration(info, WorkerLoad(free_pages=info.num_pages), slot, ref)
        self._kinds.add(info.kind, slot, is_prefill=is_prefill)
        if is_prefill:
            if info.pipeline > 1:
                self._stages[info.name] = worker
            self.prefills.add(slot, info.name)
            self.paths.add(info.host, slot)
        else:
            self.decodes.add(slot, info.name, info.max_num_seqs)
            self._update_decode(worker)
        return worker

    def unregister(self, worker: Registration, now_s: float = 0.0) -> None:
        """Remove a worker; do nothing if it has registered again since."""
        name = worker.info.name
        if self._workers.get(name) is not worker:
            return
        del self._workers[name]
        self._others.worker_gone(worker.others, now_s)
        self._kinds.drop(worker.info.kind, worker.slot, is_prefill=worker.is_prefill)
        self._update_max_tokens()
        if not worker.is_prefill:
            self.decodes.drop(worker.slot)
            del self._decode_now[name]
            self._decode_slots.free(worker.slot)
        else:
            self._stages.pop(name, None)
            self.index.drop_worker(name)
            self.prefills.drop(worker.slot)
            self.paths.drop(worker.info.host, worker.slot)
            for request in self._open.values():
                if request.prefill is worker:
                    self.traffic.end(request.request_id)
                    request.prefill = None
        self.counters["lost_late"] += worker.is_late
        self._find_late()
        self.counters["unregistered"] += 1

    def report(self, call: ReportWorker, now_s: float = 0.0) -> AssignedRole | None:
        """Apply a worker's report; return the role that it should take, None: it has it. Load and samples always count;
        raise NotFound if the worker is not registered, or if a report before this one is
        missing, so that the content of its pages is unknown.
        """
        worker = self._workers.get(call.name)
        if worker is None or worker.info.incarnation != call.incarnation:
            raise NotFound(f"worker {call.name} is not registered with this incarnation")
        worker.reported(call, self.report_interval_s)
        if worker.is_late != (call.name in self.late):
            self._find_late()
        costs = self._kinds.of(worker.info.kind)
        prefills, decodes, pulls = self._thinning
        costs.learn(
            prefills.take(call.prefills, now_s), decodes.take(call.decodes, now_s), pulls.take(call.pulls, now_s)
        )
        self._others.changed(worker.others, call.requests, call.gone, costs.prefill_s, worker.backlog.own_s, now_s)
        if not worker.is_prefill:
            self._count_arrived(worker, call.arrived)
            self._update_decode(worker)
        elif not self.index.report(call.name, call.sequence, call.cached, call.dropped):
            self.counters["report_gaps"] += 1
            raise NotFound(f"reports of {call.name} before {call.sequence} are missing; register again")
        else:
            self._update_prefill(worker, now_s)
        return self.roles.answer(worker.info)

    def _update_prefill(self, worker: Registration, now_s: float) -> None:
        others = worker.others
        worker.backlog.set_others(others.num_prompts, others.work_s, others.first_s, now_s)
        self.prefills.update(worker.slot, worker.backlog)

    def look(self) -> None:
        """Look at the age of all reports; called every LOOK_S, or later when this process stood still."""
        for worker in self._workers.values():
            worker.num_looks += 1
        self._find_late()

    def _find_late(self) -> None:
        """Avoid the workers that are late, while there are others of their role."""
        late = [worker for worker in self._workers.values() if worker.is_late]
        names = frozenset(worker.info.name for worker in late)
        self.counters["late"] += len(names - self.late)
        on_time = {worker.info.role for worker in self._workers.values() if not worker.is_late} if late else set()
        self.late, self._avoided = names, [worker for worker in late if worker.info.role in on_time]

    @property
    def workers(self) -> Collection[Registration]:
        return self._workers.values()

    def route(self, call: Route, owner: Hashable, now_s: float, wall_s: float) -> Decision:
        """Decide now, without waiting: return the decision, already counted in the workers' queues, or raise the
        refusal. Both are recorded."""
        self.begin(call, now_s, wall_s)
        try:
            weighed = self.weigh(call, now_s)
        except MoonpoolError as error:
            raise self.refuse(call.request_id, error) from None
        if isinstance(weighed.verdict, RefusedRequest):
            self.unmet.refused(weighed.verdict.cause, weighed.work, now_s)
            raise self.refuse(call.request_id, weighed.verdict.error(), weighed.verdict.cause)
        return self.send(call, owner, weighed, now_s)

    def begin(self, call: Route, now_s: float, wall_s: float) -> None:
        """Open the request's record, and undo an earlier assignment of the same request.

        Raise PromptTooLong if no registered worker can hold the prompt. Such a request is not recorded, because a
        client may invent the length, and readers of records loop over their blocks.
        """
        if call.num_tokens < 1 or call.max_tokens < 0:
            raise InvalidInput("a request has at least one token and asks for none or more")
        if self._workers and call.num_tokens > self._max_tokens:
            raise PromptTooLong(f"the prompt has {call.num_tokens} tokens, the largest worker holds {self._max_tokens}")
        self._remove(call.request_id, now_s)
        self.records.add(open_record(call, wall_s), tenant=call.tenant or None, keys=call.keys, now_s=now_s)

    def weigh(self, call: Route, now_s: float, before_s: float = 0.0) -> WeighedRequest:
        """Choose workers and ask admission; nothing changes but round-robin positions. `before_s` is how long the
        request has waited, or will wait before it is sent. Raise Unavailable when there are no workers."""
        prints = fingerprints(call.keys)
        inputs, choice = self._choose(call, prints, now_s)
        if may_resume(call, inputs.leading.pool, self.block_tokens):  # it was admitted once
            choice = resumed(choice, self.decodes.names[choice.decode_slot])
            return WeighedRequest(prints, inputs, choice, AdmittedRequest(0.0, now_s), resumes=True)
        decodes = self._decode_now.values()
        verdict = self._admission.at_arrival(call.num_tokens, choice.prefill, before_s, decodes, now_s)
        return WeighedRequest(prints, inputs, choice, verdict)

    def send(
        self, call: Route, owner: Hashable, weighed: WeighedRequest, now_s: float, waited_s: float = 0.0
    ) -> Decision:
        decision = self._dispatch(call, owner, weighed, now_s, waited_s)
        self._admission.sent(call, weighed.choice.prefill.ttft_s, weighed.verdict, now_s)
        if weighed.resumes:
            self.counters["resumed"] += 1
            self.prefill_ended(call.request_id, now_s)
        record = self.records.get(call.request_id)
        if record is not None:
            record_decision(record, decision)
        self.counters["routed"] += 1
        return decision

    def refuse(
        self, request_id: str, error: MoonpoolError, cause: Cause | None = None, waited_s: float = 0.0
    ) -> MoonpoolError:
        """Record the refusal and return the same error."""
        self.counters[error.code] += 1
        if cause is not None:
            self.refused[cause] += 1
        record = self.records.get(request_id)
        if record is not None:
            record_refusal(record, error, waited_s)
        return error

    def prefill_ended(self, request_id: str, now_s: float) -> None:
        request = self._open.get(request_id)
        if request is None:
            return
        self._leave_backlogs(request, now_s)
        if not request.has_joined:
            self._admission.joined(request_id, self._num_joined + self._others.num_decoding, now_s)
            request.has_joined = True
            self._count_joined(request, 1)

    def before_decode(self, request_id: str, now_s: float) -> None:
        """Check admission again, before prefill_ended. Raise Overloaded if the request must not decode: its prefill was
        wasted, and the caller ends the request."""
        request = self._open.get(request_id)
        if request is None or request.has_joined:
            return
        verdict = self._admission.before_decode(request_id, request.num_tokens, request.decode.decode_now, now_s)
        if isinstance(verdict, RefusedRequest):
            self.counters["wasted_prefills"] += 1
            self.unmet.refused(verdict.cause, UnmetWork(0.0, 1, request.num_tokens), now_s)
            raise self.refuse(request_id, verdict.error(), verdict.cause)

    def request_ended(self, call: RequestEnded, now_s: float) -> None:
        request = self._remove(call.request_id, now_s, call.output_tokens)
        self.counters["ended"] += request is not None
        if request is not None and call.output_tokens and call.outcome in _WHOLE:
            self._lengths.learn(request.tenant, call.output_tokens)
        kept = self.records.kept(call.request_id)
        if kept is None:
            return
        record_end(kept.record, call)
        kept.ended(now_s)
        self._request_errors.add(kept.record)
        if request is not None:
            kept.missed = first_missed(request.keys, request.num_tokens, call.cached_tokens, self.block_tokens)
            self._decode_side.learn(call, -(-request.num_tokens // self.block_tokens) * self._block_shape[1])

    def owner_gone(self, owner: Hashable, now_s: float) -> None:
        """Remove all requests of a front end that has disconnected."""
        for request_id in [one.request_id for one in self._open.values() if one.owner == owner]:
            self._remove(request_id, now_s)
            self.abandon(request_id, now_s)

    def abandon(self, request_id: str, now_s: float) -> None:
        """Record that no client waits for the request any more."""
        self.counters["abandoned"] += 1
        kept = self.records.kept(request_id)
        if kept is not None:
            kept.record.outcome = "abandoned"
            kept.ended(now_s)

    def _choose(self, call: Route, prints: list[int], now_s: float) -> tuple[PlacementInput, PlacementChoice]:
        self.traffic.advance(now_s)
        queue_s, among, excluded = self.prefills.wait_s(now_s), self.prefills.mask, []
        failed = [self._workers[name] for name in call.exclude if name in self._workers]
        for worker in (*failed, *self._avoided):
            if worker.is_prefill:
                queue_s[worker.slot] = math.inf
                among &= ~(1 << worker.slot)
            else:
                excluded.append(worker.slot)
        leading = self.index.leading(prints, among)
        expected_tokens = self._lengths.expected(call.tenant, call.max_tokens)
        request = PlacementRequest(
            call.num_tokens, call.max_tokens, expected_tokens, *self._block_shape, self._step_tokens
        )
        paths = self.paths if self._chooser.policy.by_node else None
        prices, kinds = self._kinds.prices(request, leading, self.traffic, paths)
        inputs = PlacementInput(request, leading, queue_s, self.prefills, prices, self.traffic, kinds)
        choice = self._chooser.choose(inputs, self.decodes, excluded, self._kinds)
        if self.records.num_attempts(call.request_id) <= 1:  # a second one depends on one worker alone
            policy, stages = self._chooser.policy, self._stages.values()
            min_tokens = self._pipeline_min_tokens
            choice = choose_pipeline(choice, inputs, policy, stages, self.costs, paths, min_tokens=min_tokens)
        decode = self._workers[self.decodes.names[choice.decode_slot]]
        return inputs, self._decode_side.add_waits(choice, request, *decode.decode_pages)

    def _dispatch(
        self, call: Route, owner: Hashable, weighed: WeighedRequest, now_s: float, waited_s: float
    ) -> Decision:
        prints, inputs, choice, _, resumes = weighed
        best = choice.prefill
        prefill = self._workers[best.worker]
        decode = self._workers[self.decodes.names[choice.decode_slot]]
        stages = [self._workers[name] for name in best.stages]
        self._others.take_over(call.request_id, [worker.others for worker in (prefill, decode, *stages)])
        for worker in () if resumes else (prefill, *stages):
            worker.backlog.add(call.request_id, best.service_s, now_s)
            self.prefills.update(worker.slot, worker.backlog)
        if stages:
            self.counters["pipelined"] += 1  # its blocks go to the pool, and stay in no worker's pages
        elif not resumes:
            self._expect_blocks(choice, inputs, prints)
        self._expect_traffic(call, weighed, prefill, now_s + best.queue_s)
        tokens, pages = call.num_tokens, inputs.request.prompt_pages
        request = self._open[call.request_id] = OpenRequest(
            call.request_id,
            owner,
            call.tenant,
            call.keys,
            prints,
            tokens,
            pages,
            None if resumes else prefill,
            decode,
            stages,
            call.weight,
        )
        self._count_decoding(request, 1)
        return Decision(
            request_id=call.request_id,
            prefill=prefill.ref,
            decode=decode.ref,
            pool_blocks=inputs.leading.pool,
            ttft_s=waited_s + best.ttft_s,
            tbt_s=choice.tbt_s,
            candidates=choice.candidates,
            max_pool_blocks=choice.max_pool_blocks,
            waited_s=waited_s,
            asks_before_decode=self._admission.asks_before_decode,
            stages=tuple(worker.ref for worker in stages),
            chunk_tokens=best.chunk_tokens,
            reused_tokens=min((best.local_blocks + best.pulled_blocks) * self.block_tokens, tokens - 1),
            resumes=resumes,
        )

    def _expect_traffic(self, call: Route, weighed: WeighedRequest, prefill: Registration, start_s: float) -> None:
        """Expect the request's pull, from `start_s` on, and its hand-off."""
        _, inputs, choice, _, resumes = weighed
        best = choice.prefill
        if best.pulled_blocks and choice.plan.far:
            nbytes = min(best.pulled_blocks, choice.plan.far) * inputs.request.block_nbytes
            # Pulls on one machine slow no others down.
            self.traffic.expect(call.request_id, prefill.slot, nbytes, start_s, start_s + best.transfer_s)
        if prefill.info.host in self.paths.sources and call.max_tokens > 1 and not resumes:
            nbytes = prompt_nbytes(inputs.request)
            self.traffic.expect_handoff(call.request_id, prefill.info.host, nbytes, start_s, start_s + best.service_s)

    def _expect_blocks(self, choice: PlacementChoice, inputs: PlacementInput, prints: list[int]) -> None:
        copied = replicated(inputs.leading, choice.plan)
        if copied.pulled or copied.computed:
            self.counters["replicated_by_pulling"] += copied.pulled
            self.counters["replicated_by_computing"] += copied.computed
        self.index.expect(choice.prefill.worker, prints)

    def _remove(self, request_id: str, now_s: float, output_tokens: int = 0) -> OpenRequest | None:
        request = self._open.pop(request_id, None)
        if request is None:
            return None
        self._admission.ended(request_id, now_s, output_tokens)
        self.traffic.end_handoff(request_id)
        self._leave_backlogs(request, now_s)
        if request.prefill is not None and not request.stages:
            self.index.unexpect(request.prefill.info.name, request.prints)
        if request.has_joined:
            self._count_joined(request, -1)
        self._count_decoding(request, -1)
        return request

    def _leave_backlogs(self, request: OpenRequest, now_s: float) -> None:
        """The request's prefill workers have ended with it; those that are gone have left already."""
        for worker in (request.prefill, *request.stages):
            if worker is not None and self._workers.get(worker.info.name) is worker:
                worker.backlog.remove(request.request_id, now_s)
                self.prefills.update(worker.slot, worker.backlog)
        self.traffic.end(request.request_id)

    def _count_decoding(self, request: OpenRequest, sign: int) -> None:
        worker, tenant = request.decode, request.tenant
        self._shares[tenant] = self._shares.get(tenant, 0.0) + sign * request.num_tokens / request.weight
        if self._shares[tenant] < _NO_SHARE:
            del self._shares[tenant]
        worker.count_decoding(sign, request.num_tokens, request.unreported_pages)
        if self._workers.get(worker.info.name) is worker:
            self._update_decode(worker)

    def _count_arrived(self, worker: Registration, request_ids: Iterable[str]) -> None:
        """The worker's load counts the pages of these requests from now on."""
        for request in (self._open.get(request_id) for request_id in request_ids):
            if request is not None and request.decode is worker:
                worker.unreported_pages -= request.unreported_pages
                request.unreported_pages = 0

    def _count_joined(self, request: OpenRequest, sign: int) -> None:
        worker = request.decode
        self._num_joined += sign
        worker.count_joined(sign, request.num_tokens)
        if self._workers.get(worker.info.name) is worker:
            self._decode_now[worker.info.name] = worker.decode_now

    def _update_decode(self, worker: Registration) -> None:
        self._decode_now[worker.info.name] = worker.decode_now
        self.decodes.update(worker.slot, *worker.decode_load)
