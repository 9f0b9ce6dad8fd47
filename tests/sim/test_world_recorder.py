"""Samples of a simulated cluster while it runs."""

from __future__ import annotations

import math

import numpy as np
import pytest
from world_cases import BLOCK, chat, cluster, coupled, trace_of

from moonpool.base.errors import InvalidInput
from moonpool.conductor.placement.policy import PolicyConfig
from moonpool.sim.world.cluster import SimCluster
from moonpool.sim.world.coupled import CoupledCluster
from moonpool.sim.world.recorder import _MAX_SAMPLES, SAMPLES_PER_TRACE, WorldRecorder, blocks_by_rank
from moonpool.sim.world.results import Results


def test_looking_changes_nothing() -> None:
    trace = chat(100, seed=5)
    for make in (lambda: SimCluster(cluster(), trace), lambda: CoupledCluster(coupled(prefix_caching=True), trace)):
        plain, recorded = make(), make()
        WorldRecorder(recorded)
        assert Results.of(recorded.run()).summary() == Results.of(plain.run()).summary()


def test_columns_tell_what_went_on() -> None:
    trace = chat(80, seed=1)
    world = SimCluster(cluster(), trace)
    recorder = WorldRecorder(world)
    jobs = world.run()
    columns = recorder.columns()
    assert {len(values) for values in columns.values()} == {len(columns["time_s"])}
    gaps = np.diff(columns["time_s"])
    assert np.allclose(gaps, trace.duration_s / SAMPLES_PER_TRACE)
    assert columns["open"][-1] == 0
    assert columns["ended"][-1] == len(trace)
    assert columns["time_s"][-1] == pytest.approx(max(job.end_s for job in jobs), abs=recorder.every_s)
    for kind in ("prefill", "decode"):
        assert all(0 <= share <= 1 for share in columns[f"{kind}_busy_share"])
    for at in range(len(gaps)):
        inside = sum(
            columns[f"{kind}_{state}"][at] for kind in ("prefill", "decode") for state in ("waiting", "running")
        )
        assert inside <= columns["open"][at]
    busy_s = sum(columns["decode_busy_share"]) * recorder.every_s * 2
    assert busy_s == pytest.approx(
        sum(each.busy_until_s(world.clock.now_s) for each in world.decodes.values()), rel=0.02
    )
    assert columns["pool_dram_nbytes"][-1] == world.pools["p0"].state.stats().used_nbytes > 0  # type: ignore[union-attr]


def test_link_rates_add_up_to_the_bytes_that_were_moved() -> None:
    world = SimCluster(cluster(policy=PolicyConfig(name="round-robin")), chat(60, seed=3))
    recorder = WorldRecorder(world)
    world.run()
    width_s, rates = recorder.links()
    network = world.clock.network
    for kind in ("nic_out", "nic_in", "h2d"):
        moved = sum(network.nbytes_over_time(f"{node}/{kind}")[1].sum() for node in [*world.prefills, *world.decodes])
        assert sum(rates[kind]) * width_s == pytest.approx(moved)
    assert sum(rates["nic_in"]) > 0


def test_memory_is_bounded_however_long_the_run() -> None:
    """The last answer is long, so the run lasts far longer than the trace."""
    world = SimCluster(cluster(), trace_of((0.0, 600, 2, [1, 2]), (1.0, 600, 3000, [1, 3])))
    recorder = WorldRecorder(world)
    world.run()
    times = recorder.columns()["time_s"]
    assert len(times) <= _MAX_SAMPLES
    assert times[-1] > 60
    assert recorder.every_s == pytest.approx(1.0 / SAMPLES_PER_TRACE * 2 ** round(math.log2(recorder.every_s * 200)))


def test_a_request_that_never_ends_does_not_keep_the_clock_going() -> None:
    """Nobody has pages for it."""
    world = CoupledCluster(coupled(num_nodes=1), chat(1, seed=1))
    recorder = WorldRecorder(world)
    world._arrived = lambda number, request: None  # type: ignore[method-assign]  # it comes, and nobody takes it
    world.run()
    assert len(recorder.columns()["time_s"]) <= 2


def test_ranks_are_by_use_and_leave_partial_blocks_out() -> None:
    trace = trace_of(
        (0.0, 2 * BLOCK, 1, [7, 5]), (1.0, 2 * BLOCK, 1, [7, 5]), (2.0, BLOCK + 1, 1, [7, 9]), (3.0, BLOCK, 1, [8])
    )
    assert blocks_by_rank(trace, (1, 2, 3, 4)) == {1: 7, 2: 5, 3: 8}


def test_replicas_are_counted_per_node() -> None:
    """Two nodes compute the same prompt at once: it is in the pages of both, and in the pool of one."""
    prompt = list(range(12))
    requests = [(0.0, 12 * BLOCK, 1, prompt), (0.0, 12 * BLOCK, 1, prompt), (50.0, BLOCK, 1, [99])]
    world = SimCluster(cluster(policy=PolicyConfig(name="round-robin")), trace_of(*requests))
    recorder = WorldRecorder(world)
    world.run()
    assert recorder.columns()["replicas_rank_10"][-1] == 2
    assert "replicas_rank_100" not in recorder.columns()


def test_times_that_cannot_be() -> None:
    for every_s in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(InvalidInput):
            WorldRecorder(SimCluster(cluster(), chat(3, seed=1)), every_s)
