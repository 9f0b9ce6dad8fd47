"""When requests arrive: evenly, by Poisson, or in bursts, and perhaps told only in steps, as some traces are.

Gaps between requests are drawn from a gamma distribution with a given coefficient of variation: 0 is a metronome, 1 is
Poisson, more is bursty (in the long run the count per interval has variance / mean = cv squared).
"""

from __future__ import annotations

import math

import msgspec
import numpy as np

from moonpool.base.errors import InvalidInput
from moonpool.traces.columns import Floats


class Arrivals(msgspec.Struct, frozen=True, kw_only=True):
    """How arrivals are spread. `step_s`: each is told as the beginning of the step it falls in."""

    cv: float = 1.0
    step_s: float | None = None

    def __post_init__(self) -> None:
        if not (math.isfinite(self.cv) and self.cv >= 0):
            raise InvalidInput(f"a coefficient of variation cannot be {self.cv}; 0 is even, 1 is Poisson, 2 is bursty")
        if self.step_s is not None and not (math.isfinite(self.step_s) and self.step_s > 0):
            raise InvalidInput(f"arrivals cannot be told in steps of {self.step_s} s")


POISSON = Arrivals()


def draw_arrivals(arrivals: Arrivals, num_requests: int, rate_per_s: float, rng: np.random.Generator) -> Floats:
    """So many times in seconds, sorted, from 0 on, at exactly this mean rate over the whole."""
    if not (math.isfinite(rate_per_s) and rate_per_s > 0):
        raise InvalidInput(f"requests cannot arrive at {rate_per_s} per second")
    times = np.cumsum(_draw_gaps(arrivals.cv, num_requests, rng))
    if num_requests > 1:
        times = (times - times[0]) * (num_requests - 1) / (rate_per_s * (times[-1] - times[0]))
    else:
        times = np.zeros(num_requests)
    return times if arrivals.step_s is None else quantise(times, arrivals.step_s)


def quantise(times_s: Floats, step_s: float) -> Floats:
    """Each time as the beginning of its step."""
    steps: Floats = np.floor(times_s / step_s) * step_s
    return steps


def dispersion(times_s: Floats, interval_s: float) -> float:
    """Variance / mean of the number of arrivals per whole interval: 1 for Poisson, more for bursts, 0 for none."""
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
    if count > 1 and gaps[1:].sum() == 0:  # so bursty that no gap is larger than what a float can tell from 0
        gaps[-1] = 1.0
    return gaps
