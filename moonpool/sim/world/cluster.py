"""The simulated cluster: a trace's requests pass through the real conductor, pool and schedulers on one clock."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from moonpool.base.errors import MoonpoolError, Overloaded, PeerLost, Unavailable
from moonpool.conductor.messages import Decision, PrefillParts, RequestEnded, Route
from moonpool.conductor.placement.policy import PolicyConfig
from moonpool.conductor.request_queue import RequestQueue
from moonpool.conductor.state import ConductorState
from moonpool.sim.world.clock import Handle, SimClock
from moonpool.sim.world.components import ClusterComponents
from moonpool.sim.world.config import ClusterConfig
from moonpool.sim.world.decode import AttemptOutput, DecodeWorker
from moonpool.sim.world.job import DONE, LOST, REFUSED, Job, schedule_arrivals
from moonpool.sim.world.outages import Outages, PoolMembers
from moonpool.sim.world.retries import RequestRetries
from moonpool.sim.world.roles import SimRoles
from moonpool.sim.world.sequence import block_keys
from moonpool.traces.columns import Trace, TraceRequest

_OWNER = "trace"  # the client name of all requests


class SimFrontend:
    """The real RequestQueue before the conductor's state, with one timer.

    For each routed job exactly one of `on_sent` and `on_refused` is called, at once or later.
    """

    def __init__(
        self,
        clock: SimClock,
        conductor: ConductorState,
        policy: PolicyConfig,
        asked_tokens: int | None,
        context_tokens: int,
        on_sent: Callable[[Job, Decision], None],
        on_refused: Callable[[Job, MoonpoolError], None],
        promote: Callable[[list[bytes]], None],
    ) -> None:
        self._clock, self._on_sent, self._on_refused = clock, on_sent, on_refused
        self._queue = RequestQueue(conductor, policy, promote)
        self._asked_tokens, self._context_tokens = asked_tokens, context_tokens
        self._jobs: dict[str, Job] = {}  # jobs in the queue
        self._timer: Handle | None = None

    def route(self, job: Job, tenant: str, priority: int, exclude: tuple[str, ...] = (), num_written: int = 0) -> None:
        """Route a job to workers not in `exclude`. The client has `num_written` tokens of the answer already."""
        job.asked_tokens = max(job.num_output, self._room(job, num_written))
        call = Route(
            request_id=job.request_id,
            keys=job.keys,
            num_tokens=job.num_input,
            max_tokens=job.asked_tokens,
            exclude=exclude,
            tenant=tenant,
            priority=priority,
        )
        now_s = self._clock.now_s
        try:
            decision = self._queue.submit(call, _OWNER, now_s, now_s)
        except (Overloaded, Unavailable) as error:
            self._on_refused(job, error)
            return
        if decision is not None:
            self._on_sent(job, decision)
        else:
            self._jobs[job.request_id] = job
            self._settle()  # the queue may have refused another request in favour of this one

    def _room(self, job: Job, num_written: int) -> int:
        """Return for how many more tokens the client has asked."""
        asked = self._asked_tokens
        return self._context_tokens - job.num_input if asked is None else asked - num_written

    @property
    def num_waiting(self) -> int:
        """Jobs in the queue."""
        return len(self._jobs)

    def capacity_changed(self) -> None:
        """Try queued jobs again: a request has ended, or a worker has registered."""
        if self._jobs:
            self._settle()

    def _settle(self) -> None:
        if self._timer is not None:
            self._clock.cancel(self._timer)
            self._timer = None
        for request_id, outcome in self._queue.dispatch(self._clock.now_s):
            job = self._jobs.pop(request_id)
            if isinstance(outcome, Decision):
                self._on_sent(job, outcome)
            else:
                self._on_refused(job, outcome)
        at_s = self._queue.next_event_s(self._clock.now_s)
        if at_s is not None:
            self._timer = self._clock.call_at(at_s, self._settle)


class SimCluster:
    """Runs one trace, once. `jobs` has every request when run() returns, in the trace's order."""

    def __init__(self, config: ClusterConfig, trace: Trace) -> None:
        self.config, self.trace = config, trace
        self.jobs: list[Job] = []
        self._components = components = ClusterComponents(
            config, trace, self._first_token, self._handed_over, self._ended, self._capacity_changed
        )
        self.clock, self.conductors, self.runs = components.clock, components.conductors, components.runs
        self.pools, self.prefills, self.decodes = components.pools, components.prefills, components.decodes
        policy = config.policy
        if config.pipeline_nodes > 1:
            # A worker of several nodes begins a prompt before it has ended others: its backlog is not the wait there.
            policy = replace(policy, worker_backlog_s=math.inf)
        self._frontends = [
            SimFrontend(
                self.clock,
                conductor,
                policy,
                config.asked_tokens,
                config.num_pages(trace.block_tokens) * trace.block_tokens,
                self._sent,
                self._refused,
                components.promote,
            )
            for conductor in self.conductors
        ]
        self.roles = SimRoles(config, components, self._is_busy, self._capacity_changed)
        self._retries: RequestRetries | None = None  # only if nodes fail
        if config.failures:
            self._retries = RequestRetries(config.retry, trace.block_tokens)
            self._plan_failures()

    def run(self, progress: Callable[[float], None] | None = None) -> list[Job]:
        schedule_arrivals(self.clock, self.trace, self._arrived)
        self.clock.run(progress)
        return self.jobs

    def _is_busy(self) -> bool:
        num_open = sum([conductor.num_open for conductor in self.conductors])
        return len(self.jobs) < len(self.trace) or num_open > 0 or any(each.num_waiting for each in self._frontends)

    @property
    def conductor(self) -> ConductorState:
        """The only one, or the first of several."""
        return self.conductors[0]

    def _number_of(self, job: Job) -> int:
        """Return the number of the conductor that routes the job."""
        return job.number % len(self.conductors)

    def _capacity_changed(self) -> None:
        for frontend in self._frontends:
            frontend.capacity_changed()

    # --- a request from arrival to end ---

    def _arrived(self, number: int, request: TraceRequest) -> None:
        block_tokens = self.trace.block_tokens
        numbers = request.block_ids[: request.num_input // block_tokens].tolist()
        job = Job(number, self.clock.now_s, request.num_input, request.num_output, block_keys(numbers))
        job.runs = self.runs.split(numbers)
        self.jobs.append(job)
        request_s = self.config.cost.overhead.request_s
        if request_s:
            self.clock.call_at(job.arrival_s + request_s, lambda: self._route(job))
        else:
            self._route(job)

    def _route(self, job: Job) -> None:
        tenant, priority = self.trace.tenant, self.trace.priority
        self._frontends[self._number_of(job)].route(
            job,
            "" if tenant is None else str(tenant[job.number]),
            0 if priority is None else int(priority[job.number]),
            *(() if self._retries is None else (self._retries.excluded(job), self._retries.num_written(job))),
        )

    def _refused(self, job: Job, error: MoonpoolError) -> None:
        """Handle a refusal. It is final, unless the request has lost a worker before or no worker is there now."""
        if self._retries is not None:
            pause_s = self._retries.refused(job, error, self.clock.now_s)
            if pause_s is not None:
                self.clock.call_at(self.clock.now_s + pause_s, lambda: self._route(job))
                return
            if self._retries.num_written(job) or isinstance(error, Unavailable):
                self._give_up(job, str(error))
                return
            self._retries.give_up(job)
        job.outcome, job.reason = REFUSED, str(error)

    def _sent(self, job: Job, decision: Decision) -> None:
        job.prefill, job.decode, job.predicted_ttft_s = decision.prefill.name, decision.decode.name, decision.ttft_s
        job.expected_tokens = decision.reused_tokens
        job.asks_before_decode = decision.asks_before_decode and not (self._retries and self._retries.num_written(job))
        # The policy's limit is about the shared pool, not about the node's own memory.
        takes_all = self.config.pool == "local" or self.config.always_pulls
        job.max_pool_blocks = None if takes_all else decision.max_pool_blocks
        decode = self.decodes[job.decode]

        def reserve() -> None:
            decode.reserve(job, lambda present: self._compute(job, decision, present))

        if self.config.answers_between_steps:
            decode.call_between_steps(_in_this_attempt(job, reserve))
        else:
            reserve()

    def _compute(self, job: Job, decision: Decision, present_tokens: int) -> None:
        """Begin the prompt, at several workers if the conductor has chosen them and all have pages."""
        leader = decision.prefill.name
        nodes = [*(stage.name for stage in decision.stages), leader]
        is_started = len(nodes) > 1 and self._components.pipelines.start(
            job, present_tokens, nodes, decision.chunk_tokens
        )
        if not is_started:
            self.prefills[leader].submit(job, present_tokens)

    def _first_token(self, job: Job) -> None:
        """Handle a computed prompt. The prefill is wasted if the conductor refuses the decode now."""
        now_s, conductor = self.clock.now_s, self.conductors[self._number_of(job)]
        if job.asks_before_decode and job.num_output > 1:
            try:
                conductor.before_decode(job.request_id, now_s)
            except Overloaded as error:
                job.is_wasted = True
                job.outcome, job.reason = REFUSED, str(error)
        conductor.prefill_ended(job.request_id, now_s)
        self._frontends[self._number_of(job)].capacity_changed()

    def _handed_over(self, job: Job) -> None:
        if self.config.changes_roles:  # the pages that the prompt had are free for answers now
            self.decodes[job.prefill].grant_waiting()
        if self.config.pipeline > 1:  # the pages that the prompt had are free at all of its stages
            for prefill in self.prefills.values():
                prefill.resume()
        job.prefill, decode = "", self.decodes[job.decode]
        if job.num_output > 1 and not job.is_wasted:
            self._hand_off(job, decode)
            return
        decode.release(job)
        if job.is_wasted:
            self._report_end(job, 0, Overloaded.code)
        else:
            job.end_s, job.tbt_s = self.clock.now_s, 0.0
            self._ended(job)

    def _hand_off(self, job: Job, decode: DecodeWorker) -> None:
        """Start decoding after the hand-off. A real decode worker checks the KV beside its steps, and accepts the
        request between two of them."""
        overhead_s = self.config.cost.overhead.handoff_s

        def accept() -> None:
            job.handoff_s = self.clock.now_s - job.first_token_s
            decode.start_decoding(job)

        accept = _in_this_attempt(job, accept)
        if self.config.answers_between_steps:
            self.clock.call_at(self.clock.now_s + overhead_s, lambda: decode.call_between_steps(accept))
        elif overhead_s:
            self.clock.call_at(self.clock.now_s + overhead_s, accept)
        else:
            decode.start_decoding(job)

    def _ended(self, job: Job) -> None:
        job.outcome = DONE
        if self.config.changes_roles:  # the pages that the answer had are free for prompts now
            self.prefills[job.decode].resume()
        if self._retries is not None:
            self._retries.ended(job, self.decodes[job.decode].gaps(job))
        self._report_end(job, job.num_output, "done")

    def _report_end(self, job: Job, num_output: int, outcome: str) -> None:
        if job.outcome:
            job.keys, job.runs = [], []  # there may be millions of jobs
        call = RequestEnded(
            request_id=job.request_id,
            ttft_s=job.ttft_s,
            cached_tokens=job.reused_tokens,
            pool_tokens=job.reused_tokens - job.local_tokens,
            output_tokens=num_output,
            tbt_s=job.mean_gap_s,
            outcome=outcome,
            parts=PrefillParts(queue_s=0.0, compute_s=0.0, handoff_s=job.handoff_s) if job.handoff_s else None,
        )
        self.conductors[self._number_of(job)].request_ended(call, self.clock.now_s)
        self._frontends[self._number_of(job)].capacity_changed()

    # --- lost workers ---

    def _plan_failures(self) -> None:
        config, pool = self.config, next(iter(self.pools.values()))
        members = PoolMembers(self.clock, pool) if config.pool == "shared" and pool is not None else None
        Outages(self._components, config.node, members, self._worker_lost, self._worker_back).schedule(config.failures)

    def _worker_lost(self, worker: str) -> None:
        """Cancel the jobs of a lost worker on all other workers, and try them again."""
        if worker in self.decodes:
            self.decodes[worker].stop()
        self._components.unregister(worker)
        jobs = [job for job in self.jobs if worker in (job.prefill, job.decode) and _is_open(job)]
        outputs = [self.decodes[job.decode].output_of(job) for job in jobs]
        for job in jobs:
            if job.prefill and job.prefill != worker:
                self.prefills[job.prefill].cancel(job)
            if job.decode != worker:
                self.decodes[job.decode].cancel(job)
        self._components.restart(worker)
        for job, output in zip(jobs, outputs, strict=True):
            self._try_again(job, worker, output)
        for decode in self.decodes.values():
            decode.grant_waiting()
        for prefill in self.prefills.values():
            prefill.resume()

    def _try_again(self, job: Job, worker: str, output: AttemptOutput) -> None:
        assert self._retries is not None
        if job.is_wasted:  # it was refused already; only its end is not reported yet
            job.prefill = ""
            self._report_end(job, 0, Overloaded.code)
            return
        pause_s = self._retries.lost(job, worker, output)
        if pause_s is None:
            self._give_up(job, f"gave up after {job.num_retries + 1} attempts")
            return
        self._report_end(job, self._retries.num_written(job), PeerLost.code)
        self.clock.call_at(self.clock.now_s + pause_s, lambda: self._start_attempt(job))

    def _start_attempt(self, job: Job) -> None:
        assert self._retries is not None
        self._retries.start_attempt(job)
        self._route(job)

    def _give_up(self, job: Job, reason: str) -> None:
        assert self._retries is not None
        num_written = self._retries.num_written(job)
        self._retries.give_up(job)
        job.outcome, job.reason = LOST, reason
        self._report_end(job, num_written, Unavailable.code)

    def _worker_back(self, worker: str) -> None:
        self._components.register(worker)
        self._capacity_changed()


def _is_open(job: Job) -> bool:
    return not job.outcome or (job.is_wasted and bool(job.prefill))


def _in_this_attempt(job: Job, callback: Callable[[], None]) -> Callable[[], None]:
    """Return a callback that does nothing if the job has lost a worker in the meantime."""
    attempt = job.attempt
    return lambda: callback() if job.attempt == attempt else None
