"""Chooses the pair of workers for a request: the policies by name, and what all of them share. Pure.

A policy picks the prefill worker, whose predicted TTFT is queue + transfer + prefill - overlap:

random, round-robin, least-loaded   ignore the cache; the worker still reuses its own pages
local    smallest TTFT with each worker's own prefix, no pulls (Algorithm 1 without lines 5-8 and 20-21)
paper    the paper's whole Algorithm 1: if the pool's run is more than `kvcache_balancing_threshold` times the worker's
         own, the worker pulls all missing blocks, else it computes them; the terms are summed
cost     (default) for each worker the number of blocks to pull, 0 included, that makes TTFT smallest, so the prediction
         is never slower than without the pool; loading overlaps with computing layer by layer. A tier of the pool
         that no pull has measured yet is tried with one block

The decode worker is the one with free pages and the smallest predicted time between tokens. All policies that compare
TTFT follow two rules:

- No division: ratios of runs are compared by products, so empty prefixes need no special case.
- Near ties: workers whose TTFT is within `tie_slack` of the best worker's own work (transfer + prefill, not queue)
  count as equal. The one with the fewest assigned requests wins, then round-robin. So a tiny prefix that all prompts
  share does not draw all of them to one worker, while a prefix that saves real work still does.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from moonpool.base.errors import ConfigError, Unavailable
from moonpool.conductor.admission.forms import AdmissionConfig, AdmissionForm
from moonpool.conductor.costs import CostModels
from moonpool.conductor.messages import Candidate
from moonpool.conductor.placement.prefix_index import Leading
from moonpool.conductor.placement.pricing import MIN_GAIN, PlacementRequest, PricedPlacement, Pricing
from moonpool.conductor.placement.tables import FULL_S, Column, DecodeTable, PrefillTable, slot_index
from moonpool.conductor.placement.traffic import Traffic

POLICY_NAMES = ("random", "round-robin", "least-loaded", "local", "paper", "cost")
DEFAULT_POLICY = "cost"
_FORMER_NAMES = {"global": "paper", "ours": "cost"}  # accepted until version 0.2
DEFAULT_QUEUE_CAPACITY = 256
DEFAULT_QUEUE_TIMEOUT_S = 30.0
_MAX_COLUMNS = 256
_FEW_SLOTS = 64
_MAX_TTFT_S = 1e300  # that of a worker that may get no request is infinite
_ELSEWHERE = "", -1  # the workers on machines without blocks of the prompt


@dataclass(frozen=True, slots=True)
class PolicyConfig:
    """Where requests go, and which are refused. Targets are in seconds; None refuses nothing.
    `kvcache_balancing_threshold` is a ratio of leading runs, at least 1."""

    name: str = DEFAULT_POLICY  # how workers are chosen: random, round-robin, least-loaded, local, paper or cost
    # target for the time to first token; a request predicted to miss it is queued or refused; default: no target
    ttft_slo_s: float | None = None
    # target for the time between tokens; a request predicted to miss it is refused, or queued if there is a TTFT target
    # or a queue_capacity; default: no target
    tbt_slo_s: float | None = None
    admission: AdmissionForm = AdmissionForm.PREDICTED  # which decode load counts when a request arrives
    # requests that may wait in the queue, 0: none; default: 256 with a TTFT target, otherwise no limit
    queue_capacity: int | None = None
    # seconds after which a queued request is refused, if there is no TTFT target; default: 30 with a TBT target and a
    # queue_capacity, otherwise when its front end gives it up
    queue_timeout_s: float | None = None
    # seconds of predicted work that a prefill worker may have ahead of a request that is sent there; others wait in the
    # queue. With a TTFT target at most a quarter of it
    worker_backlog_s: float = 0.25
    # policy paper: pull from the pool if its prefix is more than this many times the local one
    kvcache_balancing_threshold: float = 1.0
    # treat workers as tied if their predicted TTFT differs by less than this fraction of the request's own work; 0:
    # exact ties only
    tie_slack: float = 0.05
    # send a prompt to a pipeline if it has at least this many tokens beside those that one worker finds in a cache;
    # default: if the pipeline is predicted to be clearly faster
    pipeline_min_tokens: int | None = None
    num_candidates: int = 4  # candidate workers kept in a decision record
    pool_sources: int | None = None  # nodes that serve pulls in the prediction; default: all nodes of the pool
    seed: int = 0  # random seed of the policy random

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", _FORMER_NAMES.get(self.name, self.name))
        if self.name not in POLICY_NAMES:
            raise ConfigError(f"policy {self.name!r} is none of {', '.join(POLICY_NAMES)}", param="name")
        if not self.kvcache_balancing_threshold >= 1:
            raise ConfigError("kvcache_balancing_threshold must be at least 1", param="kvcache_balancing_threshold")
        for name in (
            "ttft_slo_s",
            "tbt_slo_s",
            "pipeline_min_tokens",
            "num_candidates",
            "pool_sources",
            "queue_timeout_s",
            "worker_backlog_s",
        ):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"{name} must be above 0", param=name)
        if not 0 <= self.tie_slack < 1:
            raise ConfigError("tie_slack must be at least 0 and below 1", param="tie_slack")
        if self.queue_capacity is not None and self.queue_capacity < 0:
            raise ConfigError("queue_capacity must be 0 or more", param="queue_capacity")

    @property
    def targets(self) -> AdmissionConfig:
        return AdmissionConfig(AdmissionForm(self.admission), self.ttft_slo_s, self.tbt_slo_s)

    @property
    def max_waiting(self) -> int | None:
        """How many requests may wait in the queue; None: no limit. 0: there is no queue, and a request that misses a
        target is refused at once."""
        if self.queue_capacity is None and self.ttft_slo_s is not None:
            return DEFAULT_QUEUE_CAPACITY
        return self.queue_capacity

    @property
    def waits_for_decode(self) -> bool:
        """Whether a request waits in the queue that would miss the target of the time between tokens now."""
        return self.ttft_slo_s is not None or (self.tbt_slo_s is not None and self.queue_capacity is not None)

    def max_wait_s(self, work_s: float) -> float | None:
        """Return how long a request may wait in the queue whose prompt takes `work_s`; None: no limit."""
        if self.ttft_slo_s is not None:
            return self.ttft_slo_s - work_s
        if self.queue_timeout_s is None and self.waits_for_decode:
            return DEFAULT_QUEUE_TIMEOUT_S
        return self.queue_timeout_s


class PlacementInput(NamedTuple):
    """All that the choice of a prefill worker depends on. `queue_s` is infinite where a request must not go."""

    request: PlacementRequest
    leading: Leading
    queue_s: Column
    table: PrefillTable
    prices: Pricing
    traffic: Traffic
    kinds: tuple[tuple[int, Pricing], ...] = ()  # with several kinds of workers: mask of slots, their prices

    def parts(self) -> list[tuple[int, PlacementInput]]:
        """Return (mask of slots, inputs with their prices) for each kind of worker."""
        return [(mask, self._replace(prices=prices, kinds=())) for mask, prices in self.kinds] or [(-1, self)]

    def at(self, slot: int) -> PlacementInput:
        """Return the inputs with the prices of that worker."""
        return next(part for mask, part in self.parts() if mask >> slot & 1)


class Policy(Protocol):
    """`pick` needs at least one worker with a finite queue; it returns (slot, plan) of the best few, the chosen one
    first. A policy keeps no state but a round-robin position or a random generator."""

    name: str
    pulls: bool  # whether its workers may take blocks from the pool
    by_node: bool  # whether it prices pulls by the node that they come from

    def pick(self, inputs: PlacementInput) -> list[tuple[int, PricedPlacement]]: ...

    def pool_limit(self, inputs: PlacementInput, plan: PricedPlacement) -> int | None:
        """Return how many leading blocks the worker may take from the pool if it finds them there; None: all."""
        ...


class PlacementChoice(NamedTuple):
    plan: PricedPlacement
    prefill: Candidate
    decode_slot: int
    tbt_s: float
    candidates: tuple[Candidate, ...]
    max_pool_blocks: int | None


class DecodeCosts(Protocol):
    """What the choice of a decode worker costs: placement/kinds.py."""

    def decode_rank_s(self, table: DecodeTable, num_tokens: int) -> Column: ...

    def decode_of(self, slot: int) -> CostModels: ...


class RoundRobinTies:
    """Breaks ties round-robin: the search for the lowest rank starts after the slot chosen last."""

    def __init__(self) -> None:
        self._next = 0

    def pick(self, rank: Column) -> int:
        """Return one of the slots with the lowest rank."""
        slot = int(rank.argmin())
        if 0 < self._next < len(rank):
            later = self._next + int(rank[self._next :].argmin())
            if rank.item(later) <= rank.item(slot):
                slot = later
        self._next = slot + 1
        return slot


class Chooser:
    """Chooses both workers of a request."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self._ties = RoundRobinTies()  # of decode workers

    def choose(
        self, inputs: PlacementInput, decodes: DecodeTable, excluded: Sequence[int], costs: DecodeCosts
    ) -> PlacementChoice:
        """Raise Unavailable when there is no prefill worker or no decode worker."""
        if not inputs.leading.groups:
            raise Unavailable("no prefill worker is ready")
        decode, tbt_s = self.select_decode(inputs.request, decodes, excluded, costs)
        picked = self.policy.pick(inputs)
        candidates = tuple(_candidate(inputs, slot, plan) for slot, plan in picked)
        slot, plan = picked[0]
        limit = self.policy.pool_limit(inputs.at(slot), plan)
        return PlacementChoice(plan, candidates[0], decode, tbt_s, candidates, limit)

    def select_decode(
        self, request: PlacementRequest, table: DecodeTable, excluded: Sequence[int], costs: DecodeCosts
    ) -> tuple[int, float]:
        """Return the slot with free pages and the smallest predicted TBT with this request in its batch, and that TBT.
        If no worker has free pages, choose among all of them: the request waits there."""
        rank = costs.decode_rank_s(table, request.num_tokens)
        if excluded:
            rank = rank.copy()
            rank[excluded] = np.inf
        slot = self._ties.pick(rank)
        if table.free_pages.item(slot) < request.num_pages:
            short = (table.free_pages < request.num_pages) & (rank < FULL_S)  # the others already rank as full
            rank = rank + short * FULL_S
            slot = self._ties.pick(rank)
        if rank.item(slot) == math.inf:
            raise Unavailable("no decode worker is ready")
        num_seqs, kv_tokens = table.num_seqs.item(slot) + 1, table.kv_tokens.item(slot) + request.num_tokens
        return slot, costs.decode_of(slot).decode_step_s(num_seqs, kv_tokens)


def _candidate(inputs: PlacementInput, slot: int, plan: PricedPlacement) -> Candidate:
    return Candidate(
        worker=inputs.table.names[slot],
        local_blocks=plan.local,
        pulled_blocks=plan.pulled,
        transfer_s=plan.transfer_s,
        queue_s=inputs.queue_s.item(slot),
        prefill_s=plan.prefill_s,
        ssd_blocks=plan.ssd,
        congestion_s=plan.congestion_s,
        overlap_s=plan.overlap_s,
    )


class _NoPulls:
    """The worker reuses its own pages only."""

    pulls = by_node = False

    def pool_limit(self, inputs: PlacementInput, plan: PricedPlacement) -> int | None:
        return 0


class Random(_NoPulls):
    name = "random"

    def __init__(self, config: PolicyConfig, rng: random.Random) -> None:
        self._rng = rng

    def pick(self, inputs: PlacementInput) -> list[tuple[int, PricedPlacement]]:
        slots = np.isfinite(inputs.queue_s).nonzero()[0]
        return _with_own_prefix(inputs, int(slots[self._rng.randrange(len(slots))]))


class RoundRobin(_NoPulls):
    name = "round-robin"

    def __init__(self, config: PolicyConfig, rng: random.Random) -> None:
        self._ties = RoundRobinTies()

    def pick(self, inputs: PlacementInput) -> list[tuple[int, PricedPlacement]]:
        return _with_own_prefix(inputs, self._ties.pick(np.where(inputs.queue_s < math.inf, 0.0, math.inf)))


class LeastLoaded(_NoPulls):
    """By predicted queue, then by assigned requests, then round-robin."""

    name = "least-loaded"

    def __init__(self, config: PolicyConfig, rng: random.Random) -> None:
        self._ties = RoundRobinTies()

    def pick(self, inputs: PlacementInput) -> list[tuple[int, PricedPlacement]]:
        least = inputs.queue_s.item(int(inputs.queue_s.argmin()))
        rank = np.where(inputs.queue_s <= least, inputs.table.assigned, math.inf)
        return _with_own_prefix(inputs, self._ties.pick(rank))


class _Group(NamedTuple):
    """Workers that share a plan, with what it was made from."""

    mask: int
    plan: PricedPlacement
    inputs: PlacementInput
    machine: str


class SmallestTtft:
    """What local, paper and cost share; they differ in the plan for a worker with a given run."""

    name, pulls, by_node = "", True, False

    def __init__(self, config: PolicyConfig, rng: random.Random) -> None:
        self._config = config
        self._ties = RoundRobinTies()
        self._columns: dict[int, Column] = {}

    def plan(self, inputs: PlacementInput, local: int, slot: int | None, machine: str) -> PricedPlacement:
        raise NotImplementedError

    def pool_limit(self, inputs: PlacementInput, plan: PricedPlacement) -> int | None:
        wanted = plan.local + plan.pulled
        return None if wanted >= inputs.leading.pool else wanted if plan.pulled else 0

    def pick(self, inputs: PlacementInput) -> list[tuple[int, PricedPlacement]]:
        groups = self._groups(inputs)
        ttft_s = self._ttft_s(inputs, groups)
        priced: dict[int, PricedPlacement] = {}

        def plan_of(slot: int) -> PricedPlacement:
            return priced[slot] if slot in priced else _group_of(groups, slot).plan

        best, limit_s = self._leaders(ttft_s, plan_of)
        crowded = _Crowded(self, groups) if self.pulls and inputs.traffic.num_flows else None
        while crowded is not None and crowded.price(ttft_s, max(limit_s, ttft_s.item(best[-1])), priced):
            best, limit_s = self._leaders(ttft_s, plan_of)
        slot = best[0]
        if len(best) > 1 and ttft_s.item(best[1]) <= limit_s:
            slot = self._ties.pick(np.where(ttft_s <= limit_s, inputs.table.assigned, math.inf))
        others = [one for one in best if one != slot and ttft_s.item(one) < math.inf]
        ranked = [slot, *others[: self._config.num_candidates - 1]]
        return [(one, plan_of(one)) for one in ranked]

    def _leaders(self, ttft_s: Column, plan_of: Callable[[int], PricedPlacement]) -> tuple[list[int], float]:
        """Return the best few slots, and the TTFT up to which a worker counts as equal to the best one."""
        best = _smallest(ttft_s, max(2, self._config.num_candidates))
        return best, ttft_s.item(best[0]) + self._config.tie_slack * plan_of(best[0]).service_s

    def _groups(self, inputs: PlacementInput) -> list[_Group]:
        """Return the workers in groups with the same plan if none of them receives pulls now: those of a kind with the
        same run, without those that have some of the blocks on their machine."""
        return [group for among, part in inputs.parts() for group in self._groups_of_kind(part, among)]

    def _groups_of_kind(self, inputs: PlacementInput, among: int) -> Iterator[_Group]:
        pool = inputs.leading.pool
        for local, slots in inputs.leading.groups:
            mask = slots & among
            machines = inputs.prices.machines(local) if self.pulls and local < pool else None
            for machine, near in (*machines, _ELSEWHERE) if machines else (_ELSEWHERE,):
                here = mask & near
                mask ^= here
                if here:
                    yield _Group(here, self.plan(inputs, local, None, machine), inputs, machine)

    def _ttft_s(self, inputs: PlacementInput, groups: list[_Group]) -> Column:
        """Add the most common service time to every queue, then each other group's difference to it."""
        usual = max(groups, key=_num_slots).plan.service_s
        ttft_s = inputs.queue_s + usual
        for mask, plan, *_ in groups:
            if plan.service_s == usual:
                continue
            if mask & (mask - 1):
                ttft_s += self._column(mask, len(ttft_s)) * (plan.service_s - usual)
            else:
                ttft_s[mask.bit_length() - 1] += plan.service_s - usual
        return ttft_s

    def _column(self, mask: int, length: int) -> Column:
        """Return 1 for the slots in the mask, 0 for the others. Cached, because the same few masks recur."""
        found = self._columns.get(mask)
        if found is None or len(found) != length:
            if len(self._columns) >= _MAX_COLUMNS:
                self._columns.clear()
            found = self._columns[mask] = np.zeros(length)
            found[slot_index(mask)] = 1.0
        return found


class _Crowded:
    """The workers that receive pulls now, which congestion makes slower than the others of their groups. Of a thousand
    workers, few are so near the best that they have to be priced; all would take longer than the rest of a decision."""

    def __init__(self, policy: SmallestTtft, groups: list[_Group]) -> None:
        traffic, pool = groups[0].inputs.traffic, groups[0].inputs.leading.pool
        self._policy, self._traffic = policy, traffic
        self._groups = [group for group in groups if group.plan.local < pool]
        self._left = slot_index(traffic.busy_mask & sum([group.mask for group in self._groups]))
        # A plan with congestion may be shorter than the one without, by the share that part of a pull must save.
        self._shorter_s = MIN_GAIN * max([group.plan.service_s for group in self._groups], default=0.0)
        self._same: dict[tuple[int, tuple[float, float]], PricedPlacement] = {}  # by group and load

    def price(self, ttft_s: Column, limit_s: float, priced: dict[int, PricedPlacement]) -> bool:
        """Price the workers that could have a TTFT up to that limit: enter it into the column, and their plans into
        `priced`. Return whether there were any."""
        is_near = ttft_s[self._left] <= min(limit_s + self._shorter_s, _MAX_TTFT_S)
        near, self._left = self._left[is_near].tolist(), self._left[~is_near]
        for slot in near:
            group = _group_of(self._groups, slot)
            key = group.mask, self._traffic.others(slot)
            if key not in self._same:
                self._same[key] = self._policy.plan(group.inputs, group.plan.local, slot, group.machine)
            priced[slot] = self._same[key]
            ttft_s[slot] += priced[slot].service_s - group.plan.service_s
        return bool(near)


class Local(SmallestTtft):
    name, pulls = "local", False

    def pool_limit(self, inputs: PlacementInput, plan: PricedPlacement) -> int | None:
        return 0

    def plan(self, inputs: PlacementInput, local: int, slot: int | None, machine: str) -> PricedPlacement:
        return inputs.prices.plan(local, 0, slot)


class PaperAlgorithm(SmallestTtft):
    name = "paper"

    def plan(self, inputs: PlacementInput, local: int, slot: int | None, machine: str) -> PricedPlacement:
        # best_len / prefix_len > threshold, written without the division, which an empty prefix would break.
        worth_it = inputs.leading.pool > self._config.kvcache_balancing_threshold * local
        return inputs.prices.plan(local, inputs.leading.pool - local if worth_it else 0, slot, machine=machine)


class SmallestCost(SmallestTtft):
    name, by_node = "cost", True

    def plan(self, inputs: PlacementInput, local: int, slot: int | None, machine: str) -> PricedPlacement:
        return inputs.prices.best_plan(local, slot, machine)

    def pool_limit(self, inputs: PlacementInput, plan: PricedPlacement) -> int | None:
        limit = super().pool_limit(inputs, plan)
        return inputs.prices.limit_beyond(plan) if limit is None else limit


_POLICIES: dict[str, Callable[[PolicyConfig, random.Random], Policy]] = {
    one.name: one for one in (Random, RoundRobin, LeastLoaded, Local, PaperAlgorithm, SmallestCost)
}
assert tuple(_POLICIES) == POLICY_NAMES


def make_policy(config: PolicyConfig, rng: random.Random) -> Policy:
    return _POLICIES[config.name](config, rng)


def _smallest(column: Column, count: int) -> list[int]:
    """Return the slots of the `count` smallest values, ascending; among equals the lowest slot first."""
    if len(column) <= _FEW_SLOTS:
        slots: list[int] = column.argsort(kind="stable")[:count].tolist()
        return slots
    # Sorting many would take longer than the rest of a decision.
    limit = np.partition(column, count - 1).item(count - 1)
    less = (column < limit).nonzero()[0].tolist()
    equal: list[int] = (column == limit).nonzero()[0][: count - len(less)].tolist()  # of hundreds where all are idle
    return sorted(less, key=column.item) + equal


def _with_own_prefix(inputs: PlacementInput, slot: int) -> list[tuple[int, PricedPlacement]]:
    return [(slot, inputs.at(slot).prices.plan(inputs.leading.run_of(slot), 0, None))]


def _num_slots(group: _Group) -> int:
    return group.mask.bit_count()


def _group_of(groups: list[_Group], slot: int) -> _Group:
    for group in groups:
        if group.mask >> slot & 1:
            return group
    raise AssertionError("every worker is in a group")
