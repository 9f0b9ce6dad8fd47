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

from moonpool.base.errors import ConfigError, Overloaded, Unavailable
from moonpool.conductor.estimate import CostModels
from moonpool.conductor.leading import Leading
from moonpool.conductor.messages import Candidate
from moonpool.conductor.pricing import Demand, Plan, Pricing
from moonpool.conductor.tables import FULL_S, Column, DecodeTable, PrefillTable
from moonpool.conductor.traffic import Traffic

MIN_RETRY_S = 1.0


@dataclass(frozen=True, slots=True)
class PolicyConfig:
    """Targets in seconds; None never refuses. The threshold is a ratio of leading runs, at least 1."""

    policy: str = "global"  # random, round-robin, least-loaded, local, global or ours (policies.py)
    ttft_slo_s: float | None = None
    tbt_slo_s: float | None = None
    kvcache_balancing_threshold: float = 1.0
    tie_slack: float = 0.05  # of the best worker's own work for the request; 0: exact ties only
    num_candidates: int = 4  # kept in a decision record
    pool_sources: int | None = None  # nodes that pulls come from; None: as many as there are prefill workers
    seed: int = 0  # of the policy that draws

    def __post_init__(self) -> None:
        if not self.kvcache_balancing_threshold >= 1:
            raise ConfigError("kvcache_balancing_threshold must be at least 1", param="kvcache_balancing_threshold")
        for name in ("ttft_slo_s", "tbt_slo_s", "num_candidates", "pool_sources"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"{name} must be above 0", param=name)
        if not 0 <= self.tie_slack < 1:
            raise ConfigError("tie_slack must be at least 0 and below 1", param="tie_slack")


class Scene(NamedTuple):
    """All that bears on the choice of a prefill worker. `queue_s` is infinite where a request must not go."""

    demand: Demand
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

    def pick(self, scene: Scene) -> list[tuple[int, Plan]]: ...


class Choice(NamedTuple):
    plan: Plan
    prefill: Candidate
    decode_slot: int
    tbt_s: float
    candidates: tuple[Candidate, ...]
    max_pool_blocks: int | None


class Chooser:
    """Keeps the turn of decode workers that are equal."""

    def __init__(self, policy: Policy, config: PolicyConfig) -> None:
        self.policy = policy
        self._config = config
        self._turn = Turn()

    def choose(self, scene: Scene, decodes: DecodeTable, excluded: Sequence[int], costs: CostModels) -> Choice:
        """Unavailable when there is no worker of a kind, Overloaded when the best pair misses a target."""
        if not scene.leading.groups:
            raise Unavailable("no prefill worker is ready")
        decode, tbt_s = self.select_decode(scene.demand, decodes, excluded, costs)
        picked = self.policy.pick(scene)
        candidates = tuple(_candidate(scene, slot, plan) for slot, plan in picked)
        best = candidates[0]
        _check_targets(best, tbt_s, self._config)
        return Choice(picked[0][1], best, decode, tbt_s, candidates, self._pool_limit(scene.leading, best))

    def _pool_limit(self, leading: Leading, best: Candidate) -> int | None:
        if not self.policy.pulls:
            return 0
        wanted = best.local_blocks + best.pulled_blocks
        return None if wanted >= leading.pool else wanted if best.pulled_blocks else 0

    def select_decode(
        self, demand: Demand, table: DecodeTable, excluded: Sequence[int], costs: CostModels
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


class Turn:
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


def _candidate(scene: Scene, slot: int, plan: Plan) -> Candidate:
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


def _check_targets(best: Candidate, tbt_s: float, config: PolicyConfig) -> None:
    if config.ttft_slo_s is not None and best.ttft_s > config.ttft_slo_s:
        # The queue has to shrink by the excess; a request too long for an idle worker has no queue to wait for.
        wait_s = min(best.queue_s, best.ttft_s - config.ttft_slo_s)
        raise Overloaded(
            f"the first token would take {best.ttft_s:.2f} s, the target is {config.ttft_slo_s:g} s",
            retry_after_s=max(MIN_RETRY_S, wait_s),
        )
    if config.tbt_slo_s is not None and tbt_s > config.tbt_slo_s:
        raise Overloaded(
            f"tokens would come {tbt_s * 1e3:.0f} ms apart, the target is {config.tbt_slo_s * 1e3:.0f} ms",
            retry_after_s=max(MIN_RETRY_S, best.queue_s),
        )
