"""The client's connection to the master, behind a circuit breaker.

A caller waits `BreakerLimits.silence_s` for a master that does not answer. From then on all calls fail at once with
BreakerOpen (an Unavailable, not a miss), until a probe finds the master back. With `retry_s` a call waits for that and
is sent again. Every call ends within its deadline; begin_close() wakes all threads that wait for an absent master,
close() all others.

Calls for whose answer no caller waits are owed to the master: they are sent before the next call, or when the master is
back, and again until they are answered.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import TypeVar

from moonpool.base.backoff import Backoff
from moonpool.base.clock import Deadline
from moonpool.base.errors import (
    BreakerOpen,
    DeadlineExceeded,
    Internal,
    MoonpoolError,
    NotSettled,
    PeerLost,
    PeerSilent,
    ProtocolError,
    TooLate,
)
from moonpool.base.rpc import BlockingClient, Call
from moonpool.base.rpc.breaker import BreakerLimits, ProbedBreaker
from moonpool.store.messages import SERVICE

R = TypeVar("R")
_LOG = logging.getLogger(__name__)
FIRST_PAUSE_S = 0.02
LONGEST_PAUSE_S = 0.5
_PROBE_TIMEOUT_S = 2.0
_FIRST_UNSETTLED_PAUSE_S = 0.0005  # a node voids a header in less than a millisecond
_LONGEST_UNSETTLED_PAUSE_S = 0.05


class MasterClient:
    """One connection and its breaker. Thread-safe.

    A call waits up to `retry_s` for a master that is away; 0: it fails at once.
    """

    def __init__(
        self,
        address: str,
        *,
        name: str,
        connect_timeout_s: float,
        timeout_s: float,
        retry_s: float = 0.0,
        limits: BreakerLimits | None = None,
    ) -> None:
        limits = limits or BreakerLimits()
        self._breaker = ProbedBreaker(address, self._ping, limits, when_back=self._send_owed)
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
        self._owed: deque[Call[None]] = deque()
        self._sending_owed = threading.Lock()
        self._is_closing, self._closed = threading.Event(), threading.Event()
        self._last_calls: Deadline | None = None  # of the calls after begin_close(), together

    def call(self, call: Call[R], meanwhile: Callable[[], bool] | None = None) -> R:
        """Return the answer to a call that may be sent twice. Raise BreakerOpen when the master is away,
        DeadlineExceeded when other calls of this connection take too long, NotSettled when that is the answer until the
        call's time is over. `meanwhile` as in BlockingClient.call.
        """
        try:
            return self.call_noting_repeats(call, meanwhile)[0]
        except NotSettled:
            return self._call_until_settled(call)

    def _call_until_settled(self, call: Call[R]) -> R:
        deadline, backoff = Deadline(self._timeout_s), Backoff(_FIRST_UNSETTLED_PAUSE_S, _LONGEST_UNSETTLED_PAUSE_S)
        while True:
            self._is_closing.wait(backoff.next_s())
            try:
                return self.call_noting_repeats(call)[0]
            except NotSettled:
                if deadline.expired() or self._is_closing.is_set():
                    raise

    def call_noting_repeats(
        self,
        call: Call[R],
        meanwhile: Callable[[], bool] | None = None,
        lost: Callable[[], None] | None = None,
    ) -> tuple[R, bool]:
        """As call(). Return the answer, and whether the call was sent more than once: the master may have done it
        twice then. `lost` is called each time that the call was sent and its answer is given up, before it is sent
        again; it may change the call.
        """
        if self._breaker.is_open:
            return self._call_when_back(call, self._breaker.refusal(), False, lost)
        try:
            return self._send(call, meanwhile, lost), False
        except BreakerOpen as refusal:  # opened while this call waited for its turn
            return self._call_when_back(call, refusal, False, lost)
        except PeerSilent as error:
            return self._call_when_back(call, self._breaker.trip(error), True, lost)
        except PeerLost:
            return self._call_again(call, lost)

    def call_once(self, call: Call[R], connection: object = None) -> R:
        """Return the answer to a call that must not be sent twice. Raise PeerLost also when the connection broke
        earlier: its pins are gone then. With `connection`, one of `self.connection`, raise it also when there is
        another one now.
        """
        if self._breaker.is_open and not self._is_back(Deadline(self._retry_s)):
            raise self._breaker.refusal()
        try:
            if connection is None:
                return self._send(call)
            self._pay()
            return self._rpc.call_on(connection, call, timeout_s=self._limit_s())
        except PeerSilent as error:
            raise self._breaker.trip(error) from error

    def owe(self, call: Call[None]) -> None:
        """Send this call before the next one, or when the master is back, and again until it is answered: it may be
        sent more than once. Its errors are not reported.
        """
        self._owed.append(call)

    def wait_for_master(self, timeout_s: float) -> bool:
        """Wait for a master that is away. Return False when it is not back in time."""
        return not self._breaker.is_open or self._is_back(Deadline(timeout_s))

    def retry_pauses(self) -> Iterator[None]:
        """Wait before each retry of a call that the master refused for now. Ends after `retry_s`, or when closed."""
        deadline, backoff = Deadline(self._retry_s), Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S)
        while True:
            self._is_closing.wait(min(backoff.next_s(), deadline.remaining_s()))
            if self._is_closing.is_set() or deadline.expired():
                return
            yield

    @property
    def connection(self) -> object:
        """Another object after each connect. A master that was away may have lost what it was told last."""
        return self._rpc.peer

    @property
    def incarnation(self) -> int:
        """The master's, as of the latest connection; another number after a restart. 0: there was no connection yet."""
        return 0 if self._rpc.peer is None else self._rpc.peer.incarnation

    def counters(self) -> dict[str, int]:
        """master_outages: how often the master was found away; calls_refused: calls that failed at once meanwhile."""
        return {"master_outages": self._breaker.num_openings, "calls_refused": self._breaker.num_refused}

    def begin_close(self) -> None:
        """From now on no call waits for a master that is away, and all calls together take no longer than one may: the
        last ones, which say what ends with this client. Idempotent.
        """
        if self._last_calls is None:
            self._last_calls = Deadline(self._timeout_s)
        self._is_closing.set()

    def close(self) -> None:
        """Idempotent. Calls that wait end with PeerLost."""
        if self._closed.is_set():
            return
        self.begin_close()
        if not self._breaker.is_open:
            self._send_owed()
        self._closed.set()
        self._breaker.stop()
        self._rpc.close()
        self._breaker.join()

    def _ping(self) -> None:
        self._rpc.ping(timeout_s=_PROBE_TIMEOUT_S)

    def _send(
        self, call: Call[R], meanwhile: Callable[[], bool] | None = None, lost: Callable[[], None] | None = None
    ) -> R:
        """Send what is owed, then the call, once. `meanwhile` and `lost` as in call_noting_repeats()."""
        if self._owed:
            self._pay()
        try:
            try:
                return self._rpc.call(call, timeout_s=self._limit_s(), meanwhile=meanwhile)
            except TooLate:  # this process stood still, and waits for longer than it has stated: the call did not begin
                return self._rpc.call(call, timeout_s=self._limit_s())
        except BaseException as error:
            if lost is not None and _is_answer_lost(error):
                lost()
            raise

    def _pay(self) -> None:
        """Send what is owed. Raise PeerLost or DeadlineExceeded when the master does not answer: the rest is still owed
        then.
        """
        while self._owed:
            with self._sending_owed:  # the others wait: what they send next may need what is told here
                self._breaker.check()
                if self._owed:
                    self._send_first_owed()

    def _send_first_owed(self) -> None:
        try:
            self._rpc.call(self._owed[0], timeout_s=self._limit_s())
        except PeerSilent as error:
            raise self._breaker.trip(error) from error
        except (PeerLost, DeadlineExceeded):
            raise
        except MoonpoolError as error:  # the master has done it, or refuses it: it would answer the same again
            _LOG.warning("the master answered %s: %s", type(self._owed[0]).__name__, error)
        self._owed.popleft()

    def _send_owed(self) -> None:
        with contextlib.suppress(MoonpoolError):  # it is sent before the next call
            self._pay()

    def _call_again(self, call: Call[R], lost: Callable[[], None] | None) -> tuple[R, bool]:
        """Send the call on a new connection: the old one may have broken long ago, and the master may be back."""
        try:
            return self._send(call, lost=lost), True
        except BreakerOpen as refusal:
            return self._call_when_back(call, refusal, True, lost)
        except (PeerLost, PeerSilent) as error:
            return self._call_when_back(call, self._found_away(error), True, lost)

    def _call_when_back(
        self, call: Call[R], refusal: PeerLost, was_sent: bool, lost: Callable[[], None] | None
    ) -> tuple[R, bool]:
        """Wait for the master and send the call, for at most `retry_s`. Raise the last refusal."""
        retry_deadline = Deadline(self._retry_s)
        while self._is_back(retry_deadline):
            try:
                return self._send(call, lost=lost), was_sent
            except BreakerOpen as error:
                refusal = error
            except (PeerLost, PeerSilent) as error:
                refusal, was_sent = self._found_away(error), True
        raise refusal

    def _limit_s(self) -> float:
        """Return how long a call may take that is sent now."""
        return self._timeout_s if self._last_calls is None else self._last_calls.remaining_s()

    def _is_back(self, retry_deadline: Deadline) -> bool:
        left_s = retry_deadline.remaining_s()
        return not retry_deadline.expired() and self._breaker.wait_closed(left_s, self._is_closing)

    def _found_away(self, error: PeerLost | PeerSilent) -> PeerLost:
        """Return the error for the caller, and open the breaker. A connection that this side closed is no outage."""
        if self._closed.is_set() and isinstance(error, PeerLost):
            return error
        return self._breaker.trip(error)


def _is_answer_lost(error: BaseException) -> bool:
    """Return whether the master may have carried out a call that ended with this error: an error that the master
    answered says that it has not. BreakerOpen and TooLate: the call was not sent, or not begun."""
    if isinstance(error, (PeerLost, DeadlineExceeded)):
        return not isinstance(error, (BreakerOpen, TooLate))
    return not isinstance(error, MoonpoolError) or isinstance(error, (ProtocolError, Internal))
