"""Checks estimates of splits with the simulated cluster, on the busiest part of the trace.

The requests just before that part run as a warm-up, so that the pool and the nodes are not empty; they are not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import msgspec
import numpy as np

from moonpool.planner.demand import PoolSize, ReuseProfile, busiest_row, demand_of
from moonpool.planner.split import Estimate, SplitEstimator, Targets
from moonpool.sim.fleet import Machine
from moonpool.sim.world.cluster import SimCluster
from moonpool.sim.world.config import ClusterConfig
from moonpool.sim.world.results import Results
from moonpool.traces.changes import slice_count
from moonpool.traces.columns import Trace


class Checked(msgspec.Struct, frozen=True, kw_only=True):
    """The simulated result of a split, over the counted requests."""

    num_prefill: int
    num_decode: int
    num_requests: int
    effective_share: float
    ttft_s_mean: float
    tbt_s_mean: float
    hit_share: float
    by_models: Estimate  # the estimate for the same part


Run: TypeAlias = Callable[[int, int], Checked]  # by prefill and decode nodes


def check(estimates: Sequence[Estimate], run: Run) -> list[Checked]:
    """Run each split once."""
    splits = dict.fromkeys((each.num_prefill, each.num_decode) for each in estimates)
    return [run(*split) for split in splits]


def busiest_part(trace: Trace, num_requests: int) -> tuple[Trace, int]:
    """Return the busiest `num_requests` requests after up to as many warm-up requests, and the number of these."""
    count = min(num_requests, len(trace))
    first = busiest_row(trace.arrival_s, count)
    warm = min(first, count)
    return slice_count(trace, first - warm, first + count), warm


def cluster_run(trace: Trace, machine: Machine, targets: Targets, num_requests: int) -> Run:
    """Return a function that runs the full system with one pool of the memory of all nodes."""
    part, warm = busiest_part(trace, num_requests)
    profile = ReuseProfile.of(part)
    per_node = PoolSize(machine.node.dram_nbytes, machine.node.ssd_nbytes)

    def run(num_prefill: int, num_decode: int) -> Checked:
        demand = demand_of(profile, per_node.of_nodes(num_prefill + num_decode), machine)
        config = ClusterConfig(
            shape=machine.shape,
            node=machine.node,
            cost=machine.cost,
            num_prefill=num_prefill,
            num_decode=num_decode,
            pool="shared" if per_node.dram_nbytes else "none",
            decode_nodes_hold_blocks=True,
        )
        results = Results.of(SimCluster(config, part).run()[warm:])
        summary = results.summary()
        return Checked(
            num_prefill=num_prefill,
            num_decode=num_decode,
            num_requests=len(results),
            effective_share=results.effective_share(targets.ttft_s, targets.tbt_s),
            ttft_s_mean=_finite(summary["ttft_s_mean"]),
            tbt_s_mean=_finite(summary["tbt_s_mean"]),
            hit_share=summary["hit_share"],
            by_models=SplitEstimator(demand, machine, targets, warm).estimate(num_prefill, num_decode),
        )

    return run


def _finite(value: float) -> float:
    return value if np.isfinite(value) else 0.0
