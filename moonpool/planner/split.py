"""How many nodes, and how many of them for prefill, by the models of waiting.py. Pure.

The margin of a split is the factor by which the load may grow until fewer requests than the goal meet both targets
(below 1: the goal is not met now). The best split has the largest margin. Both models are monotone (more nodes never
wait longer), so searches can bisect.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import ceil

import msgspec
import numpy as np

from moonpool.base.errors import InvalidInput
from moonpool.planner import GOAL
from moonpool.planner.demand import PrefillDemand
from moonpool.planner.waiting import DecodeRoom, decode_gaps, fifo_waits
from moonpool.sim.fleet import Machine
from moonpool.sim.physics.roofline import kv_capacity_tokens
from moonpool.traces.columns import Floats

MAX_NUM_SEQS = 256  # on a decode node, as in engines
MAX_NODES = 100_000
_NEIGHBOURS = 2  # splits on each side of the best that are reported
_SLACK = 0.005  # a share of requests that makes no difference
_MARGINS = 1.05 ** np.arange(-60, 61)  # 0.054 to 18.7


class Targets(msgspec.Struct, frozen=True, kw_only=True):
    """`goal` is the share of requests that should meet both targets."""

    ttft_s: float
    tbt_s: float
    goal: float = GOAL

    def __post_init__(self) -> None:
        if not (self.ttft_s > 0 and self.tbt_s > 0 and 0 < self.goal < 1):
            raise InvalidInput(
                f"targets are times above 0 and a share below 1, not {self.ttft_s:g} s, {self.tbt_s:g} s and"
                f" {self.goal:g}"
            )


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """The estimated performance of one split."""

    num_prefill: int
    num_decode: int
    effective_share: float
    ttft_s_mean: float
    ttft_s_p90: float
    tbt_s_mean: float
    tbt_s_p90: float
    prefill_busy: float  # share of the prefill nodes' time
    margin: float | None = None  # if computed


@dataclass(slots=True)
class SplitEstimator:
    """Estimates splits for one demand. Results are cached, because searches repeat and splits share waiting times.

    The first `num_warm` requests are simulated but not counted.
    """

    demand: PrefillDemand
    machine: Machine
    targets: Targets
    num_warm: int = 0
    _ttft: dict[int, Floats] = field(default_factory=dict)
    _estimates: dict[tuple[int, int], Estimate] = field(default_factory=dict)

    def ttft_s(self, num_prefill: int) -> Floats:
        found = self._ttft.get(num_prefill)
        if found is None:
            demand = self.demand
            found = fifo_waits(demand.arrival_s, demand.prefill_s, num_prefill) + demand.prefill_s
            self._ttft[num_prefill] = found
        return found

    def ttft_share(self, num_prefill: int) -> float:
        return float((self.ttft_s(num_prefill)[self.num_warm :] <= self.targets.ttft_s).mean())

    def estimate(self, num_prefill: int, num_decode: int) -> Estimate:
        split = num_prefill, num_decode
        if split not in self._estimates:
            self._estimates[split] = self._estimate(*split)
        return self._estimates[split]

    def _estimate(self, num_prefill: int, num_decode: int) -> Estimate:
        demand, targets = self.demand, self.targets
        ttft_s = self.ttft_s(num_prefill)
        room = DecodeRoom(MAX_NUM_SEQS, kv_capacity_tokens(self.machine.shape, self.machine.node))
        begin_s = demand.arrival_s + ttft_s
        decoding = decode_gaps(self.machine.cost.decode, room, begin_s, demand.num_input, demand.num_output, num_decode)
        good = (ttft_s <= targets.ttft_s) & (decoding.tbt_s <= targets.tbt_s) & ~decoding.crowded
        good, ttft_s, tbt_s = good[self.num_warm :], ttft_s[self.num_warm :], decoding.tbt_s[self.num_warm :]
        return Estimate(
            num_prefill=num_prefill,
            num_decode=num_decode,
            effective_share=float(good.mean()),
            ttft_s_mean=float(ttft_s.mean()),
            ttft_s_p90=float(np.percentile(ttft_s, 90)),
            tbt_s_mean=float(tbt_s.mean()),
            tbt_s_p90=float(np.percentile(tbt_s, 90)),
            prefill_busy=demand.prefill_load / num_prefill,
        )

    def is_enough(self, num_prefill: int, num_decode: int) -> bool:
        """Return whether the split meets the goal. TTFT is checked first, as it is cheaper."""
        if self.ttft_share(num_prefill) < self.targets.goal:
            return False
        return self.estimate(num_prefill, num_decode).effective_share >= self.targets.goal

    def margin(self, num_prefill: int, num_decode: int) -> float:
        """Return the margin in steps of 5 %; 0 if even a twentieth of the load is too much."""

        def too_much(place: int) -> bool:
            grown = SplitEstimator(
                self.demand.faster(float(_MARGINS[place])), self.machine, self.targets, self.num_warm
            )
            return not grown.is_enough(num_prefill, num_decode)

        place = first_true(too_much, 0, len(_MARGINS))
        return float(_MARGINS[place - 1]) if place else 0.0

    def with_margin(self, num_prefill: int, num_decode: int) -> Estimate:
        margin = self.margin(num_prefill, num_decode)
        return msgspec.structs.replace(self.estimate(num_prefill, num_decode), margin=margin)


def best_split(estimator: SplitEstimator, num_nodes: int) -> tuple[Estimate, list[Estimate]]:
    """Return the best split, and the splits around it (including it) by prefill nodes.

    Hill climbing from a guess by mean loads: the margins of prefill and decode only rise with their own nodes, and the
    smaller one counts.
    """
    if num_nodes < 2:
        raise InvalidInput("separate prefill and decode need at least two nodes", param="nodes")
    known: dict[int, Estimate] = {}

    def at(num_prefill: int) -> Estimate:
        if num_prefill not in known:
            known[num_prefill] = estimator.with_margin(num_prefill, num_nodes - num_prefill)
        return known[num_prefill]

    here = _guess(estimator, num_nodes)
    while True:
        around = range(max(1, here - _NEIGHBOURS), min(num_nodes - 1, here + _NEIGHBOURS) + 1)
        best = max(around, key=lambda each: (_rank(at(each)), -abs(each - here)))
        if best == here:
            return at(here), [at(each) for each in around]
        here = best


def equal_splits(estimator: SplitEstimator, best: Estimate) -> tuple[int, int]:
    """Return the fewest and the most prefill nodes that serve the current load as well as the best split, or worse by
    at most 0.5 % of all requests."""
    num_nodes = best.num_prefill + best.num_decode

    def is_worse(num_prefill: int) -> bool:
        share = estimator.estimate(num_prefill, num_nodes - num_prefill).effective_share
        return share < best.effective_share - _SLACK

    low = first_true(lambda count: not is_worse(count), 1, best.num_prefill)
    high = first_true(is_worse, best.num_prefill + 1, num_nodes) - 1
    return low, high


def fewest_nodes(estimator: SplitEstimator) -> Estimate:
    """Return the smallest cluster that meets the goal. Raise InvalidInput if too many prompts take longer than the
    target on an idle node, so that no number of nodes is enough."""
    goal = estimator.targets.goal
    alone = float((estimator.demand.prefill_s <= estimator.targets.ttft_s).mean())
    if alone < goal:
        raise InvalidInput(
            f"only {alone:.1%} of the prompts can be prefilled within {estimator.targets.ttft_s:g} s by a node that has"
            f" nothing else to do; the goal is {goal:.1%}"
        )
    least = _first_enough(
        lambda count: estimator.ttft_share(count) >= goal, max(1, ceil(estimator.demand.prefill_load / 2))
    )
    best: Estimate | None = None
    for num_prefill in range(least, least + 2):
        found = _fewest_decode(estimator, num_prefill)
        if best is None or found.num_prefill + found.num_decode < best.num_prefill + best.num_decode:
            best = found
    assert best is not None
    return best


def _fewest_decode(estimator: SplitEstimator, num_prefill: int) -> Estimate:
    count = _first_enough(lambda num_decode: estimator.is_enough(num_prefill, num_decode), 1)
    return estimator.estimate(num_prefill, count)


def _first_enough(is_enough: Callable[[int], bool], start: int) -> int:
    """Return the smallest number that is enough: double until it is, then bisect."""
    low, high = 0, start
    while not is_enough(high):
        low, high = high, 2 * high
        if high > MAX_NODES:
            raise InvalidInput(f"not even {MAX_NODES} nodes would meet the targets; give them more time")
    return first_true(is_enough, low + 1, high)


def first_true(holds: Callable[[int], bool], low: int, high: int) -> int:
    """Return the first of low..high - 1 for which `holds` is true, if it is true for all after it; else `high`."""
    while low < high:
        middle = (low + high) // 2
        if holds(middle):
            high = middle
        else:
            low = middle + 1
    return low


def _guess(estimator: SplitEstimator, num_nodes: int) -> int:
    """Guess the prefill nodes from GPU time: a full decode node makes one token per sequence in each step."""
    demand, decode = estimator.demand, estimator.machine.cost.decode
    context = float((demand.num_input + demand.num_output / 2).mean())
    at_once = first_true(lambda n: decode.decode_step_s(n, int(n * context)) > estimator.targets.tbt_s, 1, MAX_NUM_SEQS)
    tokens_s = float(demand.num_output.sum()) / demand.span_s
    decode_load = tokens_s * estimator.targets.tbt_s / at_once
    share = demand.prefill_load / max(demand.prefill_load + decode_load, 1e-9)
    return min(num_nodes - 1, max(1, round(num_nodes * share)))


def _rank(estimate: Estimate) -> tuple[float, float, float]:
    """Order splits by margin, then by the share within both targets, then by mean TTFT."""
    return estimate.margin or 0.0, estimate.effective_share, -estimate.ttft_s_mean
