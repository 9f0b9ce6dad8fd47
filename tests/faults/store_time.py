"""Time that passes at once, in each process of a pool under test.

The master's promises last for long, so that a host that stalls breaks none of them, and a test that waits for their end
lets that time pass: first at those who rely on the promises, then at the master.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from moonpool.base.clock import AttendedClock, BootClock

_passed_s = 0.0


def pass_here(seconds: float) -> None:
    """Let the clients of this process see that so much time has passed."""
    global _passed_s
    _passed_s += seconds


@contextmanager
def passing_time() -> Iterator[None]:
    """Let this process's clients see the time that passes, inside the block only: others use that clock."""
    real = BootClock.now_s
    setattr(BootClock, "now_s", _now_s)  # noqa: B010 - mypy does not let a method be assigned
    try:
        yield
    finally:
        setattr(BootClock, "now_s", real)  # noqa: B010


def _now_s(_: BootClock) -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME) + _passed_s


class PassingClock(AttendedClock):
    """The master's."""

    def __init__(self, step_s: float) -> None:
        super().__init__(step_s)
        self.passed_s = 0.0

    def now_s(self) -> float:
        return super().now_s() + self.passed_s
