"""Algorithm 1 of the paper (KVCache-centric scheduling) over what is known now. Pure.

For each prefill worker: if the pool's leading run is more than `kvcache_balancing_threshold` times the worker's
own, the missing blocks are pulled, else they are computed again; TTFT = transfer + queue + prefill, and the
smallest wins. The decode worker is chosen beforehand by predicted time between tokens among those with room.
Ties go to the worker with fewer assigned requests, then to the first by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from moonpool.base.errors import ConfigError, Overloaded, Unavailable
from moonpool.conductor.estimate import CostModels
from moonpool.conductor.messages import Candidate

MIN_RETRY_S = 1.0


@dataclass(frozen=True, slots=True)
class PolicyConfig:
    """Targets in seconds; None never refuses. The threshold is a ratio of leading runs, at least 1."""

    ttft_slo_s: float | None = None
    tbt_slo_s: float | None = None
    kvcache_balancing_threshold: float = 1.0

    def __post_init__(self) -> None:
        if not self.kvcache_balancing_threshold >= 1:
            raise ConfigError("kvcache_balancing_threshold must be at least 1", param="kvcache_balancing_threshold")
        for name in ("ttft_slo_s", "tbt_slo_s"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"{name} must be above 0", param=name)


class Demand(NamedTuple):
    """A request as the policy sees it."""

    num_tokens: int
    max_tokens: int
    block_tokens: int
    block_nbytes: int
    pool_blocks: int


class PrefillView(NamedTuple):
    """A prefill worker now: its leading blocks of this prompt, and the predicted work sent there already."""

    name: str
    local_blocks: int
    queue_s: float
    assigned: int


class DecodeView(NamedTuple):
    """A decode worker now, the requests on their way to it included."""

    name: str
    num_seqs: int
    max_num_seqs: int
    kv_tokens: int
    free_pages: int


class Choice(NamedTuple):
    prefill: Candidate
    decode: str
    tbt_s: float
    candidates: tuple[Candidate, ...]


def choose(
    demand: Demand,
    prefills: Sequence[PrefillView],
    decodes: Sequence[DecodeView],
    costs: CostModels,
    config: PolicyConfig,
) -> Choice:
    """Unavailable when a pool of workers is empty, Overloaded when the best pair misses a target."""
    if not prefills or not decodes:
        raise Unavailable(f"no {'decode' if prefills else 'prefill'} worker is ready")
    candidates = tuple(weigh(demand, view, costs, config.kvcache_balancing_threshold) for view in prefills)
    assigned = {view.name: view.assigned for view in prefills}
    best = min(candidates, key=lambda one: (one.ttft_s, assigned[one.worker], one.worker))
    decode, tbt_s = select_decode(demand, decodes, costs)
    _check_targets(best, tbt_s, config)
    return Choice(best, decode.name, tbt_s, candidates)


def weigh(demand: Demand, view: PrefillView, costs: CostModels, threshold: float) -> Candidate:
    """The predicted parts of TTFT on one prefill worker."""
    pulled = demand.pool_blocks - view.local_blocks if _worth_pulling(demand, view, threshold) else 0
    prefix_tokens = (view.local_blocks + pulled) * demand.block_tokens
    return Candidate(
        worker=view.name,
        local_blocks=view.local_blocks,
        pulled_blocks=pulled,
        transfer_s=costs.transfer_s(pulled * demand.block_nbytes),
        queue_s=view.queue_s,
        prefill_s=costs.prefill_s(demand.num_tokens, prefix_tokens),
    )


def _worth_pulling(demand: Demand, view: PrefillView, threshold: float) -> bool:
    # best_len / prefix_len > threshold, written so that an empty prefix divides nothing.
    return demand.pool_blocks > threshold * view.local_blocks


def select_decode(demand: Demand, views: Sequence[DecodeView], costs: CostModels) -> tuple[DecodeView, float]:
    """The worker with room and the smallest predicted TBT with this request in its batch. If none has room,
    the same among all of them: the request waits there."""
    pages = -(-(demand.num_tokens + demand.max_tokens) // demand.block_tokens)

    def predicted_s(view: DecodeView) -> float:
        return costs.decode_step_s(view.num_seqs + 1, view.kv_tokens + demand.num_tokens)

    def rank(view: DecodeView) -> tuple[bool, float, int, str]:
        full = view.free_pages < pages or view.num_seqs >= view.max_num_seqs
        return full, predicted_s(view), view.num_seqs, view.name

    best = min(views, key=rank)
    return best, predicted_s(best)


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
