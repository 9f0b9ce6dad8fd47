"""The systems that Moonpool is compared with: prefill and decode in one engine, nothing shared between nodes.

The real scheduler does continuous batching: prompts first and whole (the default of vLLM 0.5), or in chunks together
with decodes; each with or without a prefix cache in GPU memory. vLLM's V1 engine has chunks and the cache.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from moonpool.base.errors import ConfigError
from moonpool.engine.blocks import PageManager
from moonpool.engine.jumping import JumpingScheduler
from moonpool.engine.scheduler import SchedulerConfig
from moonpool.engine.sequence import StepResult
from moonpool.sim.physics.cost import EngineCost
from moonpool.sim.physics.hardware import NodeSpec
from moonpool.sim.physics.links import Network
from moonpool.sim.physics.model_shape import ModelShape
from moonpool.sim.physics.roofline import kv_capacity_tokens
from moonpool.sim.world.clock import SimClock
from moonpool.sim.world.job import DONE, Job, schedule_arrivals
from moonpool.sim.world.sequence import SimSequence, block_keys
from moonpool.sim.world.stepper import Stepper
from moonpool.traces.columns import Trace, TraceRequest

_MAX_SEQ_TOKENS = 1 << 30
_PRIVATE = 1 << 55  # block numbers from here on are of one request only
_PRIVATE_BLOCKS = 1 << 20
Router = Literal["round-robin", "least-loaded"]


@dataclass(frozen=True, kw_only=True)
class CoupledConfig:
    shape: ModelShape
    node: NodeSpec
    cost: EngineCost
    num_nodes: int
    chunked_prefill: bool = False
    prefix_caching: bool = False
    router: Router = "round-robin"
    max_batch_tokens: int = 1 << 18  # of one step without chunked prefill
    chunk_tokens: int = 512  # of one step with chunked prefill
    max_num_seqs: int = 256

    def __post_init__(self) -> None:
        if self.num_nodes < 1:
            raise ConfigError("a cluster has at least one node")


class CoupledWorker:
    def __init__(self, clock: SimClock, config: CoupledConfig, block_tokens: int) -> None:
        tokens = max(config.chunk_tokens, config.max_num_seqs) if config.chunked_prefill else config.max_batch_tokens
        limits = SchedulerConfig(
            max_batch_tokens=tokens,
            max_num_seqs=config.max_num_seqs,
            max_seq_tokens=_MAX_SEQ_TOKENS,
            prefill_first=not config.chunked_prefill,
        )
        pages = PageManager(kv_capacity_tokens(config.shape, config.node) // block_tokens, block_tokens)
        self._clock, self._cost = clock, config.cost
        self._block_tokens = block_tokens
        self.scheduler = JumpingScheduler(limits, pages)
        self._stepper = Stepper(clock, self.scheduler, config.cost, self._stepped)
        self._jobs: dict[str, Job] = {}

    @property
    def num_jobs(self) -> int:
        return len(self._jobs)

    def busy_until_s(self, now_s: float) -> float:
        return self._stepper.busy_until_s(now_s)

    def submit(self, job: Job) -> None:
        self._jobs[job.request_id] = job
        self.scheduler.add(
            SimSequence(job.request_id, job.number, job.num_input, job.num_output, job.keys, self._block_tokens)
        )
        self._stepper.request_joined()

    def _stepped(self, result: StepResult, num_steps: int, took_s: float) -> None:
        now_s, log = self._clock.now_s, self._stepper.log
        for accepted in result.accepted:
            job = self._jobs[accepted.request_id]
            if job.ttft_s is None:
                job.ttft_s, job.first_token_s, job.first_entry = now_s - job.arrival_s, now_s, len(log)
                job.local_tokens = accepted.num_cached_tokens
                job.compute_s = self._cost.prefill.compute_s(job.num_input, job.local_tokens)
            if accepted.finish_reason is not None:
                del self._jobs[accepted.request_id]
                job.tbt_s = log.long_gaps_s(job.first_entry) if job.num_output > 1 else 0.0
                job.end_s, job.outcome = now_s, DONE


class CoupledCluster:
    """Runs one trace, once. `jobs` has every request when run() returns, in the trace's order."""

    def __init__(self, config: CoupledConfig, trace: Trace) -> None:
        self.config, self.trace = config, trace
        self.jobs: list[Job] = []
        self.clock = SimClock(Network())
        self.workers = [CoupledWorker(self.clock, config, trace.block_tokens) for _ in range(config.num_nodes)]

    def run(self, progress: Callable[[float], None] | None = None) -> list[Job]:
        schedule_arrivals(self.clock, self.trace, self._arrived)
        self.clock.run(progress)
        return self.jobs

    def _arrived(self, number: int, request: TraceRequest) -> None:
        job = Job(number, self.clock.now_s, request.num_input, request.num_output, self._keys(number, request))
        self.jobs.append(job)
        self._choose(number).submit(job)

    def _keys(self, number: int, request: TraceRequest) -> list[bytes]:
        num_blocks = request.num_input // self.trace.block_tokens
        if self.config.prefix_caching:
            return block_keys(request.block_ids[:num_blocks].tolist())
        first = _PRIVATE + number * _PRIVATE_BLOCKS
        return block_keys(range(first, first + num_blocks))

    def _choose(self, number: int) -> CoupledWorker:
        if self.config.router == "round-robin":
            return self.workers[number % len(self.workers)]
        return min(self.workers, key=lambda worker: worker.num_jobs)
