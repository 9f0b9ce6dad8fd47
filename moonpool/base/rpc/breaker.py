"""A circuit breaker: callers fail at once while their server is away, instead of waiting for it in turn.

`CallWait` judges one call: the server is silent when nothing came for `silence_s` in which this process could listen.
A server that is merely busy answers long before; a caller that was not scheduled looks late, and the server gets that
much more time (base/clock.py). `Breaker` opens when a server was found away, and closes when a probe got an answer.
Both are pure.

`ProbedBreaker` adds the thread that probes the server while the breaker is open. A probe is a ping on the client's own
connection, or a new connection when there is none: a server that accepts no new clients still serves those that it
knows. A frozen server answers the ping when it runs again; a server that is gone refuses the probe, and is probed again
after a pause. There is one warning per outage in the log.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from moonpool.base.backoff import Backoff
from moonpool.base.clock import Deadline, late_s
from moonpool.base.errors import BreakerOpen, ConfigError, MoonpoolError
from moonpool.base.side_thread import SideThread

_TIMER_GRAIN_S = 0.008  # the kernel's timers fire this much later than asked for, with 100 ticks a second
_LOG = logging.getLogger(__name__)
_JOIN_TIMEOUT_S = 5.0
_LOOK_EVERY_S = 0.05  # whether the waiting caller was closed


@dataclass(frozen=True)
class BreakerLimits:
    """The longest wait measured for an answer of a busy master is 58 ms."""

    silence_s: float = 0.2  # a server that sends nothing for this long during a call is away
    look_every_s: float = 0.02  # how often a waiting caller checks the clock
    first_probe_s: float = 0.02  # from the opening to the first probe
    longest_probe_s: float = 0.25  # between two probes, at most
    calm_s: float = 5.0  # after this long without an outage, probes start with the first pause again

    def __post_init__(self) -> None:
        if not 0 < 2 * self.look_every_s <= self.silence_s:
            raise ConfigError(f"a silence of {self.silence_s:g} s needs at least two looks within it")
        if not 0 < self.first_probe_s <= self.longest_probe_s:
            raise ConfigError("first_probe_s must be above 0 and at most longest_probe_s")


class CallWait:
    """How long the server of one call has been silent. Call is_silent() every `look_every_s`."""

    __slots__ = ("_limits", "heard_s", "next_look_s")

    def __init__(self, limits: BreakerLimits, now_s: float) -> None:
        self._limits = limits
        self.heard_s = now_s
        self.next_look_s = now_s + limits.look_every_s

    def is_silent(self, now_s: float) -> bool:
        """Return whether the server counts as away, and set `next_look_s`."""
        late = late_s(self.next_look_s + _TIMER_GRAIN_S, now_s)
        self.heard_s = min(now_s, self.heard_s + late)
        self.next_look_s = now_s + self._limits.look_every_s
        return now_s - self.heard_s >= self._limits.silence_s


class Breaker:
    """Open while the server is away. Probes of outages that follow each other closely have growing pauses."""

    def __init__(self, limits: BreakerLimits) -> None:
        self._limits = limits
        self.is_open = False
        self.num_openings = 0
        self._opened_s = self._closed_s = -limits.calm_s
        self._backoff = Backoff(limits.first_probe_s, limits.longest_probe_s)

    def open(self, now_s: float) -> bool:
        """Open the breaker. Return False if it was open already."""
        if self.is_open:
            return False
        if now_s - self._closed_s >= self._limits.calm_s:
            self._backoff.reset()
        self.is_open, self._opened_s = True, now_s
        self.num_openings += 1
        return True

    def next_probe_s(self) -> float:
        """Return the pause before the next probe; it grows up to the limit."""
        return self._backoff.next_s()

    def close(self, now_s: float) -> float:
        """Close the breaker after a successful probe. Return for how long it was open."""
        assert self.is_open, "only an open breaker is probed"
        self.is_open, self._closed_s = False, now_s
        return now_s - self._opened_s


class ProbedBreaker:
    """Thread-safe. `ping` returns when the server at `address` has answered, and raises a MoonpoolError otherwise.
    `when_back` is called after each outage, by the thread that probed, with the breaker closed."""

    def __init__(
        self,
        address: str,
        ping: Callable[[], None],
        limits: BreakerLimits | None = None,
        when_back: Callable[[], None] = lambda: None,
    ) -> None:
        self.num_refused = 0  # calls that failed at once
        self._address, self._ping, self._when_back = address, ping, when_back
        self._core = Breaker(limits or BreakerLimits())
        self._lock = threading.Lock()
        self._is_closed = threading.Event()
        self._is_closed.set()
        self._reason = ""
        self._probing: SideThread | None = None
        self._ended = threading.Event()

    @property
    def is_open(self) -> bool:
        return self._core.is_open

    @property
    def num_openings(self) -> int:
        return self._core.num_openings

    def check(self) -> None:
        """Raise BreakerOpen while the server is away."""
        if self._core.is_open:
            raise self.refusal()

    def refusal(self) -> BreakerOpen:
        """Count a call that is refused, and return its error."""
        with self._lock:
            self.num_refused += 1
            self._ensure_probing()  # a fork copies the state but not the thread
            return BreakerOpen(f"{self._address} is away ({self._reason}); it is asked again when it answers probes")

    def trip(self, error: MoonpoolError) -> BreakerOpen:
        """Open the breaker and start to probe the server. Return the error for the caller."""
        with self._lock:
            if not self._ended.is_set() and self._core.open(time.monotonic()):
                self._reason = str(error)
                self._is_closed.clear()
                _LOG.warning("%s is away: %s; calls to it fail at once until it is back", self._address, error)
                self._ensure_probing()
        return BreakerOpen(str(error))

    def wait_closed(self, timeout_s: float, given_up: threading.Event) -> bool:
        """Wait until the server is back. Return False after the timeout, or when `given_up` is set."""
        deadline = Deadline(timeout_s)
        while not given_up.is_set():
            if self._is_closed.wait(min(deadline.remaining_s(), _LOOK_EVERY_S)):
                return True
            if deadline.expired():
                return False
        return False

    def stop(self) -> None:
        """Stop probing. Idempotent. A thread that waits in `ping` is not woken; the owner does that before join()."""
        self._ended.set()

    def join(self) -> None:
        """Wait for the end of the current probe. Idempotent."""
        with self._lock:
            probing = self._probing
        if probing is not None:
            probing.join(_JOIN_TIMEOUT_S)

    def _ensure_probing(self) -> None:
        if self._core.is_open and not self._ended.is_set() and (self._probing is None or not self._probing.is_alive()):
            self._probing = SideThread(self._probe_until_closed, "rpc-probe")

    def _probe_until_closed(self) -> None:
        while not self._ended.wait(self._core.next_probe_s()):
            try:
                self._ping()
            except MoonpoolError:
                continue
            self._close()
            self._when_back()
            return

    def _close(self) -> None:
        with self._lock:
            away_s = self._core.close(time.monotonic())
            self._probing = None
            self._is_closed.set()
        _LOG.info("%s is back after %.1f s", self._address, away_s)
