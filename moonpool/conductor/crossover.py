"""Computes from which prefix length on fetching KV is faster than computing it. Pure.

The paper's form (eq. 2), from peak figures: a prefix of p tokens is worth fetching when

    B / G > 2 d s / (gqa (a p d + b d^2))

with B the bandwidth in bytes/s, G the compute in FLOP/s, d the model's width, s the bytes per element, and a, b the
attention's and the rest's operations (4 and 22 for LLaMA-like models). The measured form uses the learnt cost models:
the shortest prefix whose transfer takes less time than its prefill.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from moonpool.conductor.costs import CostModels
from moonpool.conductor.messages import FetchOrCompute

ATTENTION_OPS = 4.0
DENSE_OPS = 22.0


def break_even_bandwidth(
    flops: float,
    prefix_tokens: int,
    *,
    width: int,
    gqa: float,
    element_nbytes: int = 2,
    attention_ops: float = ATTENTION_OPS,
    dense_ops: float = DENSE_OPS,
) -> float:
    """Return the bytes/s above which fetching a prefix of that length is faster than computing it at `flops`."""
    work = gqa * (attention_ops * prefix_tokens * width + dense_ops * width**2)
    return flops * 2 * width * element_nbytes / work


def break_even_tokens(
    flops: float,
    nbytes_s: float,
    *,
    width: int,
    gqa: float,
    element_nbytes: int = 2,
    attention_ops: float = ATTENTION_OPS,
    dense_ops: float = DENSE_OPS,
) -> int:
    """Return the prefix length from which on fetching at `nbytes_s` is faster than computing at `flops`; 0: always."""
    work = flops * 2 * width * element_nbytes / (gqa * nbytes_s)  # operations per token and layer at the break-even
    return max(0, math.ceil((work - dense_ops * width**2) / (attention_ops * width)))


def crossover(
    costs: CostModels, token_nbytes: float, *, at_tokens: int = 8192, max_tokens: int = 1 << 20
) -> FetchOrCompute:
    """Compute from the current models, for a worker without the prefix. A prompt has one token more than the prefix:
    the last token is always computed."""

    def saves(tokens: int) -> bool:
        return costs.transfer_s(tokens * token_nbytes) < _saved_s(costs, tokens)

    fixed_s, per_byte_s = costs.transfer.terms
    saved_s, pull_s = _saved_s(costs, at_tokens), costs.transfer_s(at_tokens * token_nbytes)
    spare_s = saved_s - fixed_s
    return FetchOrCompute(
        min_tokens=_first(saves, max_tokens),
        computed_tokens_s=at_tokens / saved_s if saved_s > 0 else float("inf"),
        pulled_tokens_s=at_tokens / pull_s if pull_s > 0 else float("inf"),
        break_even_nbytes_s=at_tokens * token_nbytes / spare_s if spare_s > 0 else float("inf"),
        measured_nbytes_s=1 / per_byte_s if per_byte_s > 0 else float("inf"),
        at_tokens=at_tokens,
        num_prefills=costs.prefill.num_samples,
        num_pulls=costs.transfer.num_samples,
    )


def _saved_s(costs: CostModels, tokens: int) -> float:
    return costs.prefill_s(tokens + 1, 0) - costs.prefill_s(tokens + 1, tokens)


def _first(holds: Callable[[int], bool], limit: int) -> int | None:
    """Return the smallest number from which on `holds` is true; None: none up to `limit`. Savings grow faster than
    linearly, so `holds` changes once."""
    high = 1
    while not holds(high):
        if high >= limit:
            return None
        high *= 2
    low = high // 2  # does not hold
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high
