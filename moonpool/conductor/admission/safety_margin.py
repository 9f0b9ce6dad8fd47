"""How much more than predicted must be reckoned with, learnt: a quantile that follows, in one number. Pure.

After each outcome it goes up a little when that was beyond it, else down by a ninth of that; where it stays, nine
of ten outcomes are within it.
"""

from __future__ import annotations

_SURE = 0.9  # share of outcomes that are to be within
_PACE = 0.005
_LARGEST = 0.25


class SafetyMargin:
    """`value` 0.03: nine of ten outcomes are at most 3 % above what was predicted."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def learn(self, predicted: float, actual: float) -> None:
        beyond = actual > predicted * (1 + self.value)
        moved = self.value + (_PACE * _SURE if beyond else -_PACE * (1 - _SURE))
        self.value = min(_LARGEST, max(0.0, moved))
