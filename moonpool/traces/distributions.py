"""Random distributions for generated traces: quantile tables, Zipf's law, arrival processes.

A quantile table has the value at each of some probabilities, with straight lines between. It reproduces any measured
distribution of lengths or times and is readable in a file.

Gaps between arrivals come from a gamma distribution with a given coefficient of variation: 0 is even, 1 is Poisson,
more is bursty (in the long run the count per interval has variance / mean = cv squared).
"""

from __future__ import annotations

import math

import msgspec
import numpy as np

from moonpool.base.errors import InvalidInput
from moonpool.traces.columns import Floats, Ints

# Fine steps at the end: a straight line from the 98th percentile to the maximum would double a heavy tail.
_FITTED_AT = (*np.linspace(0, 0.98, 50).round(2).tolist(), 0.985, 0.99, 0.993, 0.996, 0.998, 0.999, 0.9995, 1.0)

_GOLDEN = (5**0.5 - 1) / 2  # the fractional parts of its multiples fill 0..1 most evenly


class Quantiles(msgspec.Struct, frozen=True):
    """A share of `at[i]` of all draws does not exceed `values[i]`; `at` rises from 0 to 1."""

    at: tuple[float, ...]
    values: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.at) != len(self.values) or len(self.at) < 2:
            raise InvalidInput("a table of quantiles needs as many values as probabilities, at least two")
        if self.at[0] != 0 or self.at[-1] != 1 or list(self.at) != sorted(self.at):
            raise InvalidInput("the probabilities of a table of quantiles must rise from 0 to 1")
        if list(self.values) != sorted(self.values):
            raise InvalidInput("the values of a table of quantiles must not fall")

    def draw(self, count: int, rng: np.random.Generator) -> Floats:
        drawn: Floats = np.interp(rng.random(count), self.at, self.values)
        return drawn

    def draw_tokens(self, count: int, rng: np.random.Generator) -> Ints:
        """Draw integers."""
        return np.rint(self.draw(count, rng)).astype(np.int64)

    def spread_tokens(self, count: int, rng: np.random.Generator) -> Ints:
        """Draw integers, evenly spread: any few in a row represent the distribution."""
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
    """Return the table of {percentile: value}, which includes 0 and 100."""
    return Quantiles(tuple(percent / 100 for percent in table), tuple(float(value) for value in table.values()))


def fit_quantiles(samples: Ints | Floats, otherwise: float = 0.0, weights: Floats | None = None) -> Quantiles:
    """Return the table of a sample, weighted if `weights` are given; a constant `otherwise` for an empty sample."""
    if len(samples) == 0:
        return constant(otherwise)
    if weights is None:
        return Quantiles(_FITTED_AT, tuple(np.quantile(samples, _FITTED_AT).round(3).tolist()))
    order = np.argsort(samples, kind="stable")
    reached = np.cumsum(weights[order]) - weights[order] / 2
    values = np.interp(np.array(_FITTED_AT) * weights.sum(), reached, samples[order])
    return Quantiles(_FITTED_AT, tuple(values.round(3).tolist()))


def draw_zipf(num_things: int, exponent: float, count: int, rng: np.random.Generator) -> Ints:
    """Draw indices by Zipf's law: the k-th of n things is drawn in proportion to 1 / k**exponent."""
    if num_things < 1:
        raise InvalidInput(f"cannot draw from {num_things} things")
    reached = np.cumsum(np.arange(1, num_things + 1, dtype=np.float64) ** -exponent)
    drawn: Ints = np.searchsorted(reached, rng.random(count) * reached[-1], side="right")
    return np.minimum(drawn, num_things - 1)


class Arrivals(msgspec.Struct, frozen=True, kw_only=True):
    """An arrival process. With `step_s`, each time is rounded down to a multiple of it, as in some recorded traces."""

    cv: float = 1.0
    step_s: float | None = None

    def __post_init__(self) -> None:
        if not (math.isfinite(self.cv) and self.cv >= 0):
            raise InvalidInput(f"a coefficient of variation cannot be {self.cv}; 0 is even, 1 is Poisson, 2 is bursty")
        if self.step_s is not None and not (math.isfinite(self.step_s) and self.step_s > 0):
            raise InvalidInput(f"arrivals cannot be rounded to steps of {self.step_s} s")


POISSON = Arrivals()


def draw_arrivals(arrivals: Arrivals, num_requests: int, rate_per_s: float, rng: np.random.Generator) -> Floats:
    """Return `num_requests` arrival times in seconds, sorted, from 0, with exactly this mean rate."""
    if not (math.isfinite(rate_per_s) and rate_per_s > 0):
        raise InvalidInput(f"requests cannot arrive at {rate_per_s} per second")
    times = np.cumsum(_draw_gaps(arrivals.cv, num_requests, rng))
    if num_requests > 1:
        times = (times - times[0]) * (num_requests - 1) / (rate_per_s * (times[-1] - times[0]))
    else:
        times = np.zeros(num_requests)
    return times if arrivals.step_s is None else quantise(times, arrivals.step_s)


def quantise(times_s: Floats, step_s: float) -> Floats:
    """Return each time rounded down to a multiple of `step_s`."""
    steps: Floats = np.floor(times_s / step_s) * step_s
    return steps


def dispersion(times_s: Floats, interval_s: float) -> float:
    """Return variance / mean of the arrivals per whole interval: 1 for Poisson, more for bursts; 0 for no arrivals."""
    if len(times_s) == 0:
        return 0.0
    counts = np.bincount(np.floor((times_s - times_s[0]) / interval_s + 1e-9).astype(np.int64))
    whole = counts[:-1] if len(counts) > 1 else counts
    return float(whole.var() / whole.mean())


def _draw_gaps(cv: float, count: int, rng: np.random.Generator) -> Floats:
    if cv == 0:
        return np.ones(count)
    shape = 1 / cv**2
    gaps: Floats = rng.gamma(shape, 1 / shape, count)
    if count > 1 and gaps[1:].sum() == 0:  # so bursty that all gaps underflow to 0
        gaps[-1] = 1.0
    return gaps
