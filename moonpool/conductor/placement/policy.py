"""Which pair of workers takes a request: what every policy sees, and what is common to all of them. Pure.

A policy (policies.py) picks the prefill worker; its TTFT is queue + transfer + prefill - overlap. The decode worker is
the one with room and the smallest predicted time between tokens. Guards, for every policy that weighs TTFT:

- No division: ratios of runs are compared by products, so empty prefixes need no special case.
- Ties, and near ties: workers whose TTFT is within `tie_slack` of the best one's own work (transfer + prefill, not
  queue) count as equal. Fewest assigned requests first, then in turn. So a tiny prefix that all prompts share does not
  draw all of them to the one worker that has it, while a prefix that saves real work still does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from moonpool.base.errors import ConfigError, Unavailable
from moonpool.conductor.admission.forms import AdmissionConfig, AdmissionForm
from moonpool.conductor.costs.estimate import CostModels
from moonpool.conductor.messages import Candidate
from moonpool.conductor.placement.leading import Leading
from moonpool.conductor.placement.pricing import PlacementRequest, PricedPlacement, Pricing
from moonpool.conductor.placement.tables import FULL_S, Column, DecodeTable, PrefillTable
from moonpool.conductor.placement.traffic import Traffic

POLICY_NAMES = ("random", "round-robin", "least-loaded", "local", "paper", "cost")  # see policies.py
DEFAULT_POLICY = "cost"
_FORMER_NAMES = {"global": "paper", "ours": "cost"}  # taken until version 0.2
DEFAULT_QUEUE_CAPACITY = 256


@dataclass(frozen=True, slots=True)
class PolicyConfig:
    """Which worker, and whether at all. Targets in seconds; None never refuses. The threshold is a ratio of leading
    runs, at least 1."""

    name: str = DEFAULT_POLICY  # how workers are chosen: random, round-robin, least-loaded, local, paper or cost
    # target for the time to first token; a request predicted to miss it is queued or refused; default: no target
    ttft_slo_s: float | None = None
    # target for the time between tokens; a request predicted to miss it is queued or refused; default: no target
    tbt_slo_s: float | None = None
    admission: AdmissionForm = AdmissionForm.PREDICTED  # which decode load counts when a request arrives
    # requests that may wait in the queue; default: 256 with a TTFT target, otherwise 0
    queue_capacity: int | None = None
    queue_timeout_s: float = 30.0  # seconds after which a queued request is refused, if there is no TTFT target
    # policy paper: pull from the pool if its prefix is more than this many times the local one
    kvcache_balancing_threshold: float = 1.0
    # treat workers as tied if their predicted TTFT differs by less than this fraction of the request's own work; 0:
    # exact ties only
    tie_slack: float = 0.05
    num_candidates: int = 4  # candidate workers kept in a decision record
    pool_sources: int | None = None  # nodes that serve pulls in the prediction; default: all nodes of the pool
    seed: int = 0  # random seed of the policy random

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", _FORMER_NAMES.get(self.name, self.name))
        if self.name not in POLICY_NAMES:
            raise ConfigError(f"policy {self.name!r} is none of {', '.join(POLICY_NAMES)}", param="name")
        if not self.kvcache_balancing_threshold >= 1:
            raise ConfigError("kvcache_balancing_threshold must be at least 1", param="kvcache_balancing_threshold")
        for name in ("ttft_slo_s", "tbt_slo_s", "num_candidates", "pool_sources", "queue_timeout_s"):
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
    def room_to_wait(self) -> int:
        """How many requests may wait; 0: what does not fit is refused at once."""
        if self.queue_capacity is not None:
            return self.queue_capacity
        return 0 if self.ttft_slo_s is None else DEFAULT_QUEUE_CAPACITY


class PlacementInput(NamedTuple):
    """All that bears on the choice of a prefill worker. `queue_s` is infinite where a request must not go."""

    demand: PlacementRequest
    leading: Leading
    queue_s: Column
    table: PrefillTable
    prices: Pricing
    traffic: Traffic


class Policy(Protocol):
    """`pick` finds at least one worker with a finite queue; it returns (slot, plan) of the best few, the chosen one
    first. It may keep a turn or a generator, nothing else."""

    name: str
    pulls: bool  # whether its workers may take blocks from the pool

    def pick(self, scene: PlacementInput) -> list[tuple[int, PricedPlacement]]: ...

    def pool_limit(self, scene: PlacementInput, plan: PricedPlacement) -> int | None:
        """How many leading blocks the worker may take from the pool, should it find them there; None: all."""
        ...


class PlacementChoice(NamedTuple):
    plan: PricedPlacement
    prefill: Candidate
    decode_slot: int
    tbt_s: float
    candidates: tuple[Candidate, ...]
    max_pool_blocks: int | None


class Chooser:
    """Keeps the turn of decode workers that are equal."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self._turn = RoundRobinTies()

    def choose(
        self, scene: PlacementInput, decodes: DecodeTable, excluded: Sequence[int], costs: CostModels
    ) -> PlacementChoice:
        """Unavailable when there is no worker of a kind."""
        if not scene.leading.groups:
            raise Unavailable("no prefill worker is ready")
        decode, tbt_s = self.select_decode(scene.demand, decodes, excluded, costs)
        picked = self.policy.pick(scene)
        candidates = tuple(_candidate(scene, slot, plan) for slot, plan in picked)
        plan = picked[0][1]
        return PlacementChoice(plan, candidates[0], decode, tbt_s, candidates, self.policy.pool_limit(scene, plan))

    def select_decode(
        self, demand: PlacementRequest, table: DecodeTable, excluded: Sequence[int], costs: CostModels
    ) -> tuple[int, float]:
        """The slot with room and the smallest predicted TBT with this request in its batch. If none has room, the
        same among all of them: the request waits there."""
        rank = table.rank_s(costs.decode.terms)
        if excluded:
            rank = rank.copy()
            rank[excluded] = np.inf
        slot = self._turn.take(rank)
        if table.free_pages.item(slot) < demand.num_pages:
            short = (table.free_pages < demand.num_pages) & (rank < FULL_S)  # others are known to be full
            rank = rank + short * FULL_S
            slot = self._turn.take(rank)
        if rank.item(slot) == math.inf:
            raise Unavailable("no decode worker is ready")
        return slot, costs.decode_step_s(table.num_seqs.item(slot) + 1, table.kv_tokens.item(slot) + demand.num_tokens)


class RoundRobinTies:
    """Equals take turns: the first at or after the one behind the last that was chosen, round and round."""

    def __init__(self) -> None:
        self._next = 0

    def take(self, rank: Column) -> int:
        """One of the slots with the lowest rank."""
        slot = int(rank.argmin())
        if 0 < self._next < len(rank):
            later = self._next + int(rank[self._next :].argmin())
            if rank.item(later) <= rank.item(slot):
                slot = later
        self._next = slot + 1
        return slot


def _candidate(scene: PlacementInput, slot: int, plan: PricedPlacement) -> Candidate:
    return Candidate(
        worker=scene.table.names[slot],
        local_blocks=plan.local,
        pulled_blocks=plan.pulled,
        transfer_s=plan.transfer_s,
        queue_s=scene.queue_s.item(slot),
        prefill_s=plan.prefill_s,
        ssd_blocks=plan.ssd,
        congestion_s=plan.congestion_s,
        overlap_s=plan.overlap_s,
    )
