"""The line to the master, with a breaker in front of it.

A master that is away costs a caller `BreakerLimits.silence_s` once. From then on calls fail at once with BreakerOpen,
which is Unavailable and no miss, until a probe finds that the master is back. With `retry_s` a call waits for that, and
may be said again. Every call ends within its deadline, close() included: it wakes all waiting threads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

from moonpool.base.backoff import Backoff
from moonpool.base.clock import Deadline
from moonpool.base.errors import BreakerOpen, PeerLost, PeerSilent
from moonpool.base.rpc import BlockingClient, Call
from moonpool.base.rpc.breaker import BreakerLimits, ProbedBreaker
from moonpool.store.messages import SERVICE

R = TypeVar("R")
FIRST_PAUSE_S = 0.02
LONGEST_PAUSE_S = 0.5
_PROBE_TIMEOUT_S = 2.0


class MasterClient:
    """One connection and its breaker, shared by threads.

    `retry_s` is how long a call waits for a master that is away: 0 fails at once.
    """

    def __init__(
        self, address: str, *, name: str, connect_timeout_s: float, timeout_s: float, retry_s: float = 0.0
    ) -> None:
        limits = BreakerLimits()
        self._breaker = ProbedBreaker(address, self._ping, limits)
        self._rpc = BlockingClient(
            address,
            SERVICE,
            name=name,
            connect_timeout_s=connect_timeout_s,
            limits=limits,
            gate=self._breaker.check,
        )
        self._timeout_s = timeout_s
        self._retry_s = min(retry_s, timeout_s)
        self._closed = threading.Event()

    def ask(self, call: Call[R], meanwhile: Callable[[], bool] | None = None) -> R:
        """For calls that may be said twice. BreakerOpen when the master is away, DeadlineExceeded when it is busy
        with other calls of this line for too long.

        `meanwhile` as in BlockingClient.call.
        """
        return self.ask_noting_repeats(call, meanwhile)[0]

    def ask_noting_repeats(self, call: Call[R], meanwhile: Callable[[], bool] | None = None) -> tuple[R, bool]:
        """The answer, and whether the call was said before without one: then it may have been done twice.

        `meanwhile` as in BlockingClient.call.
        """
        if self._breaker.is_open:
            return self._ask_when_back(call, self._breaker.refusal(), False)
        try:
            return self._rpc.call(call, timeout_s=self._timeout_s, meanwhile=meanwhile), False
        except BreakerOpen as refusal:  # while it waited for its turn
            return self._ask_when_back(call, refusal, False)
        except PeerSilent as error:
            return self._ask_when_back(call, self._breaker.trip(error), True)
        except PeerLost:
            return self._ask_anew(call)

    def ask_once(self, call: Call[R]) -> R:
        """For calls that must not be repeated, or are not worth it. PeerLost also when the connection broke before:
        what it held (pins) is gone with it.
        """
        if self._breaker.is_open and not self._is_back(Deadline(self._retry_s)):
            raise self._breaker.refusal()
        try:
            return self._rpc.call(call, timeout_s=self._timeout_s)
        except PeerSilent as error:
            raise self._breaker.trip(error) from error

    def wait_for_master(self, timeout_s: float) -> bool:
        """Wait until the master is back, if it was found away; False when that took too long."""
        return not self._breaker.is_open or self._is_back(Deadline(timeout_s))

    def patience(self) -> Iterator[None]:
        """Waits, again and again, before what the master has refused for the time being is tried once more. Ends when
        `retry_s` have passed, or with close().
        """
        deadline, backoff = Deadline(self._retry_s), Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S)
        while True:
            self._closed.wait(min(backoff.next_s(), deadline.remaining_s()))
            if self._closed.is_set() or deadline.expired():
                return
            yield

    def counters(self) -> dict[str, int]:
        """How often the master was found away, and how many calls failed at once because of it."""
        return {"master_outages": self._breaker.num_openings, "calls_refused": self._breaker.num_refused}

    def close(self) -> None:
        """Idempotent. Calls that wait end with PeerLost."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._breaker.stop()
        self._rpc.close()
        self._breaker.join()

    def _ping(self) -> None:
        self._rpc.ping(timeout_s=_PROBE_TIMEOUT_S)

    def _ask_anew(self, call: Call[R]) -> tuple[R, bool]:
        """The connection broke, perhaps long ago: a master that is back answers a new one at once."""
        try:
            return self._rpc.call(call, timeout_s=self._timeout_s), True
        except BreakerOpen as refusal:
            return self._ask_when_back(call, refusal, True)
        except (PeerLost, PeerSilent) as error:
            return self._ask_when_back(call, self._found_away(error), True)

    def _ask_when_back(self, call: Call[R], refusal: PeerLost, was_said: bool) -> tuple[R, bool]:
        """As long as `retry_s` allows. Raises the last refusal."""
        patience = Deadline(self._retry_s)
        while self._is_back(patience):
            try:
                return self._rpc.call(call, timeout_s=self._timeout_s), was_said
            except BreakerOpen as error:
                refusal = error
            except (PeerLost, PeerSilent) as error:
                refusal, was_said = self._found_away(error), True
        raise refusal

    def _is_back(self, patience: Deadline) -> bool:
        return not patience.expired() and self._breaker.wait_closed(patience.remaining_s(), self._closed)

    def _found_away(self, error: PeerLost | PeerSilent) -> PeerLost:
        """What the caller is told. A line that was closed by this side says nothing about the master."""
        if self._closed.is_set() and isinstance(error, PeerLost):
            return error
        return self._breaker.trip(error)
