"""Waiting in a command for something that goes on elsewhere: prints what is left, and gives up in time."""

from __future__ import annotations

import sys
import time

from moonpool.base.errors import DeadlineExceeded

_POLL_S = 0.1


class BoundedWait:
    """`unmet` and `goes_on` are parts of the message when the time is up: what is not so yet, and what goes on."""

    def __init__(self, timeout_s: float, every_s: float, *, unmet: str, goes_on: str, prefix: str = "") -> None:
        self._timeout_s, self._every_s = timeout_s, every_s
        self._unmet, self._goes_on, self._prefix = unmet, goes_on, prefix
        now_s = time.monotonic()
        self._deadline_s, self._say_at_s = now_s + timeout_s, now_s + every_s

    def pause(self, left: str) -> None:
        """Wait a moment. Raise DeadlineExceeded if the time is up."""
        now_s = time.monotonic()
        if now_s > self._deadline_s:
            raise DeadlineExceeded(f"{self._unmet} after {self._timeout_s:g} s: {left}; {self._goes_on} goes on")
        if now_s >= self._say_at_s:
            print(f"{self._prefix}{left}", file=sys.stderr, flush=True)
            self._say_at_s = now_s + self._every_s
        time.sleep(_POLL_S)
