"""The components of a simulated cluster: links, pools, workers, and the conductor that they register with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from moonpool.base.cluster import AssignedRole, DecodeSample, PrefillSample, PullSample, WorkerInfo, WorkerRole
from moonpool.conductor.placement.prefix_index import PrefixIndex
from moonpool.conductor.registration import Registration
from moonpool.conductor.state import ConductorState
from moonpool.engine.blocks import MAX_EVENTS, PageManager
from moonpool.engine.jumping import JumpingScheduler
from moonpool.engine.scheduler import SchedulerConfig
from moonpool.master.state.changes import Changes
from moonpool.sim.physics.cost import pipelined_prefill_s
from moonpool.sim.physics.links import Network
from moonpool.sim.world.clock import SimClock
from moonpool.sim.world.config import ClusterConfig
from moonpool.sim.world.decode import DecodeWorker
from moonpool.sim.world.job import Job
from moonpool.sim.world.pipelines import PipelineSizes, SimPipelines
from moonpool.sim.world.pool import BlockRuns, SimPool
from moonpool.sim.world.prefill import PrefillWorker, Stages
from moonpool.sim.world.reporter import INCARNATION, SimReporter
from moonpool.sim.world.sequence import block_number
from moonpool.sim.world.turns import EngineTurns
from moonpool.traces.columns import Trace

_MODEL = "simulated"
_MAX_SEQ_TOKENS = 1 << 30
OnJob = Callable[[Job], None]


class ClusterComponents:
    """A worker has the name of its (first) node; `worker_of` maps each node to its worker.

    Where roles change, every node has a prefill and a decode worker with the same pages and one engine; `roles` has the
    role in which each is registered.
    """

    def __init__(
        self,
        config: ClusterConfig,
        trace: Trace,
        on_first_token: OnJob,
        on_handed_over: OnJob,
        on_done: OnJob,
        on_reported: Callable[[], None],
    ) -> None:
        self._config, self._trace, self._on_reported = config, trace, on_reported
        self.clock = SimClock(_network(config))
        self.conductors = [
            ConductorState(config.policy, PrefixIndex(max_pool_blocks=1 << 24), num_records=0)
            for _ in range(config.num_conductors)
        ]
        self.runs = BlockRuns(trace, config.max_run_blocks)
        size, nodes = config.pipeline_nodes, config.prefill_nodes
        self._groups = {nodes[at]: tuple(nodes[at : at + size]) for at in range(0, len(nodes), size)}
        self.worker_of = {node: name for name, group in self._groups.items() for node in group}
        self.worker_of |= {node: node for node in config.decode_nodes}
        self._incarnations = dict.fromkeys([*self._groups, *config.decode_nodes], INCARNATION)
        self._registrations: dict[str, list[Registration]] = {}
        self.roles = dict.fromkeys(self._groups, WorkerRole.PREFILL)
        self.roles |= dict.fromkeys(config.decode_nodes, WorkerRole.DECODE)
        self._fixed = dict.fromkeys(self.roles, not config.elastic)
        if config.changes_roles:
            self._groups |= {node: (node,) for node in config.decode_nodes}
        self.pools = self._make_pools()
        self.prefills: dict[str, PrefillWorker] = {}
        self.decodes: dict[str, DecodeWorker] = {}
        self.reporters: dict[str, SimReporter] = {}
        self.pipelines = self._make_pipelines(on_first_token, on_handed_over)
        for name in self.roles:
            self._add_worker(name, on_first_token, on_handed_over, on_done)
        self._calibrate()

    # --- workers ---

    def register(self, name: str) -> None:
        shape, block_tokens = self._config.shape, self._trace.block_tokens
        info = WorkerInfo(
            name=name,
            role=self.roles[name],
            address=name,
            incarnation=self._incarnations[name],
            identity=b"",
            model=_MODEL,
            block_tokens=block_tokens,
            num_pages=self._num_pages(name),
            max_num_seqs=self._max_num_seqs(self.roles[name]),
            page_nbytes=block_tokens * shape.kv_nbytes_per_token,
            num_layers=shape.num_layers if self._config.layer_wise else 1,
            fixed=self._fixed[name],
            pipeline=self._config.pipeline,
            step_tokens=self._config.max_batch_tokens if self._config.pipeline > 1 else 0,
            host=name,
        )
        self._registrations[name] = [conductor.register(info) for conductor in self.conductors]

    def unregister(self, name: str) -> None:
        for conductor, registration in zip(self.conductors, self._registrations.pop(name), strict=True):
            conductor.unregister(registration, self.clock.now_s)

    def take_role(self, name: str, assigned: AssignedRole) -> None:
        """Register the worker again in this role. It goes on with what it has begun in its old role."""
        self.roles[name], self._fixed[name] = assigned.role, assigned.fixed
        self.register(name)
        self.reporters[name].start_over(self.clock.now_s)

    def restart(self, name: str) -> None:
        """Reset a crashed worker to a new process without state. The caller registers it when it is back."""
        self._incarnations[name] += 1
        self.reporters[name].stop()
        schedulers, reporter = self._make_schedulers(name)
        self.reporters[name] = reporter
        if name in self.decodes:
            self.decodes[name].restart(schedulers[WorkerRole.DECODE], reporter)
        else:
            self._make_own_pool(name, reporter)
            self.prefills[name].restart(schedulers[WorkerRole.PREFILL], self.pools[name], reporter)

    def _add_worker(self, name: str, on_first_token: OnJob, on_handed_over: OnJob, on_done: OnJob) -> None:
        """Make the worker, for one role or for both, and register it."""
        self.register(name)
        schedulers, reporter = self._make_schedulers(name)
        self.reporters[name] = reporter
        turns = EngineTurns()
        if WorkerRole.PREFILL in schedulers:
            self._make_own_pool(name, reporter)
            scheduler = schedulers[WorkerRole.PREFILL]
            self.prefills[name] = self._make_prefill(name, scheduler, reporter, on_first_token, on_handed_over, turns)
            self.pipelines.add_node(name, scheduler.pages, turns)
        if WorkerRole.DECODE in schedulers:
            self.decodes[name] = DecodeWorker(
                self.clock, name, schedulers[WorkerRole.DECODE], self._config.cost, reporter, on_done, turns
            )

    def _make_schedulers(self, name: str) -> tuple[dict[WorkerRole, JumpingScheduler], SimReporter]:
        """Return a scheduler for each role that the worker can have; both have the same pages."""
        config = self._config
        roles = list(WorkerRole) if config.changes_roles else [self.roles[name]]
        # The conductor does not use the cached blocks of decode workers.
        max_events = MAX_EVENTS if WorkerRole.PREFILL in roles else 0
        pages = PageManager(self._num_pages(name), self._trace.block_tokens, max_events)
        schedulers = {role: JumpingScheduler(self._limits(role), pages) for role in roles}
        reporter = SimReporter(
            self.clock,
            name,
            self._incarnations[name],
            tuple(schedulers.values()),
            self.conductors,
            config.report_every_s,
            self.runs,
            self._on_reported,
        )
        return schedulers, reporter

    def _limits(self, role: WorkerRole) -> SchedulerConfig:
        config = self._config
        return SchedulerConfig(
            max_batch_tokens=config.max_batch_tokens if role is WorkerRole.PREFILL else config.max_num_seqs,
            max_num_seqs=self._max_num_seqs(role),
            max_seq_tokens=_MAX_SEQ_TOKENS,
        )

    def _num_pages(self, name: str) -> int:
        return self._config.num_pages(self._trace.block_tokens, len(self._groups.get(name, (name,))))

    def _max_num_seqs(self, role: WorkerRole) -> int:
        config = self._config
        is_prefill = role is WorkerRole.PREFILL
        return min(config.max_num_seqs, config.max_batch_tokens) if is_prefill else config.max_num_seqs

    def _make_prefill(
        self,
        name: str,
        scheduler: JumpingScheduler,
        reporter: SimReporter,
        on_first_token: OnJob,
        on_handed_over: OnJob,
        turns: EngineTurns,
    ) -> PrefillWorker:
        config, shape = self._config, self._config.shape
        stages = Stages(self._groups[name], shape.hidden_size * shape.dtype_nbytes, config.node.network_bandwidth)
        return PrefillWorker(
            self.clock,
            stages,
            scheduler,
            config.cost.prefill,
            self.pools[name],
            reporter,
            shape.kv_nbytes_per_token,
            shape.num_layers if config.layer_wise else 1,
            on_first_token,
            on_handed_over,
            turns,
        )

    def _make_pipelines(self, on_first_token: OnJob, on_handed_over: OnJob) -> SimPipelines:
        """Return what runs the prompts of several workers; only `config.pipeline` makes the conductor choose them."""
        shape = self._config.shape
        hidden_nbytes, block_tokens = shape.hidden_size * shape.dtype_nbytes, self._trace.block_tokens
        kv_nbytes, step_tokens = shape.kv_nbytes_per_token, self._config.max_batch_tokens
        sizes = PipelineSizes(shape.num_layers, hidden_nbytes, kv_nbytes, block_tokens, step_tokens)
        pool = next(iter(self.pools.values()))
        return SimPipelines(
            self.clock,
            self._config.cost.prefill,
            sizes,
            pool,
            lambda node, sample: self.reporters[node].pulls.append(sample),
            on_first_token,
            on_handed_over,
        )

    # --- pools ---

    def _make_pools(self) -> dict[str, SimPool | None]:
        config = self._config
        if config.pool == "shared":
            everywhere = config.decode_nodes_hold_blocks or config.changes_roles
            nodes = config.prefill_nodes + (config.decode_nodes if everywhere else [])
            for conductor in self.conductors:
                conductor.set_pool_nodes({node: node for node in nodes})
            return dict.fromkeys(self._groups, self._make_pool(nodes, self._pool_changed))
        return dict.fromkeys(self._groups)

    def _make_own_pool(self, name: str, reporter: SimReporter) -> None:
        if self._config.pool == "local":
            self.pools[name] = self._make_pool(list(self._groups[name]), reporter.own_pool_changed)

    def _make_pool(self, nodes: list[str], on_changes: Callable[[Changes], None]) -> SimPool:
        config = self._config
        nbytes = self._trace.block_tokens * config.shape.kv_nbytes_per_token
        return SimPool(
            self.clock,
            nodes,
            config.node,
            nbytes,
            config.pool_rules,
            on_changes,
        )

    def _pool_changed(self, changes: Changes) -> None:
        """Pass changes to the conductors' indices, as blocks (they know no runs). Block numbers are their
        fingerprints."""
        for conductor in self.conductors:
            self._update_index(conductor.index, changes)

    def _update_index(self, index: PrefixIndex, changes: Changes) -> None:
        runs, at = self.runs, 0
        for node, count in changes.nodes:
            index.update_pool_prints(runs.blocks_of_all(changes.stored[at : at + count]), (), node)
            at += count
        if changes.removed:
            index.update_pool_prints((), runs.blocks_of_all(changes.removed))
        for name, tier in changes.tiers:
            index.set_tier(runs.blocks(name), tier)

    def promote(self, keys: list[bytes]) -> None:
        """Have blocks that a request which waits will pull brought from SSD to memory."""
        pool = next(iter(self.pools.values()))
        if pool is not None:
            pool.promote(self.runs.heads([block_number(key) for key in keys]))

    # --- initial costs ---

    def _calibrate(self) -> None:
        """Give the conductors what real workers measure before they register, on idle machines."""
        cost, size = self._config.cost, self._config.pipeline_nodes
        bandwidth = self._config.node.network_bandwidth * size
        for conductor in self.conductors:
            conductor.costs.learn(
                prefills=list(_calibration_prefills(self._prefill_s)),
                decodes=[
                    DecodeSample(num_seqs, num_seqs * context, cost.decode_step_s(num_seqs, num_seqs * context))
                    for num_seqs in (1, 8, 32)
                    for context in (1024, 8192, 32_768)
                ],
                pulls=[PullSample(nbytes, nbytes / bandwidth) for nbytes in (1 << 28, 1 << 30, 1 << 32, 1 << 34)],
            )

    @property
    def _prefill_s(self) -> Callable[[int, int], float]:
        config, prefill = self._config, self._config.cost.prefill
        if config.pipeline_nodes == 1:
            return prefill.prefill_s
        return partial(
            pipelined_prefill_s, prefill, chunk_tokens=config.max_batch_tokens, num_stages=config.pipeline_nodes
        )


def _network(config: ClusterConfig) -> Network:
    network = Network()
    for name in [*config.prefill_nodes, *config.decode_nodes]:
        for link, capacity in config.node.link_capacities(name).items():
            network.add(link, capacity)
    return network


def _calibration_prefills(prefill_s: Callable[[int, int], float]) -> Iterator[PrefillSample]:
    for num_tokens in (1024, 4096, 16_384, 65_536):
        for prefix_tokens in (0, num_tokens // 2, num_tokens * 7 // 8):
            yield PrefillSample(num_tokens, prefix_tokens, prefill_s(num_tokens, prefix_tokens))
