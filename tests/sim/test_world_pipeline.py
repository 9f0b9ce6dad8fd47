"""Several prefill nodes as one worker (chunked pipeline parallelism), against the formula and against single nodes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from world_cases import BLOCK, chat, cluster, trace_of

from moonpool.base.errors import ConfigError
from moonpool.conductor.placement.policy import PolicyConfig
from moonpool.sim.physics.cost import StagePipeline, chunk_ends, pipelined_prefill_s
from moonpool.sim.physics.paper_fit import paper_cost
from moonpool.sim.physics.roofline import kv_capacity_tokens
from moonpool.sim.world.cluster import SimCluster
from moonpool.sim.world.job import DONE, Job
from moonpool.sim.world.results import Results

COST = paper_cost()
CHUNK = 8192
KV_NBYTES = 327_680


def run(trace: Any, pipeline_nodes: int, **changes: Any) -> list[Job]:
    return SimCluster(cluster(num_prefill=4, pipeline_nodes=pipeline_nodes, **changes), trace).run()


def prompt(
    num_tokens: int, at_s: float = 0.0, first: int = 0, num_output: int = 1
) -> tuple[float, int, int, list[int]]:
    return at_s, num_tokens, num_output, list(range(first, first - (-num_tokens // BLOCK)))


def ttft_s(num_tokens: int, pipeline_nodes: int) -> float:
    (job,) = run(trace_of(prompt(num_tokens)), pipeline_nodes)
    assert job.ttft_s is not None
    return job.ttft_s


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 120_000), st.sampled_from([1, 2, 4]))
def test_one_prompt_takes_what_the_formula_says(num_tokens: int, num_stages: int) -> None:
    formula_s = pipelined_prefill_s(COST.prefill, num_tokens, 0, chunk_tokens=CHUNK, num_stages=num_stages)
    boundary_s = CHUNK * 8192 * 2 / cluster().node.network_bandwidth
    assert formula_s - 1e-9 <= ttft_s(num_tokens, num_stages) <= formula_s + (num_stages - 1) * boundary_s + 1e-9


@given(st.lists(st.floats(0.01, 5.0), min_size=1, max_size=12), st.integers(1, 6), st.floats(0, 0.5))
def test_a_line_of_stages_is_walked_one_by_one(times: list[float], num_stages: int, boundary_s: float) -> None:
    line, now_s = StagePipeline(num_stages), 0.0
    free = [0.0] * num_stages
    for each in times:
        now_s += each  # the first stage is never idle
        left_s = line.exit_time_s(now_s, each, boundary_s)
        ready_s = 0.0
        for stage in range(num_stages):
            ready_s = free[stage] = max(ready_s + (boundary_s if stage else 0.0), free[stage]) + each
        assert left_s == pytest.approx(ready_s)


def test_a_long_prompt_is_close_to_x_times_faster() -> None:
    one = ttft_s(120_000, 1)
    assert one / ttft_s(120_000, 2) > 1.75
    assert one / ttft_s(120_000, 4) > 2.9


def test_a_short_prompt_is_no_slower_but_for_what_is_handed_on() -> None:
    for num_tokens in (100, 2000, CHUNK):
        handed_s = 3 * num_tokens * 8192 * 2 / cluster().node.network_bandwidth
        assert ttft_s(num_tokens, 4) == pytest.approx(ttft_s(num_tokens, 1) + handed_s, abs=1e-6)


@pytest.mark.parametrize("num_tokens", [4000, 40_000])
def test_throughput_is_kept(num_tokens: int) -> None:
    """A crowd, and nothing to reuse: whether nodes work alone or in line, they are done at about the same time."""
    crowd = trace_of(*[prompt(num_tokens, first=1000 * n) for n in range(48)])
    policy = PolicyConfig(name="least-loaded")
    ends = {size: max(job.end_s for job in run(crowd, size, policy=policy)) for size in (1, 2, 4)}
    work_s = 48 * sum(COST.prefill.compute_s(end, start) for end, start in chunk_ends(num_tokens, 0, CHUNK)) / 4
    assert ends[1] == pytest.approx(work_s, rel=0.15)
    last_s = COST.prefill.compute_s(num_tokens, max(0, num_tokens - CHUNK))
    for size in (2, 4):
        fill_s = (size - 1) / size * max(last_s, COST.prefill.compute_s(CHUNK))
        assert ends[size] < 1.03 * ends[1] + fill_s, "but for what fills the line, once"


def test_what_one_pipeline_has_reaches_another_over_all_nics() -> None:
    prefix = list(range(64))
    trace = trace_of((0.0, 64 * BLOCK + 1, 1, [*prefix, 99]), (100.0, 66 * BLOCK, 1, [*prefix, 64, 65]))
    node = replace(cluster().node, nic_bandwidth=1e9)  # so that pulling is what takes time
    pulled_s: dict[int, float] = {}
    for size in (1, 2):
        how: dict[str, Any] = {"policy": PolicyConfig(name="round-robin"), "always_pulls": True, "node": node}
        world = SimCluster(cluster(num_prefill=4, pipeline_nodes=size, **how), trace)
        job = world.run()[1]
        assert (job.outcome, job.remote_tokens) == (DONE, 64 * BLOCK)
        pulled_s[size] = job.ttft_s or 0.0
        moved = sum(world.clock.network.nbytes_over_time(f"p{n}/nic_in")[1].sum() for n in range(4))
        activations = (size - 1) * (66 * BLOCK + 1) * 8192 * 2 if size > 1 else 0
        assert moved == pytest.approx(64 * BLOCK * KV_NBYTES + activations, rel=0.05)
    assert pulled_s[1] == pytest.approx(64 * BLOCK * KV_NBYTES / node.network_bandwidth, rel=0.1)
    assert pulled_s[2] == pytest.approx(pulled_s[1] / 2, rel=0.15)


def test_a_hand_off_leaves_over_all_nics() -> None:
    node = replace(cluster().node, nic_bandwidth=1e8)
    ends = {}
    for size in (1, 4):
        world = SimCluster(cluster(num_prefill=4, pipeline_nodes=size, node=node), trace_of(prompt(8000, num_output=2)))
        (job,) = world.run()
        sent = [world.clock.network.nbytes_over_time(f"p{n}/nic_out")[1].sum() for n in range(4)]
        assert sum(sent) >= 8000 * KV_NBYTES * 0.999
        received = [world.clock.network.nbytes_over_time(f"d{n}/nic_in")[1].sum() for n in range(2)]
        assert sum(received) == pytest.approx(8000 * KV_NBYTES)
        assert min(sent) >= 8000 * KV_NBYTES / 4 * 0.999 or size == 1
        ends[size] = job.end_s
    assert ends[4] == pytest.approx(ends[1], rel=0.1), "the decode worker's NIC is as narrow as before"


@pytest.mark.parametrize("pool", ["shared", "local", "none"])
@pytest.mark.parametrize("layer_wise", [True, False])
def test_every_request_ends_and_the_books_balance(pool: str, layer_wise: bool) -> None:
    trace = chat(120, seed=3)
    world = SimCluster(cluster(num_prefill=4, pipeline_nodes=2, pool=pool, layer_wise=layer_wise), trace)
    jobs = world.run()
    assert [job.outcome for job in jobs] == [DONE] * len(trace)
    workers: list[Any] = [*world.prefills.values(), *world.decodes.values()]
    for worker in workers:
        worker.scheduler.check_integrity()
    for each in set(world.pools.values()) - {None}:
        each.state.check_integrity()  # type: ignore[union-attr]
    assert list(world.prefills) == ["p0", "p2"]
    assert Results.of(jobs).summary()["hit_share"] > 0.05


def test_nodes_of_a_pipeline_share_the_weights_and_hold_more_kv() -> None:
    config = cluster(num_prefill=4, pipeline_nodes=2)
    alone = kv_capacity_tokens(config.shape, config.node)
    assert config.num_pages(BLOCK, 2) * BLOCK > 2 * alone


def test_pipelines_that_cannot_be() -> None:
    with pytest.raises(ConfigError, match="4 prefill nodes are no pipelines of 3"):
        cluster(num_prefill=4, pipeline_nodes=3)
    with pytest.raises(ConfigError, match="80 layers for 100 stages"):
        cluster(num_prefill=100, pipeline_nodes=100)
