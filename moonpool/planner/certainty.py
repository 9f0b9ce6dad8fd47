"""How certain a plan is: confidence intervals, and what a trace of this length cannot show.

Block bootstrap: the trace is cut into slices of time, and as many whole slices are drawn again and again, with what
their requests found in the pool. So bursts and neighbouring requests stay together. Pure; the caller gives the random
generator.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import numpy as np

from moonpool.base.errors import InvalidInput
from moonpool.planner.demand import PoolSize, PrefillDemand, ReuseProfile
from moonpool.planner.split import SplitEstimator, fewest_nodes
from moonpool.sim.fleet import Machine
from moonpool.traces.columns import Floats, Ints
from moonpool.traces.statistics import reuse_gaps_s

SLICE_S = 300.0
NUM_DRAWS = 20
_FEW_SLICES = 6
_PERCENTILES = (10, 90)


class Interval(msgspec.Struct, frozen=True):
    """The 10th and the 90th percentile of the draws."""

    low: float
    high: float


class Certainty(msgspec.Struct, frozen=True, kw_only=True):
    num_draws: int
    slice_s: float
    num_slices: int
    hit_share: Interval
    num_nodes: Interval | None  # None: some draws cannot meet the targets with any number of nodes
    doubts: list[str]  # sentences


def certainty(
    profile: ReuseProfile,
    demand: PrefillDemand,
    size: PoolSize,
    sized: SplitEstimator,
    rng: np.random.Generator,
    num_draws: int = NUM_DRAWS,
) -> Certainty:
    """Return the intervals of the hit rate for `demand`, which has a pool of `size`, and of the nodes that `sized`
    needs for the same requests."""
    slice_s = min(SLICE_S, demand.span_s / _FEW_SLICES)
    hits: list[float] = []
    nodes: list[float] = []
    for rows, arrival_s in draws(demand, slice_s, num_draws, rng):
        hits.append(demand.rows(rows, arrival_s).hit_share)
        try:
            found = fewest_nodes(SplitEstimator(sized.demand.rows(rows, arrival_s), sized.machine, sized.targets))
        except InvalidInput:
            continue
        nodes.append(found.num_prefill + found.num_decode)
    return Certainty(
        num_draws=num_draws,
        slice_s=slice_s,
        num_slices=len(_bounds(demand, slice_s)) - 1,
        hit_share=_interval(np.array(hits)),
        num_nodes=_interval(np.array(nodes)) if len(nodes) == len(hits) else None,
        doubts=list(doubts(profile, size, sized.machine)),
    )


def draws(demand: PrefillDemand, slice_s: float, count: int, rng: np.random.Generator) -> Iterator[tuple[Ints, Floats]]:
    """Yield `count` draws: rows of randomly chosen slices, with new arrivals. Empty draws are left out."""
    bounds = _bounds(demand, slice_s)
    num_slices = len(bounds) - 1
    since_s = demand.arrival_s - demand.arrival_s[0]
    for _ in range(count):
        chosen = rng.integers(num_slices, size=num_slices)
        rows = np.concatenate([np.arange(bounds[each], bounds[each + 1]) for each in chosen])
        later_s = np.repeat((np.arange(num_slices) - chosen) * slice_s, bounds[chosen + 1] - bounds[chosen])
        if len(rows):
            yield rows, np.maximum.accumulate(since_s[rows] + later_s)  # rounding must not swap two arrivals


def doubts(profile: ReuseProfile, size: PoolSize, machine: Machine) -> Iterator[str]:
    """Yield what the trace is too short to show."""
    trace = profile.trace
    duration_s = max(trace.duration_s, 1e-9)
    if trace.duration_s < 2 * SLICE_S:
        yield (
            f"The trace lasts {trace.duration_s:.0f} s. Traffic of another hour or day may differ by more than the"
            " intervals say."
        )
    written_nbytes = profile.num_blocks_written * trace.block_tokens * machine.shape.kv_nbytes_per_token
    pool_nbytes = size.dram_nbytes + size.ssd_nbytes
    if pool_nbytes > written_nbytes:
        holds_s = duration_s * pool_nbytes / written_nbytes
        yield (
            f"The trace is too short for this pool: it writes {written_nbytes / 1e12:.1f} TB and never fills"
            f" {pool_nbytes / 1e12:.1f} TB, which would hold {holds_s / 60:.0f} minutes of such traffic. Reuse after"
            f" more than {duration_s / 60:.0f} minutes is not in it, so the real hit rate of a pool that large is"
            " higher than said here, by an unknown amount."
        )
    gaps_s = reuse_gaps_s(trace)
    if len(gaps_s) and (late := float((gaps_s > duration_s / 2).mean())) > 0.02:
        yield (
            f"{late:.0%} of all reuse comes after more than half the trace's length: there is more of it that the"
            " trace cannot show."
        )
    early, later = _halves(profile, pool_nbytes / machine.shape.kv_nbytes_per_token)
    if later - early > 0.03:
        yield (
            f"The pool starts empty: hit rate {early:.1%} in the first half of the trace, {later:.1%} in the second."
            " The plan counts both."
        )


def _halves(profile: ReuseProfile, capacity_tokens: float) -> tuple[float, float]:
    trace = profile.trace
    hits = profile.hits(capacity_tokens)
    middle = int(np.searchsorted(trace.arrival_s, (trace.arrival_s[0] + trace.arrival_s[-1]) / 2, side="right"))
    if middle == len(trace):
        return 0.0, 0.0
    first = hits[:middle].sum() / trace.num_input[:middle].sum()
    return float(first), float(hits[middle:].sum() / trace.num_input[middle:].sum())


def _bounds(demand: PrefillDemand, slice_s: float) -> Ints:
    """Return the rows at which slices begin, and the end."""
    since_s = demand.arrival_s - demand.arrival_s[0]
    num_slices = int(since_s[-1] // slice_s) + 1
    edges_s = np.arange(num_slices) * slice_s
    bounds: Ints = np.append(np.searchsorted(since_s, edges_s, side="left"), len(demand))
    return bounds


def _interval(values: Floats) -> Interval:
    low, high = np.percentile(values, _PERCENTILES)
    return Interval(float(low), float(high))
