"""The simulated cluster: times that can be worked out by hand, and what holds for every trace."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from world_cases import BLOCK, chat, cluster, coupled, trace_of, workers_of

from moonpool.conductor.admission.forms import AdmissionForm
from moonpool.conductor.placement.policy import PolicyConfig
from moonpool.sim.physics.paper_fit import paper_cost
from moonpool.sim.world.cluster import SimCluster
from moonpool.sim.world.coupled import CoupledCluster
from moonpool.sim.world.job import DONE, REFUSED, Job
from moonpool.sim.world.results import Results
from moonpool.traces.columns import Trace

COST = paper_cost()
KV_NBYTES = 327_680


def run(trace: Any, **changes: Any) -> list[Job]:
    return SimCluster(cluster(**changes), trace).run()


def test_one_request_takes_what_the_cost_model_says() -> None:
    (job,) = run(trace_of((1.0, 4000, 11, list(range(8)))))
    assert job.outcome == DONE
    assert job.ttft_s == pytest.approx(COST.prefill.compute_s(4000))
    assert job.compute_s == pytest.approx(COST.prefill.compute_s(4000))
    # Its KV was on its way while it was computed, so the second token comes one step after the first.
    decode_s = COST.decode_steps_s(1, 4000, 10)
    assert job.end_s == pytest.approx(1.0 + (job.ttft_s or 0.0) + decode_s)
    assert job.tbt_s == pytest.approx(COST.decode_step_s(1, 4009), rel=1e-3)


def test_a_prefix_comes_from_the_pool_layer_by_layer() -> None:
    """Another worker has it: the pull is hidden behind the computing of the rest, all but its first layer."""
    first = (0.0, 8 * BLOCK + 1, 1, list(range(9)))
    second = (100.0, 16 * BLOCK, 1, list(range(16)))
    config = cluster(num_prefill=1, policy=PolicyConfig(name="paper"))
    world = SimCluster(config, trace_of(first, second))
    # The worker's own pages are gone, the pool's blocks are not.
    world.clock.call_at(50.0, lambda: world.prefills["p0"].scheduler.pages.drop_cached())
    job = world.run()[1]
    assert (job.local_tokens, job.dram_tokens, job.remote_tokens) == (0, 8 * BLOCK, 0)
    compute_s = COST.prefill.base_s + COST.prefill.work_s(8192, 8 * BLOCK)
    load_s = 8 * BLOCK * KV_NBYTES / config.node.h2d_bandwidth
    assert job.ttft_s == pytest.approx(max(load_s / 80 + compute_s, load_s + compute_s / 80))


def test_own_pages_are_reused_without_a_pull() -> None:
    jobs = run(
        trace_of((0.0, 8 * BLOCK + 1, 1, list(range(9))), (100.0, 16 * BLOCK, 1, list(range(16)))), num_prefill=1
    )
    assert (jobs[1].local_tokens, jobs[1].dram_tokens) == (8 * BLOCK, 0)


SYSTEMS = [
    {"pool": pool, "policy": PolicyConfig(name=policy)}
    for pool in ("shared", "local", "none")
    for policy in ("random", "paper")
]


@pytest.mark.parametrize("changes", SYSTEMS, ids=lambda each: f"{each['pool']}-{each['policy'].name}")
def test_every_request_ends_and_the_books_balance(changes: dict[str, Any]) -> None:
    trace = chat(150, seed=3)
    world = SimCluster(cluster(**changes), trace)
    jobs = world.run()
    assert [job.outcome for job in jobs] == [DONE] * len(trace)
    assert [job.num_input for job in jobs] == trace.num_input.tolist()
    for job in jobs:
        assert job.ttft_s is not None
        assert job.tbt_s is not None
        assert job.end_s >= job.arrival_s + job.ttft_s
        assert 0 <= job.reused_tokens < job.num_input
        assert job.ttft_s >= COST.prefill.work_s(job.num_input, job.reused_tokens)
    for worker in workers_of(world):
        worker.scheduler.check_integrity()
    for pool in {pool for pool in world.pools.values() if pool is not None}:
        pool.state.check_integrity()
    assert world.conductor.num_open == 0


def test_the_same_twice() -> None:
    for make in (
        lambda: SimCluster(cluster(), chat(100, seed=5)),
        lambda: CoupledCluster(coupled(), chat(100, seed=5)),
    ):
        first, second = (Results.of(make().run()).summary() for _ in "ab")
        assert first == second


def test_a_shared_pool_finds_what_others_computed() -> None:
    trace = chat(200, seed=7)
    systems = {"shared": "paper", "local": "round-robin", "none": "round-robin"}
    shares = {
        pool: Results.of(run(trace, pool=pool, policy=PolicyConfig(name=policy), num_prefill=4)).summary()["hit_share"]
        for pool, policy in systems.items()
    }
    assert shares["shared"] > 1.5 * shares["local"]
    assert shares["local"] >= shares["none"] > 0, "a node's memory holds no less than its GPUs"


def test_good_affinity_needs_no_pool_as_long_as_the_load_is_low() -> None:
    trace = chat(200, seed=7, rate=0.2)
    shared, local = (
        Results.of(run(trace, pool=pool, policy=PolicyConfig(name=policy), num_prefill=4)).summary()["hit_share"]
        for pool, policy in (("shared", "paper"), ("local", "local"))
    )
    assert local > 0.8 * shared


def test_what_cannot_meet_its_target_is_refused() -> None:
    policy = PolicyConfig(name="paper", ttft_slo_s=3.0)
    jobs = run(trace_of(*[(0.0, 16_000, 20, list(range(100 * n, 100 * n + 32))) for n in range(8)]), policy=policy)
    outcomes = [job.outcome for job in jobs]
    assert outcomes.count(REFUSED) > 0
    assert outcomes.count(DONE) > 0
    assert all("target" in job.reason for job in jobs if job.outcome == REFUSED)
    assert all(job.ttft_s <= 3.0 * 1.05 for job in jobs if job.ttft_s is not None)


def test_long_decodes_are_disturbed_by_prompts_in_one_engine_and_not_in_two() -> None:
    trace = trace_of(
        (0.0, 1000, 400, [1, 2]), *[(1.0 + n, 8000, 2, list(range(100 * n, 100 * n + 16))) for n in range(10)]
    )
    apart = run(trace, num_prefill=1, num_decode=1)[0]
    together = {
        name: CoupledCluster(coupled(num_nodes=1, **how), trace).run()[0]
        for name, how in (("whole", {}), ("chunked", {"chunked_prefill": True}))
    }
    assert apart.tbt_s is not None
    assert apart.tbt_s < 0.04
    whole_s, chunked_s = together["whole"].tbt_s, together["chunked"].tbt_s
    assert whole_s is not None
    assert chunked_s is not None
    assert whole_s > 4 * apart.tbt_s
    assert apart.tbt_s < chunked_s < whole_s


def test_a_coupled_engine_caches_prefixes_when_told_to() -> None:
    trace = chat(100, seed=9)
    plain, cached = (Results.of(CoupledCluster(coupled(prefix_caching=on), trace).run()) for on in (False, True))
    assert plain.summary()["hit_share"] == 0
    assert cached.summary()["hit_share"] > 0.1
    assert cached.summary()["prefill_gpu_s_mean"] < plain.summary()["prefill_gpu_s_mean"]


def test_a_small_pool_evicts_and_spills_to_disk() -> None:
    """With so little memory at the GPUs that nothing is found there."""
    trace = chat(300, seed=11)
    gpu = replace(cluster().node.gpu, hbm_nbytes=26e9)
    small = replace(cluster().node, dram_nbytes=100 * BLOCK * KV_NBYTES, gpu=gpu)
    shares = {}
    for name, node in (("small", small), ("disk", replace(small, ssd_nbytes=2e12))):
        world = SimCluster(cluster(node=node), trace)
        shares[name] = Results.of(world.run()).summary()
        world.pools["p0"].state.check_integrity()  # type: ignore[union-attr]
    assert shares["small"]["hit_share_ssd"] == 0
    assert shares["disk"]["hit_share_ssd"] > 0.02
    assert shares["disk"]["hit_share"] > 1.2 * shares["small"]["hit_share"]


def test_targets_are_counted_over_all_requests() -> None:
    jobs = [Job(number, float(number), 100, 5, []) for number in range(4)]
    for job, (ttft_s, tbt_s) in zip(jobs, [(1.0, 0.1), (40.0, 0.1), (1.0, 0.4)], strict=False):
        job.ttft_s, job.tbt_s, job.outcome, job.end_s = ttft_s, tbt_s, DONE, 50.0
    jobs[3].outcome, jobs[3].reason = REFUSED, "full"
    results = Results.of(jobs)
    assert results.effective_share(30, 0.2) == 0.25
    assert results.goodput(30, 0.2) == pytest.approx(1 / 3)
    assert results.summary()["num_refused"] == 1
    assert np.isnan(results.ttft_s[3])


def test_without_overlap_loading_computing_and_sending_take_turns() -> None:
    config = cluster(num_prefill=1, num_decode=1, layer_wise=False)
    world = SimCluster(
        config, trace_of((0.0, 8 * BLOCK + 1, 1, list(range(9))), (100.0, 16 * BLOCK, 2, list(range(16))))
    )
    world.clock.call_at(50.0, lambda: world.prefills["p0"].scheduler.pages.drop_cached())
    job = world.run()[1]
    load_s = 8 * BLOCK * KV_NBYTES / config.node.h2d_bandwidth
    compute_s = COST.prefill.base_s + COST.prefill.work_s(8192, 8 * BLOCK)
    send_s = 16 * BLOCK * KV_NBYTES / config.node.network_bandwidth
    assert job.ttft_s == pytest.approx(load_s + compute_s)
    assert job.end_s == pytest.approx(100.0 + load_s + compute_s + send_s + COST.decode_step_s(1, 8192))


def test_a_blind_policy_may_still_take_what_the_pool_has() -> None:
    trace = chat(200, seed=7)
    policy = PolicyConfig(name="round-robin")
    blind, pulling = (
        Results.of(run(trace, policy=policy, num_prefill=4, always_pulls=on)).summary() for on in (False, True)
    )
    assert pulling["hit_share"] > 1.5 * blind["hit_share"]


@pytest.mark.parametrize("form", ["none", "early", "paper", "predicted"])
@pytest.mark.parametrize("queue_capacity", [0, 8])
def test_in_an_overload_everybody_is_answered_once(form: str, queue_capacity: int) -> None:
    trace = chat(300, seed=13, rate=12.0)
    policy = PolicyConfig(
        name="cost",
        ttft_slo_s=6.0,
        tbt_slo_s=0.036,
        admission=AdmissionForm(form),
        queue_capacity=queue_capacity,
    )
    world = SimCluster(cluster(num_decode=1, policy=policy), trace)
    results = Results.of(world.run())
    assert results.is_done.sum() + sum(results.refusals.values()) == len(trace)
    assert results.is_done.sum() > 50
    assert sum(results.refusals.values()) > 20
    assert world.conductor.num_open == 0
    late = results.is_done & (results.ttft_s > 6.0 * 1.1)
    assert late.mean() < 0.05, "who is let in is in time, by the conductor's own predictions"
    for worker in workers_of(world):
        worker.scheduler.check_integrity()
    if form == "none":
        assert results.is_wasted.sum() > 0
    assert not (results.is_wasted & results.is_done).any()


def test_a_crowd_waits_for_its_turn_instead_of_being_sent_away() -> None:
    crowd = trace_of(*[(0.0, 8000, 2, list(range(100 * n, 100 * n + 16))) for n in range(8)])
    policy = PolicyConfig(name="cost", ttft_slo_s=6.0)
    jobs = run(crowd, policy=policy)
    assert [job.outcome for job in jobs] == [DONE] * 8
    assert max(job.ttft_s for job in jobs if job.ttft_s is not None) <= 6.0


def test_prefill_costs_are_learnt_right_however_slow_the_network_and_crowded_the_steps() -> None:
    slow = replace(cluster().node, num_nics=1, nic_bandwidth=2e9)
    world = SimCluster(cluster(node=slow, always_pulls=True), chat(200, seed=3, rate=3.0))
    assert sum(job.remote_tokens for job in world.run()) > 0
    (error,) = [each for each in world.conductor.predictions() if each.model == "prefill"]
    assert error.p50 < 0.15, "loading, and the prompts of others, are no part of it"
    learnt = world.conductor.costs
    for num_tokens in (4000, 16_000):
        assert learnt.prefill_s(num_tokens, 0) == pytest.approx(COST.prefill.compute_s(num_tokens), rel=0.2)


def burst(num_requests: int, num_output: int) -> Trace:
    """Short prompts, all different, ten a second."""
    return trace_of(*((0.1 * number, 400, num_output, [number]) for number in range(num_requests)))


def test_requests_for_the_whole_context_are_admitted_like_those_for_a_few_tokens() -> None:
    """What an answer may become at most takes no pages: clients that set no limit ask for all that is left."""
    policy = PolicyConfig(ttft_slo_s=4.0)
    ends = {}
    for asked_tokens in (None, 1):
        world = SimCluster(cluster(num_decode=1, policy=policy, asked_tokens=asked_tokens), burst(60, 100))
        ends[asked_tokens] = [(job.outcome, job.ttft_s, job.end_s) for job in world.run()]
        assert {job.outcome for job in world.jobs} == {DONE}
    assert ends[None] == ends[1]


def test_answers_that_become_longer_than_expected_preempt_each_other_and_none_fails() -> None:
    """128 tokens are expected and 3,000 come, which take seven pages: there are pages for a quarter of the answers."""
    gpu = replace(cluster().node.gpu, hbm_nbytes=22.2e9)
    config = cluster(num_decode=1, node=replace(cluster().node, gpu=gpu), policy=PolicyConfig(ttft_slo_s=60.0))
    world = SimCluster(config, burst(60, 3000))
    scheduler = world.decodes["d0"].scheduler
    assert scheduler.pages.num_pages == pytest.approx(60 * 7 / 4, rel=0.1)
    jobs = world.run()
    assert {job.outcome for job in jobs} == {DONE}
    assert scheduler.num_preemptions > 0
