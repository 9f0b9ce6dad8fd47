"""Decides when a server counts as away, so that callers fail at once instead of waiting for it in turn. Pure.

`CallWait` judges one call: the server is silent when nothing came for `silence_s` in which this process could listen.
A server that is merely busy answers long before; a caller that was not scheduled looks late, and by as much the server
gets more time (base/clock.py). `Breaker` holds what follows: it opens when a server was found away, and closes when a
probe got an answer. rpc/probed.py is the shell around both.
"""

from __future__ import annotations

from dataclasses import dataclass

from moonpool.base.backoff import Backoff
from moonpool.base.clock import late_s
from moonpool.base.errors import ConfigError

_TIMER_GRAIN_S = 0.005  # the kernel's timers fire this much later than asked for


@dataclass(frozen=True, slots=True)
class BreakerLimits:
    """The longest wait measured for an answer of a busy master is 58 ms."""

    silence_s: float = 0.2  # a server with a call outstanding from which nothing came for so long is away
    look_every_s: float = 0.02  # how often a waiting caller looks at the time
    first_probe_s: float = 0.02  # from the opening to the first probe
    longest_probe_s: float = 0.25  # between two probes, at most
    calm_s: float = 5.0  # closed for so long: the next outage is another one

    def __post_init__(self) -> None:
        if not 0 < 2 * self.look_every_s <= self.silence_s:
            raise ConfigError(f"a silence of {self.silence_s:g} s needs at least two looks, not one every half of it")
        if not 0 < self.first_probe_s <= self.longest_probe_s:
            raise ConfigError("first_probe_s must be above 0 and at most longest_probe_s")


class CallWait:
    """How long the server of one call has been silent. Look at it every `look_every_s`."""

    __slots__ = ("_limits", "heard_s", "next_look_s")

    def __init__(self, limits: BreakerLimits, now_s: float) -> None:
        self._limits = limits
        self.heard_s = now_s
        self.next_look_s = now_s + limits.look_every_s

    def is_silent(self, now_s: float) -> bool:
        """Whether the server counts as away by now. Plans the next look."""
        late = late_s(self.next_look_s + _TIMER_GRAIN_S, now_s)
        self.heard_s = min(now_s, self.heard_s + late)
        self.next_look_s = now_s + self._limits.look_every_s
        return now_s - self.heard_s >= self._limits.silence_s


class Breaker:
    """Open while the server is away. Outages that follow each other closely are probed more and more slowly."""

    def __init__(self, limits: BreakerLimits) -> None:
        self._limits = limits
        self.is_open = False
        self.num_openings = 0
        self._opened_s = self._closed_s = -limits.calm_s
        self._backoff = Backoff(limits.first_probe_s, limits.longest_probe_s)

    def open(self, now_s: float) -> bool:
        """True when it was closed."""
        if self.is_open:
            return False
        if now_s - self._closed_s >= self._limits.calm_s:
            self._backoff.reset()
        self.is_open, self._opened_s = True, now_s
        self.num_openings += 1
        return True

    def next_probe_s(self) -> float:
        """How long to wait before the next probe; each time longer, up to the limit."""
        return self._backoff.next_s()

    def close(self, now_s: float) -> float:
        """A probe got an answer. Returns for how long it was open."""
        assert self.is_open, "only an open breaker is probed"
        self.is_open, self._closed_s = False, now_s
        return now_s - self._opened_s
