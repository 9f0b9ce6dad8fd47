"""How long a step takes, and how work overlaps. Pure; the costs are made by paper_fit, roofline and fleet.

    prefill  = base + per_token (n - p) + per_square (n^2 - p^2) + per_masked (n - p)^2 + per_context p + per_prefix p
                                                                                   n tokens, the first p of them cached
    decode   = base + batched [s > 1] + per_seq s + per_kv_token k                 s sequences with k tokens of KV

`per_prefix` is the time to bring the cached prefix to the GPU; `compute_s` leaves it out. `per_context` is the price of
KV that is on the GPU and only read: nothing if attention reads pages in place, but some engines copy the pages first.
`per_masked` is for engines that compute all pairs and mask the future ones. Two more terms are zero for most models:
layers with a sliding window attend to the window only, and of a mixture only the experts that the batch needs are read.
All coefficients are >= 0, so more work never takes less time.

Overlapping layers (load, compute, store) and pipelined chunks are the same: the first item passes all equal stations,
then each further item follows at the pace of the slowest station.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from moonpool.base.errors import InvalidInput
from moonpool.engine.stages import pipeline_s
from moonpool.sim.physics.model_shape import windowed_pairs

Seconds = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillCost:
    """Seconds to compute the KV of prompts."""

    base_s: float
    per_token_s: float
    per_square_s: float = 0.0
    per_prefix_s: float = 0.0
    per_context_s: float = 0.0
    per_masked_s: float = 0.0
    window: int = 0
    per_window_pair_s: float = 0.0  # for each (query, key) pair of the windowed layers

    def __post_init__(self) -> None:
        _require_non_negative(self)

    def prefill_s(self, num_tokens: int, prefix_tokens: int = 0) -> float:
        """Return the time to load the prefix and compute tokens prefix_tokens..num_tokens, without overlap. A full hit
        still computes the last token."""
        prefix = min(prefix_tokens, num_tokens - 1)
        return self.base_s + self.work_s(num_tokens, prefix) + self.per_prefix_s * prefix

    def compute_s(self, num_tokens: int, prefix_tokens: int = 0) -> float:
        """The same if the prefix's KV is on the GPU already."""
        return self.base_s + self.work_s(num_tokens, min(prefix_tokens, num_tokens - 1))

    def load_s(self, prefix_tokens: int) -> float:
        """Return the time to bring cached KV from the node's memory to its GPUs."""
        return self.per_prefix_s * prefix_tokens

    def work_s(self, num_tokens: int, prefix_tokens: int) -> float:
        """Return what the tokens add to a step that runs anyway (without the base)."""
        new = num_tokens - prefix_tokens
        seconds = new * (self.per_token_s + self.per_square_s * (num_tokens + prefix_tokens))
        seconds += self.per_context_s * prefix_tokens + self.per_masked_s * new * new
        if self.per_window_pair_s:
            pairs = windowed_pairs(num_tokens, self.window) - windowed_pairs(prefix_tokens, self.window)
            seconds += self.per_window_pair_s * pairs
        return seconds

    def prefills_s(self, num_tokens: ArrayLike, prefix_tokens: ArrayLike) -> Seconds:
        """`prefill_s` of whole arrays."""
        total = np.asarray(num_tokens, dtype=np.float64)
        prefix = np.minimum(np.asarray(prefix_tokens, dtype=np.float64), total - 1)
        new = total - prefix
        work = new * (self.per_token_s + self.per_square_s * (total + prefix) + self.per_masked_s * new)
        if self.per_window_pair_s:
            work += self.per_window_pair_s * (_windowed_many(total, self.window) - _windowed_many(prefix, self.window))
        return np.asarray(self.base_s + work + (self.per_context_s + self.per_prefix_s) * prefix)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeCost:
    """Seconds of decode steps. In each step every sequence's KV grows by one token."""

    base_s: float
    per_seq_s: float
    per_kv_token_s: float
    batched_s: float = 0.0  # added for batches of more than one: other kernels are used then
    window: int = 0
    per_window_token_s: float = 0.0  # for each token of KV inside its sequence's window
    experts_s: float = 0.0  # reading all routed experts once
    expert_idle_share: float = 1.0  # chance that one sequence does not need a given expert

    def __post_init__(self) -> None:
        _require_non_negative(self)

    def decode_step_s(self, num_seqs: int, kv_tokens: int) -> float:
        """Return the time of one step of a batch with this many sequences and KV tokens in all."""
        seconds = self.base_s + self.work_s(num_seqs, kv_tokens)
        if self.experts_s:
            seconds += self.experts_s * (1.0 - self.expert_idle_share**num_seqs)
        return seconds

    def work_s(self, num_seqs: int, kv_tokens: int) -> float:
        """Return what the sequences add to a step that runs anyway (without the base)."""
        seconds = self.per_seq_s * num_seqs + self.per_kv_token_s * kv_tokens
        if self.batched_s:
            seconds += self.batched_s * (num_seqs > 1)  # also works on arrays
        if self.per_window_token_s:
            # Only the total is known: sequences are assumed to have equal lengths.
            seconds += self.per_window_token_s * min(kv_tokens, num_seqs * self.window)
        return seconds

    def decode_steps_s(self, num_seqs: int, kv_tokens: int, num_steps: int) -> float:
        """Return the time of num_steps successive steps of one batch: the exact sum, in closed form."""
        first = self.decode_step_s(num_seqs, kv_tokens) - self.per_window_token_s * min(
            kv_tokens, num_seqs * self.window
        )
        grown = num_seqs * (num_steps * (num_steps - 1) // 2)
        seconds = num_steps * first + self.per_kv_token_s * grown
        if self.per_window_token_s:
            seconds += self.per_window_token_s * _capped_sum(kv_tokens, num_seqs, num_seqs * self.window, num_steps)
        return seconds

    def steps_within(self, num_seqs: int, kv_tokens: int, seconds: float) -> int:
        """Return the largest number of steps that end within that time."""
        first = self.decode_step_s(num_seqs, kv_tokens)
        if first > seconds:
            return 0
        if first <= 0:
            raise InvalidInput("steps that take no time never fill a span")
        # k first + g k (k - 1) / 2 = seconds, with g the growth from step to step; the loops below correct rounding.
        growth = self.per_kv_token_s * num_seqs
        half = first - growth / 2
        steps = int(2 * seconds / (half + math.sqrt(half * half + 2 * growth * seconds)))
        if self.per_window_token_s:
            return self._search_steps(num_seqs, kv_tokens, seconds, steps)
        while self.decode_steps_s(num_seqs, kv_tokens, steps) > seconds:
            steps -= 1
        while self.decode_steps_s(num_seqs, kv_tokens, steps + 1) <= seconds:
            steps += 1
        return steps

    def _search_steps(self, num_seqs: int, kv_tokens: int, seconds: float, too_many: int) -> int:
        """`steps_within` by bisection, for sums that windows make nonlinear. `too_many` is an upper bound."""
        low, high = 0, too_many + 2
        while high - low > 1:
            middle = (low + high) // 2
            if self.decode_steps_s(num_seqs, kv_tokens, middle) <= seconds:
                low = middle
            else:
                high = middle
        return low


@dataclass(frozen=True, slots=True, kw_only=True)
class Overhead:
    """Time of a request outside the model's steps, on idle machines."""

    request_s: float = 0.0  # from the client to a prefill worker's queue: HTTP, keys, routing, reserving pages
    handoff_s: float = 0.0  # from its last prefill step until the decode worker can decode it

    def __post_init__(self) -> None:
        _require_non_negative(self)


@dataclass(frozen=True, slots=True)
class EngineCost:
    """Step times of one model instance, as the simulated workers use them."""

    prefill: PrefillCost
    decode: DecodeCost
    overhead: Overhead = field(default_factory=Overhead)

    def in_chunks(self) -> EngineCost:
        """Return the costs for prompts computed in chunks together with decodes: the base of a chunk is one pass
        through the model, as in a decode step, not the overhead of a whole prompt."""
        base_s = min(self.prefill.base_s, self.decode.base_s)
        return replace(self, prefill=replace(self.prefill, base_s=base_s))

    def prefill_s(self, num_tokens: int, prefix_tokens: int = 0) -> float:
        return self.prefill.prefill_s(num_tokens, prefix_tokens)

    def decode_step_s(self, num_seqs: int, kv_tokens: int) -> float:
        return self.decode.decode_step_s(num_seqs, kv_tokens)

    def decode_steps_s(self, num_seqs: int, kv_tokens: int, num_steps: int) -> float:
        return self.decode.decode_steps_s(num_seqs, kv_tokens, num_steps)

    def steps_within(self, num_seqs: int, kv_tokens: int, seconds: float) -> int:
        return self.decode.steps_within(num_seqs, kv_tokens, seconds)

    def step_s(self, prefill_chunks: Iterable[tuple[int, int]], num_seqs: int, kv_tokens: int) -> float:
        """Return the time of one batch of prompt chunks, given as (end, prefix), and decodes in a coupled engine.

        The weights are read once, so the larger base counts once; the rest adds up. The prefixes of the chunks are
        on the GPU already.
        """
        prefill = self.prefill
        work = 0.0
        num_chunks = 0
        for end, prefix in prefill_chunks:
            work += prefill.work_s(end, prefix)
            num_chunks += 1
        if not num_chunks:
            return self.decode.decode_step_s(num_seqs, kv_tokens) if num_seqs else 0.0
        if not num_seqs:
            return prefill.base_s + work
        decode = self.decode
        # The base of a prefill includes all experts.
        return max(prefill.base_s, decode.base_s) + work + decode.work_s(num_seqs, kv_tokens)


def _require_non_negative(cost: Any) -> None:
    for each in fields(cost):
        value = getattr(cost, each.name)
        if not 0 <= value < math.inf:
            raise InvalidInput(f"{type(cost).__name__}.{each.name} is {value}", param=each.name)


def _windowed_many(num_tokens: Seconds, window: int) -> Seconds:
    inside = np.minimum(num_tokens, window)
    return np.asarray(inside * (inside + 1) / 2 + (num_tokens - inside) * window)


def _capped_sum(start: int, step: int, cap: int, count: int) -> int:
    """Return the sum of min(start + i step, cap) for i < count."""
    if step == 0:
        return count * min(start, cap)
    below = min(count, max(0, -(-(cap - start) // step)))
    return below * start + step * (below * (below - 1) // 2) + (count - below) * cap


def overlapped_s(compute_s: float, load_s: float, num_layers: int, store_s: float = 0.0) -> float:
    """Return the time of a prefill that loads its prefix and stores or sends its KV layer by layer (paper.md A5).

    Layer j loads while layer j - 1 computes and layer j - 2 is stored. It ends when the last layer is stored.
    """
    if num_layers < 1:
        raise InvalidInput(f"a model has at least one layer, not {num_layers}")
    slowest = max(compute_s, load_s, store_s)
    return (load_s + compute_s + store_s + (num_layers - 1) * slowest) / num_layers


def chunk_ends(num_tokens: int, prefix_tokens: int, chunk_tokens: int) -> list[tuple[int, int]]:
    """Return (end, start) of the chunks of the uncached part of a prompt, which has at least the last token."""
    if chunk_tokens < 1:
        raise InvalidInput(f"a chunk has at least one token, not {chunk_tokens}")
    start = min(prefix_tokens, num_tokens - 1)
    return [(min(at + chunk_tokens, num_tokens), at) for at in range(start, num_tokens, chunk_tokens)]


class StagePipeline:
    """Stages that batches pass one after the other. The caller simulates the first stage."""

    __slots__ = ("_free_s",)

    def __init__(self, num_stages: int) -> None:
        if num_stages < 1:
            raise InvalidInput(f"a pipeline has at least one stage, not {num_stages}")
        self._free_s = [0.0] * (num_stages - 1)

    def exit_time_s(self, now_s: float, stage_s: float, boundary_s: float) -> float:
        """Return when a batch leaves the last stage, if it leaves the first now and takes `stage_s` at each."""
        at_s = now_s
        for stage, free_s in enumerate(self._free_s):
            at_s = self._free_s[stage] = max(at_s + boundary_s, free_s) + stage_s
        return at_s


def pipelined_prefill_s(
    cost: PrefillCost,
    num_tokens: int,
    prefix_tokens: int,
    *,
    chunk_tokens: int,
    num_stages: int,
    boundary_s: float = 0.0,
) -> float:
    """Return the time of a prefill in chunks over stages with equal numbers of layers (CPP, paper.md A4).

    It is the time of all chunks divided by the stages, plus the bubble of the longest chunk, which is the last full
    one. A stage sends a chunk to the next in `boundary_s` while it computes the next chunk. All stages load their
    layers of the prefix at the same time. `cost` is of all layers on one node.
    """
    chunks = chunk_ends(num_tokens, prefix_tokens, chunk_tokens)
    times = [cost.compute_s(end, start) for end, start in chunks]
    passing_s = pipeline_s(times, num_stages, boundary_s)
    return cost.load_s(min(prefix_tokens, num_tokens - 1)) / num_stages + passing_s
