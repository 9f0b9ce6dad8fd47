"""A simulated prefill worker: production's scheduler, with time taken from the cost model and from links.

Layer by layer, as a real one: what is pulled from the pool is loaded while earlier layers are computed, and what is
computed is on its way to the decode worker while later ones are. So a step ends when both the computing and the loading
have, the last layer's computing included; its KV has arrived when the last layer's has.

Several nodes may be one worker, a line of stages with equally many layers each (CPP). Steps follow each other at the
pace of the first stage, for a chunk needs earlier ones' KV of the same layers only; what comes out of a step does so
when it has passed the last stage. Each node pulls, stores and sends its layers' part of the KV.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import NamedTuple

from moonpool.base.cluster import PrefillSample, PullSample
from moonpool.engine.jumping import JumpingScheduler
from moonpool.engine.sequence import AdmittedSequence, Chunk
from moonpool.sim.physics.cost import PrefillCost, StageLine
from moonpool.sim.world.clock import Handle, SimTimers
from moonpool.sim.world.job import Job
from moonpool.sim.world.pool import PoolHit, Run, SimPool
from moonpool.sim.world.reporter import SimReporter
from moonpool.sim.world.sequence import TOKEN, PaperSequence


class Stages(NamedTuple):
    """The nodes of one worker, and what each token brings from one to the next."""

    nodes: tuple[str, ...]
    token_nbytes: int
    bandwidth: float  # of a node's network, when nobody else uses it

    def boundary_s(self, num_tokens: int) -> float:
        return num_tokens * self.token_nbytes / self.bandwidth


class _Leaving:
    """A step on its way through the later stages."""

    __slots__ = ("accepted", "chunks")

    def __init__(self, chunks: list[Chunk], accepted: list[str]) -> None:
        self.chunks, self.accepted = chunks, accepted

    def forget(self, request_id: str) -> None:
        self.chunks = [chunk for chunk in self.chunks if chunk.request_id != request_id]
        self.accepted = [each for each in self.accepted if each != request_id]


class PrefillWorker:
    """With `num_layers` 1 nothing overlaps: loading comes before computing, and sending after it.

    It has the name of its first node.
    `on_first_token` hears of each prompt that is done, `on_handed_over` when the decode worker has all of its KV.
    """

    def __init__(
        self,
        clock: SimTimers,
        stages: Stages,
        scheduler: JumpingScheduler,
        cost: PrefillCost,
        pool: SimPool | None,
        reporter: SimReporter,
        kv_nbytes_per_token: int,
        num_layers: int,
        on_first_token: Callable[[Job], None],
        on_handed_over: Callable[[Job], None],
    ) -> None:
        self._clock, self.node, self._stages, self._cost = clock, stages.nodes[0], stages, cost
        self._token_nbytes, self._num_layers = kv_nbytes_per_token, num_layers
        self._num_stages = len(stages.nodes)
        self._stage_layers = max(1, num_layers // self._num_stages)
        self._on_first_token, self._on_handed_over = on_first_token, on_handed_over
        self._block_tokens = scheduler.pages.block_tokens
        self.busy_s = 0.0
        self._life = 0  # what began in an earlier one counts no more
        self._begin_life(scheduler, pool, reporter)

    def _begin_life(self, scheduler: JumpingScheduler, pool: SimPool | None, reporter: SimReporter) -> None:
        self.scheduler, self._pool, self._reporter = scheduler, pool, reporter
        self._line = StageLine(self._num_stages)
        self._leaving: list[_Leaving] = []
        self._jobs: dict[str, Job] = {}
        self._found: dict[str, PoolHit] = {}
        self._present: dict[str, int] = {}  # tokens that the decode worker has already
        self._chunks: list[Chunk] = []
        self._admitted: list[AdmittedSequence] = []
        self._step_began_s = self._compute_s = 0.0
        self._num_loading = 0
        self._computing: Handle | None = None
        self._void: set[str] = set()  # requests of the open step whose outcome counts no more
        self._missing: dict[str, int] = {}  # first block that could not be pulled

    def take(self, job: Job, present_tokens: int) -> None:
        """A request with its place at a decode worker, where the KV of some tokens is already."""
        sequence = PaperSequence(
            job.request_id,
            job.number,
            job.num_input,
            job.num_output,
            job.keys,
            self._block_tokens,
            prefill_only=True,
            hold_pages=True,
        )
        reusable = job.keys[: sequence.num_reusable_blocks]
        if self._pool is not None and reusable:
            limit = len(reusable) if job.max_pool_blocks is None else min(len(reusable), job.max_pool_blocks)
            found = self._pool.find([run for run in job.runs if run[1] < limit], self.node)
            sequence.num_pool_blocks = min(found.num_blocks, limit)
            self._found[job.request_id] = found
        self._jobs[job.request_id] = job
        self._present[job.request_id] = present_tokens
        self.scheduler.add(sequence)
        self._begin_step()

    def cancel(self, job: Job) -> None:
        """Somebody else on its way was lost. Whoever calls sees to it that others go on."""
        if self._jobs.pop(job.request_id, None) is None:
            return
        del self._present[job.request_id]
        self._found.pop(job.request_id, None)
        self.scheduler.cancel(job.request_id)
        if self._chunks:
            self._void.add(job.request_id)
        for each in self._leaving:
            each.forget(job.request_id)

    def go_on(self) -> None:
        """After others were cancelled."""
        self._begin_step()

    def restart(self, scheduler: JumpingScheduler, pool: SimPool | None, reporter: SimReporter) -> None:
        """It crashes, and begins anew with nothing of what it had."""
        if self._computing is not None:
            self._clock.cancel(self._computing)
        if self._chunks:
            self.busy_s += self._clock.now_s - self._step_began_s
        self._life += 1
        self._begin_life(scheduler, pool, reporter)

    def busy_until_s(self, now_s: float) -> float:
        """Return the seconds spent in steps so far, the open step included."""
        return self.busy_s + (now_s - self._step_began_s if self._chunks else 0.0)

    # one step

    def _begin_step(self) -> None:
        """Nothing happens when one is under way, or when there is nothing to compute."""
        if self._chunks:
            return
        self._chunks = chunks = self.scheduler.schedule()
        if not chunks:
            return
        now_s = self._step_began_s = self._clock.now_s
        self._admitted = self.scheduler.drain_admitted()
        for entry in self._admitted:
            self._start_pull(entry)
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
            self._send_on(chunks, now_s)
        self._computing = self._clock.at(now_s + compute_s, self._computed)

    def _pass_activations(self, chunks: list[Chunk]) -> None:
        """From each stage to the next; the step lasts at least as long as they do."""
        nodes, life = self._stages.nodes, self._life
        nbytes = sum([len(chunk.tokens) for chunk in chunks]) * self._stages.token_nbytes
        for node, following in pairwise(nodes):
            self._num_loading += 1
            self._clock.send((f"{node}/nic_out", f"{following}/nic_in"), nbytes, lambda: self._loaded(life))

    def _start_pull(self, entry: AdmittedSequence) -> None:
        job = self._jobs[entry.request_id]
        job.prefill_start_s, job.alone_s = self._clock.now_s, 0.0
        job.local_tokens = entry.num_local_blocks * self._block_tokens
        found = self._found.pop(entry.request_id, None)
        if not entry.blocks or found is None or self._pool is None:
            return
        self._num_loading += 1
        life, left = self._life, [0]

        def loaded() -> None:
            left[0] -= 1
            if not left[0] and life == self._life:
                self._pulled(entry, num_on_ssd)

        def lost(source: str) -> None:
            if life == self._life:
                self._miss(job, entry, found, source)
            loaded()

        nbytes = self._block_tokens * self._token_nbytes / self._num_stages
        sources = _sources(found, entry.blocks[0], entry.blocks[-1] + 1)
        self._count_hits(job, sources)
        num_on_ssd = sum([count for (_, on_ssd), count in sources.items() if on_ssd])
        for (source, on_ssd), count in sources.items():
            for node in self._stages.nodes:
                left[0] += 1
                self._clock.send(self._pool.route(source, node, on_ssd), count * nbytes, loaded, partial(lost, source))

    def _count_hits(self, job: Job, sources: dict[tuple[str, bool], int]) -> None:
        job.dram_tokens = job.remote_tokens = job.ssd_tokens = 0
        for (source, on_ssd), count in sources.items():
            num_tokens = count * self._block_tokens
            if on_ssd:
                job.ssd_tokens += num_tokens
            elif source in self._stages.nodes:
                job.dram_tokens += num_tokens
            else:
                job.remote_tokens += num_tokens

    def _miss(self, job: Job, entry: AdmittedSequence, found: PoolHit, source: str) -> None:
        """A node went away while its blocks were on their way: from the first of them on all is computed."""
        first = _first_of(found, source, entry.blocks[0])
        first = self._missing[entry.request_id] = min(first, self._missing.get(entry.request_id, first))
        if entry.request_id not in self._void:
            self._count_hits(job, _sources(found, entry.blocks[0], first))

    def _pulled(self, entry: AdmittedSequence, num_on_ssd: int) -> None:
        seconds = self._clock.now_s - self._step_began_s
        if entry.request_id not in self._missing:
            block_nbytes = self._block_tokens * self._token_nbytes
            sample = PullSample(len(entry.blocks) * block_nbytes, seconds, num_on_ssd * block_nbytes)
            self._reporter.pulls.append(sample)
        # The last layer came only now, and is still to be computed.
        life = self._life
        self._clock.at(self._clock.now_s + self._compute_s / self._stage_layers, lambda: self._loaded(life))

    def _loaded(self, life: int) -> None:
        if life == self._life:
            self._num_loading -= 1
            self._maybe_end_step()

    def _computed(self) -> None:
        self._computing = None
        self._maybe_end_step()

    def _maybe_end_step(self) -> None:
        if self._chunks and self._computing is None and not self._num_loading:
            self._end_step()

    def _send_on(self, chunks: list[Chunk], began_s: float) -> None:
        """What a step that began then has computed, or is computing."""
        for chunk in chunks:
            job = self._jobs[chunk.request_id]
            if job.num_output > 1:
                self._send_chunk(chunk, job, job.prefill_start_s == began_s)

    def _send_chunk(self, chunk: Chunk, job: Job, is_first: bool) -> None:
        """The chunk's KV, and before its first one also what was reused, as far as the decode worker lacks it."""
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
        if self._void:
            chunks = [chunk for chunk in chunks if chunk.request_id not in self._void]
            self._void = set()
        accepted = [each.request_id for each in result.accepted]
        if self._num_stages == 1:
            self._come_out(chunks, accepted, self._step_began_s)
        else:
            self._leave_first_stage(chunks, accepted)
        self._chunks = []  # only now: what happened above must not begin another
        self._begin_step()

    def _rewind(self, request_id: str) -> None:
        first = self._missing.pop(request_id)
        if request_id not in self._void:
            self.scheduler.rewind(request_id, first * self._block_tokens)
            self._void.add(request_id)

    def _leave_first_stage(self, chunks: list[Chunk], accepted: list[str]) -> None:
        now_s, began_s, life = self._clock.now_s, self._step_began_s, self._life
        num_tokens = sum([len(chunk.tokens) for chunk in self._chunks])
        leaving = _Leaving(chunks, accepted)
        self._leaving.append(leaving)

        def leave() -> None:
            if life == self._life:
                self._leaving.remove(leaving)
                self._come_out(leaving.chunks, leaving.accepted, began_s)
                self._begin_step()

        self._clock.at(self._line.leaves_s(now_s, self._compute_s, self._stages.boundary_s(num_tokens)), leave)

    def _come_out(self, chunks: list[Chunk], accepted: list[str], began_s: float) -> None:
        """What the step has computed is there: blocks, and the first tokens of some."""
        now_s = self._clock.now_s
        if self._num_layers == 1:
            self._send_on(chunks, began_s)
        self._store(chunks)
        for request_id in accepted:
            job = self._jobs[request_id]
            job.ttft_s, job.first_token_s = now_s - job.arrival_s, now_s
            # A pipeline's stages are busy one after the other: what counts there is when it comes out.
            own_s = job.alone_s if self._num_stages == 1 else now_s - job.prefill_start_s
            self._reporter.prefills.append(PrefillSample(job.num_input, job.reused_tokens, own_s))
            self._on_first_token(job)
            self._sent_if_all(job)
        self._reporter.after_step(now_s)

    def _store(self, chunks: list[Chunk]) -> None:
        """The runs that the step completed, as far as it computed any of their blocks."""
        if self._pool is None:
            return
        nodes = self._stages.nodes
        # By turns: each node holds as much as if it had its layers of all.
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
            self._sent_if_all(job)

    def _sent_if_all(self, job: Job) -> None:
        if job.num_flows or job.ttft_s is None or job.request_id not in self._jobs:
            return
        del self._jobs[job.request_id], self._present[job.request_id]
        self.scheduler.release(job.request_id)
        self._on_handed_over(job)
        self._begin_step()


def _first_of(found: PoolHit, source: str, begin: int) -> int:
    """The first of the blocks from `begin` on that would come from there."""
    start = 0
    for stop, node in zip(found.ends, found.nodes, strict=True):
        if node == source and stop > begin:
            return max(start, begin)
        start = stop
    return begin


def _sources(found: PoolHit, begin: int, end: int) -> dict[tuple[str, bool], int]:
    """How many of the blocks begin..end each node has, in memory or on SSD."""
    counts: dict[tuple[str, bool], int] = {}
    start = 0
    for stop, node, on_ssd in zip(found.ends, found.nodes, found.on_ssd, strict=True):
        count = min(stop, end) - max(start, begin)
        if count > 0:
            counts[node, on_ssd] = counts.get((node, on_ssd), 0) + count
        start = stop
    return counts
