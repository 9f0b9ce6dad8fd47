"""A breaker and the thread that probes its server while it is open.

A probe is a ping on the client's own connection, or a new connection when there is none: so a server that takes in no
new clients is still there for those that it knows. A server that is frozen answers in the moment in which it moves
again; one that is gone refuses the probe, and is asked again after a pause. The log has one warning per outage.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from moonpool.base.clock import Deadline
from moonpool.base.errors import BreakerOpen, MoonpoolError
from moonpool.base.rpc.breaker import Breaker, BreakerLimits

_LOG = logging.getLogger(__name__)
_JOIN_TIMEOUT_S = 5.0
_LOOK_EVERY_S = 0.05  # whether a caller that waits was closed


class ProbedBreaker:
    """Thread-safe. `ping` returns when the server at `address` has answered, and raises a MoonpoolError otherwise."""

    def __init__(self, address: str, ping: Callable[[], None], limits: BreakerLimits | None = None) -> None:
        self.num_refused = 0  # calls that failed at once
        self._address, self._ping = address, ping
        self._core = Breaker(limits or BreakerLimits())
        self._lock = threading.Lock()
        self._is_closed = threading.Event()
        self._is_closed.set()
        self._reason = ""
        self._probing: threading.Thread | None = None
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
        """The error for a call that is not made, which is counted."""
        with self._lock:
            self.num_refused += 1
            self._ensure_probing()  # a fork copies the state and not the thread
            return BreakerOpen(f"{self._address} is away ({self._reason}); it is asked again when it answers probes")

    def trip(self, error: MoonpoolError) -> BreakerOpen:
        """The server was found away: open, probe it from now on. Returns the error for the caller."""
        with self._lock:
            if not self._ended.is_set() and self._core.open(time.monotonic()):
                self._reason = str(error)
                self._is_closed.clear()
                _LOG.warning("%s is away: %s; calls to it fail at once until it is back", self._address, error)
                self._ensure_probing()
        return BreakerOpen(str(error))

    def wait_closed(self, timeout_s: float, given_up: threading.Event) -> bool:
        """Wait until the server is back; False when that took too long or `given_up` is set meanwhile."""
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
        """Waits for the end of a probe under way. Idempotent."""
        with self._lock:
            probing = self._probing
        if probing is not None:
            probing.join(_JOIN_TIMEOUT_S)

    def _ensure_probing(self) -> None:
        if self._core.is_open and not self._ended.is_set() and (self._probing is None or not self._probing.is_alive()):
            self._probing = threading.Thread(target=self._probe_until_closed, name="rpc-probe", daemon=True)
            self._probing.start()

    def _probe_until_closed(self) -> None:
        while not self._ended.wait(self._core.next_probe_s()):
            try:
                self._ping()
            except MoonpoolError:
                continue
            self._close()
            return

    def _close(self) -> None:
        with self._lock:
            away_s = self._core.close(time.monotonic())
            self._probing = None
            self._is_closed.set()
        _LOG.info("%s is back after %.1f s", self._address, away_s)
