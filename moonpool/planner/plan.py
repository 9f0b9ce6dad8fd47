"""The whole plan for a trace: hit curve, best split, fewest nodes, cheapest pool, and how certain these are.

Pure: the same trace, machine, targets and seed give the same plan.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np

from moonpool.base.errors import InvalidInput
from moonpool.planner.certainty import Certainty, certainty
from moonpool.planner.check import Checked, Run, check
from moonpool.planner.demand import PoolSize, ReuseProfile, demand_of, saved_gpu_s
from moonpool.planner.kv_sizes import KvSizes, kv_sizes
from moonpool.planner.price import CheapestPool, Prices, cheapest_pool
from moonpool.planner.split import Estimate, SplitEstimator, Targets, best_split, equal_splits, fewest_nodes, first_true
from moonpool.sim.fleet import Machine
from moonpool.traces.columns import Trace

MAX_SCREENED = 20_000  # requests
CURVE_TB = (0.01, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0)
_TB = 1e12


class CurvePoint(msgspec.Struct, frozen=True, kw_only=True):
    """An LRU pool of one size. `saved_per_tb` is what the bytes added since the previous point save, per TB."""

    nbytes: float
    tokens: float
    hit_share: float
    saved_gpu_s_per_s: float  # seconds of a node's prefill saved per second
    saved_per_tb: float


class TierShares(msgspec.Struct, frozen=True, kw_only=True):
    """Hits per tier, as shares of all prompt tokens."""

    dram_nbytes: float
    ssd_nbytes: float
    dram_share: float
    ssd_share: float
    most_that_can_hit: float


class ClusterPlan(msgspec.Struct, frozen=True, kw_only=True):
    trace: str
    num_requests: int
    duration_s: float
    targets: Targets
    num_nodes: int
    sizes: KvSizes
    curve: list[CurvePoint]
    tiers: TierShares
    best: Estimate
    around: list[Estimate]
    equally_good: tuple[int, int]  # range of prefill nodes, at the current load
    fewest: Estimate | None  # None: no number of nodes meets the goal; `impossible` has the reason
    impossible: str | None
    checked: list[Checked]
    prices: Prices
    pool: CheapestPool | None
    certainty: Certainty
    assumptions: list[str]

    def headline(self) -> str:
        """Return the answer in one line: how many nodes this load needs, of the number given, and how to split them."""
        best = f"split {self.num_nodes} into {self.best.num_prefill} prefill + {self.best.num_decode} decode"
        if self.fewest is None:
            return "No number of nodes meets the targets."
        needed = self.fewest.num_prefill + self.fewest.num_decode
        if needed > self.num_nodes:
            return f"{self.num_nodes} nodes are not enough: this load needs {needed}."
        spare = f" ({needed} would be, too)" if needed < self.num_nodes else ""
        pool = f", with {self.pool.best.dram_nbytes / _TB:g} TB of DRAM as the cheapest pool" if self.pool else ""
        return f"{self.num_nodes} nodes are enough{spare}: {best}{pool}."


def make_plan(
    trace: Trace,
    machine: Machine,
    targets: Targets,
    *,
    num_nodes: int,
    prices: Prices,
    rng: np.random.Generator,
    run: Run | None = None,
    on_step: Callable[[str], None] = lambda step: None,
) -> ClusterPlan:
    """Make the plan. Each node gives the pool the memory of `machine.node`. `run`, if given, checks the best splits;
    `on_step` is called with the name of each step."""
    on_step("reuse")
    profile = ReuseProfile.of(trace)
    sizing = _Sizing(profile, machine, targets)
    estimator = sizing.estimator(num_nodes)
    on_step("split")
    best, around = best_split(estimator, num_nodes)
    fewest, impossible = sizing.fewest()
    on_step("price")
    pool = cheapest_pool(profile, machine, prices, fewest) if fewest is not None else None
    on_step("certainty")
    sized = estimator if fewest is None else sizing.estimator(fewest.num_prefill + fewest.num_decode)
    size = sizing.per_node.of_nodes(num_nodes)
    sure = certainty(profile, estimator.demand, size, sized, rng)
    on_step("simulation")
    checked = check(_to_check(around, best, fewest), run) if run is not None else []
    return ClusterPlan(
        trace=trace.name,
        num_requests=len(trace),
        duration_s=trace.duration_s,
        targets=targets,
        num_nodes=num_nodes,
        sizes=kv_sizes(machine),
        curve=hit_points(profile, machine),
        tiers=_tiers(profile, size, machine),
        best=best,
        around=around,
        equally_good=equal_splits(estimator, best),
        fewest=fewest,
        impossible=impossible,
        checked=checked,
        prices=prices,
        pool=pool,
        certainty=sure,
        assumptions=_assumptions(machine, prices, len(trace) > MAX_SCREENED, bool(checked)),
    )


def hit_points(profile: ReuseProfile, machine: Machine) -> list[CurvePoint]:
    span_s = demand_of(profile, PoolSize(0.0), machine).span_s
    points: list[CurvePoint] = []
    before_nbytes = before_saved = 0.0
    for nbytes in (size * _TB for size in CURVE_TB):
        tokens = nbytes / machine.shape.kv_nbytes_per_token
        saved = float(saved_gpu_s(profile, machine.cost.prefill, tokens).sum()) / span_s
        points.append(
            CurvePoint(
                nbytes=nbytes,
                tokens=tokens,
                hit_share=profile.share(tokens),
                saved_gpu_s_per_s=saved,
                saved_per_tb=(saved - before_saved) / (nbytes - before_nbytes) * _TB,
            )
        )
        before_nbytes, before_saved = nbytes, saved
    return points


def _tiers(profile: ReuseProfile, size: PoolSize, machine: Machine) -> TierShares:
    per_token = machine.shape.kv_nbytes_per_token
    dram = profile.share(size.dram_nbytes / per_token)
    return TierShares(
        dram_nbytes=size.dram_nbytes,
        ssd_nbytes=size.ssd_nbytes,
        dram_share=dram,
        ssd_share=profile.share((size.dram_nbytes + size.ssd_nbytes) / per_token) - dram,
        most_that_can_hit=profile.share(float("inf")),
    )


class _Sizing:
    """Clusters of all sizes. Each node adds its memory to the pool, so a smaller cluster has fewer hits."""

    def __init__(self, profile: ReuseProfile, machine: Machine, targets: Targets) -> None:
        self._profile, self._machine, self._targets = profile, machine, targets
        self.per_node = PoolSize(machine.node.dram_nbytes, machine.node.ssd_nbytes)

    def estimator(self, num_nodes: int) -> SplitEstimator:
        demand = demand_of(self._profile, self.per_node.of_nodes(num_nodes), self._machine)
        return SplitEstimator(demand.busiest(MAX_SCREENED), self._machine, self._targets)

    def fewest(self) -> tuple[Estimate | None, str | None]:
        """Return the smallest cluster that is enough with its own pool, or the reason why there is none."""
        try:
            most = _num_nodes(fewest_nodes(self.estimator(2)))
        except InvalidInput as error:
            return None, str(error)
        count = first_true(lambda nodes: _num_nodes(fewest_nodes(self.estimator(nodes))) <= nodes, 2, most)
        estimator = self.estimator(count)
        found = fewest_nodes(estimator)
        spare = count - _num_nodes(found)  # needed only for their memory; let them prefill
        return (estimator.estimate(found.num_prefill + spare, found.num_decode) if spare else found), None


def _num_nodes(estimate: Estimate) -> int:
    return estimate.num_prefill + estimate.num_decode


def _to_check(around: list[Estimate], best: Estimate, fewest: Estimate | None) -> list[Estimate]:
    """Return the best split, its two neighbours, and the smallest cluster."""
    near = [each for each in around if abs(each.num_prefill - best.num_prefill) <= 1]
    return near if fewest is None else [*near, fewest]


def _assumptions(machine: Machine, prices: Prices, is_part: bool, is_checked: bool) -> list[str]:
    node = machine.node
    network = f"{node.num_nics} x {node.nic_bandwidth * 8 / 1e9:.0f} Gbit/s"
    lines = [
        f"A node is {node.num_gpus} x {node.gpu.name} with {network}; it runs one instance of the model.",
        f"Times: {machine.cost_source}.",
        "The pool is one LRU stack over the memory of all nodes; DRAM holds the blocks used last, SSD the next ones.",
        "Prefills are served first come, first served; decode nodes share their load evenly; neither is ever down.",
        f"Prices are {prices.source}; the price of nodes counts fractions of one.",
    ]
    if is_part:
        lines.append(f"Splits and nodes are for the busiest {MAX_SCREENED} requests in a row of the trace.")
    if is_checked:
        lines.append(
            "The simulation ran the busiest part of the trace after as many requests before it, starting with an empty"
            " pool: its hit rate is lower than the plan's."
        )
    return lines
