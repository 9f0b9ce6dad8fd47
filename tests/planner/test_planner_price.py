"""Prices: sums that can be worked out by hand, and where the minimum must lie."""

from __future__ import annotations

from typing import Any

import pytest

from moonpool.base.errors import InvalidInput
from moonpool.planner.demand import PoolSize, ReuseProfile, demand_of
from moonpool.planner.price import CheapestPool, Prices, cheapest_pool, pool_cost, read_prices
from moonpool.planner.split import Estimate, SplitEstimator, Targets, fewest_nodes
from moonpool.sim.fleet import machine_for
from moonpool.sim.physics.hardware import node
from moonpool.sim.physics.model_shape import preset
from moonpool.traces.generate import generate

MACHINE = machine_for(preset("llama3-70b"), node("a800"))


@pytest.fixture(scope="module")
def profile() -> ReuseProfile:
    return ReuseProfile.of(generate("documents", num_requests=1500, seed=4))


@pytest.fixture(scope="module")
def sized(profile: ReuseProfile) -> Estimate:
    demand = demand_of(profile, PoolSize(4e12), MACHINE)
    return fewest_nodes(SplitEstimator(demand, MACHINE, Targets(ttft_s=10.0, tbt_s=0.1)))


def cheapest(profile: ReuseProfile, sized: Estimate, **prices: Any) -> CheapestPool:
    return cheapest_pool(profile, MACHINE, Prices(**prices), sized)


def test_a_month_is_gpus_and_memory(profile: ReuseProfile) -> None:
    prices = Prices(gpu_hour=1.0, dram_gb_month=3.0, ssd_gb_month=0.5)
    size = PoolSize(2e12, 4e12)
    cost = pool_cost(profile, size, MACHINE, prices, spare=2.0, num_decode=3)
    assert cost.nodes == pytest.approx(2 * demand_of(profile, size, MACHINE).prefill_load + 3)
    assert cost.gpus == pytest.approx(cost.nodes * 8 * 730)
    assert cost.memory == 2000 * 3 + 4000 * 0.5
    assert cost.total == cost.gpus + cost.memory


def test_the_cheapest_is_the_least_of_all_that_last(profile: ReuseProfile, sized: Estimate) -> None:
    found = cheapest(profile, sized)
    assert found.best in found.by_dram
    assert found.best.total == min(row.total for row in found.by_dram)
    assert found.best.ssd_writes_per_day <= 3
    assert found.if_disks_lasted.total <= found.best.total <= found.without_pool.total
    low, high = found.flat_dram_nbytes
    assert low <= found.best.dram_nbytes <= high
    assert all((low <= row.dram_nbytes <= high) or row.total > 1.05 * found.best.total for row in found.by_dram)


def test_dear_memory_is_not_bought_and_free_memory_is(profile: ReuseProfile, sized: Estimate) -> None:
    dear = cheapest(profile, sized, dram_gb_month=1e6, ssd_gb_month=1e6)
    assert dear.best == dear.without_pool
    free = cheapest(profile, sized, dram_gb_month=0.0)
    assert free.best.hit_share == pytest.approx(profile.share(float("inf")))


def test_disks_wear_out(profile: ReuseProfile, sized: Estimate) -> None:
    """With all blocks pushed through a disk, its size decides how often a day it is written over."""
    cost = pool_cost(profile, PoolSize(1.0, 8e12), MACHINE, Prices(), 1.0, 1)
    trace = profile.trace
    written = len(trace.block_ids) * trace.block_tokens * 327_680
    lasted_s = trace.duration_s * len(trace) / (len(trace) - 1)
    assert cost.ssd_writes_per_day == pytest.approx(written / 8e12 * 86_400 / lasted_s)
    frail, sturdy = (cheapest(profile, sized, ssd_writes_per_day=limit) for limit in (0.0, 1e9))
    assert all(row.ssd_nbytes == 0 for row in frail.by_dram)
    assert sturdy.best.ssd_nbytes > 0


def test_prices_from_a_file() -> None:
    assert Prices().source == "assumed"
    assert read_prices(b'{"gpu_hour": 1.5}') == Prices(gpu_hour=1.5, source="given")
    for text, complaint in (
        (b'{"gpu": 1}', "unknown field"),
        (b'{"gpu_hour": "x"}', "gpu_hour"),
        (b"{", "invalid prices"),
        (b'{"gpu_hour": -1}', "gpu_hour cannot be"),
    ):
        with pytest.raises(InvalidInput, match=complaint):
            read_prices(text)
