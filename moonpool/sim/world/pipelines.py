"""Prompts that several simulated prefill workers compute together: the real StageQueue on the simulated clock.

As in worker/pipeline/: every stage has a span of the layers, pulls these of the prompt's prefix in the pool, and when
all have pulled, chunks of the rest pass the stages in order. A stage hands the KV of its layers over from where it is.
Chunks and the steps of a worker's own prompts take turns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from moonpool.base.cluster import PullSample
from moonpool.base.errors import NoSpace
from moonpool.engine.blocks import PageManager
from moonpool.engine.sequence import pages_for
from moonpool.engine.stages import StageQueue, chunk_bounds, common_prefix_blocks, layer_spans, widened_chunk_tokens
from moonpool.sim.physics.cost import PrefillCost
from moonpool.sim.world.clock import SimClock
from moonpool.sim.world.job import Job
from moonpool.sim.world.pool import Run, SimPool, Sources
from moonpool.sim.world.pulled import count_sources, find_prefix, pull_sample
from moonpool.sim.world.turns import EngineTurns


class PipelineSizes(NamedTuple):
    """The model's layers and the bytes of one token, and how its tokens are divided."""

    num_layers: int
    hidden_nbytes: int  # that go from stage to stage
    kv_nbytes: int  # of all layers
    block_tokens: int
    step_tokens: int  # that a worker computes at once


@dataclass(eq=False, slots=True)
class StagedJob:
    """A job on its way through the stages, the first one first."""

    job: Job
    present_tokens: int  # whose KV the decode worker has already
    chunk_tokens: int
    spans: list[range]
    bounds: list[tuple[int, int]] = field(default_factory=list)  # of the chunks, once it is known where they begin
    stages: list[SimStage] = field(default_factory=list)
    is_computed: bool = False

    @property
    def name(self) -> str:
        return self.job.request_id


class SimStage:
    """The stages of one prefill node: at most one chunk at a time, in turns with the node's own prompts."""

    def __init__(
        self, clock: SimClock, node: str, pages: PageManager, turns: EngineTurns, pipelines: SimPipelines
    ) -> None:
        self._clock, self.node, self.pages, self._turns, self._pipelines = clock, node, pages, turns, pipelines
        self.queue: StageQueue[str] = StageQueue()
        self._is_computing = False
        self.busy_s = 0.0

    def look(self) -> None:
        """Begin the next chunk, if one is ready and the engine is free."""
        if self._is_computing or not self.queue.has_ready or not self._turns.begin(self):
            return
        opened = self.queue.begin()
        assert opened is not None, "a chunk is ready"
        self._is_computing = True
        name, number = opened
        seconds = self._pipelines.begin_chunk(self, name, number)
        self.busy_s += seconds
        self._clock.call_at(self._clock.now_s + seconds, lambda: self._computed(name, number))

    def resume_steps(self) -> None:
        """Have the turn that the node's own prompts have just ended."""
        self.look()

    def yield_soon(self) -> None:
        """Do nothing: the chunk under way is the last one already."""

    def _computed(self, name: str, number: int) -> None:
        self.queue.end()
        self._is_computing = False
        self._turns.end(self)
        self._pipelines.end_chunk(self, name, number)
        self.look()


class SimPipelines:
    """All pipelines of a cluster. Calls `on_first_token` and `on_handed_over` as a prefill worker does, and `on_pulled`
    with the node and the measured time of each stage's pull."""

    def __init__(
        self,
        clock: SimClock,
        cost: PrefillCost,
        sizes: PipelineSizes,
        pool: SimPool | None,
        on_pulled: Callable[[str, PullSample], None],
        on_first_token: Callable[[Job], None],
        on_handed_over: Callable[[Job], None],
    ) -> None:
        self._on_pulled = on_pulled
        self._clock, self._cost, self._sizes, self._pool = clock, cost, sizes, pool
        self._on_first_token, self._on_handed_over = on_first_token, on_handed_over
        self.stages: dict[str, SimStage] = {}  # by node
        self._running: dict[str, StagedJob] = {}
        self.num_prompts = 0

    def add_node(self, node: str, pages: PageManager, turns: EngineTurns) -> None:
        self.stages[node] = SimStage(self._clock, node, pages, turns, self)

    def start(self, job: Job, present_tokens: int, nodes: Sequence[str], chunk_tokens: int) -> bool:
        """Begin a job at these nodes, the last of which leads. Return False, and begin nothing, if a node has too few
        pages now: one worker computes the job then."""
        staged = StagedJob(job, present_tokens, chunk_tokens, layer_spans(self._sizes.num_layers, len(nodes)))
        for stage in [self.stages[node] for node in nodes]:
            try:
                stage.pages.reserve(staged.name, pages_for(job.num_input, stage.pages.block_tokens))
            except NoSpace:
                self._release(staged)
                return False
            staged.stages.append(stage)
        self._running[staged.name] = staged
        self.num_prompts += 1
        self._pull(staged)
        return True

    def _pull(self, staged: StagedJob) -> None:
        """Pull the prompt's prefix, each stage its layers, then begin. Nodes do not fail here, so all of it comes."""
        job, leader = staged.job, staged.stages[-1].node
        job.prefill_start_s, block_tokens = self._clock.now_s, self._sizes.block_tokens
        reusable = common_prefix_blocks([len(job.keys)], job.num_input, block_tokens)
        found, num_blocks = find_prefix(self._pool, job, reusable, leader)
        sources = found.sources(0, num_blocks)
        count_sources(job, (leader,), block_tokens, sources)
        left = len(staged.stages)

        def pulled() -> None:
            nonlocal left
            left -= 1
            if not left:
                self._begin(staged, num_blocks * block_tokens)

        for stage, layers in zip(staged.stages, staged.spans, strict=True):
            self._pull_span(stage.node, len(layers) / self._sizes.num_layers, sources, pulled)

    def _pull_span(self, node: str, share: float, sources: Sources, on_end: Callable[[], None]) -> None:
        """Bring a share of the blocks' layers to the node; call `on_end` when all of it is there, at once for none."""
        if not sources:
            on_end()
            return
        began_s, left = self._clock.now_s, len(sources)
        block_nbytes = share * self._sizes.block_tokens * self._sizes.kv_nbytes

        def loaded() -> None:
            nonlocal left
            left -= 1
            if not left:
                self._on_pulled(node, pull_sample(sources, block_nbytes, self._clock.now_s - began_s, (node,)))
                on_end()

        assert self._pool is not None, "only a pool has sources"
        for (source, on_ssd), count in sources.items():
            self._clock.send(self._pool.route(source, node, on_ssd), count * block_nbytes, loaded)

    def _begin(self, staged: StagedJob, first_token: int) -> None:
        """Compute from `first_token` on, and hand over what is before it."""
        num_tokens = staged.job.num_input
        chunk_tokens = widened_chunk_tokens(staged.chunk_tokens, num_tokens - first_token, self._sizes.step_tokens)
        staged.bounds = chunk_bounds(num_tokens, chunk_tokens, first_token)
        first, last = staged.stages[0], staged.stages[-1]
        for stage, layers in zip(staged.stages, staged.spans, strict=True):
            share = len(layers) / self._sizes.num_layers
            self._send_kv(staged, stage, share * max(0, first_token - staged.present_tokens))
            stage.queue.add(staged.name, len(staged.bounds), is_first=stage is first, is_last=stage is last)
        first.look()

    def begin_chunk(self, stage: SimStage, name: str, number: int) -> float:
        """Send the chunk's KV of this stage's layers, which leave as they are computed. Return the computing time."""
        staged = self._running[name]
        at = staged.stages.index(stage)
        share = len(staged.spans[at]) / self._sizes.num_layers
        start, end = staged.bounds[number]
        seconds = share * self._cost.compute_s(end, start)
        staged.job.compute_s += seconds
        self._send_kv(staged, stage, share * max(0, end - max(start, staged.present_tokens)))
        return seconds

    def _send_kv(self, staged: StagedJob, stage: SimStage, num_tokens: float) -> None:
        if num_tokens and staged.job.num_output > 1:
            staged.job.num_flows += 1
            route = f"{stage.node}/nic_out", f"{staged.job.decode}/nic_in"
            self._clock.send(route, num_tokens * self._sizes.kv_nbytes, lambda: self._sent(staged))

    def end_chunk(self, stage: SimStage, name: str, number: int) -> None:
        """Pass the chunk on to the next stage; its room at the stage before is free."""
        staged = self._running[name]
        at = staged.stages.index(stage)
        if at:
            staged.stages[at - 1].queue.taken(name)
            staged.stages[at - 1].look()
        if at + 1 < len(staged.stages):
            following, (start, end) = staged.stages[at + 1], staged.bounds[number]

            def arrive() -> None:
                following.queue.arrived(name)
                following.look()

            route = f"{stage.node}/nic_out", f"{following.node}/nic_in"
            self._clock.send(route, (end - start) * self._sizes.hidden_nbytes, arrive)
        elif number == len(staged.bounds) - 1:
            self._computed(staged)

    def _computed(self, staged: StagedJob) -> None:
        job, now_s = staged.job, self._clock.now_s
        staged.is_computed = True
        job.ttft_s, job.first_token_s = now_s - job.arrival_s, now_s
        self._store(staged)
        self._on_first_token(job)
        self._finish_if_sent(staged)

    def _store(self, staged: StagedJob) -> None:
        """Store all blocks. Round-robin: each node stores as much as if it stored its layers of all runs."""
        runs: list[Run] = staged.job.runs
        if self._pool is None or not runs:
            return
        parents = [None, *(run[0] for run in runs)]
        for number, stage in enumerate(staged.stages):
            own = runs[number :: len(staged.stages)]
            if own:
                self._pool.put(stage.node, own, parents[number : len(runs) : len(staged.stages)])

    def _sent(self, staged: StagedJob) -> None:
        staged.job.num_flows -= 1
        self._finish_if_sent(staged)

    def _finish_if_sent(self, staged: StagedJob) -> None:
        if staged.job.num_flows or not staged.is_computed:
            return
        del self._running[staged.name]
        self._release(staged)
        self._on_handed_over(staged.job)

    def _release(self, staged: StagedJob) -> None:
        for stage in staged.stages:
            stage.queue.drop(staged.name)
            stage.pages.release(staged.name)
