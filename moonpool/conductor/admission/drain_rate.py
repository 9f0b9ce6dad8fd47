"""How fast a queue empties: seconds of predicted work that leave it per second, learnt while something waits. Pure.

Starts at 1, the rate of one prefill worker that is never idle, which counts as `_INITIAL_S` seconds of measuring;
what was measured fades with a time constant of `_FADE_S`.
"""

from __future__ import annotations

import math

_INITIAL_S = 2.0
_FADE_S = 60.0


class DrainRate:
    """Time in which nothing waits is not counted: then the rate says how much came, not how much could leave."""

    __slots__ = ("_seconds", "_since_s", "_work_s")

    def __init__(self) -> None:
        self._work_s = self._seconds = _INITIAL_S
        self._since_s: float | None = None  # None: nothing waits

    @property
    def rate(self) -> float:
        return self._work_s / self._seconds

    def seconds_for(self, work_s: float) -> float:
        return work_s / self.rate

    def begins(self, now_s: float) -> None:
        """Something waits from now on."""
        self._since_s = now_s

    def drained(self, work_s: float, now_s: float, *, still_waiting: bool) -> None:
        """That much left since the last call. An empty round is worth telling too: time has passed."""
        if self._since_s is None:
            return
        passed_s = now_s - self._since_s
        keep = math.exp(-passed_s / _FADE_S)
        self._seconds = max(self._seconds * keep + passed_s, 1e-3)
        # Never nothing: a queue that stands still has a long Retry-After, not an endless one.
        self._work_s = max(self._work_s * keep + work_s, 1e-3 * self._seconds)
        self._since_s = now_s if still_waiting else None
