"""What the pool costs in the simulator: storing moves bytes, disks teach their model, a slow pool is left alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
from world_cases import BLOCK, chat, cluster, trace_of

from moonpool.conductor.placement.policy import PolicyConfig
from moonpool.sim.physics.hardware import node
from moonpool.sim.physics.paper_fit import paper_cost
from moonpool.sim.systems import BASELINE, Goals, system
from moonpool.sim.world.cluster import SimCluster
from moonpool.sim.world.coupled import CoupledCluster
from moonpool.sim.world.job import DONE
from moonpool.sim.world.results import Results
from moonpool.traces.columns import Trace

BLOCK_NBYTES = BLOCK * 327_680
FIRST = (0.0, 8 * BLOCK + 1, 1, list(range(9)))
AGAIN = (100.0, 8 * BLOCK + 1, 1, list(range(9)))


def moved(world: SimCluster, kind: str) -> float:
    network = world.clock.network
    names = [name for name in network.link_names if name.endswith(f"/{kind}")]
    return float(sum(network.nbytes_over_time(name)[1].sum() for name in names))


def test_storing_moves_what_is_stored_from_the_gpus_to_memory() -> None:
    world = SimCluster(cluster(num_prefill=1), trace_of(FIRST, AGAIN))
    world.run()
    assert moved(world, "d2h") == pytest.approx(8 * BLOCK_NBYTES, rel=1e-3)  # once: it is stored already


def test_what_is_being_stored_cannot_be_found_yet() -> None:
    slow = replace(node("a800"), h2d_share=1e-3)  # 8 blocks take 10 s into memory
    found = []
    for second_s in (5.0, 100.0):
        trace = trace_of(FIRST, (second_s, *AGAIN[1:]))
        world = SimCluster(cluster(num_prefill=1, node=slow, policy=PolicyConfig(name="paper")), trace)
        world.clock.call_at(second_s - 0.1, world.prefills["p0"].scheduler.pages.drop_cached)
        found.append(world.run()[1].dram_tokens)
    assert found == [0, 8 * BLOCK]


def test_storing_at_another_node_takes_the_network() -> None:
    world = SimCluster(cluster(num_prefill=2), trace_of(FIRST))
    pool = world.pools["p0"]
    assert pool is not None
    options = pool._options
    options["p0"] = options["p1"]
    world.run()
    assert moved(world, "nic_out") == pytest.approx(8 * BLOCK_NBYTES, rel=1e-3)
    assert moved(world, "d2h") == 0


def _slow_pool(policy: str) -> float:
    """Mean TTFT of a prompt that computes in about a second and that another node holds, at 10 MB/s."""
    slow = replace(node("a800"), num_nics=1, nic_bandwidth=10e6)
    trace = trace_of(FIRST, *((100.0 + 1000 * turn, *AGAIN[1:]) for turn in range(3)))
    world = SimCluster(cluster(num_prefill=1, node=slow, policy=PolicyConfig(name=policy)), trace)
    pool = world.pools["p0"]
    assert pool is not None
    pool.route = lambda source, target, on_ssd: (f"{source}/nic_out",)  # type: ignore[method-assign]
    for turn in range(3):
        world.clock.call_at(99.0 + 1000 * turn, world.prefills["p0"].scheduler.pages.drop_cached)
    jobs = world.run()
    assert {job.outcome for job in jobs} == {DONE}
    return max(job.ttft_s or 0.0 for job in jobs)


def test_a_slow_pool_is_left_alone_by_default() -> None:
    alone_s = paper_cost().prefill.compute_s(8 * BLOCK + 1)
    assert _slow_pool(PolicyConfig().name) == pytest.approx(alone_s, rel=0.01)
    assert _slow_pool("paper") > 16 * alone_s


def test_pulls_from_disk_teach_the_model_of_disks() -> None:
    gpu = replace(node("a800").gpu, hbm_nbytes=26e9)  # too little to find anything there
    small = replace(node("a800"), gpu=gpu, dram_nbytes=100.0 * BLOCK_NBYTES, ssd_nbytes=2e12)
    world = SimCluster(cluster(node=small), chat(300, seed=11))
    results = Results.of(world.run())
    assert results.hit_share("ssd") > 0
    model = world.conductor.costs.transfer_ssd
    assert model.num_samples > 0
    slowest = 4 * 6.5e9  # of the disks; the network is faster
    assert world.conductor.costs.ssd_terms[1] == pytest.approx(1 / slowest, rel=1.0)


def _shared_then_long() -> Trace:
    """A decode under way, then a prompt whose first half was computed before."""
    return trace_of(
        (0.0, 16 * BLOCK + 1, 1, list(range(17))),
        (60.0, 1000, 400, [900, 901]),
        (61.0, 32 * BLOCK + 1, 1, list(range(16)) + list(range(1000, 1017))),
    )


def test_what_vllm_does_today_caches_prefixes_and_chunks_prompts() -> None:
    from moonpool.sim.fleet import make_fleet

    fleet = make_fleet(num_nodes=2)
    found = {}
    for name in ("vllm", "vllm-prefix", "vllm-chunked", BASELINE):
        world = system(name).make(_shared_then_long(), fleet, Goals())
        assert isinstance(world, CoupledCluster)
        world.workers[:] = world.workers[:1]  # one engine gets all
        jobs = world.run()
        found[name] = jobs[2].reused_tokens, jobs[1].tbt_s or 0.0
    assert [found[name][0] for name in found] == [0, 16 * BLOCK, 0, 16 * BLOCK]
    assert found[BASELINE][1] < found["vllm-prefix"][1], "a long prompt holds up the decodes for a chunk at a time"
