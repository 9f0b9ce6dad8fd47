"""The limits of one HTTP connection: sizes, and how long each of its phases may last.

`ConnectionWatch` gets the events of a connection and computes when it must end. It has no clock and no socket;
protocol.py calls it. The phases of a connection:

    idle      no request has begun            ends after `idle_s` (`keep_alive_s` after an answer)
    head      request line and headers arrive ends `head_s` after the first byte
    body      the body arrives                ends `body_s` after the head, later by one second per `body_rate` bytes
    answer    the app works or answers        ends when nothing could be written for `write_s`
    draining  the answer is sent, but the rest of a refused body still arrives, or the client does not read the answer:
              ends after `drain_s`
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


@dataclass(frozen=True)
class ConnectionLimits:
    """Docs: docs/operations.md, "Limits"."""

    max_connections: int = 1024
    reserve: int = 16  # more connections, accepted for /health and /metrics only
    max_headers: int = 100
    max_head_nbytes: int = 64 * 1024
    idle_s: float = 30.0
    keep_alive_s: float = 30.0
    head_s: float = 10.0
    body_s: float = 20.0
    body_rate: float = 16 * 1024.0  # bytes per second
    write_s: float = 30.0
    drain_s: float = 5.0
    max_drain_nbytes: int = 64 * 1024 * 1024


class Phase(enum.Enum):
    IDLE = "idle"
    HEAD = "head"
    BODY = "body"
    ANSWER = "answer"
    DRAINING = "draining"


class ConnectionWatch:
    """Times are seconds of one monotonic clock that the caller reads."""

    def __init__(self, limits: ConnectionLimits, now_s: float) -> None:
        self._limits = limits
        self.phase = Phase.IDLE
        self._due_s = now_s + limits.idle_s
        self._write_due_s: float | None = None
        self._num_headers = 0
        self._head_nbytes = 0
        self._drained_nbytes = 0
        self._more_body = False
        self._is_answered = True

    @property
    def is_idle(self) -> bool:
        return self.phase is Phase.IDLE

    @property
    def due_s(self) -> float:
        """The time at which the connection must end if no event comes before."""
        if self._write_due_s is not None:
            return min(self._due_s, self._write_due_s)
        return self._due_s

    def overdue(self, now_s: float) -> Phase | None:
        """Return the phase that has lasted too long, or None. An unread answer counts as ANSWER."""
        if self._write_due_s is not None and now_s >= self._write_due_s:
            return Phase.ANSWER
        return self.phase if now_s >= self._due_s else None

    def head_began(self, now_s: float) -> None:
        self.phase, self._due_s = Phase.HEAD, now_s + self._limits.head_s
        self._num_headers = self._head_nbytes = self._drained_nbytes = 0
        self._more_body, self._is_answered = True, False

    def header(self, nbytes: int) -> None:
        """One header, or the request line, of this size. Trailers count like headers."""
        self._num_headers += 1
        self._head_nbytes += nbytes

    @property
    def is_head_too_large(self) -> bool:
        limits = self._limits
        return self._num_headers > limits.max_headers + 1 or self._head_nbytes > limits.max_head_nbytes

    def head_ended(self, now_s: float) -> None:
        self.phase, self._due_s = Phase.BODY, now_s + self._limits.body_s

    def body(self, nbytes: int) -> None:
        """Extend the time for a body that makes progress, but not for bytes that arrive after the answer."""
        if self.phase is Phase.BODY:
            self._due_s += nbytes / self._limits.body_rate
        elif self.phase is Phase.DRAINING:
            self._drained_nbytes += nbytes
            if self._drained_nbytes > self._limits.max_drain_nbytes:
                self._due_s = 0.0

    def body_ended(self, now_s: float) -> None:
        self._more_body = False
        if self._is_answered:
            self._rest(now_s)
        else:
            self.phase, self._due_s = Phase.ANSWER, float("inf")

    def answered(self, now_s: float) -> None:
        self._is_answered = True
        if self._more_body:
            self.phase, self._due_s = Phase.DRAINING, now_s + self._limits.drain_s
        else:
            self._rest(now_s)

    def closing(self, now_s: float) -> None:
        """The answer is sent, and the connection closes once the client has read it."""
        self.phase, self._due_s = Phase.DRAINING, now_s + self._limits.drain_s

    def write_paused(self, now_s: float) -> None:
        """The client does not read as fast as the answer is written."""
        self._write_due_s = now_s + self._limits.write_s

    def write_resumed(self) -> None:
        self._write_due_s = None

    def _rest(self, now_s: float) -> None:
        self.phase, self._due_s = Phase.IDLE, now_s + self._limits.keep_alive_s
