"""The two directions of a connection as the owner sees them: requests come in, answers go out, both by the dozen.

A caller that has many small requests sends them together. The inbox takes all that has arrived in one call, the
outbox sends all answers in one call; large data goes straight between the socket and the segment.
"""

from __future__ import annotations

import socket

from moonpool.base.clock import Deadline
from moonpool.transfer.memory.buffers import total_nbytes
from moonpool.transfer.transports.sockets import (
    after,
    receive_ahead,
    receive_exactly,
    receive_some,
    send_all,
    send_message,
)

# Data moves in parts of this size. Each has the stall timeout to itself: a large request on a slow wire is no stall.
PART_NBYTES = 4 * 1024 * 1024
INBOX_NBYTES = 256 * 1024
# What is taken on suspicion after a large request: the next one's head, and little of data that has a place to go to.
_GLANCE_NBYTES = 4096
# Data of this size and more is not taken ahead.
DIRECT_NBYTES = 64 * 1024
# Answers are sent by the 4 MiB: after each MiB that passes through it the processor's cache has forgotten all else, so
# what Python does per call costs several times the usual.
_OUTBOX_NBYTES = PART_NBYTES
_OUTBOX_PARTS = 512


class Inbox:
    """Bytes that have arrived and wait to be read. Bounded: it takes no more at once than `ahead_nbytes` suggests."""

    def __init__(self, sock: socket.socket, ahead_nbytes: int) -> None:
        self._sock = sock
        self._capacity = min(max(ahead_nbytes, _GLANCE_NBYTES), INBOX_NBYTES)
        self._buffer = memoryview(bytearray(self._capacity))
        self._start = self._end = 0
        self._appetite = _GLANCE_NBYTES

    @property
    def nbytes(self) -> int:
        return self._end - self._start

    def expect(self, nbytes: int) -> None:
        """Says how much data the last message had: the next is likely of the same kind."""
        self._appetite = _GLANCE_NBYTES if nbytes >= DIRECT_NBYTES else INBOX_NBYTES

    def receive(self, nbytes: int, deadline: Deadline | None) -> None:
        """Returns when `nbytes` (at most 4 KiB) or more are here."""
        while self._end - self._start < nbytes:
            if self._start == self._end or self._start + nbytes > self._capacity:
                self._to_front()
            room = self._buffer[self._end : self._end + self._appetite]
            self._end += receive_some(self._sock, room, deadline)

    def receive_present(self) -> bool:
        """Takes what has arrived, without waiting; False when there is nothing, or nothing will come any more."""
        self._to_front()
        count = receive_ahead(self._sock, self._buffer[self._end : self._end + self._appetite])
        self._end += count
        return count > 0

    def give_back(self, data: bytes) -> None:
        """Put bytes that were received past the inbox into it, which must be empty. It grows if they need it."""
        assert self._start == self._end
        if len(data) > self._capacity:
            self._buffer, self._capacity = memoryview(bytearray(len(data))), len(data)
        self._buffer[: len(data)] = data
        self._start, self._end = 0, len(data)

    def take(self, nbytes: int) -> memoryview:
        """Return the next `nbytes`, which must have been received; valid until the next receive()."""
        start, self._start = self._start, self._start + nbytes
        assert self._start <= self._end
        return self._buffer[start : self._start]

    def peek(self, nbytes: int) -> memoryview:
        """Return what take() would, and leave it in the buffer."""
        assert self._start + nbytes <= self._end
        return self._buffer[self._start : self._start + nbytes]

    def all(self) -> memoryview:
        """Return everything received so far, and leave it in the buffer."""
        return self._buffer[self._start : self._end]

    def fill(self, views: list[memoryview], next_nbytes: int, deadline: Deadline) -> None:
        """Fills the views with what is here, then with what comes: a little by way of the inbox, together with what
        follows it; much straight from the socket, together with the `next_nbytes` (at most 4 KiB) known to follow.
        """
        rest, direct = views, total_nbytes(views) >= DIRECT_NBYTES
        while rest:
            if self._start == self._end:
                if direct:
                    break
                self.receive(1, deadline)
            here = min(self._end - self._start, rest[0].nbytes)
            rest[0][:here] = self.take(here)
            rest = after(rest, here)
        if rest:
            self._start, self._end = 0, next_nbytes
            receive_exactly(self._sock, [*rest, self._buffer[:next_nbytes]], deadline)

    def _to_front(self) -> None:
        rest = self.nbytes
        if rest:
            self._buffer[:rest] = bytes(self._buffer[self._start : self._end])
        self._start, self._end = 0, rest


class ResponseQueue:
    """Answers that wait to be sent, in order. Bounded; borrows the memory it is given until flush()."""

    def __init__(self, sock: socket.socket, stall_timeout_s: float) -> None:
        self._sock = sock
        self._stall_timeout_s = stall_timeout_s
        self._parts: list[bytes | memoryview] = []
        self._nbytes = 0
        self._has_data = False

    @property
    def has_data(self) -> bool:
        """Whether memory of a segment waits to be sent: what is written there now would be sent too."""
        return self._has_data

    def add(self, head: bytes, data: memoryview | None = None) -> None:
        self._parts.append(head)
        self._nbytes += len(head)
        if data is not None and data.nbytes:
            self._add_data(data)
        if self._nbytes >= _OUTBOX_NBYTES or len(self._parts) >= _OUTBOX_PARTS:
            self.flush()

    def flush(self) -> None:
        parts, self._parts, self._nbytes, self._has_data = self._parts, [], 0, False
        if len(parts) == 1 and type(parts[0]) is bytes:  # mostly a small answer
            send_message(self._sock, parts[0], self._stall_timeout_s)
        elif parts:
            send_all(self._sock, parts, Deadline(self._stall_timeout_s))

    def _add_data(self, data: memoryview) -> None:
        for start in range(0, data.nbytes, PART_NBYTES):
            if start:
                self.flush()
            self._parts.append(data[start : start + PART_NBYTES])
        self._nbytes += data.nbytes
        self._has_data = True
