"""The line to the master, which rides through its restarts.

A call that may be said twice is said again, with growing pauses, while nobody answers, until `retry_s` have passed.
Every call ends within its deadline, close() included: it wakes whoever waits.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from itertools import islice
from typing import TypeVar

from moonpool.base.clock import Deadline
from moonpool.base.errors import PeerLost
from moonpool.base.rpc import BlockingClient, Call
from moonpool.store.messages import SERVICE

R = TypeVar("R")
FIRST_PAUSE_S = 0.02
LONGEST_PAUSE_S = 0.5


def pauses() -> Iterator[float]:
    """How long to wait before each attempt after the first. A connection that broke while idle is made anew at once."""
    yield 0.0
    pause_s = FIRST_PAUSE_S
    while True:
        yield pause_s
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


class MasterLine:
    """One connection, shared by threads."""

    def __init__(
        self, address: str, *, name: str, connect_timeout_s: float, timeout_s: float, retry_s: float | None
    ) -> None:
        self._rpc = BlockingClient(address, SERVICE, name=name, connect_timeout_s=connect_timeout_s)
        self._timeout_s = timeout_s
        self._retry_s = timeout_s if retry_s is None else min(retry_s, timeout_s)
        self._closed = threading.Event()

    def ask(self, call: Call[R], meanwhile: Callable[[], bool] | None = None) -> R:
        """For calls that may be said twice. PeerLost or DeadlineExceeded when there is no answer in time.

        `meanwhile` as in BlockingClient.call.
        """
        try:
            return self._rpc.call(call, timeout_s=self._timeout_s, meanwhile=meanwhile)
        except PeerLost:
            return self._ask_again(call)

    def ask_noting_repeats(self, call: Call[R], meanwhile: Callable[[], bool] | None = None) -> tuple[R, bool]:
        """The answer, and whether the call was said before without one: then it may have been done twice.

        `meanwhile` as in BlockingClient.call.
        """
        try:
            return self._rpc.call(call, timeout_s=self._timeout_s, meanwhile=meanwhile), False
        except PeerLost:
            return self._ask_again(call), True

    def ask_once(self, call: Call[R]) -> R:
        """For calls that must not be repeated, or are not worth it."""
        return self._rpc.call(call, timeout_s=self._timeout_s)

    def patience(self) -> Iterator[None]:
        """Waits, again and again, before what the master has refused for the time being is tried once more. Ends when
        `retry_s` have passed, or with close().
        """
        patience = Deadline(self._retry_s)
        for pause_s in islice(pauses(), 1, None):
            self._closed.wait(min(pause_s, patience.remaining_s()))
            if self._closed.is_set() or patience.expired():
                return
            yield

    def close(self) -> None:
        """Idempotent. Calls that wait end with PeerLost."""
        self._closed.set()
        self._rpc.close()

    def _ask_again(self, call: Call[R]) -> R:
        deadline, patience = Deadline(self._timeout_s), Deadline(self._retry_s)
        for pause_s in pauses():
            self._closed.wait(min(pause_s, patience.remaining_s()))
            try:
                return self._rpc.call(call, timeout_s=max(deadline.remaining_s(), 0.001))
            except PeerLost:
                if self._closed.is_set() or patience.expired():
                    raise
        raise AssertionError("there is always another pause")
