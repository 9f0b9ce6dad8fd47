"""A breaker and the thread that probes its server while it is open. One per server and process, shared by all clients.

A probe is a connection and the server's HELLO. A server that is frozen answers it in the moment in which it moves
again; one that is gone refuses it, and is asked again after a pause. The log has one warning per outage.
"""

from __future__ import annotations

import logging
import threading
import time

from moonpool.base.clock import Deadline
from moonpool.base.errors import BreakerOpen, MoonpoolError
from moonpool.base.rpc.blocking import BlockingClient
from moonpool.base.rpc.breaker import Breaker, BreakerLimits

_LOG = logging.getLogger(__name__)
_PROBE_TIMEOUT_S = 2.0
_JOIN_TIMEOUT_S = 5.0
_LOOK_EVERY_S = 0.05  # whether a caller that waits was closed
_REGISTRY_LOCK = threading.Lock()
_REGISTRY: dict[tuple[str, str], ProbedBreaker] = {}


def join_breaker(address: str, service: str) -> ProbedBreaker:
    """Return this process's breaker of that server. Call leave() once when it is not needed any more."""
    with _REGISTRY_LOCK:
        breaker = _REGISTRY.get((address, service))
        if breaker is None:
            breaker = _REGISTRY[address, service] = ProbedBreaker(address, service)
        breaker.num_users += 1
        return breaker


class ProbedBreaker:
    """Thread-safe. Made by join_breaker()."""

    def __init__(self, address: str, service: str, limits: BreakerLimits | None = None) -> None:
        self.limits = limits or BreakerLimits()
        self.num_users = 0  # guarded by the registry's lock
        self.num_refused = 0  # calls that failed at once
        self._address, self._service = address, service
        self._core = Breaker(self.limits)
        self._lock = threading.Lock()
        self._is_closed = threading.Event()
        self._is_closed.set()
        self._reason = ""
        self._probing: threading.Thread | None = None
        self._probe: BlockingClient | None = None
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

    def leave(self) -> None:
        """With the last user the probing ends."""
        with _REGISTRY_LOCK:
            self.num_users -= 1
            if self.num_users:
                return
            if _REGISTRY.get((self._address, self._service)) is self:
                del _REGISTRY[self._address, self._service]
        with self._lock:
            self._ended.set()
            probing, probe = self._probing, self._probe
        if probe is not None:
            probe.close()
        if probing is not None and probing is not threading.current_thread():
            probing.join(_JOIN_TIMEOUT_S)

    def _ensure_probing(self) -> None:
        if self._core.is_open and not self._ended.is_set() and (self._probing is None or not self._probing.is_alive()):
            self._probing = threading.Thread(target=self._probe_until_closed, name="rpc-probe", daemon=True)
            self._probing.start()

    def _probe_until_closed(self) -> None:
        while not self._ended.wait(self._core.next_probe_s()):
            if self._is_answered():
                self._close()
                return

    def _is_answered(self) -> bool:
        with self._lock:
            if self._ended.is_set():
                return False
            client = self._probe = BlockingClient(
                self._address, self._service, name="probe", connect_timeout_s=_PROBE_TIMEOUT_S
            )
        try:
            client.connect(timeout_s=_PROBE_TIMEOUT_S)
        except MoonpoolError:
            return False
        finally:
            client.close()
        return True

    def _close(self) -> None:
        with self._lock:
            away_s = self._core.close(time.monotonic())
            self._probing = None
            self._is_closed.set()
        _LOG.info("%s is back after %.1f s", self._address, away_s)
