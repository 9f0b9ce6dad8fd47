"""Limits what one connection can make a server hold in memory, and how long it can keep the event loop busy.

A turn is what the server does for one connection before it serves the others. Frames that arrive in many parts are
collected in memory: small frames always, large ones only while all connections together hold no more than a limit.
Beyond the limit a connection is not read until others have finished their frames. The connection that began its frame
first is closed if it does not finish in time, so that senders which never finish cannot block the others.

Calls wait, too: for their turn, and while earlier answers are unread. ArrivalTimes keeps when the waiting bytes came,
so that the server begins no call whose caller has given up meanwhile.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

MAX_HELLO_NBYTES = 4096  # of a peer's first frame, before it is known to speak this protocol
TURN_FRAMES = 256
TURN_S = 1e-3
MAX_BACKLOG_NBYTES = 256 * 1024  # frames that wait for their turn; beyond it the connection is not read
SMALL_FRAME_NBYTES = 64 * 1024
MAX_LARGE_NBYTES = 16 * 1024 * 1024  # unfinished large frames of all connections; a single one may be larger
LARGE_FRAME_S = 1.0  # how long the first one may make others wait
_MAX_READS = 64  # of one connection whose times are kept; the bytes of more count as having come with the last one


class Sender(Protocol):
    """A connection as LargeFrames sees it."""

    def read_on(self) -> None:
        """The connection may be read again."""
        ...

    def cut_off(self, reason: str) -> None:
        """The connection must end."""
        ...


class LargeFrames:
    """Shares the memory for unfinished large frames among the connections of one server."""

    def __init__(
        self,
        max_nbytes: int = MAX_LARGE_NBYTES,
        max_wait_s: float = LARGE_FRAME_S,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self._max_nbytes = max_nbytes
        self._max_wait_s = max_wait_s
        self._clock = clock or time.monotonic
        self._held: dict[Sender, tuple[int, float]] = {}  # bytes, and when it began; in the order they began
        self._waiting: dict[Sender, None] = {}
        self._timer: asyncio.TimerHandle | None = None
        self.nbytes = 0  # of all

    def note(self, sender: Sender, nbytes: int) -> bool:
        """Record that `sender` holds `nbytes` of an unfinished frame. Return False when the server must stop reading
        it; read_on() is called when it may read again.
        """
        if nbytes <= SMALL_FRAME_NBYTES:
            self.forget(sender)
            return True
        before, began_s = self._held.get(sender, (0, self._clock()))
        self._held[sender] = nbytes, began_s
        self.nbytes += nbytes - before
        if self.nbytes <= self._max_nbytes or next(iter(self._held)) is sender:
            return True
        self._waiting[sender] = None
        self._look()
        return sender not in self._waiting

    def forget(self, sender: Sender) -> None:
        """Forget a sender whose frame is complete, or whose connection has ended. Idempotent."""
        held = self._held.pop(sender, None)
        self._waiting.pop(sender, None)
        if held is not None:
            self.nbytes -= held[0]
            self._let_read()

    def close(self) -> None:
        """Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _let_read(self) -> None:
        """Let waiting senders continue while there is room; the one that began first always."""
        first = next(iter(self._held), None)
        for sender in list(self._waiting):
            if self.nbytes <= self._max_nbytes or sender is first:
                del self._waiting[sender]
                sender.read_on()

    def _look(self) -> None:
        """Close the sender that began first once others have waited too long for it."""
        self.close()
        while self._waiting:
            first = next(iter(self._held))
            left_s = self._held[first][1] + self._max_wait_s - self._clock()
            if left_s > 0:
                self._timer = asyncio.get_running_loop().call_later(left_s, self._look)
                return
            self.forget(first)
            first.cut_off(
                f"a large message was not complete after {self._max_wait_s:g} s, and others wait for its memory"
            )


class ArrivalTimes:
    """When the bytes arrived that one connection has received and not handled yet. Pure."""

    def __init__(self) -> None:
        self.first_s = 0.0  # of the first of them, after skip_to()
        self.later: deque[tuple[int, float]] = deque()  # later reads: how many bytes had been received before, and when
        self._received_nbytes = 0

    def begin(self, nbytes: int, now_s: float) -> None:
        """Record a read of `nbytes` while nothing waits."""
        self.first_s, self._received_nbytes = now_s, nbytes

    def add(self, nbytes: int, now_s: float) -> None:
        """Record a read of `nbytes` while others wait."""
        if len(self.later) < _MAX_READS:
            self.later.append((self._received_nbytes, now_s))
        else:  # all bytes of this read and the one before count as having come now
            self.later[-1] = self.later[-1][0], now_s
        self._received_nbytes += nbytes

    def skip_to(self, waiting_nbytes: int) -> None:
        """All but the last `waiting_nbytes` are handled."""
        handled_nbytes = self._received_nbytes - waiting_nbytes
        while self.later and self.later[0][0] <= handled_nbytes:
            self.first_s = self.later.popleft()[1]
