"""Pulls on a slow network in the simulator: priced by where the blocks are and by the hand-offs on the same link, they
make no request slower; priced all alike, they do."""

from __future__ import annotations

from dataclasses import replace

import pytest
from world_cases import cluster

from moonpool.conductor.placement.paths import PoolPaths
from moonpool.conductor.placement.policy import PolicyConfig
from moonpool.conductor.placement.traffic import Traffic
from moonpool.sim.physics.hardware import node
from moonpool.sim.world.cluster import SimCluster
from moonpool.sim.world.job import DONE
from moonpool.traces.generate import generate

GBIT_PER_S = 24


def mean_ttft_s(**changes: object) -> float:
    slow = replace(node("a800"), num_nics=1, nic_bandwidth=GBIT_PER_S / 8 * 1e9)
    config = cluster(num_prefill=8, num_decode=8, node=slow, policy=PolicyConfig(), **changes)
    world = SimCluster(config, generate("synthetic", num_requests=400, seed=1))
    jobs = world.run()
    assert {job.outcome for job in jobs} == {DONE}
    return sum(job.ttft_s or 0.0 for job in jobs) / len(jobs)


def test_pulls_are_priced_by_where_they_come_from_and_what_they_take_from_hand_offs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    without_pool_s = mean_ttft_s(pool="none")
    ours_s = mean_ttft_s()
    monkeypatch.setattr(Traffic, "expect_handoff", lambda *_: None)
    without_handoffs_s = mean_ttft_s()
    monkeypatch.setattr(PoolPaths, "set_nodes", lambda *_: None)
    all_alike_s = mean_ttft_s()
    assert ours_s < without_handoffs_s < all_alike_s
    assert ours_s < 0.8 * all_alike_s
    assert ours_s < 1.05 * without_pool_s < all_alike_s
