"""Prices one request at a worker with a given leading run, by arithmetic on the cost models' coefficients. Pure.

A Pricing is made once per request; then each worker, and each number of blocks to pull, costs a few multiplications.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from moonpool.conductor.costs import CostModels
from moonpool.conductor.placement.prefix_index import Leading
from moonpool.conductor.placement.traffic import Traffic

_MAX_EDGES = 8
_MIN_GAIN = 0.1


class PlacementRequest(NamedTuple):
    """A request as policies see it."""

    num_tokens: int
    max_tokens: int
    block_tokens: int
    block_nbytes: int
    num_layers: int = 1  # loaded one by one while others are computed; 1: loading ends before computing begins
    step_tokens: int = 0  # computed in one step, the only one that loading overlaps with; 0: the whole prompt

    @property
    def num_pages(self) -> int:
        return -(-(self.num_tokens + self.max_tokens) // self.block_tokens)


class PricedPlacement(NamedTuple):
    """How a worker with `local` leading blocks would serve a request, and how long it would be busy with it."""

    local: int
    pulled: int
    ssd: int
    transfer_s: float
    congestion_s: float
    prefill_s: float
    overlap_s: float
    service_s: float


class Replicated(NamedTuple):
    """Numbers of blocks that a request copies to its worker although another worker has them."""

    pulled: int
    computed: int


def replicated(leading: Leading, plan: PricedPlacement) -> Replicated:
    """Return how a placement spreads a prefix. `leading` holds the runs of all workers that were considered.

    This is how hot prefixes spread (the paper's rule): a request that load sends to a worker without the longest prefix
    pulls or recomputes the missing blocks there, and that worker's own eviction drops them when they become cold.
    """
    longest = leading.groups[-1][0]  # groups ascend
    missing = max(0, longest - plan.local)
    pulled = min(missing, plan.pulled)
    return Replicated(pulled, missing - pulled)


class Pricing:
    """The prices of one request. `slot` is the worker's; None stands for a worker that receives no pulls now."""

    __slots__ = (
        "_is_known",
        "_last_split",
        "_leading",
        "_most",
        "_prefill",
        "_ssd",
        "_step",
        "_traffic",
        "_transfer",
        "request",
    )

    def __init__(self, request: PlacementRequest, leading: Leading, costs: CostModels, traffic: Traffic) -> None:
        self.request = request
        self._leading = leading
        self._traffic = traffic
        tokens, _, block_tokens, block_nbytes, _, step_tokens = request
        fixed_s, per_token_s, per_pair_s, per_prefix_s = costs.prefill.terms
        whole_s = fixed_s + tokens * (per_token_s + per_pair_s * tokens)
        # In blocks: a prefix of k blocks saves k (linear + square k).
        linear_s = (per_token_s - per_prefix_s) * block_tokens
        square_s = per_pair_s * block_tokens * block_tokens
        self._prefill = whole_s, linear_s, square_s
        self._most = (tokens - 1) / block_tokens
        # In blocks: a step, and the longest prefix behind which more than one step is computed.
        self._step = step_tokens / block_tokens
        self._last_split = (tokens - step_tokens) / block_tokens if step_tokens else 0.0
        fixed_s, per_byte_s = costs.transfer.terms
        self._transfer = fixed_s, per_byte_s * block_nbytes, per_byte_s
        self._ssd = costs.ssd_terms
        self._is_known = costs.transfer.num_samples > 0, costs.transfer_ssd.num_samples > 0

    def prefill_s(self, prefix_blocks: float) -> float:
        """Return the time to compute the prompt behind a prefix; a full hit still computes the last token."""
        whole_s, linear_s, square_s = self._prefill
        if prefix_blocks > self._most:
            prefix_blocks = self._most
        return whole_s - prefix_blocks * (linear_s + square_s * prefix_blocks)

    def first_step_s(self, prefix_blocks: float) -> float:
        """Return the time to compute the first step behind a prefix: the worker needs all pulled blocks in it, so later
        steps do not overlap with loading."""
        if prefix_blocks >= self._last_split:
            return self.prefill_s(prefix_blocks)
        return self.prefill_s(prefix_blocks) - self.prefill_s(prefix_blocks + self._step)

    def transfer_s(self, local: int, pulled: int, slot: int | None) -> tuple[float, float, int]:
        """Return (all seconds, the part that other pulls cause (traffic.py), blocks from SSD)."""
        fixed_s, per_block_s, _ = self._transfer
        most_s, slope_s = self._others_s(slot)
        congestion_s = min(most_s, slope_s * pulled)
        seconds = fixed_s + per_block_s * pulled + congestion_s
        if not self._leading.on_ssd:
            return seconds, congestion_s, 0
        return seconds + self._ssd_s(local, pulled), congestion_s, self._leading.num_on_ssd(local, local + pulled)

    def _others_s(self, slot: int | None) -> tuple[float, float]:
        """Return the seconds that other pulls add: (at most, per block)."""
        if not self._traffic.num_flows:
            return 0.0, 0.0
        nbytes, num_flows = self._traffic.others(slot)
        return nbytes * self._transfer[2], num_flows * self._transfer[1]

    def _ssd_s(self, local: int, pulled: int) -> float:
        """Return the extra seconds for the blocks that are on SSD."""
        ssd = self._leading.num_on_ssd(local, local + pulled)
        if not ssd:
            return 0.0
        fixed_s, per_block_s, _ = self._transfer
        extra_s = self._ssd[0] + ssd * (self._ssd[1] * self.request.block_nbytes - per_block_s)
        return extra_s - fixed_s if ssd == pulled else extra_s

    def plan(self, local: int, pulled: int, slot: int | None, num_layers: int = 1) -> PricedPlacement:
        """Price a placement that pulls `pulled` blocks behind the local ones and loads them layer by layer.

        With L layers of equal size the longer of loading and computing the first step hides all but 1/L of the shorter.
        """
        prefill_s = self.prefill_s(local + pulled)
        if not pulled:
            return PricedPlacement(local, 0, 0, 0.0, 0.0, prefill_s, 0.0, prefill_s)
        transfer_s, congestion_s, ssd = self.transfer_s(local, pulled, slot)
        overlap_s = min(transfer_s, self.first_step_s(local + pulled)) * (1 - 1 / num_layers)
        service_s = transfer_s + prefill_s - overlap_s
        return PricedPlacement(local, pulled, ssd, transfer_s, congestion_s, prefill_s, overlap_s, service_s)

    def best_plan(self, local: int, slot: int | None) -> PricedPlacement:
        """Return the placement with the number of pulled blocks that makes it shortest, 0 included; of equals the
        fewest blocks. To pull only some of the blocks must save _MIN_GAIN of the time: such a plan relies on loading
        and computing at once, and what it computes, others wait for.

        The time to compute is concave in the number of pulled blocks, the time to load is linear. So the minimum is
        at an end, where loading and the first step cross, where the rest becomes one step, or where the next block is
        on a slower tier. `_known_end` leaves out blocks of a tier that no pull has measured.
        """
        missing, layers, on_ssd = self._known_end(local) - local, self.request.num_layers, self._leading.on_ssd
        if missing <= 0:
            return self.plan(local, 0, slot)
        fixed_s, per_block_s, _ = self._transfer
        most_s, slope_s = self._others_s(slot)

        def load_s(pulled: int) -> float:  # as transfer_s, without recomputing constants
            seconds = fixed_s + per_block_s * pulled + min(most_s, slope_s * pulled)
            return seconds + self._ssd_s(local, pulled) if on_ssd else seconds

        tries = [missing]
        if layers > 1:
            tries += self._crossing(local, missing, load_s)
            split = int(self._last_split) - local
            tries += [at for at in (split, split + 1) if 0 < at < missing]
        if on_ssd:
            tries += [at - local for at in on_ssd if local < at < local + missing][:_MAX_EDGES]
        best, best_s = 0, self.prefill_s(local)
        for pulled in tries:
            seconds = self._both_s(load_s(pulled), local + pulled)
            if seconds < best_s * (1 - _MIN_GAIN if best == missing else 1):
                best, best_s = pulled, seconds
        return self.plan(local, best, slot, layers)

    def _known_end(self, local: int) -> int:
        """Return the block before which pulls can be priced. A tier that no pull has measured is tried with one block:
        a prior alone must not make a whole prompt wait."""
        (knows_dram, knows_ssd), pool, on_ssd = self._is_known, self._leading.pool, self._leading.on_ssd
        if not knows_dram:
            return min(pool, local + 1)
        if knows_ssd or not on_ssd:
            return pool
        untried = [at for at in on_ssd if at >= local]
        return untried[1] if len(untried) > 1 else pool

    def limit_beyond(self, plan: PricedPlacement) -> int | None:
        """Return how many leading blocks the worker may take from the pool if it finds more there, or fewer in its own
        pages, than the conductor knew: None (all) if pulling the whole prompt is measured to be faster than computing
        it, else the blocks of the plan.
        """
        whole = int(self._most)
        is_known = whole > 0 and self._is_known[0]
        if is_known and self._both_s(self.transfer_s(0, whole, None)[0], whole) < self.prefill_s(0):
            return None
        return plan.local + plan.pulled if plan.pulled else 0

    def _both_s(self, load_s: float, prefix_blocks: float) -> float:
        """Return the time to load a prefix in `load_s` and to compute the rest, which overlap in the first step."""
        hidden_s = min(load_s, self.first_step_s(prefix_blocks)) * (1 - 1 / self.request.num_layers)
        return load_s + self.prefill_s(prefix_blocks) - hidden_s

    def _crossing(self, local: int, missing: int, load_s: Callable[[int], float]) -> tuple[int, ...]:
        """Return the last number of blocks that load faster than the first step is computed, and the next; () if all
        do."""
        low, high, middle = -1, missing + 1, missing
        while high - low > 1:
            if load_s(middle) > self.first_step_s(local + middle):
                high = middle
            else:
                low = middle
            middle = (low + high) // 2
        return () if high > missing else (low, high) if low > 0 else (high,)
