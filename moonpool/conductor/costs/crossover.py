"""Where fetching KV becomes faster than computing it. Pure.

The paper's form (eq. 2), from peak figures: a prefix of p tokens is worth fetching when

    B / G > 2 d s / (gqa (a p d + b d^2))

with B the bandwidth in bytes/s, G the compute in FLOP/s, d the model's width, s the bytes per element, and a, b the
attention's and the rest's operations (4 and 22 for LLaMA-like models). The measured form asks the learnt models
instead: the fewest tokens of prefix whose transfer takes less time than their prefill.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from moonpool.conductor.costs.estimate import CostModels

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
    """Bytes/s above which fetching a prefix of that length beats computing it at `flops`."""
    work = gqa * (attention_ops * prefix_tokens * width + dense_ops * width**2)
    return flops * 2 * width * element_nbytes / work


class Crossover(NamedTuple):
    """For a worker without any of it: prefixes of `min_tokens` and more are fetched; None: never."""

    min_tokens: int | None
    break_even_nbytes_s: float  # bandwidth that would do for a prefix of `at_tokens`
    measured_nbytes_s: float
    at_tokens: int


def crossover(costs: CostModels, token_nbytes: float, *, at_tokens: int = 8192, max_tokens: int = 1 << 20) -> Crossover:
    """From the models as they are now. All prompts have one token more than the prefix: it is always computed."""

    def saves(tokens: int) -> bool:
        return costs.transfer_s(tokens * token_nbytes) < _saved_s(costs, tokens)

    fixed_s, per_byte_s = costs.transfer.terms
    spare_s = _saved_s(costs, at_tokens) - fixed_s
    return Crossover(
        min_tokens=_first(saves, max_tokens),
        break_even_nbytes_s=at_tokens * token_nbytes / spare_s if spare_s > 0 else float("inf"),
        measured_nbytes_s=1 / per_byte_s if per_byte_s > 0 else float("inf"),
        at_tokens=at_tokens,
    )


def _saved_s(costs: CostModels, tokens: int) -> float:
    return costs.prefill_s(tokens + 1, 0) - costs.prefill_s(tokens + 1, tokens)


def _first(holds: Callable[[int], bool], limit: int) -> int | None:
    """The smallest number from which on it holds. Savings grow faster than linearly, so that there is one turn."""
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
