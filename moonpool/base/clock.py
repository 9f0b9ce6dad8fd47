"""Time as a parameter. Cores get `now` as a number; shells get a Clock; tests get a VirtualClock."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    def now_s(self) -> float:
        """Seconds on a monotonic scale; only differences mean anything."""
        ...


class SystemClock:
    """The machine's monotonic clock."""

    def now_s(self) -> float:
        return time.monotonic()


class VirtualClock:
    """A clock that moves only when told to."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now_s(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        assert seconds >= 0, "time does not run backwards"
        self._now_s += seconds


class Deadline:
    """A moment by which something must be over. Pass it down instead of handing out the same timeout twice."""

    __slots__ = ("_at_s", "_clock")

    def __init__(self, timeout_s: float, clock: Clock | None = None) -> None:
        self._clock: Clock = clock or SystemClock()
        self._at_s = self._clock.now_s() + timeout_s

    def remaining_s(self) -> float:
        """Seconds left, never below zero."""
        return max(0.0, self._at_s - self._clock.now_s())

    def expired(self) -> bool:
        return self._clock.now_s() >= self._at_s
