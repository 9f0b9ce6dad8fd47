"""A simulated prefill worker: the real scheduler, with times from the cost model and from links.

KV moves layer by layer, as in a real worker: a layer pulled from the pool is loaded while earlier layers are computed,
and a computed layer is sent to the decode worker while later layers are computed. So a step ends when computing and
loading have both ended, including the computing of the last layer; the KV has arrived when its last layer has.

Several nodes may be one worker: a pipeline of stages with the same number of layers each (CPP). Steps follow each other
at the pace of the first stage, because a chunk needs the KV of earlier chunks of the same layers only. The results of a
step are available when the step has left the last stage. Each node pulls, stores and sends the KV of its layers.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

from moonpool.base.cluster import PrefillSample
from moonpool.engine.jumping import JumpingScheduler
from moonpool.engine.pulls_ahead import PullAhead
from moonpool.engine.sequence import AdmittedSequence, Chunk, Sequence
from moonpool.sim.physics.cost import PrefillCost, StagePipeline
from moonpool.sim.world.clock import Handle, SimClock
from moonpool.sim.world.job import Job
from moonpool.sim.world.pool import PoolHit, Run, SimPool, Sources
from moonpool.sim.world.pull_ahead import SimPullsAhead
from moonpool.sim.world.pulled import count_sources, find_prefix
from moonpool.sim.world.reporter import SimReporter
from moonpool.sim.world.sequence import TOKEN, SimSequence
from moonpool.sim.world.turns import EngineTurns


class Stages(NamedTuple):
    """The nodes of one worker, and the bytes per token that each stage sends to the next."""

    nodes: tuple[str, ...]
    token_nbytes: int
    bandwidth: float  # of a node's network without other traffic

    def boundary_s(self, num_tokens: int) -> float:
        return num_tokens * self.token_nbytes / self.bandwidth


class _PipelinedStep:
    """A step that has left the first stage and not yet the last."""

    __slots__ = ("accepted", "chunks")

    def __init__(self, chunks: list[Chunk], accepted: list[str]) -> None:
        self.chunks, self.accepted = chunks, accepted

    def remove(self, request_id: str) -> None:
        self.chunks = [chunk for chunk in self.chunks if chunk.request_id != request_id]
        self.accepted = [each for each in self.accepted if each != request_id]


class PrefillWorker:
    """With `num_layers` 1 nothing overlaps: loading comes before computing, and sending after it.

    Its name is that of its first node. Without `turns` it has the engine alone. Calls `on_first_token` with each job
    whose prompt is computed, and `on_handed_over` when the decode worker has all of the job's KV.
    """

    def __init__(
        self,
        clock: SimClock,
        stages: Stages,
        scheduler: JumpingScheduler,
        cost: PrefillCost,
        pool: SimPool | None,
        reporter: SimReporter,
        kv_nbytes_per_token: int,
        num_layers: int,
        on_first_token: Callable[[Job], None],
        on_handed_over: Callable[[Job], None],
        turns: EngineTurns | None = None,
    ) -> None:
        self._turns = turns or EngineTurns()
        self._clock, self.node, self._stages, self._cost = clock, stages.nodes[0], stages, cost
        self._token_nbytes, self._num_layers = kv_nbytes_per_token, num_layers
        self._num_stages = len(stages.nodes)
        self._stage_layers = max(1, num_layers // self._num_stages)
        self._on_first_token, self._on_handed_over = on_first_token, on_handed_over
        self._block_tokens = scheduler.pages.block_tokens
        self.busy_s = 0.0
        self._incarnation = 0  # callbacks of earlier incarnations are ignored
        self._reset(scheduler, pool, reporter)

    def _reset(self, scheduler: JumpingScheduler, pool: SimPool | None, reporter: SimReporter) -> None:
        self.scheduler, self._pool, self._reporter = scheduler, pool, reporter
        self._pipeline = StagePipeline(self._num_stages)
        self._pipelined: list[_PipelinedStep] = []
        self._jobs: dict[str, Job] = {}
        self._pool_hits: dict[str, PoolHit] = {}
        self._present: dict[str, int] = {}  # tokens whose KV the decode worker has already
        self._chunks: list[Chunk] = []
        self._admitted: list[AdmittedSequence] = []
        self._step_began_s = self._compute_s = 0.0
        self._num_loading = 0
        self._computing: Handle | None = None
        self._ignored: set[str] = set()  # requests of the open step whose result is not used
        self._missing: dict[str, int] = {}  # first block that could not be pulled
        self._ahead = None if pool is None else self._make_ahead(pool, reporter)

    def _make_ahead(self, pool: SimPool, reporter: SimReporter) -> SimPullsAhead:
        nbytes = self._block_tokens * self._token_nbytes
        return SimPullsAhead(
            self._clock,
            self._stages.nodes,
            self.scheduler,
            pool,
            nbytes,
            self._stage_layers if self._num_layers > 1 else 1,
            self._own_compute_s,
            lambda sample: reporter.pulls.append(sample),
            self._begin_step,
        )

    def _own_compute_s(self, sequence: Sequence, num_blocks: int) -> float:
        """Return how long a step computes a sequence alone, behind this many blocks."""
        start = num_blocks * self._block_tokens
        end = min(sequence.num_tokens, start + self.scheduler.config.max_batch_tokens)
        return (self._cost.base_s + self._cost.work_s(end, start)) / self._num_stages

    def submit(self, job: Job, present_tokens: int) -> None:
        """Add a job whose pages at the decode worker are reserved; the KV of `present_tokens` is there already."""
        sequence = SimSequence(
            job.request_id,
            job.number,
            job.num_input,
            job.num_output,
            job.keys,
            self._block_tokens,
            prefill_only=True,
            hold_pages=True,
            expected_tokens=job.expected_tokens,
        )
        found, sequence.num_pool_blocks = find_prefix(self._pool, job, sequence.num_reusable_blocks, self.node)
        self._pool_hits[job.request_id] = found
        self._jobs[job.request_id] = job
        self._present[job.request_id] = present_tokens
        self.scheduler.add(sequence)
        self._reporter.request_came()
        if self._chunks and self._ahead is not None:
            self._ahead.begin(self._pool_hits)
        self._begin_step()

    def cancel(self, job: Job) -> None:
        """Cancel a job that lost its decode worker. The caller has to call `resume` afterwards."""
        if self._jobs.pop(job.request_id, None) is None:
            return
        del self._present[job.request_id]
        self._pool_hits.pop(job.request_id, None)
        self.scheduler.cancel(job.request_id)
        if self._chunks:
            self._ignored.add(job.request_id)
        for each in self._pipelined:
            each.remove(job.request_id)

    def resume(self) -> None:
        """Continue after `cancel`."""
        self._begin_step()

    def resume_steps(self) -> None:
        """Have the turn that the other role has just ended."""
        self._begin_step()

    def yield_soon(self) -> None:
        """Do nothing: the step under way is the last one already."""

    def restart(self, scheduler: JumpingScheduler, pool: SimPool | None, reporter: SimReporter) -> None:
        """Crash, and start again as a new process without state."""
        if self._computing is not None:
            self._clock.cancel(self._computing)
        if self._chunks:
            self.busy_s += self._clock.now_s - self._step_began_s
        self._incarnation += 1
        if self._ahead is not None:
            self._ahead.stop()
        self._reset(scheduler, pool, reporter)

    def busy_until_s(self, now_s: float) -> float:
        """Return the seconds spent in steps so far, the open step included."""
        return self.busy_s + (now_s - self._step_began_s if self._chunks else 0.0)

    # --- one step ---

    def _begin_step(self) -> None:
        """Start a step, unless one is under way or there is nothing to compute."""
        if self._chunks or not self._turns.begin(self):
            return
        if self._ahead is not None:
            self._ahead.begin(self._pool_hits)
        self._chunks = chunks = self.scheduler.schedule()
        if not chunks:
            self._turns.end(self)
            return
        now_s = self._step_began_s = self._clock.now_s
        self._admitted = self.scheduler.drain_admitted()
        for entry in self._admitted:
            self._admit(entry)
        cost, compute_s = self._cost, self._cost.base_s
        for chunk in chunks:
            work_s = cost.work_s(chunk.end, chunk.start)
            own_s, job = work_s + cost.base_s / len(chunks), self._jobs[chunk.request_id]
            job.compute_s += own_s
            job.alone_s += own_s
            compute_s += work_s
        self._compute_s = compute_s = compute_s / self._num_stages
        if self._num_stages > 1:
            self._pass_activations(chunks)
        if self._num_layers > 1:
            self._send_kv(chunks, now_s)
        self._computing = self._clock.call_at(now_s + compute_s, self._computed)

    def _pass_activations(self, chunks: list[Chunk]) -> None:
        """Send the activations from each stage to the next; the step waits for them."""
        nodes, incarnation = self._stages.nodes, self._incarnation
        nbytes = sum([len(chunk.tokens) for chunk in chunks]) * self._stages.token_nbytes
        for node, following in pairwise(nodes):
            self._num_loading += 1
            self._clock.send((f"{node}/nic_out", f"{following}/nic_in"), nbytes, lambda: self._loaded(incarnation))

    def _admit(self, entry: AdmittedSequence) -> None:
        """Count where the KV of a prompt that enters the batch comes from; the step waits for what is on its way."""
        job = self._jobs[entry.request_id]
        job.prefill_start_s, job.alone_s = self._clock.now_s, 0.0
        job.local_tokens = (entry.num_local_blocks - entry.num_ahead_blocks) * self._block_tokens
        found = self._pool_hits.pop(entry.request_id, None)
        ahead = {} if self._ahead is None else self._ahead.take(entry.request_id, entry.num_ahead_blocks)
        beside: Sources = {}
        if entry.blocks and found is not None and self._ahead is not None:
            beside = found.sources(entry.blocks[0], entry.blocks[-1] + 1)
            self._num_loading += 1
            incarnation = self._incarnation
            self._ahead.join(entry.request_id, lambda pull: self._pulled(pull, job, ahead, incarnation))
        if ahead or beside:
            count_sources(job, self._stages.nodes, self._block_tokens, ahead, beside)

    def _pulled(self, pull: PullAhead, job: Job, ahead: Sources, incarnation: int) -> None:
        if incarnation != self._incarnation:
            return
        if pull.num_good < len(pull.wanted.blocks) and pull.request_id not in self._ignored:
            self._missing[pull.request_id] = pull.end
            count_sources(job, self._stages.nodes, self._block_tokens, ahead)
        # The last layer has only just arrived and has to be computed yet.
        self._clock.call_at(self._clock.now_s + self._compute_s / self._stage_layers, lambda: self._loaded(incarnation))

    def _loaded(self, incarnation: int) -> None:
        if incarnation == self._incarnation:
            self._num_loading -= 1
            self._maybe_end_step()

    def _computed(self) -> None:
        self._computing = None
        self._maybe_end_step()

    def _maybe_end_step(self) -> None:
        if self._chunks and self._computing is None and not self._num_loading:
            self._end_step()

    def _send_kv(self, chunks: list[Chunk], began_s: float) -> None:
        """Send the KV of a step's chunks to the decode workers."""
        for chunk in chunks:
            job = self._jobs[chunk.request_id]
            if job.num_output > 1:
                self._send_chunk(chunk, job, job.prefill_start_s == began_s)

    def _send_chunk(self, chunk: Chunk, job: Job, is_first: bool) -> None:
        """Send the chunk's KV, and with a job's first chunk the reused KV, except what the decode worker has."""
        begin = 0 if is_first else chunk.start
        begin = max(begin, self._present[chunk.request_id])
        nbytes = max(0, chunk.end - begin) * self._token_nbytes / self._num_stages
        if nbytes:
            attempt = job.attempt
            for node in self._stages.nodes:
                job.num_flows += 1
                self._clock.send((f"{node}/nic_out", f"{job.decode}/nic_in"), nbytes, lambda: self._sent(job, attempt))

    def _end_step(self) -> None:
        now_s, scheduler, chunks = self._clock.now_s, self.scheduler, self._chunks
        for entry in self._admitted:
            if self._missing and entry.request_id in self._missing:
                self._rewind(entry.request_id)
            else:
                scheduler.confirm_pulled(entry.request_id)
        self.busy_s += now_s - self._step_began_s
        result = scheduler.complete({chunk.request_id: TOKEN for chunk in chunks if chunk.wants_logits})
        if self._ignored:
            chunks = [chunk for chunk in chunks if chunk.request_id not in self._ignored]
            self._ignored = set()
        accepted = [each.request_id for each in result.accepted]
        if self._num_stages == 1:
            self._finish_step(chunks, accepted, self._step_began_s)
        else:
            self._leave_first_stage(chunks, accepted)
        self._chunks = []  # only now, so that the calls above do not start another step
        self._turns.end(self)
        self._begin_step()

    def _rewind(self, request_id: str) -> None:
        first = self._missing.pop(request_id)
        if request_id not in self._ignored:
            self.scheduler.rewind(request_id, first * self._block_tokens)
            self._ignored.add(request_id)

    def _leave_first_stage(self, chunks: list[Chunk], accepted: list[str]) -> None:
        now_s, began_s, incarnation = self._clock.now_s, self._step_began_s, self._incarnation
        num_tokens = sum([len(chunk.tokens) for chunk in self._chunks])
        step = _PipelinedStep(chunks, accepted)
        self._pipelined.append(step)

        def leave() -> None:
            if incarnation == self._incarnation:
                self._pipelined.remove(step)
                self._finish_step(step.chunks, step.accepted, began_s)
                self._begin_step()

        self._clock.call_at(
            self._pipeline.exit_time_s(now_s, self._compute_s, self._stages.boundary_s(num_tokens)), leave
        )

    def _finish_step(self, chunks: list[Chunk], accepted: list[str], began_s: float) -> None:
        """Store the blocks that the step computed, and report the first tokens."""
        now_s = self._clock.now_s
        if self._num_layers == 1:
            self._send_kv(chunks, began_s)
        self._store(chunks)
        for request_id in accepted:
            job = self._jobs[request_id]
            job.ttft_s, job.first_token_s = now_s - job.arrival_s, now_s
            # The stages of a pipeline work one after the other, so the time until the result is available counts.
            own_s = job.alone_s if self._num_stages == 1 else now_s - job.prefill_start_s
            self._reporter.prefills.append(PrefillSample(job.num_input, job.reused_tokens, own_s))
            self._on_first_token(job)
            self._finish_if_sent(job)
        self._reporter.after_step(now_s)

    def _store(self, chunks: list[Chunk]) -> None:
        """Store the runs that the step completed, if it computed any of their blocks."""
        if self._pool is None:
            return
        nodes = self._stages.nodes
        # Round-robin: each node stores as much as if it stored its layers of all runs.
        done: list[list[Run]] = [[] for _ in nodes]
        parents: list[list[int | None]] = [[] for _ in nodes]
        for chunk in chunks:
            job = self._jobs[chunk.request_id]
            begin, end = chunk.start // self._block_tokens, chunk.end // self._block_tokens
            at = job.num_runs_passed
            while at < len(job.runs) and job.runs[at][2] <= end:
                if job.runs[at][2] > begin:
                    done[at % len(nodes)].append(job.runs[at])
                    parents[at % len(nodes)].append(job.runs[at - 1][0] if at else None)
                at += 1
            job.num_runs_passed = at
        for node, runs, above in zip(nodes, done, parents, strict=True):
            if runs:
                self._pool.put(node, runs, above)

    def _sent(self, job: Job, attempt: int) -> None:
        if attempt == job.attempt:
            job.num_flows -= 1
            self._finish_if_sent(job)

    def _finish_if_sent(self, job: Job) -> None:
        if job.num_flows or job.ttft_s is None or job.request_id not in self._jobs:
            return
        del self._jobs[job.request_id], self._present[job.request_id]
        self.scheduler.release(job.request_id)
        self._on_handed_over(job)
        self._begin_step()
