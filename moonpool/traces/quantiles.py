"""A distribution as a table: the value at each of some probabilities, straight lines between.

Enough to give back any measured distribution of lengths or times, and readable in a file.
"""

from __future__ import annotations

import msgspec
import numpy as np

from moonpool.base.errors import InvalidInput
from moonpool.traces.columns import Floats, Ints

# Fine where values grow fast: a line from the 98th percentile to the longest of all would double a heavy tail.
_FITTED_AT = (*np.linspace(0, 0.98, 50).round(2).tolist(), 0.985, 0.99, 0.993, 0.996, 0.998, 0.999, 0.9995, 1.0)

_GOLDEN = (5**0.5 - 1) / 2  # its multiples, less their whole parts, fill the span from 0 to 1 most evenly


class Quantiles(msgspec.Struct, frozen=True):
    """`values[i]` is what a share of `at[i]` of all draws does not exceed; `at` rises from 0 to 1."""

    at: tuple[float, ...]
    values: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.at) != len(self.values) or len(self.at) < 2:
            raise InvalidInput("a table of quantiles needs as many values as probabilities, and two at least")
        if self.at[0] != 0 or self.at[-1] != 1 or list(self.at) != sorted(self.at):
            raise InvalidInput("the probabilities of a table of quantiles must rise from 0 to 1")
        if list(self.values) != sorted(self.values):
            raise InvalidInput("the values of a table of quantiles must not fall")

    def draw(self, count: int, rng: np.random.Generator) -> Floats:
        drawn: Floats = np.interp(rng.random(count), self.at, self.values)
        return drawn

    def draw_tokens(self, count: int, rng: np.random.Generator) -> Ints:
        """Whole numbers."""
        return np.rint(self.draw(count, rng)).astype(np.int64)

    def spread_tokens(self, count: int, rng: np.random.Generator) -> Ints:
        """Whole numbers, evenly spread: any few in a row are like the whole. For things whose first few count most."""
        shares = (rng.random() + np.arange(count) * _GOLDEN) % 1
        tokens: Ints = np.rint(np.interp(shares, self.at, self.values)).astype(np.int64)
        return tokens

    @property
    def mean(self) -> float:
        values = np.array(self.values)
        return float(((values[1:] + values[:-1]) / 2 * np.diff(self.at)).sum())

    def scaled(self, factor: float) -> Quantiles:
        return Quantiles(self.at, tuple(value * factor for value in self.values))


def constant(value: float) -> Quantiles:
    return Quantiles((0.0, 1.0), (value, value))


def by_percent(table: dict[float, float]) -> Quantiles:
    """From {percentile: value}, 0 and 100 among them."""
    return Quantiles(tuple(percent / 100 for percent in table), tuple(float(value) for value in table.values()))


def fit_quantiles(samples: Ints | Floats, otherwise: float = 0.0, weights: Floats | None = None) -> Quantiles:
    """The table of a sample; `otherwise` and nothing else if there is none. Each counts as much as its weight."""
    if len(samples) == 0:
        return constant(otherwise)
    if weights is None:
        return Quantiles(_FITTED_AT, tuple(np.quantile(samples, _FITTED_AT).round(3).tolist()))
    order = np.argsort(samples, kind="stable")
    reached = np.cumsum(weights[order]) - weights[order] / 2
    values = np.interp(np.array(_FITTED_AT) * weights.sum(), reached, samples[order])
    return Quantiles(_FITTED_AT, tuple(values.round(3).tolist()))
