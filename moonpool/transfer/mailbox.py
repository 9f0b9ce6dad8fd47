"""Messages that peers left with this engine, until somebody takes them. Bounded: a full box refuses, it never drops."""

from __future__ import annotations

import threading
from collections import deque
from typing import NamedTuple

from moonpool.base.clock import Deadline
from moonpool.base.errors import Cancelled, InvalidInput, Overloaded
from moonpool.transfer.pending import Pending

MAX_MESSAGE_NBYTES = 32 * 1024
_MAX_MESSAGES = 4096
_MAX_NBYTES = 16 * 1024 * 1024


class Notification(NamedTuple):
    """What a peer says about a segment of ours: "these pages are written", in words the two have agreed on."""

    segment: str
    message: bytes


class Mailbox:
    """First come, first taken. Thread-safe."""

    def __init__(self, max_messages: int = _MAX_MESSAGES, max_nbytes: int = _MAX_NBYTES) -> None:
        self._max_messages = max_messages
        self._max_nbytes = max_nbytes
        self._changed = threading.Condition()
        self._messages: deque[Notification] = deque()
        self._waiting: set[Pending[None]] = set()
        self._nbytes = 0
        self._closed = False

    def put(self, notification: Notification) -> None:
        """Overloaded when there is no room: the sender learns that nobody takes its messages."""
        size = len(notification.message)
        check_message(notification.message)
        with self._changed:
            if len(self._messages) >= self._max_messages or self._nbytes + size > self._max_nbytes:
                raise Overloaded(f"{len(self._messages)} messages wait for the owner of {notification.segment!r}")
            self._messages.append(notification)
            self._nbytes += size
            self._changed.notify()
        self._tell()

    def arrival(self) -> Pending[None]:
        """Over when there is something to take, or the box is closed. It takes nothing: who gives up loses nothing."""
        pending: Pending[None] = Pending(lambda: self._give_up(pending))
        with self._changed:
            is_here = bool(self._messages) or self._closed
            if not is_here:
                self._waiting.add(pending)
        if is_here:
            pending.resolve(None)
        return pending

    def take(self, timeout_s: float = 0.0) -> list[Notification]:
        """All that is there, in order of arrival; waits for the first one at most so long, empty if none came."""
        deadline = Deadline(timeout_s)
        with self._changed:
            while not self._messages and not self._closed:
                if not self._changed.wait(deadline.remaining_s()):
                    break
            taken, self._nbytes = list(self._messages), 0
            self._messages.clear()
            return taken

    def close(self) -> None:
        """Idempotent. Whoever waits gets what there is."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._tell()

    def _tell(self) -> None:
        """Without the lock: what they do next is not known here."""
        with self._changed:
            waiting, self._waiting = self._waiting, set()
        for pending in waiting:
            pending.resolve(None)

    def _give_up(self, pending: Pending[None]) -> None:
        with self._changed:
            self._waiting.discard(pending)
        pending.fail(Cancelled("no longer waited for"))


def check_message(message: bytes) -> None:
    if len(message) > MAX_MESSAGE_NBYTES:
        raise InvalidInput(f"a message has at most {MAX_MESSAGE_NBYTES} bytes, not {len(message)}")
