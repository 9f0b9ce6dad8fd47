"""Whether a long prompt is computed by several workers together (chunked pipeline parallelism). Pure.

The prompt goes to the pipeline if its predicted TTFT is clearly below that of the best single worker: from a length on
that the cost models give, and only while enough workers have little to do. With `PolicyConfig.pipeline_min_tokens` it
goes there from that many tokens on. A prefix in the pool is priced on both
sides: every stage pulls its layers of it, and together they compute the rest. Where little is left to compute, one
worker is as fast. Blocks in a worker's own pages do not help a pipeline, because the other stages do not have them.
"""

from __future__ import annotations

import math
from collections.abc import Collection

from moonpool.conductor.costs import CostModels
from moonpool.conductor.messages import Candidate
from moonpool.conductor.placement.paths import PoolPaths
from moonpool.conductor.placement.policy import PlacementChoice, PlacementInput, Policy, SmallestTtft
from moonpool.conductor.placement.pricing import PricedPlacement, Pricing
from moonpool.conductor.registration import Registration
from moonpool.engine.stages import MIN_CHUNKS, PipelineShape, best_chunk_tokens, chunk_bounds, pipeline_s

_CLEARLY = 0.9  # of the TTFT of one worker: several are kept busy, so a small gain is not worth it


class PipelinePricing(Pricing):
    """The prices of one request at a pipeline. Its stages pull first and compute then."""

    __slots__ = ("_shape",)

    def __init__(
        self, inputs: PlacementInput, costs: CostModels, paths: PoolPaths | None, shape: PipelineShape
    ) -> None:
        # Every stage pulls its part of each block, all at once: they share the links of the pool's nodes.
        num_parts = min(shape.num_stages, inputs.traffic.num_sources)
        part_nbytes = -(-inputs.request.block_nbytes // num_parts)
        request = inputs.request._replace(block_nbytes=part_nbytes, num_layers=1, step_tokens=0)
        super().__init__(request, inputs.leading, costs, inputs.traffic, paths)
        self._shape = shape

    def prefill_s(self, prefix_blocks: float) -> float:
        """Return the time to compute the prompt behind a prefix; a full hit still computes the last token."""
        num_tokens, first_token = self.request.num_tokens, self._first_token(prefix_blocks)
        bounds = chunk_bounds(num_tokens, self.chunk_tokens(prefix_blocks), first_token)
        return pipeline_s([self._costs.prefill_s(end, start) for start, end in bounds], self._shape.num_stages)

    def first_step_s(self, prefix_blocks: float) -> float:
        """Return 0: no stage computes before all have pulled, because only then they know where the prompt begins."""
        return 0.0

    def chunk_tokens(self, prefix_blocks: float) -> int:
        """Return the best size of the chunks behind a prefix."""
        num_tokens, first_token = self.request.num_tokens, self._first_token(prefix_blocks)
        work_s, fixed_s = self._costs.prefill_s(num_tokens, first_token), self._costs.prefill.terms[0]
        return best_chunk_tokens(self._shape, num_tokens - first_token, work_s, fixed_s)

    def _first_token(self, prefix_blocks: float) -> int:
        return int(min(prefix_blocks, self._most) * self.request.block_tokens)


def choose_pipeline(
    single: PlacementChoice,
    inputs: PlacementInput,
    policy: Policy,
    workers: Collection[Registration],
    costs: CostModels,
    paths: PoolPaths | None,
    *,
    min_tokens: int | None = None,
) -> PlacementChoice:
    """Return `single`, or it with a pipeline of the least busy of these prefill workers: if `single` would compute at
    least `min_tokens` or, without that number, if the pipeline is clearly faster. The policy says how much of the
    pool's prefix the pipeline takes, as for a single worker."""
    chosen = _least_busy(inputs, workers)
    if len(chosen) < 2 or inputs.request.num_tokens < MIN_CHUNKS:
        return single
    if min_tokens is not None and _computed_tokens(inputs, single.prefill) < min_tokens:
        return single
    shape = PipelineShape(len(chosen), chosen[0].info.step_tokens)
    prices = PipelinePricing(inputs, costs, paths, shape)
    shared = inputs._replace(prices=prices, kinds=())
    plan = _plan(policy, shared, chosen)
    candidate = _candidate(inputs, plan, chosen, prices.chunk_tokens(plan.pulled))
    if min_tokens is None and candidate.ttft_s >= _CLEARLY * single.prefill.ttft_s:
        return single
    return single._replace(
        plan=plan,
        prefill=candidate,
        candidates=(candidate, *single.candidates),
        max_pool_blocks=policy.pool_limit(shared, plan),
    )


def _computed_tokens(inputs: PlacementInput, one: Candidate) -> int:
    num_reused = (one.local_blocks + one.pulled_blocks) * inputs.request.block_tokens
    return inputs.request.num_tokens - num_reused


def _least_busy(inputs: PlacementInput, workers: Collection[Registration]) -> list[Registration]:
    """Return the workers of a pipeline, the least busy first; none if too few may get a request."""
    num_stages = max((one.info.pipeline for one in workers), default=1)
    waits = [(inputs.queue_s.item(one.slot), one) for one in workers if one.info.pipeline == num_stages]
    free = [(wait_s, one) for wait_s, one in waits if wait_s < math.inf]
    if len(free) < num_stages:
        return []
    return [one for _, one in sorted(free, key=lambda each: (each[0], each[1].info.name))[:num_stages]]


def _plan(policy: Policy, inputs: PlacementInput, chosen: list[Registration]) -> PricedPlacement:
    """Return what the policy would do at a worker without blocks of its own that is as fast as the pipeline."""
    if not isinstance(policy, SmallestTtft):
        return inputs.prices.plan(0, 0, None)
    hosts = {one.info.host for one in chosen}
    machine = (
        hosts.pop() if len(hosts) == 1 else ""
    )  # the slowest stage counts: with several, one has to pull from afar
    busy = [one.slot for one in chosen if one.slot in inputs.traffic.busy_slots]
    return policy.plan(inputs, 0, busy[0] if busy else None, machine)


def _candidate(
    inputs: PlacementInput, plan: PricedPlacement, chosen: list[Registration], chunk_tokens: int
) -> Candidate:
    leader, *others = [one.info.name for one in chosen]  # the least busy one leads: it has the most to do
    return Candidate(
        worker=leader,
        local_blocks=0,
        pulled_blocks=plan.pulled,
        transfer_s=plan.transfer_s,
        queue_s=inputs.queue_s.item(chosen[-1].slot),
        prefill_s=plan.prefill_s,
        ssd_blocks=plan.ssd,
        congestion_s=plan.congestion_s,
        overlap_s=plan.overlap_s,
        stages=tuple(others),
        chunk_tokens=chunk_tokens,
    )
