"""Detects a peer that is frozen, or whose machine is gone, although its connection looks open.

The client pings when either direction was quiet for an interval; the server answers at once. A peer from which nothing
came for the limit is lost. So a peer may stall for limit minus interval at any moment and survive.

Time in which this process could not listen does not count as the peer's silence: the peer gets as much more time as the
timer was late, and after a long stop at least one full interval. `Silence` decides; `SilenceWatch` is its timer.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

from moonpool.base.clock import late_s
from moonpool.base.errors import ConfigError

PING_INTERVAL_S = 3.0
SILENCE_LIMIT_S = 10.0
_TIMER_GRAIN_S = 0.001  # uvloop counts in milliseconds; less would spin until the moment has come
_PUNCTUAL_S = 0.1  # a timer that fires later than this fired after a standstill


@dataclass(frozen=True, slots=True)
class SilenceLimits:
    """A server's limit must suit the interval of its clients, not only its own."""

    ping_interval_s: float = PING_INTERVAL_S
    silence_limit_s: float = SILENCE_LIMIT_S

    def __post_init__(self) -> None:
        # One interval until the ping, one for a stop of this process, one for the answer.
        if not 0 < 3 * self.ping_interval_s <= self.silence_limit_s:
            raise ConfigError(
                f"a silence limit of {self.silence_limit_s:g} s needs pings at least every "
                f"{self.silence_limit_s / 3:g} s, not every {self.ping_interval_s:g} s"
            )


DEFAULT_SILENCE_LIMITS = SilenceLimits()


class SilenceVerdict(Enum):
    WAIT = auto()
    PING = auto()
    LOST = auto()


class Silence:
    """How long one peer has been silent. Pure: call look() at `next_look_s`."""

    __slots__ = ("_limits", "_pinged_s", "heard_s", "next_look_s", "said_s")

    def __init__(self, limits: SilenceLimits, now_s: float) -> None:
        self._limits = limits
        self.heard_s = self.said_s = self._pinged_s = now_s
        self.next_look_s = now_s + limits.ping_interval_s

    def look(self, now_s: float) -> SilenceVerdict:
        """Return what to do now, and set `next_look_s`. The caller sends a ping for PING."""
        self._forgive(now_s)
        lost_s = self.heard_s + self._limits.silence_limit_s
        if now_s >= lost_s:
            return SilenceVerdict.LOST
        verdict = SilenceVerdict.WAIT
        if now_s >= self._ping_due_s():
            self.said_s = self._pinged_s = now_s
            verdict = SilenceVerdict.PING
        self.next_look_s = min(self._ping_due_s(), lost_s)
        return verdict

    def _ping_due_s(self) -> float:
        # Quiet on our side counts too: a client that reads a stream sends nothing, and the server waits for its pings.
        return max(min(self.heard_s, self.said_s), self._pinged_s) + self._limits.ping_interval_s

    def _forgive(self, now_s: float) -> None:
        late = late_s(self.next_look_s, now_s)
        heard_s = self.heard_s + late
        if late > self._limits.ping_interval_s:
            heard_s = max(heard_s, now_s + self._limits.ping_interval_s - self._limits.silence_limit_s)
        self.heard_s = min(now_s, heard_s)


class AttendedTimer:
    """Calls `over` once, after `limit_s` in which this process could listen; cancel() prevents it.

    A timer that fires late waits again, for as long as it was late, so that data that arrived meanwhile is read first.
    """

    def __init__(self, limit_s: float, over: Callable[[], None]) -> None:
        self._limit_s, self._over = limit_s, over
        self._arm(limit_s)

    def cancel(self) -> None:
        """Idempotent."""
        self._timer.cancel()

    def _arm(self, delay_s: float) -> None:
        self._due_s = time.monotonic() + delay_s
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._fire)

    def _fire(self) -> None:
        late = late_s(self._due_s, time.monotonic())
        if late > _PUNCTUAL_S:
            self._arm(min(late, self._limit_s))
        else:
            self._over()


class SilenceWatch:
    """The timer of one connection, from start() to stop(). `lost` is called at most once per start()."""

    def __init__(
        self, limits: SilenceLimits, *, lost: Callable[[], None], ping: Callable[[], None] | None = None
    ) -> None:
        self.limits = limits
        self._lost, self._ping = lost, ping
        self._silence = Silence(limits, time.monotonic())
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        now_s = time.monotonic()
        self._silence = Silence(self.limits, now_s)
        self._arm(now_s)

    def stop(self) -> None:
        """Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def heard(self, now_s: float) -> None:
        """Something came; `now_s` is time.monotonic()."""
        self._silence.heard_s = now_s

    def said(self) -> None:
        self._silence.said_s = time.monotonic()

    def _arm(self, now_s: float) -> None:
        delay_s = max(_TIMER_GRAIN_S, self._silence.next_look_s - now_s)
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._look)

    def _look(self) -> None:
        self._timer = None
        now_s = time.monotonic()
        verdict = self._silence.look(now_s)
        if verdict is SilenceVerdict.LOST:
            self._lost()
            return
        if verdict is SilenceVerdict.PING and self._ping is not None:
            self._ping()
        self._arm(now_s)
