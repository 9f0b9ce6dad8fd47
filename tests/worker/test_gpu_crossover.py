"""On a GPU like an H200: what its worker measures at its start makes the conductor pull only where that is faster.

An 8B model in bfloat16. Its true times follow from the operations of a prefill at 600 TFLOP/s and a fixed time per
step; the conductor sees only samples, of prompts up to 32,768 tokens and of pulls up to 64 blocks.
"""

from __future__ import annotations

import random

import pytest

from moonpool.base.clock import VirtualClock
from moonpool.base.cluster import PullSample
from moonpool.conductor.costs import CostModels
from moonpool.conductor.crossover import crossover
from moonpool.conductor.placement.policy import PlacementInput, PolicyConfig, make_policy
from moonpool.conductor.placement.prefix_index import Leading
from moonpool.conductor.placement.pricing import PlacementRequest, PricedPlacement, Pricing
from moonpool.conductor.placement.tables import Backlog, PrefillTable
from moonpool.conductor.placement.traffic import Traffic
from moonpool.engine.sequence import Chunk
from moonpool.worker.calibration import Calibration, Limits

BLOCK_TOKENS, LAYERS, TOKEN_NBYTES = 64, 32, 131_072
BLOCK_NBYTES = BLOCK_TOKENS * TOKEN_NBYTES
LIMITS = Limits(num_pages=4096, block_tokens=64, max_batch_tokens=8192, max_num_seqs=64, max_seq_tokens=131_072)
STEP_S, FLOPS = 0.004, 600e12


def prefill_s(num_tokens: int, prefix: int) -> float:
    """Return the true time to compute the tokens behind a prefix."""
    dense, attention = 2 * 7.0e9 * (num_tokens - prefix), 2 * LAYERS * 4096 * (num_tokens**2 - prefix**2)
    num_steps = -(-(num_tokens - prefix) // LIMITS.max_batch_tokens)
    return num_steps * STEP_S + (dense + attention) / FLOPS


def pull_s(num_blocks: int, nbytes_s: float) -> float:
    return 0.002 + num_blocks * BLOCK_NBYTES / nbytes_s


def calibrated(nbytes_s: float) -> CostModels:
    clock = VirtualClock()

    def compute(chunks: list[Chunk]) -> None:
        clock.advance(sum(prefill_s(chunk.end, chunk.start) for chunk in chunks))

    costs = CostModels()
    samples = list(Calibration(compute, LIMITS, clock, budget_s=4.0, repeats=2).prefills())
    assert samples[-1].num_tokens == 32_768
    pulls = [PullSample(count * BLOCK_NBYTES, pull_s(count, nbytes_s)) for count in (1, 8, 64)]
    costs.learn(samples, pulls=pulls)
    return costs


def choose(costs: CostModels, num_tokens: int, pool_blocks: int) -> tuple[PricedPlacement, int | None]:
    """Return the plan of one idle worker without the prefix, and how many blocks it may take from the pool."""
    request = PlacementRequest(num_tokens, 16, 16, BLOCK_TOKENS, BLOCK_NBYTES, LAYERS, LIMITS.max_batch_tokens)
    leading, traffic, table = Leading(pool_blocks, (), ((0, 1),)), Traffic(), PrefillTable()
    table.add(0, "p0")
    table.update(0, Backlog())
    prices = Pricing(request, leading, costs, traffic)
    inputs = PlacementInput(request, leading, table.wait_s(0.0), table, prices, traffic)
    policy = make_policy(PolicyConfig(name="cost"), random.Random(0))
    ((_, plan), *_) = policy.pick(inputs)
    return plan, policy.pool_limit(inputs, plan)


def true_s(num_tokens: int, pulled: int, nbytes_s: float) -> float:
    """Return the true time of a prompt: loading overlaps with the first step, layer by layer."""
    prefix = pulled * BLOCK_TOKENS
    whole_s = prefill_s(num_tokens, prefix)
    if not pulled:
        return whole_s
    load_s, first_s = pull_s(pulled, nbytes_s), prefill_s(min(num_tokens, prefix + LIMITS.max_batch_tokens), prefix)
    return max(load_s, first_s) + min(load_s, first_s) / LAYERS + whole_s - first_s


@pytest.mark.parametrize("nbytes_s", [0.3e9, 1e9, 1.5e9, 3e9, 6e9, 12e9, 25e9, 50e9])
@pytest.mark.parametrize("num_tokens", [130, 1000, 4096, 8192, 32_768, 100_000])
def test_never_slower_than_computing(num_tokens: int, nbytes_s: float) -> None:
    costs = calibrated(nbytes_s)
    blocks = (num_tokens - 1) // BLOCK_TOKENS
    plan, limit = choose(costs, num_tokens, blocks)
    found_s, alone_s = (true_s(num_tokens, count, nbytes_s) for count in (plan.pulled, 0))
    best_s = min(true_s(num_tokens, count, nbytes_s) for count in {0, blocks // 4, blocks // 2, blocks})
    assert found_s <= 1.05 * alone_s
    assert found_s <= 1.1 * best_s + 0.005
    assert plan.pulled or limit == 0, "a worker that finds more than the conductor knew does not pull it either"


def test_a_slow_link_is_hardly_used_and_a_fast_one_pays() -> None:
    slow, fast = calibrated(1e9), calibrated(45e9)
    few, _ = choose(slow, 32_768, 511)  # as many as load while the first of four steps is computed
    assert few.pulled < 40
    assert few.transfer_s <= 1.05 * prefill_s(8192, 0)
    assert choose(fast, 32_768, 511)[0].pulled > 450  # the rest is computed while these are loaded
    assert crossover(slow, TOKEN_NBYTES, max_tokens=32_768).min_tokens is None
    shortest = crossover(fast, TOKEN_NBYTES).min_tokens
    assert shortest is not None
    assert shortest < 1000
