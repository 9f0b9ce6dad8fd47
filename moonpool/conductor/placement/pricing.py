"""Prices one request at a worker with a given leading run, by arithmetic on the cost models' coefficients. Pure.

A Pricing is made once per request; then each worker, and each number of blocks to pull, costs a few multiplications.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable
from copy import copy
from typing import NamedTuple

from moonpool.conductor.costs import CostModels
from moonpool.conductor.placement.paths import PoolPaths
from moonpool.conductor.placement.prefix_index import Leading
from moonpool.conductor.placement.traffic import Traffic, crowding

_MAX_EDGES = 8
MIN_GAIN = 0.1  # of the time, that pulling only a part must save
_Point = tuple[float, float, float]  # seconds, of these by hand-offs, blocks on the worker's machine


class PlacementRequest(NamedTuple):
    """A request as policies see it."""

    num_tokens: int
    max_tokens: int
    expected_tokens: float  # of its answer, at most `max_tokens`
    block_tokens: int
    block_nbytes: int
    num_layers: int = 1  # loaded one by one while others are computed; 1: loading ends before computing begins
    step_tokens: int = 0  # computed in one step, the only one that loading overlaps with; 0: the whole prompt

    @property
    def prompt_pages(self) -> int:
        return -(-self.num_tokens // self.block_tokens)

    @property
    def num_pages(self) -> int:
        """The pages that the decode worker is expected to need for it."""
        return math.ceil((self.num_tokens + self.expected_tokens) / self.block_tokens)


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
    far: int = 0  # of the pulled blocks, those that come over the network


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


class _Line:
    """How long the first blocks of a prompt take to pull, how much of that is due to hand-offs, and how many of them
    are on the worker's machine: linear between the ends of the runs that are on one node each."""

    __slots__ = ("_begins", "_slopes", "_values", "fixed_s")

    def __init__(self) -> None:
        self._begins: list[int] = []
        self._values: list[_Point] = []
        self._slopes: list[_Point] = []
        self.fixed_s = 0.0

    def add(self, begin: int, value: _Point, slope: _Point, end: int) -> _Point:
        """Add the blocks begin..end, with the values before them and of each. Return the values behind them."""
        self._begins.append(begin)
        self._values.append(value)
        self._slopes.append(slope)
        return self.at(end)

    def at(self, num_blocks: int) -> _Point:
        """Return the values of the first `num_blocks` blocks."""
        part = bisect_right(self._begins, num_blocks) - 1
        more, (a, b, c), (d, e, f) = num_blocks - self._begins[part], self._values[part], self._slopes[part]
        return a + d * more, b + e * more, c + f * more


class Pricing:
    """The prices of one request. `slot` is the worker's; None stands for a worker that receives no pulls now. `machine`
    is the worker's, "" stands for one without blocks of the prompt."""

    __slots__ = (
        "_costs",
        "_is_known",
        "_last_split",
        "_leading",
        "_lines",
        "_most",
        "_paths",
        "_prefill",
        "_ssd",
        "_step",
        "_traffic",
        "_transfer",
        "request",
    )

    def __init__(
        self,
        request: PlacementRequest,
        leading: Leading,
        costs: CostModels,
        traffic: Traffic,
        paths: PoolPaths | None = None,
    ) -> None:
        self.request = request
        # Only where it makes a difference: prices by node cost as much time as the rest of a decision.
        is_priced = paths is not None and paths.sources and leading.places
        is_other = is_priced and (costs.other_paths or traffic.is_crowded(costs.transfer.terms[1]))
        self._paths = paths if is_other else None
        self._costs = costs
        self._lines: dict[str, _Line] = {}  # by machine
        self._leading = leading
        self._traffic = traffic
        tokens, _, _, block_tokens, block_nbytes, _, step_tokens = request
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

    def in_memory(self) -> Pricing:
        """Return the prices of the same request if no block were on SSD."""
        other = copy(self)
        other._leading = self._leading._replace(on_ssd=())
        return other

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

    def machines(self, local: int) -> list[tuple[str, int]] | None:
        """Return the machines with blocks behind the local ones whose workers have other prices, with their masks."""
        return None if self._paths is None else self._paths.machines(self._leading.places, local)

    def transfer_s(self, local: int, pulled: int, slot: int | None, machine: str = "") -> tuple[float, float, int, int]:
        """Return (all seconds, the part that other transfers cause (traffic.py), blocks from SSD, blocks over the
        network)."""
        fixed_s, per_block_s, _ = self._transfer
        seconds, crowd_s, far = fixed_s + per_block_s * pulled, 0.0, pulled
        if self._paths is not None:
            line = self._line(machine)
            (from_s, from_crowd_s, near), (to_s, to_crowd_s, to_near) = line.at(local), line.at(local + pulled)
            crowd_s, far = to_crowd_s - from_crowd_s, pulled - int(to_near - near)
            seconds = line.fixed_s + to_s - from_s - crowd_s
        most_s, slope_s = self._others_s(slot)
        congestion_s = crowd_s + min(most_s, slope_s * far)
        seconds += congestion_s
        if not self._leading.on_ssd:
            return seconds, congestion_s, 0, far
        return seconds + self._ssd_s(local, pulled), congestion_s, self._leading.num_on_ssd(local, local + pulled), far

    def _line(self, machine: str) -> _Line:
        """Return the times of the leading blocks for workers on that machine."""
        line = self._lines.get(machine)
        if line is None:
            line = self._lines[machine] = self._make_line(machine)
        return line

    def _make_line(self, machine: str) -> _Line:
        assert self._paths is not None
        begin, at, line = 0, (0.0, 0.0, 0.0), _Line()
        for end, node in self._leading.places:
            host = self._paths.hosts.get(node, "")
            is_near = machine != "" and host == machine
            fixed_s, per_byte_s = self._costs.path_terms(node, is_near)
            block_s, crowd_s = per_byte_s * self.request.block_nbytes, 0.0
            handoffs = None if is_near else self._traffic.leaving.get(host)
            if handoffs is not None:
                crowd_s = block_s * (crowding(handoffs.num_flows, handoffs.nbytes_per_s * per_byte_s) - 1)
            line.fixed_s = max(line.fixed_s, fixed_s)
            at = line.add(begin, at, (block_s + crowd_s, crowd_s, float(is_near)), end)
            begin = end
        line.add(begin, at, (self._transfer[1], 0.0, 0.0), begin + 1)
        return line

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

    def plan(
        self, local: int, pulled: int, slot: int | None, num_layers: int = 1, machine: str = ""
    ) -> PricedPlacement:
        """Price a placement that pulls `pulled` blocks behind the local ones and loads them layer by layer.

        With L layers of equal size the longer of loading and computing the first step hides all but 1/L of the shorter.
        """
        prefill_s = self.prefill_s(local + pulled)
        if not pulled:
            return PricedPlacement(local, 0, 0, 0.0, 0.0, prefill_s, 0.0, prefill_s)
        transfer_s, congestion_s, ssd, far = self.transfer_s(local, pulled, slot, machine)
        overlap_s = min(transfer_s, self.first_step_s(local + pulled)) * (1 - 1 / num_layers)
        service_s = transfer_s + prefill_s - overlap_s
        return PricedPlacement(local, pulled, ssd, transfer_s, congestion_s, prefill_s, overlap_s, service_s, far)

    def best_plan(self, local: int, slot: int | None, machine: str = "") -> PricedPlacement:
        """Return the placement with the number of pulled blocks that makes it shortest, 0 included; of equals the
        fewest blocks. To pull only some of the blocks must save MIN_GAIN of the time: such a plan relies on loading
        and computing at once, and what it computes, others wait for.

        The time to compute is concave in the number of pulled blocks, the time to load is linear. So the minimum is
        at an end, where loading and the first step cross, where the rest becomes one step, or where the next block is
        on another tier or node. `_known_end` leaves out blocks of a tier that no pull has measured.
        """
        missing, layers, on_ssd = self._known_end(local) - local, self.request.num_layers, self._leading.on_ssd
        if missing <= 0:
            return self.plan(local, 0, slot)
        fixed_s, per_block_s, _ = self._transfer
        most_s, slope_s = self._others_s(slot)

        line = None if self._paths is None else self._line(machine)
        from_s, _, near = (0.0, 0.0, 0.0) if line is None else line.at(local)
        begin_s = 0.0 if line is None else line.fixed_s - from_s

        def load_s(pulled: int) -> float:  # as transfer_s, without recomputing constants
            if line is None:
                seconds = fixed_s + per_block_s * pulled + min(most_s, slope_s * pulled)
            else:
                to_s, _, to_near = line.at(local + pulled)
                seconds = begin_s + to_s + min(most_s, slope_s * (pulled - to_near + near))
            return seconds + self._ssd_s(local, pulled) if on_ssd else seconds

        tries = [missing]
        if layers > 1:
            tries += self._crossing(local, missing, load_s)
            split = int(self._last_split) - local
            tries += [at for at in (split, split + 1) if 0 < at < missing]
        if on_ssd:
            tries += [at - local for at in on_ssd if local < at < local + missing][:_MAX_EDGES]
        if line is not None:
            tries += [end - local for end, _ in self._leading.places if local < end < local + missing][:_MAX_EDGES]
        best, best_s = 0, self.prefill_s(local)
        for pulled in tries:
            seconds = self._both_s(load_s(pulled), local + pulled)
            if seconds < best_s * (1 - MIN_GAIN if best == missing else 1):
                best, best_s = pulled, seconds
        return self.plan(local, best, slot, layers, machine)

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
