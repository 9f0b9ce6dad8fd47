"""Time as a parameter. Cores get `now` as a number; shells get a Clock; tests get a VirtualClock.

A process that stood still must not count that time against others: see late_s().
"""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    def now_s(self) -> float:
        """Seconds on a monotonic scale; only differences mean anything."""
        ...


class SystemClock:
    """The machine's monotonic clock."""

    def now_s(self) -> float:
        return time.monotonic()


_SYSTEM_CLOCK = SystemClock()


class BootClock:
    """As SystemClock, and it goes on while the machine is suspended: for promises that others keep for a time."""

    def now_s(self) -> float:
        return time.clock_gettime(time.CLOCK_BOOTTIME)


class ThreadClock:
    """The processor time of the calling thread: it stands while the thread waits, also for a core that others use."""

    def now_s(self) -> float:
        return time.thread_time()


class VirtualClock:
    """A clock that moves only by advance()."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now_s(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        assert seconds >= 0, "time does not run backwards"
        self._now_s += seconds


def late_s(planned_s: float, now_s: float) -> float:
    """Return by how many seconds a check that was planned for `planned_s` is late; 0 when it is early or on time.

    The one rule for a process that stands still (stopped, not scheduled, its machine suspended): time in which it could
    not listen does not count as the silence of others. A process that compares the time of the last message with the
    clock plans its checks, and gives others as much more time as a check was late: `AttendedClock` does this for a
    whole service, rpc/silence.py for one connection.
    """
    return max(0.0, now_s - planned_s)


class AttendedClock:
    """A clock that stands still while its process does: between two readings at most `step_s` pass.

    For a process that reads the clock regularly, at least every `step_s`. Leases and times to live by this clock become
    longer when the process stood still, never shorter. For one thread.
    """

    def __init__(self, step_s: float, clock: Clock | None = None) -> None:
        self._step_s = step_s
        self._clock: Clock = clock or SystemClock()
        self._due_s = self._clock.now_s() + step_s
        self.stood_still_s = 0.0  # in all

    def now_s(self) -> float:
        now_s = self._clock.now_s()
        if now_s > self._due_s:
            self.stood_still_s += late_s(self._due_s, now_s)
        self._due_s = now_s + self._step_s
        return now_s - self.stood_still_s


class Deadline:
    """A moment by which something must be over. Pass it down, so that no two steps get the same timeout."""

    __slots__ = ("_at_s", "_clock")

    def __init__(self, timeout_s: float, clock: Clock | None = None) -> None:
        self._clock: Clock = clock or _SYSTEM_CLOCK
        self._at_s = self._clock.now_s() + timeout_s

    def remaining_s(self) -> float:
        """Return the seconds left, never below zero."""
        return max(0.0, self._at_s - self._clock.now_s())

    def expired(self) -> bool:
        return self._clock.now_s() >= self._at_s
