"""From numbers to places on a chart, and the numbers that stand beside its axes. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

_LEAST = 1e-300  # below, steps of a scale are no numbers any more
_STEPS = (1.0, 2.0, 5.0, 10.0)
_LOG_STEPS = (1.0, 2.0, 5.0)
_PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


@dataclass(frozen=True, slots=True)
class AxisScale:
    """Numbers low..high lie at begin..end; `is_log` spaces ratios evenly (low > 0 then)."""

    low: float
    high: float
    begin: float
    end: float
    is_log: bool = False

    def at(self, value: float) -> float:
        """Numbers outside lie at the edge."""
        value = min(max(value, self.low), self.high)
        if self.is_log:
            part = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            part = (value - self.low) / (self.high - self.low)
        return self.begin + part * (self.end - self.begin)

    def ticks(self) -> list[float]:
        return _log_ticks(self.low, self.high) if self.is_log else _ticks(self.low, self.high)


def linear(values: Sequence[float], begin: float, end: float, *, is_round: bool = True) -> AxisScale:
    """From 0 to the highest of them, or to the round number at or above it."""
    highest = max([value for value in values if math.isfinite(value)], default=0.0)
    if highest < _LEAST:
        return AxisScale(0.0, 1.0, begin, end)
    step = _step(0.0, highest)
    return AxisScale(0.0, math.ceil(highest / step - 1e-9) * step if is_round else highest, begin, end)


def logarithmic(values: Sequence[float], begin: float, end: float) -> AxisScale:
    """Around all of them that are above 0, at least a factor of ten."""
    positive = [value for value in values if 0 < value < math.inf]
    low, high = (min(positive), max(positive)) if positive else (0.1, 1.0)
    decade = 10.0 ** math.floor(math.log10(low * 1.0001))
    low = max(decade * step for step in _LOG_STEPS if decade * step <= low * 1.0002)
    return AxisScale(low, max(high * 1.05, low * 10), begin, end, is_log=True)


def _step(low: float, high: float, about: int = 5) -> float:
    rough = (high - low) / about
    unit = 10.0 ** math.floor(math.log10(rough))
    return next(unit * step for step in _STEPS if unit * step >= rough * 0.999999)


def _ticks(low: float, high: float) -> list[float]:
    step = _step(low, high)
    count = math.floor((high - low) / step + 1e-9)
    return [low + at * step for at in range(count + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    steps = _LOG_STEPS if len(decades) <= 3 else (1.0,)
    found = [10.0**decade * step for decade in decades for step in steps]
    return [each for each in found if low * 0.9999 <= each <= high * 1.0001]


def short(value: float) -> str:
    """A number for a person: three figures, and k, M, G or T for thousands."""
    for size, letter in _PREFIXES:
        if abs(value) >= size * 0.9995:
            return f"{value / size:.3g}{letter}"
    return f"{value:.3g}" if value else "0"
