"""How long a step takes. Small frozen objects, whatever they were made from (paper_fit, roofline, profile). Pure.

    prefill  = base + per_token (n - p) + per_square (n^2 - p^2) + per_masked (n - p)^2 + per_context p + per_prefix p
                                                                                   n tokens, the first p of them cached
    decode   = base + batched [s > 1] + per_seq s + per_kv_token k                 s sequences with k tokens of KV

`per_prefix` is the time to bring the cached prefix to the GPU; who has it there already asks `compute_s`. `per_context`
is what a step pays for KV that is there and only read: nothing where attention reads pages in place, but engines that
gather them first copy each. `per_masked` is for engines that compute what causal attention must not see, and mask it.
Two more terms are zero for most models: layers with a sliding window attend to no more than it, and a mixture's experts
are read only as far as the batch needs them. All coefficients are >= 0, so that more work never takes less time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from moonpool.base.errors import InvalidInput
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
        """Time to compute tokens prefix_tokens..num_tokens, the prefix's load included, nothing overlapped. A full
        hit still computes the last token."""
        prefix = min(prefix_tokens, num_tokens - 1)
        return self.base_s + self.work_s(num_tokens, prefix) + self.per_prefix_s * prefix

    def compute_s(self, num_tokens: int, prefix_tokens: int = 0) -> float:
        """The same with the prefix's KV on the GPU already."""
        return self.base_s + self.work_s(num_tokens, min(prefix_tokens, num_tokens - 1))

    def load_s(self, prefix_tokens: int) -> float:
        """Time to bring that much cached KV from the node's memory to its GPUs."""
        return self.per_prefix_s * prefix_tokens

    def work_s(self, num_tokens: int, prefix_tokens: int) -> float:
        """What the tokens cost in a step that runs anyway (its base is paid)."""
        new = num_tokens - prefix_tokens
        seconds = new * (self.per_token_s + self.per_square_s * (num_tokens + prefix_tokens))
        seconds += self.per_context_s * prefix_tokens + self.per_masked_s * new * new
        if self.per_window_pair_s:
            pairs = windowed_pairs(num_tokens, self.window) - windowed_pairs(prefix_tokens, self.window)
            seconds += self.per_window_pair_s * pairs
        return seconds

    def prefills_s(self, num_tokens: ArrayLike, prefix_tokens: ArrayLike) -> Seconds:
        """`prefill_s` of many at once."""
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
    batched_s: float = 0.0  # paid by more than one: products of matrices are others than those with a vector
    window: int = 0
    per_window_token_s: float = 0.0  # for each token of KV inside its sequence's window
    experts_s: float = 0.0  # reading all routed experts once
    expert_idle_share: float = 1.0  # chance that one sequence does not need a given expert

    def __post_init__(self) -> None:
        _require_non_negative(self)

    def decode_step_s(self, num_seqs: int, kv_tokens: int) -> float:
        """Time of one step of a batch of that many sequences with that many tokens of KV together."""
        seconds = self.base_s + self.work_s(num_seqs, kv_tokens)
        if self.experts_s:
            seconds += self.experts_s * (1.0 - self.expert_idle_share**num_seqs)
        return seconds

    def work_s(self, num_seqs: int, kv_tokens: int) -> float:
        """What the sequences cost in a step that runs anyway (its base is paid)."""
        seconds = self.per_seq_s * num_seqs + self.per_kv_token_s * kv_tokens
        if self.batched_s:
            seconds += self.batched_s * (num_seqs > 1)  # of one batch, or of many at once
        if self.per_window_token_s:
            # Only the total is known: sequences are taken to be equally long.
            seconds += self.per_window_token_s * min(kv_tokens, num_seqs * self.window)
        return seconds

    def decode_steps_s(self, num_seqs: int, kv_tokens: int, num_steps: int) -> float:
        """Time of num_steps steps in a row of one batch: the exact sum, without walking them."""
        first = self.decode_step_s(num_seqs, kv_tokens) - self.per_window_token_s * min(
            kv_tokens, num_seqs * self.window
        )
        grown = num_seqs * (num_steps * (num_steps - 1) // 2)
        seconds = num_steps * first + self.per_kv_token_s * grown
        if self.per_window_token_s:
            seconds += self.per_window_token_s * _capped_sum(kv_tokens, num_seqs, num_seqs * self.window, num_steps)
        return seconds

    def steps_within(self, num_seqs: int, kv_tokens: int, seconds: float) -> int:
        """The most steps that end within that time."""
        first = self.decode_step_s(num_seqs, kv_tokens)
        if first > seconds:
            return 0
        if first <= 0:
            raise InvalidInput("steps that take no time never fill a span")
        # k first + g k (k - 1) / 2 = seconds, with g the growth from step to step; rounding is put right below.
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
        """By bisection, where windows bend the sum; `too_many` ignored their growth, so it is an upper bound."""
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
    """What a request takes beside the model's steps, on machines with nothing else to do."""

    request_s: float = 0.0  # from the client to a prefill worker's queue: HTTP, keys, routing, a place for its KV
    handoff_s: float = 0.0  # from its last prefill step until the decode worker may decode it, and the client knows

    def __post_init__(self) -> None:
        _require_non_negative(self)


@dataclass(frozen=True, slots=True)
class EngineCost:
    """What one model instance's steps take: the interface that the simulated workers use."""

    prefill: PrefillCost
    decode: DecodeCost
    overhead: Overhead = field(default_factory=Overhead)

    def in_chunks(self) -> EngineCost:
        """Return the costs where prompts are computed in chunks beside decodes: what a chunk adds to its tokens' work
        is a pass through the model, as a decode step's is, not a whole prompt's overhead."""
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
        """One batch of prompt chunks (tokens prefix..end, given as (end, prefix)) and decodes together, as coupled
        engines run it: the weights are passed once, so the larger base is paid once; the rest adds up. The chunks'
        prefixes are on the GPU already."""
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
        # The prefill's base has all experts in it.
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
    """Sum of min(start + i step, cap) for i < count."""
    if step == 0:
        return count * min(start, cap)
    below = min(count, max(0, -(-(cap - start) // step)))
    return below * start + step * (below * (below - 1) // 2) + (count - below) * cap


def overlapped_s(compute_s: float, load_s: float, num_layers: int, store_s: float = 0.0) -> float:
    """A prefill whose prefix is loaded layer by layer while it computes, and whose KV is stored or sent likewise
    (paper.md A5): layer j loads while j - 1 computes and j - 2 is stored. Ends when the last layer is stored."""
    if num_layers < 1:
        raise InvalidInput(f"a model has layers, not {num_layers}")
    slowest = max(compute_s, load_s, store_s)
    return (load_s + compute_s + store_s + (num_layers - 1) * slowest) / num_layers


def chunk_ends(num_tokens: int, prefix_tokens: int, chunk_tokens: int) -> list[tuple[int, int]]:
    """The uncached part of a prompt in chunks: (end, start) of each; a full hit still computes the last token."""
    if chunk_tokens < 1:
        raise InvalidInput(f"chunks have tokens, not {chunk_tokens}")
    start = min(prefix_tokens, num_tokens - 1)
    return [(min(at + chunk_tokens, num_tokens), at) for at in range(start, num_tokens, chunk_tokens)]


class StageLine:
    """Stages that batches pass in turn. The first is up to the caller: it says when a batch leaves that one."""

    __slots__ = ("_free_s",)

    def __init__(self, num_stages: int) -> None:
        if num_stages < 1:
            raise InvalidInput(f"a pipeline has stages, not {num_stages}")
        self._free_s = [0.0] * (num_stages - 1)

    def leaves_s(self, now_s: float, stage_s: float, boundary_s: float) -> float:
        """When a batch that leaves the first stage now, and takes so long at each, will have left the last."""
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
    """A prefill in chunks over stages of equally many layers (CPP, paper.md A4): the chunks' times divided by the
    stages, plus the bubble of the longest chunk, which is the last full one; a stage hands a chunk on in boundary_s
    while it computes the next. Every stage loads its own layers of the prefix at once with the others. `cost` is of
    all layers on one node."""
    if num_stages < 1:
        raise InvalidInput(f"a pipeline has stages, not {num_stages}")
    chunks = chunk_ends(num_tokens, prefix_tokens, chunk_tokens)
    times = [cost.compute_s(end, start) for end, start in chunks]
    # All chunks in turn at one station, and the longest once at each other one.
    passing_s = sum(times) + (num_stages - 1) * max(times)
    load_s = cost.load_s(min(prefix_tokens, num_tokens - 1))
    return (load_s + passing_s) / num_stages + (num_stages - 1) * boundary_s
