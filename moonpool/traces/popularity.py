"""Zipf's law: the k-th most popular of n things is asked for in proportion to 1 / k**exponent."""

from __future__ import annotations

import numpy as np

from moonpool.base.errors import InvalidInput
from moonpool.traces.columns import Ints


def draw_zipf(num_things: int, exponent: float, count: int, rng: np.random.Generator) -> Ints:
    """Numbers of things, 0 the most popular."""
    if num_things < 1:
        raise InvalidInput(f"nothing can be drawn from {num_things} things")
    reached = np.cumsum(np.arange(1, num_things + 1, dtype=np.float64) ** -exponent)
    drawn: Ints = np.searchsorted(reached, rng.random(count) * reached[-1], side="right")
    return np.minimum(drawn, num_things - 1)
