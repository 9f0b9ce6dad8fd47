"""The ways to pick a prefill worker, side by side and by name. Pure.

random, round-robin, least-loaded   blind to the cache; the worker still uses what its own pages have
local    smallest TTFT with each worker's own prefix; nothing is pulled (Algorithm 1 without lines 5-8 and 20-21)
paper    the paper's whole Algorithm 1: where the pool's run is more than `kvcache_balancing_threshold` times the
         worker's own, all that is missing is pulled, else it is computed again; terms are summed
cost     (default) per worker the number of blocks to pull that makes TTFT smallest, none included, so it is never
         slower than without the pool; loading overlaps with computing layer by layer. A tier of the pool that no
         pull has been measured from yet is tried with one block
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import numpy as np

from moonpool.conductor.placement.policy import POLICY_NAMES, PlacementInput, Policy, PolicyConfig, RoundRobinTies
from moonpool.conductor.placement.pricing import PricedPlacement
from moonpool.conductor.placement.slots import where
from moonpool.conductor.placement.tables import Column

_MAX_COLUMNS = 256
_FEW_SLOTS = 64


class _NoPulls:
    """The worker uses what its own pages have."""

    pulls = False

    def pool_limit(self, scene: PlacementInput, plan: PricedPlacement) -> int | None:
        return 0


class Random(_NoPulls):
    name = "random"

    def __init__(self, config: PolicyConfig, rng: random.Random) -> None:
        self._rng = rng

    def pick(self, scene: PlacementInput) -> list[tuple[int, PricedPlacement]]:
        slots = np.isfinite(scene.queue_s).nonzero()[0]
        return _with_own_prefix(scene, int(slots[self._rng.randrange(len(slots))]))


class RoundRobin(_NoPulls):
    name = "round-robin"

    def __init__(self, config: PolicyConfig, rng: random.Random) -> None:
        self._turn = RoundRobinTies()

    def pick(self, scene: PlacementInput) -> list[tuple[int, PricedPlacement]]:
        return _with_own_prefix(scene, self._turn.take(np.where(scene.queue_s < math.inf, 0.0, math.inf)))


class LeastLoaded(_NoPulls):
    """By predicted queue, then by assigned requests, then in turn."""

    name = "least-loaded"

    def __init__(self, config: PolicyConfig, rng: random.Random) -> None:
        self._turn = RoundRobinTies()

    def pick(self, scene: PlacementInput) -> list[tuple[int, PricedPlacement]]:
        least = scene.queue_s.item(int(scene.queue_s.argmin()))
        rank = np.where(scene.queue_s <= least, scene.table.assigned, math.inf)
        return _with_own_prefix(scene, self._turn.take(rank))


class SmallestTtft:
    """What local, paper and cost share; they differ in the plan for a worker with a given run."""

    name, pulls = "", True

    def __init__(self, config: PolicyConfig, rng: random.Random) -> None:
        self._config = config
        self._turn = RoundRobinTies()
        self._columns: dict[int, Column] = {}

    def plan(self, scene: PlacementInput, local: int, slot: int | None) -> PricedPlacement:
        raise NotImplementedError

    def pool_limit(self, scene: PlacementInput, plan: PricedPlacement) -> int | None:
        wanted = plan.local + plan.pulled
        return None if wanted >= scene.leading.pool else wanted if plan.pulled else 0

    def pick(self, scene: PlacementInput) -> list[tuple[int, PricedPlacement]]:
        plans = self._plans(scene)
        ttft_s = self._ttft_s(scene, plans)
        best = _smallest(ttft_s, max(2, self._config.num_candidates))
        limit_s = ttft_s.item(best[0]) + self._config.tie_slack * _plan_of(plans, best[0]).service_s
        slot = best[0]
        if len(best) > 1 and ttft_s.item(best[1]) <= limit_s:
            slot = self._turn.take(np.where(ttft_s <= limit_s, scene.table.assigned, math.inf))
        others = [one for one in best if one != slot and ttft_s.item(one) < math.inf]
        ranked = [slot, *others[: self._config.num_candidates - 1]]
        return [(one, _plan_of(plans, one)) for one in ranked]

    def _plans(self, scene: PlacementInput) -> list[tuple[int, PricedPlacement]]:
        """(mask of slots, their plan). Workers with the same run share one, but for those that are being sent to."""
        busy, pool, plans = scene.traffic.busy_slots if self.pulls else {}, scene.leading.pool, []
        for local, mask in scene.leading.groups:
            if busy and local < pool:
                for slot in [slot for slot in busy if mask >> slot & 1]:
                    mask ^= 1 << slot
                    plans.append((1 << slot, self.plan(scene, local, slot)))
            if mask:
                plans.append((mask, self.plan(scene, local, None)))
        return plans

    def _ttft_s(self, scene: PlacementInput, plans: list[tuple[int, PricedPlacement]]) -> Column:
        """The most common service time is added everywhere, and the others' differences to it where they are."""
        usual = plans[0][1].service_s if len(plans) == 1 else max(plans, key=_num_slots)[1].service_s
        ttft_s = scene.queue_s + usual
        for mask, plan in plans:
            if plan.service_s == usual:
                continue
            if mask & (mask - 1):
                ttft_s += self._column(mask, len(ttft_s)) * (plan.service_s - usual)
            else:
                ttft_s[mask.bit_length() - 1] += plan.service_s - usual
        return ttft_s

    def _column(self, mask: int, length: int) -> Column:
        """1 for the slots in the mask, 0 for the others. The same few masks come again and again."""
        found = self._columns.get(mask)
        if found is None or len(found) != length:
            if len(self._columns) >= _MAX_COLUMNS:
                self._columns.clear()
            found = self._columns[mask] = np.zeros(length)
            found[where(mask)] = 1.0
        return found


class Local(SmallestTtft):
    name, pulls = "local", False

    def pool_limit(self, scene: PlacementInput, plan: PricedPlacement) -> int | None:
        return 0

    def plan(self, scene: PlacementInput, local: int, slot: int | None) -> PricedPlacement:
        return scene.prices.plan(local, 0, slot)


class PaperAlgorithm(SmallestTtft):
    name = "paper"

    def plan(self, scene: PlacementInput, local: int, slot: int | None) -> PricedPlacement:
        # best_len / prefix_len > threshold, written so that an empty prefix divides nothing.
        worth_it = scene.leading.pool > self._config.kvcache_balancing_threshold * local
        return scene.prices.plan(local, scene.leading.pool - local if worth_it else 0, slot)


class SmallestCost(SmallestTtft):
    name = "cost"

    def plan(self, scene: PlacementInput, local: int, slot: int | None) -> PricedPlacement:
        return scene.prices.best_plan(local, slot)

    def pool_limit(self, scene: PlacementInput, plan: PricedPlacement) -> int | None:
        limit = super().pool_limit(scene, plan)
        return scene.prices.limit_beyond(plan) if limit is None else limit


_POLICIES: dict[str, Callable[[PolicyConfig, random.Random], Policy]] = {
    one.name: one for one in (Random, RoundRobin, LeastLoaded, Local, PaperAlgorithm, SmallestCost)
}
assert tuple(_POLICIES) == POLICY_NAMES


def make_policy(config: PolicyConfig, rng: random.Random) -> Policy:
    return _POLICIES[config.name](config, rng)


def _smallest(column: Column, count: int) -> list[int]:
    """The slots of the few smallest, ascending; of equals the lowest first."""
    if len(column) <= _FEW_SLOTS:
        slots: list[int] = column.argsort(kind="stable")[:count].tolist()
        return slots
    # Sorting all of many would take longer than the rest of a decision.
    limit = np.partition(column, count - 1).item(count - 1)
    slots = (column <= limit).nonzero()[0].tolist()
    return sorted(slots, key=column.item)[:count]


def _with_own_prefix(scene: PlacementInput, slot: int) -> list[tuple[int, PricedPlacement]]:
    return [(slot, scene.prices.plan(scene.leading.run_of(slot), 0, None))]


def _num_slots(plan: tuple[int, PricedPlacement]) -> int:
    return plan[0].bit_count()


def _plan_of(plans: list[tuple[int, PricedPlacement]], slot: int) -> PricedPlacement:
    for mask, plan in plans:
        if mask >> slot & 1:
            return plan
    raise AssertionError("every worker has a plan")
