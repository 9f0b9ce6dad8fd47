"""Simulated requests that wait: a prompt behind a step pulls meanwhile, and blocks on SSD come to memory first."""

from __future__ import annotations

from dataclasses import replace

import pytest
from world_cases import BLOCK, chat, cluster, trace_of

from moonpool.conductor.placement.policy import PolicyConfig
from moonpool.sim.physics.hardware import node
from moonpool.sim.physics.paper_fit import paper_cost
from moonpool.sim.world.cluster import SimCluster
from moonpool.sim.world.job import DONE, REFUSED

COST = paper_cost()
LONG = list(range(100, 165))


def test_a_prompt_that_waits_is_pulled_meanwhile() -> None:
    """Its 8 blocks take about a second from the node's memory to its GPUs, and it comes while the worker computes a
    prompt of 64 blocks."""
    slow = replace(node("a800"), h2d_share=1e-2)
    first, again = [(at_s, 8 * BLOCK + 1, 1, list(range(9))) for at_s in (0.0, 100.1)]
    trace = trace_of(first, (100.0, 64 * BLOCK + 1, 1, LONG), again)
    policy = PolicyConfig(name="paper", worker_backlog_s=60.0)  # it waits at the worker and not in the conductor
    world = SimCluster(cluster(num_prefill=1, node=slow, policy=policy), trace)
    pages = world.prefills["p0"].scheduler.pages
    world.clock.call_at(99.0, pages.drop_cached)
    jobs = world.run()
    assert {job.outcome for job in jobs} == {DONE}
    assert (pages.owned, len(world.prefills["p0"].scheduler.ahead)) == ({}, 0), (
        "nothing is held for prompts that are gone"
    )
    _, long, pulled = jobs
    assert (pulled.local_tokens, pulled.dram_tokens) == (0, 8 * BLOCK)
    assert long.ttft_s is not None
    assert pulled.ttft_s is not None
    load_s = 8 * BLOCK * 327_680 / slow.h2d_bandwidth
    assert load_s > 0.8
    assert pulled.arrival_s + pulled.ttft_s < long.arrival_s + long.ttft_s + 0.5 * load_s


def test_a_prompt_that_is_pulled_delays_no_other() -> None:
    """One that comes while the blocks of another take a second is computed as if it were alone."""
    slow = replace(node("a800"), h2d_share=1e-2)
    first, again = [(at_s, 8 * BLOCK + 1, 1, list(range(9))) for at_s in (0.0, 100.0)]
    trace = trace_of(first, again, (100.1, 4 * BLOCK, 1, list(range(200, 204))))
    world = SimCluster(cluster(num_prefill=1, node=slow, policy=PolicyConfig(name="paper")), trace)
    world.clock.call_at(99.0, world.prefills["p0"].scheduler.pages.drop_cached)
    _, pulled, other = world.run()
    assert pulled.dram_tokens == 8 * BLOCK
    assert other.ttft_s == pytest.approx(COST.prefill.compute_s(4 * BLOCK))


def test_requests_that_wait_in_the_conductor_have_their_blocks_promoted() -> None:
    gpu = replace(node("a800").gpu, hbm_nbytes=26e9)  # too little to find anything there
    small = replace(node("a800"), gpu=gpu, dram_nbytes=100.0 * BLOCK * 327_680, ssd_nbytes=2e12)
    trace = chat(300, seed=11, rate=6.0)
    world = SimCluster(cluster(node=small, policy=PolicyConfig(ttft_slo_s=20.0)), trace)
    pool, asked = world.pools["p0"], []
    assert pool is not None
    ask = pool.state.promotions.ask
    pool.state.promotions.ask = lambda keys, now_s: asked.append(ask(keys, now_s)) or asked[-1]  # type: ignore[method-assign, func-returns-value]
    assert {job.outcome for job in world.run()} <= {DONE, REFUSED}
    assert sum(asked) > 0
