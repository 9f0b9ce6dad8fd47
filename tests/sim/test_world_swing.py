"""A load that swings between long prompts and long answers: elastic roles against each fixed split of four workers."""

from __future__ import annotations

import pytest
from world_cases import cluster, swing

from moonpool.conductor.placement.policy import PolicyConfig
from moonpool.sim.physics.paper_fit import mooncake_cost
from moonpool.sim.world.cluster import SimCluster
from moonpool.sim.world.job import DONE, REFUSED
from moonpool.traces.columns import Trace

TBT_S = 0.1
SPLITS = ((3, 1), (2, 2), (1, 3))


def run(trace: Trace, split: tuple[int, int], ttft_s: float, *, elastic: bool) -> SimCluster:
    policy = PolicyConfig(ttft_slo_s=ttft_s, tbt_slo_s=TBT_S)
    config = cluster(
        cost=mooncake_cost(),
        num_prefill=split[0],
        num_decode=split[1],
        elastic=elastic,
        policy=policy,
        report_every_s=0.05,
    )
    world = SimCluster(config, trace)
    world.run()
    return world


def num_good(world: SimCluster, ttft_s: float) -> int:
    """Requests done within both targets."""
    done = [job for job in world.jobs if job.outcome == DONE]
    return sum((job.ttft_s or 0.0) <= ttft_s and (job.tbt_s or 0.0) <= TBT_S for job in done)


@pytest.mark.parametrize(("ttft_s", "seed"), [(10.0, 1), (5.0, 2)])
def test_elastic_roles_serve_a_quarter_more_than_the_best_fixed_split(ttft_s: float, seed: int) -> None:
    trace = swing(4, seed)
    best = max(num_good(run(trace, split, ttft_s, elastic=False), ttft_s) for split in SPLITS)
    world = run(trace, (2, 2), ttft_s, elastic=True)
    assert all(job.outcome in (DONE, REFUSED) for job in world.jobs)
    assert num_good(world, ttft_s) >= 1.25 * best
    assert 5 <= world.roles.num_changes <= 10, "one for the first phase, and two for each swing, with little more"
