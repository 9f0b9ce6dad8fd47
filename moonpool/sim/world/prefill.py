"""A simulated prefill worker: production's scheduler, with time taken from the cost model and from links.

Layer by layer, as a real one: what is pulled from the pool is loaded while earlier layers are computed, and what is
computed is on its way to the decode worker while later ones are. So a step ends when both the computing and the loading
have, the last layer's computing included; its KV has arrived when the last layer's has.
"""

from __future__ import annotations

from collections.abc import Callable

from moonpool.base.cluster import PrefillSample, PullSample
from moonpool.engine.jumping import JumpingScheduler
from moonpool.engine.sequence import Chunk
from moonpool.engine.step import Admitted
from moonpool.sim.physics.cost import PrefillCost
from moonpool.sim.world.clockwork import Clockwork
from moonpool.sim.world.job import Job
from moonpool.sim.world.paper import TOKEN, PaperSequence
from moonpool.sim.world.pool import Found, Run, SimPool
from moonpool.sim.world.reporter import Reporter


class PrefillWorker:
    """With `num_layers` 1 nothing overlaps: loading comes before computing, and sending after it.

    `on_first_token` hears of each prompt that is done, `on_handed_over` when the decode worker has all of its KV.
    """

    def __init__(
        self,
        clock: Clockwork,
        node: str,
        scheduler: JumpingScheduler,
        cost: PrefillCost,
        pool: SimPool | None,
        reporter: Reporter,
        kv_nbytes_per_token: int,
        num_layers: int,
        on_first_token: Callable[[Job], None],
        on_handed_over: Callable[[Job], None],
    ) -> None:
        self._clock, self.node, self._scheduler, self._cost, self._pool = clock, node, scheduler, cost, pool
        self._reporter = reporter
        self._token_nbytes, self._num_layers = kv_nbytes_per_token, num_layers
        self._on_first_token, self._on_handed_over = on_first_token, on_handed_over
        self._block_tokens = scheduler.pages.block_tokens
        self._jobs: dict[str, Job] = {}
        self._found: dict[str, Found] = {}
        self._present: dict[str, int] = {}  # tokens that the decode worker has already
        self._chunks: list[Chunk] = []
        self._admitted: list[Admitted] = []
        self._step_began_s = self._compute_s = 0.0
        self._num_loading = 0
        self._is_computing = False
        self.busy_s = 0.0

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
        self._scheduler.add(sequence)
        self._begin_step()

    def drop_cached(self) -> None:
        """Its pages forget all that nobody uses, as if others had needed them."""
        self._scheduler.pages.drop_cached()

    def check_integrity(self) -> None:
        self._scheduler.check_integrity()

    # one step

    def _begin_step(self) -> None:
        """Nothing happens when one is under way, or when there is nothing to compute."""
        if self._chunks:
            return
        self._chunks = chunks = self._scheduler.schedule()
        if not chunks:
            return
        now_s = self._step_began_s = self._clock.now_s
        self._admitted = self._scheduler.drain_admitted()
        cost, compute_s = self._cost, self._cost.base_s
        for chunk in chunks:
            work_s = cost.work_s(chunk.end, chunk.start)
            self._jobs[chunk.request_id].compute_s += work_s + cost.base_s / len(chunks)
            compute_s += work_s
        self._compute_s = compute_s
        self._is_computing = True
        for entry in self._admitted:
            self._start_pull(entry)
        if self._num_layers > 1:
            self._send_on(chunks)
        self._clock.at(now_s + compute_s, self._computed)

    def _start_pull(self, entry: Admitted) -> None:
        job = self._jobs[entry.request_id]
        job.prefill_start_s = self._clock.now_s
        job.local_tokens = entry.num_local_blocks * self._block_tokens
        found = self._found.pop(entry.request_id, None)
        if not entry.blocks or found is None or self._pool is None:
            return
        self._num_loading += 1
        nbytes = self._block_tokens * self._token_nbytes
        left = [0]

        def loaded() -> None:
            left[0] -= 1
            if not left[0]:
                self._pulled(entry)

        for (source, on_ssd), count in _sources(found, entry.blocks[0], entry.blocks[-1] + 1).items():
            self._count_hits(job, source, on_ssd, count * self._block_tokens)
            left[0] += 1
            self._clock.send(self._pool.route(source, self.node, on_ssd), count * nbytes, loaded)

    def _count_hits(self, job: Job, source: str, on_ssd: bool, num_tokens: int) -> None:
        if on_ssd:
            job.ssd_tokens += num_tokens
        elif source == self.node:
            job.dram_tokens += num_tokens
        else:
            job.remote_tokens += num_tokens

    def _pulled(self, entry: Admitted) -> None:
        seconds = self._clock.now_s - self._step_began_s
        self._reporter.pulls.append(PullSample(len(entry.blocks) * self._block_tokens * self._token_nbytes, seconds))
        # The last layer came only now, and is still to be computed.
        self._clock.at(self._clock.now_s + self._compute_s / self._num_layers, self._loaded)

    def _loaded(self) -> None:
        self._num_loading -= 1
        self._maybe_end_step()

    def _computed(self) -> None:
        self._is_computing = False
        self._maybe_end_step()

    def _maybe_end_step(self) -> None:
        if self._chunks and not self._is_computing and not self._num_loading:
            self._end_step()

    def _send_on(self, chunks: list[Chunk]) -> None:
        for chunk in chunks:
            job = self._jobs[chunk.request_id]
            if job.num_output > 1:
                self._send_chunk(chunk, job)

    def _send_chunk(self, chunk: Chunk, job: Job) -> None:
        """The chunk's KV, and before its first one also what was reused, as far as the decode worker lacks it."""
        begin = 0 if job.prefill_start_s == self._step_began_s else chunk.start
        begin = max(begin, self._present[chunk.request_id])
        nbytes = max(0, chunk.end - begin) * self._token_nbytes
        if nbytes:
            job.num_flows += 1
            self._clock.send((f"{self.node}/nic_out", f"{job.decode}/nic_in"), nbytes, lambda: self._sent(job))

    def _end_step(self) -> None:
        now_s, scheduler, chunks = self._clock.now_s, self._scheduler, self._chunks
        if self._num_layers == 1:
            self._send_on(chunks)
        for entry in self._admitted:
            scheduler.confirm_pulled(entry.request_id)
        self.busy_s += now_s - self._step_began_s
        result = scheduler.complete({chunk.request_id: TOKEN for chunk in chunks if chunk.wants_logits})
        self._store(chunks)
        for accepted in result.accepted:
            job = self._jobs[accepted.request_id]
            job.ttft_s, job.first_token_s = now_s - job.arrival_s, now_s
            self._reporter.prefills.append(PrefillSample(job.num_input, job.reused_tokens, now_s - job.prefill_start_s))
            self._on_first_token(job)
            self._sent_if_all(job)
        self._reporter.after_step(now_s)
        self._chunks = []  # only now: what happened above must not begin another
        self._begin_step()

    def _store(self, chunks: list[Chunk]) -> None:
        """The runs that the step completed, as far as it computed any of their blocks."""
        if self._pool is None:
            return
        done: list[Run] = []
        parents: list[int | None] = []
        for chunk in chunks:
            job = self._jobs[chunk.request_id]
            begin, end = chunk.start // self._block_tokens, chunk.end // self._block_tokens
            at = job.num_runs_passed
            while at < len(job.runs) and job.runs[at][2] <= end:
                if job.runs[at][2] > begin:
                    done.append(job.runs[at])
                    parents.append(job.runs[at - 1][0] if at else None)
                at += 1
            job.num_runs_passed = at
        if done:
            self._pool.put(self.node, done, parents)

    def _sent(self, job: Job) -> None:
        job.num_flows -= 1
        self._sent_if_all(job)

    def _sent_if_all(self, job: Job) -> None:
        if job.num_flows or job.ttft_s is None or job.request_id not in self._jobs:
            return
        del self._jobs[job.request_id], self._present[job.request_id]
        self._scheduler.release(job.request_id)
        self._on_handed_over(job)
        self._begin_step()


def _sources(found: Found, begin: int, end: int) -> dict[tuple[str, bool], int]:
    """How many of the blocks begin..end each node has, in memory or on SSD."""
    counts: dict[tuple[str, bool], int] = {}
    start = 0
    for stop, node, on_ssd in zip(found.ends, found.nodes, found.on_ssd, strict=True):
        count = min(stop, end) - max(start, begin)
        if count > 0:
            counts[node, on_ssd] = counts.get((node, on_ssd), 0) + count
        start = stop
    return counts
