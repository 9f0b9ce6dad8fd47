"""How many nodes, and how many of them for prefill: by the small models of waiting.py. Pure.

A split's margin is the factor by which the load may grow until fewer requests than the goal meet both targets (below
1: they do not now). The best split is the one with the largest margin. Both models are monotone, so that searches can
halve: more nodes never wait longer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import ceil

import msgspec
import numpy as np

from moonpool.base.errors import InvalidInput
from moonpool.planner.demand import PrefillDemand
from moonpool.planner.waiting import DecodeRoom, decode_gaps, fifo_waits
from moonpool.sim.fleet import Machine
from moonpool.sim.physics.roofline import kv_capacity_tokens
from moonpool.traces.columns import Floats

MAX_NUM_SEQS = 256  # under way on a decode node, as engines have it
MAX_NODES = 100_000
_MARGINS = 1.05 ** np.arange(-60, 61)  # 0.054 to 18.7


class Targets(msgspec.Struct, frozen=True, kw_only=True):
    """`goal`: the share of requests that shall meet both."""

    ttft_s: float
    tbt_s: float
    goal: float = 0.95

    def __post_init__(self) -> None:
        if not (self.ttft_s > 0 and self.tbt_s > 0 and 0 < self.goal < 1):
            raise InvalidInput(
                f"targets are times above 0 and a share below 1, not {self.ttft_s:g} s, {self.tbt_s:g} s and"
                f" {self.goal:g}"
            )


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """What one split would do, by the small models."""

    num_prefill: int
    num_decode: int
    effective_share: float
    ttft_s_mean: float
    ttft_s_p90: float
    tbt_s_mean: float
    tbt_s_p90: float
    prefill_busy: float  # of the prefill nodes' time
    margin: float | None = None  # where it was asked for


@dataclass(slots=True)
class Screen:
    """Answers about one demand, and remembers them: searches ask again, and many splits share their waits. The first
    `num_warm` requests are there and not counted."""

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
        """The cheaper half is asked first."""
        if self.ttft_share(num_prefill) < self.targets.goal:
            return False
        return self.estimate(num_prefill, num_decode).effective_share >= self.targets.goal

    def margin(self, num_prefill: int, num_decode: int) -> float:
        """To the next 5 %; 0 where even a twentieth of the load is too much."""

        def too_much(place: int) -> bool:
            grown = Screen(self.demand.faster(float(_MARGINS[place])), self.machine, self.targets, self.num_warm)
            return not grown.is_enough(num_prefill, num_decode)

        place = first_true(too_much, 0, len(_MARGINS))
        return float(_MARGINS[place - 1]) if place else 0.0

    def with_margin(self, num_prefill: int, num_decode: int) -> Estimate:
        margin = self.margin(num_prefill, num_decode)
        return msgspec.structs.replace(self.estimate(num_prefill, num_decode), margin=margin)


def best_split(screen: Screen, num_nodes: int, neighbours: int = 2) -> tuple[Estimate, list[Estimate]]:
    """The best and, sorted by prefill nodes, those around it, itself among them. Uphill from where the mean loads
    point: the margin of prefill only rises with its nodes, that of decode only with its own, and the smaller counts."""
    if num_nodes < 2:
        raise InvalidInput("prefill and decode apart need two nodes at least", param="nodes")
    known: dict[int, Estimate] = {}

    def at(num_prefill: int) -> Estimate:
        if num_prefill not in known:
            known[num_prefill] = screen.with_margin(num_prefill, num_nodes - num_prefill)
        return known[num_prefill]

    here = _guess(screen, num_nodes)
    while True:
        around = range(max(1, here - neighbours), min(num_nodes - 1, here + neighbours) + 1)
        best = max(around, key=lambda each: (_merit(at(each)), -abs(each - here)))
        if best == here:
            return at(here), [at(each) for each in around]
        here = best


def equal_splits(screen: Screen, best: Estimate, slack: float = 0.005) -> tuple[int, int]:
    """The fewest and the most prefill nodes with which the load as it is goes as well as with the best split, or less
    by no more than `slack` of all requests."""
    num_nodes = best.num_prefill + best.num_decode

    def is_worse(num_prefill: int) -> bool:
        share = screen.estimate(num_prefill, num_nodes - num_prefill).effective_share
        return share < best.effective_share - slack

    low = first_true(lambda count: not is_worse(count), 1, best.num_prefill)
    high = first_true(is_worse, best.num_prefill + 1, num_nodes) - 1
    return low, high


def fewest_nodes(screen: Screen) -> Estimate:
    """The smallest cluster that meets the goal. InvalidInput where no number of nodes does, since too many prompts
    alone take longer than the target."""
    goal = screen.targets.goal
    alone = float((screen.demand.prefill_s <= screen.targets.ttft_s).mean())
    if alone < goal:
        raise InvalidInput(
            f"only {alone:.1%} of the prompts can be prefilled within {screen.targets.ttft_s:g} s by a node that has"
            f" nothing else to do; the goal is {goal:.1%}"
        )
    least = _first_enough(lambda count: screen.ttft_share(count) >= goal, max(1, ceil(screen.demand.prefill_load / 2)))
    best: Estimate | None = None
    for num_prefill in range(least, least + 2):
        found = _fewest_decode(screen, num_prefill)
        if best is None or found.num_prefill + found.num_decode < best.num_prefill + best.num_decode:
            best = found
    assert best is not None
    return best


def _fewest_decode(screen: Screen, num_prefill: int) -> Estimate:
    count = _first_enough(lambda num_decode: screen.is_enough(num_prefill, num_decode), 1)
    return screen.estimate(num_prefill, count)


def _first_enough(is_enough: Callable[[int], bool], start: int) -> int:
    """Doubles until it is, then halves."""
    low, high = 0, start
    while not is_enough(high):
        low, high = high, 2 * high
        if high > MAX_NODES:
            raise InvalidInput(f"not even {MAX_NODES} nodes would meet the targets; give them more time")
    return first_true(is_enough, low + 1, high)


def first_true(holds: Callable[[int], bool], low: int, high: int) -> int:
    """The first of low..high - 1 for which it holds, if it holds for all after it; `high` if for none."""
    while low < high:
        middle = (low + high) // 2
        if holds(middle):
            high = middle
        else:
            low = middle + 1
    return low


def _guess(screen: Screen, num_nodes: int) -> int:
    """By GPU time: a decode step of a node that is as full as its target allows makes a token for each sequence."""
    demand, decode = screen.demand, screen.machine.cost.decode
    context = float((demand.num_input + demand.num_output / 2).mean())
    at_once = first_true(lambda n: decode.decode_step_s(n, int(n * context)) > screen.targets.tbt_s, 1, MAX_NUM_SEQS)
    tokens_s = float(demand.num_output.sum()) / demand.span_s
    decode_load = tokens_s * screen.targets.tbt_s / at_once
    share = demand.prefill_load / max(demand.prefill_load + decode_load, 1e-9)
    return min(num_nodes - 1, max(1, round(num_nodes * share)))


def _merit(estimate: Estimate) -> tuple[float, float, float]:
    """The margin; then what is good now; then the time to the first token."""
    return estimate.margin or 0.0, estimate.effective_share, -estimate.ttft_s_mean
