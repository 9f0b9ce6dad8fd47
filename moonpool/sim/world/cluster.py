"""The simulated cluster: a trace's requests pass through the real conductor, pool and schedulers on one clock."""

from __future__ import annotations

from collections.abc import Callable

from moonpool.base.errors import MoonpoolError, Overloaded, PeerLost, Unavailable
from moonpool.conductor.messages import Decision, RequestEnded, Route
from moonpool.conductor.placement.policy import PolicyConfig
from moonpool.conductor.request_queue import RequestQueue
from moonpool.conductor.state import ConductorState
from moonpool.sim.world.clock import Handle, SimTimers
from moonpool.sim.world.components import Parts
from moonpool.sim.world.config import ClusterConfig
from moonpool.sim.world.decode import DecodeWorker, Written
from moonpool.sim.world.job import DONE, LOST, REFUSED, Job, follow
from moonpool.sim.world.outages import Outages, PoolMembers
from moonpool.sim.world.retries import Lives
from moonpool.sim.world.sequence import block_keys
from moonpool.traces.columns import Trace, TraceRequest

_OWNER = "trace"


class SimFrontend:
    """Every job that is asked for is sent or refused, now or later, once."""

    def __init__(
        self,
        clock: SimTimers,
        conductor: ConductorState,
        policy: PolicyConfig,
        asked_tokens: int,
        on_sent: Callable[[Job, Decision], None],
        on_refused: Callable[[Job, MoonpoolError], None],
    ) -> None:
        self._clock, self._on_sent, self._on_refused = clock, on_sent, on_refused
        self._room = RequestQueue(conductor, policy)
        self._asked_tokens = asked_tokens
        self._jobs: dict[str, Job] = {}  # that wait
        self._timer: Handle | None = None

    def ask(self, job: Job, tenant: str, priority: int, exclude: tuple[str, ...] = (), num_written: int = 0) -> None:
        """Not from the workers in `exclude`; so many of its tokens the client has already."""
        call = Route(
            request_id=job.request_id,
            keys=job.keys,
            num_tokens=job.num_input,
            max_tokens=max(job.num_output, self._asked_tokens - num_written),
            exclude=exclude,
            tenant=tenant,
            priority=priority,
        )
        now_s = self._clock.now_s
        try:
            decision = self._room.submit(call, _OWNER, now_s, now_s)
        except (Overloaded, Unavailable) as error:
            self._on_refused(job, error)
            return
        if decision is not None:
            self._on_sent(job, decision)
        else:
            self._jobs[job.request_id] = job
            self._settle()  # another may have had to give way

    def changed(self) -> None:
        """Somebody may fit now: a request has ended, or a worker has come."""
        if self._jobs:
            self._settle()

    def _settle(self) -> None:
        if self._timer is not None:
            self._clock.cancel(self._timer)
            self._timer = None
        for request_id, outcome in self._room.dispatch(self._clock.now_s):
            job = self._jobs.pop(request_id)
            if isinstance(outcome, Decision):
                self._on_sent(job, outcome)
            else:
                self._on_refused(job, outcome)
        at_s = self._room.next_event_s()
        if at_s is not None:
            self._timer = self._clock.at(at_s, self._settle)


class SimCluster:
    """Runs one trace, once. `jobs` has every request when run() returns, in the trace's order."""

    def __init__(self, config: ClusterConfig, trace: Trace) -> None:
        self.config, self.trace = config, trace
        self.jobs: list[Job] = []
        self._parts = parts = Parts(config, trace, self._first_token, self._handed_over, self._ended)
        self.clock, self.conductor, self.runs = parts.clock, parts.conductor, parts.runs
        self.pools, self.prefills, self.decodes = parts.pools, parts.prefills, parts.decodes
        self._desk = SimFrontend(
            self.clock, self.conductor, config.policy, config.asked_tokens, self._sent, self._refused
        )
        self._lives: Lives | None = None  # where nothing fails, nobody needs another
        if config.failures:
            self._lives = Lives(config.retry, trace.block_tokens)
            self._plan_failures()

    def run(self, progress: Callable[[float], None] | None = None) -> list[Job]:
        follow(self.clock, self.trace, self._arrived)
        self.clock.run(progress)
        return self.jobs

    # a request's life

    def _arrived(self, number: int, request: TraceRequest) -> None:
        block_tokens = self.trace.block_tokens
        numbers = request.block_ids[: request.num_input // block_tokens].tolist()
        job = Job(number, self.clock.now_s, request.num_input, request.num_output, block_keys(numbers))
        job.runs = self.runs.split(numbers)
        self.jobs.append(job)
        request_s = self.config.cost.overhead.request_s
        if request_s:
            self.clock.at(job.arrival_s + request_s, lambda: self._ask(job))
        else:
            self._ask(job)

    def _ask(self, job: Job) -> None:
        tenant, priority = self.trace.tenant, self.trace.priority
        self._desk.ask(
            job,
            "" if tenant is None else str(tenant[job.number]),
            0 if priority is None else int(priority[job.number]),
            *(() if self._lives is None else (self._lives.excluded(job), self._lives.num_written(job))),
        )

    def _refused(self, job: Job, error: MoonpoolError) -> None:
        """For good, unless it lost a worker, or there is none now."""
        if self._lives is not None:
            pause_s = self._lives.refused(job, error, self.clock.now_s)
            if pause_s is not None:
                self.clock.at(self.clock.now_s + pause_s, lambda: self._ask(job))
                return
            if self._lives.num_written(job) or isinstance(error, Unavailable):
                self._give_up(job, str(error))
                return
            self._lives.given_up(job)
        job.outcome, job.reason = REFUSED, str(error)

    def _sent(self, job: Job, decision: Decision) -> None:
        job.prefill, job.decode, job.predicted_ttft_s = decision.prefill.name, decision.decode.name, decision.ttft_s
        job.asks_before_decode = decision.asks_before_decode and not (self._lives and self._lives.num_written(job))
        # What the policy says of the pool is not about the node's own memory.
        takes_all = self.config.pool == "local" or self.config.always_pulls
        job.max_pool_blocks = None if takes_all else decision.max_pool_blocks
        prefill, decode = self.prefills[decision.prefill.name], self.decodes[job.decode]

        def reserve() -> None:
            decode.reserve(job, lambda present: prefill.take(job, present))

        if self.config.answers_between_steps:
            decode.between_steps(_in_this_attempt(job, reserve))
        else:
            reserve()

    def _first_token(self, job: Job) -> None:
        """The prompt is computed; where decoding is too crowded by now, for nothing."""
        now_s = self.clock.now_s
        if job.asks_before_decode and job.num_output > 1:
            try:
                self.conductor.before_decode(job.request_id, now_s)
            except Overloaded as error:
                job.is_wasted = True
                job.outcome, job.reason = REFUSED, str(error)
        self.conductor.prefill_ended(job.request_id, now_s)
        self._desk.changed()

    def _handed_over(self, job: Job) -> None:
        job.prefill, decode = "", self.decodes[job.decode]
        if job.num_output > 1 and not job.is_wasted:
            self._hand_off(job, decode)
            return
        decode.drop(job)
        if job.is_wasted:
            self._tell_end(job, 0, Overloaded.code)
        else:
            job.end_s, job.tbt_s = self.clock.now_s, 0.0
            self._ended(job)

    def _hand_off(self, job: Job, decode: DecodeWorker) -> None:
        """With overheads the client has its first token when the decode worker has taken the request, which is when
        our prefill workers answer. They are heard between steps twice: to check what came, and to take it."""
        handoff_s = self.config.cost.overhead.handoff_s

        def take() -> None:
            job.first_token_s = self.clock.now_s
            job.ttft_s = job.first_token_s - job.arrival_s
            decode.join(job)

        take = _in_this_attempt(job, take)
        if self.config.answers_between_steps:
            at_s = self.clock.now_s + handoff_s
            self.clock.at(at_s, lambda: decode.between_steps(lambda: decode.between_steps(take)))
        elif handoff_s:
            self.clock.at(self.clock.now_s + handoff_s, take)
        else:
            decode.join(job)

    def _ended(self, job: Job) -> None:
        job.outcome = DONE
        if self._lives is not None:
            self._lives.ended(job, self.decodes[job.decode].gaps(job))
        self._tell_end(job, job.num_output, "done")

    def _tell_end(self, job: Job, num_output: int, outcome: str) -> None:
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
        )
        self.conductor.request_ended(call, self.clock.now_s)
        self._desk.changed()

    # when workers are lost

    def _plan_failures(self) -> None:
        config, pool = self.config, next(iter(self.pools.values()))
        members = PoolMembers(self.clock, pool) if config.pool == "shared" and pool is not None else None
        Outages(self._parts, config.node, members, self._lost, self._back).plan(config.failures)

    def _lost(self, worker: str) -> None:
        """Whoever was there or on the way there is taken back everywhere, and then tries again."""
        if worker in self.decodes:
            self.decodes[worker].stop()
        self._parts.unregister(worker)
        jobs = [job for job in self.jobs if worker in (job.prefill, job.decode) and _is_under_way(job)]
        written = [self.decodes[job.decode].written(job) for job in jobs]
        for job in jobs:
            if job.prefill and job.prefill != worker:
                self.prefills[job.prefill].cancel(job)
            if job.decode != worker:
                self.decodes[job.decode].cancel(job)
        self._parts.restart(worker)
        for job, what in zip(jobs, written, strict=True):
            self._try_again(job, worker, what)
        for decode in self.decodes.values():
            decode.give_places()
        for prefill in self.prefills.values():
            prefill.go_on()

    def _try_again(self, job: Job, worker: str, written: Written) -> None:
        assert self._lives is not None
        if job.is_wasted:  # it was refused already, and only its end not told
            job.prefill = ""
            self._tell_end(job, 0, Overloaded.code)
            return
        pause_s = self._lives.lost(job, worker, written)
        if pause_s is None:
            self._give_up(job, f"gave up after {job.num_retries + 1} attempts")
            return
        self._tell_end(job, self._lives.num_written(job), PeerLost.code)
        self.clock.at(self.clock.now_s + pause_s, lambda: self._begin_again(job))

    def _begin_again(self, job: Job) -> None:
        assert self._lives is not None
        self._lives.begin(job)
        self._ask(job)

    def _give_up(self, job: Job, reason: str) -> None:
        assert self._lives is not None
        num_written = self._lives.num_written(job)
        self._lives.given_up(job)
        job.outcome, job.reason = LOST, reason
        self._tell_end(job, num_written, Unavailable.code)

    def _back(self, worker: str) -> None:
        self._parts.register(worker)
        self._desk.changed()


def _is_under_way(job: Job) -> bool:
    return not job.outcome or (job.is_wasted and bool(job.prefill))


def _in_this_attempt(job: Job, act: Callable[[], None]) -> Callable[[], None]:
    """Not if a worker is lost meanwhile."""
    attempt = job.attempt
    return lambda: act() if job.attempt == attempt else None
