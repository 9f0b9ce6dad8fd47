"""The simulated cluster: a trace's requests through production's conductor, pool and schedulers, on one clock."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from moonpool.base.cluster import DecodeSample, PrefillSample, PullSample, WorkerInfo, WorkerRole
from moonpool.base.errors import Overloaded
from moonpool.conductor.messages import Decision, RequestEnded
from moonpool.conductor.placement.prefix_index import PrefixIndex
from moonpool.conductor.state import ConductorState
from moonpool.engine.blocks import MAX_EVENTS, PageManager
from moonpool.engine.jumping import JumpingScheduler
from moonpool.engine.scheduler import SchedulerConfig
from moonpool.sim.physics.links import Network
from moonpool.sim.traces.columns import Trace, TraceRequest
from moonpool.sim.world.arrivals import follow
from moonpool.sim.world.clockwork import Clockwork
from moonpool.sim.world.config import ClusterConfig
from moonpool.sim.world.decode import DecodeWorker
from moonpool.sim.world.front_desk import FrontDesk
from moonpool.sim.world.job import DONE, REFUSED, Job
from moonpool.sim.world.paper import block_keys
from moonpool.sim.world.pool import SimPool
from moonpool.sim.world.prefill import PrefillWorker
from moonpool.sim.world.reporter import INCARNATION, Reporter
from moonpool.sim.world.runs import Runs
from moonpool.store.state.changes import Changes

_MODEL = "simulated"
_MAX_SEQ_TOKENS = 1 << 30


class Cluster:
    """Runs one trace, once. `jobs` has every request when run() returns, in the trace's order."""

    def __init__(self, config: ClusterConfig, trace: Trace) -> None:
        self.config, self.trace = config, trace
        self.jobs: list[Job] = []
        prefill_nodes = [f"p{number}" for number in range(config.num_prefill)]
        decode_nodes = [f"d{number}" for number in range(config.num_decode)]
        network = Network()
        for name in [*prefill_nodes, *decode_nodes]:
            for link, capacity in config.node.link_capacities(name).items():
                network.add(link, capacity)
        self.clock = Clockwork(network)
        index = PrefixIndex(max_pool_blocks=1 << 24)
        self.conductor = ConductorState(config.policy, index, num_records=0)
        self._desk = FrontDesk(
            self.clock, self.conductor, config.policy, config.asked_tokens, self._sent, self._refused
        )
        self._runs = Runs(trace, config.max_run_blocks)
        self.pools = self._make_pools(prefill_nodes, decode_nodes)
        self.prefills = {node: self._make_prefill(node) for node in prefill_nodes}
        self.decodes = {node: self._make_decode(node) for node in decode_nodes}
        self._calibrate()

    def run(self, progress: Callable[[float], None] | None = None) -> list[Job]:
        follow(self.clock, self.trace, self._arrived)
        self.clock.run(progress)
        return self.jobs

    # a request's life

    def _arrived(self, number: int, request: TraceRequest) -> None:
        block_tokens = self.trace.block_tokens
        numbers = request.block_ids[: request.num_input // block_tokens].tolist()
        job = Job(number, self.clock.now_s, request.num_input, request.num_output, block_keys(numbers))
        job.runs = self._runs.split(numbers)
        self.jobs.append(job)
        tenant, priority = self.trace.tenant, self.trace.priority
        self._desk.ask(
            job,
            "" if tenant is None else str(tenant[number]),
            0 if priority is None else int(priority[number]),
        )

    def _refused(self, job: Job, reason: str) -> None:
        job.outcome, job.reason = REFUSED, reason

    def _sent(self, job: Job, decision: Decision) -> None:
        job.decode, job.predicted_ttft_s = decision.decode.name, decision.ttft_s
        job.asks_before_decode = decision.asks_before_decode
        # What the policy says of the pool is not about the node's own memory.
        takes_all = self.config.pool == "local" or self.config.always_pulls
        job.max_pool_blocks = None if takes_all else decision.max_pool_blocks
        prefill = self.prefills[decision.prefill.name]
        self.decodes[job.decode].reserve(job, lambda present: prefill.take(job, present))

    def _first_token(self, job: Job) -> None:
        """The prompt is computed; where decoding is too crowded by now, for nothing."""
        now_s = self.clock.now_s
        if job.asks_before_decode and job.num_output > 1:
            try:
                self.conductor.before_decode(job.request_id, now_s)
            except Overloaded as error:
                job.is_wasted = True
                self._refused(job, str(error))
        self.conductor.prefill_ended(job.request_id, now_s)
        self._desk.changed()

    def _handed_over(self, job: Job) -> None:
        decode = self.decodes[job.decode]
        if job.num_output > 1 and not job.is_wasted:
            decode.join(job)
            return
        decode.drop(job)
        if job.is_wasted:
            self._tell_end(job, 0, Overloaded.code)
        else:
            job.end_s, job.tbt_s = self.clock.now_s, 0.0
            self._ended(job)

    def _ended(self, job: Job) -> None:
        job.outcome = DONE
        self._tell_end(job, job.num_output, "done")

    def _tell_end(self, job: Job, num_output: int, outcome: str) -> None:
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

    # the parts

    def _make_pools(self, prefill_nodes: list[str], decode_nodes: list[str]) -> dict[str, SimPool | None]:
        if self.config.pool == "shared":
            nodes = prefill_nodes + (decode_nodes if self.config.decode_nodes_hold_blocks else [])
            return dict.fromkeys(prefill_nodes, self._make_pool(nodes, self._pool_changed))
        return dict.fromkeys(prefill_nodes)

    def _make_pool(self, nodes: list[str], on_changes: Callable[[Changes], None]) -> SimPool:
        config = self.config
        nbytes = self.trace.block_tokens * config.shape.kv_nbytes_per_token
        return SimPool(
            self.clock,
            nodes,
            config.node,
            nbytes,
            config.pool_rules,
            on_changes,
        )

    def _pool_changed(self, changes: Changes) -> None:
        """The conductor hears of blocks: it knows of no runs. Their numbers are their fingerprints."""
        index, runs = self.conductor.index, self._runs
        index.update_pool_prints(runs.blocks_of_all(changes.stored), runs.blocks_of_all(changes.removed))
        for name, tier in changes.tiers:
            index.set_tier(runs.blocks(name), tier)

    def _make_prefill(self, node: str) -> PrefillWorker:
        config = self.config
        scheduler = self._scheduler(
            config.max_batch_tokens, min(config.max_num_seqs, config.max_batch_tokens), MAX_EVENTS
        )
        self._register(node, WorkerRole.PREFILL, scheduler)
        reporter = Reporter(node, scheduler, self.conductor, config.report_every_s, self._runs)
        if config.pool == "local":
            self.pools[node] = self._make_pool([node], reporter.own_pool_changed)
        return PrefillWorker(
            self.clock,
            node,
            scheduler,
            config.cost.prefill,
            self.pools[node],
            reporter,
            config.shape.kv_nbytes_per_token,
            config.shape.num_layers if config.layer_wise else 1,
            self._first_token,
            self._handed_over,
        )

    def _make_decode(self, node: str) -> DecodeWorker:
        config = self.config
        scheduler = self._scheduler(config.max_num_seqs, config.max_num_seqs, 0)
        self._register(node, WorkerRole.DECODE, scheduler)
        reporter = Reporter(node, scheduler, self.conductor, config.report_every_s, self._runs)
        return DecodeWorker(self.clock, node, scheduler, config.cost, reporter, self._ended)

    def _scheduler(self, max_batch_tokens: int, max_num_seqs: int, max_events: int) -> JumpingScheduler:
        block_tokens = self.trace.block_tokens
        limits = SchedulerConfig(
            max_batch_tokens=max_batch_tokens, max_num_seqs=max_num_seqs, max_seq_tokens=_MAX_SEQ_TOKENS
        )
        return JumpingScheduler(limits, PageManager(self.config.num_pages(block_tokens), block_tokens, max_events))

    def _register(self, node: str, role: WorkerRole, scheduler: JumpingScheduler) -> None:
        shape, block_tokens = self.config.shape, self.trace.block_tokens
        self.conductor.register(
            WorkerInfo(
                name=node,
                role=role,
                address=node,
                incarnation=INCARNATION,
                identity=b"",
                model=_MODEL,
                block_tokens=block_tokens,
                num_pages=scheduler.pages.num_pages,
                max_num_seqs=scheduler.config.max_num_seqs,
                page_nbytes=block_tokens * shape.kv_nbytes_per_token,
                num_layers=shape.num_layers if self.config.layer_wise else 1,
            )
        )

    def _calibrate(self) -> None:
        """What workers measure before they register: a few prompts, batches and pulls, nobody else being there."""
        cost, node = self.config.cost, self.config.node
        self.conductor.costs.learn(
            prefills=list(_calibration_prefills(cost.prefill.prefill_s)),
            decodes=[
                DecodeSample(num_seqs, num_seqs * context, cost.decode_step_s(num_seqs, num_seqs * context))
                for num_seqs in (1, 8, 32)
                for context in (1024, 8192, 32_768)
            ],
            pulls=[
                PullSample(nbytes, nbytes / node.network_bandwidth) for nbytes in (1 << 28, 1 << 30, 1 << 32, 1 << 34)
            ],
        )


def _calibration_prefills(prefill_s: Callable[[int, int], float]) -> Iterator[PrefillSample]:
    for num_tokens in (1024, 4096, 16_384, 65_536):
        for prefix_tokens in (0, num_tokens // 2, num_tokens * 7 // 8):
            yield PrefillSample(num_tokens, prefix_tokens, prefill_s(num_tokens, prefix_tokens))
