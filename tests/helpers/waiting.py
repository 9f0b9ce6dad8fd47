"""Waiting in tests: for a condition, never for a time.

HANG_S is the one limit of all tests. It says "this hangs", and nothing about how fast something is: a host that takes
most of the processor time away makes a test slower by several times.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

HANG_S = 120.0
_LOOK_EVERY_S = 0.01


def wait_until(holds: Callable[[], object], what: str, *, every_s: float = _LOOK_EVERY_S) -> None:
    """Return when `holds()` is true. Raise AssertionError, which names what did not happen, after HANG_S."""
    deadline_s = time.monotonic() + HANG_S
    while not holds():
        assert time.monotonic() < deadline_s, f"not within {HANG_S:g} s: {what}"
        time.sleep(every_s)


async def until(holds: Callable[[], object], what: str, *, every_s: float = _LOOK_EVERY_S) -> None:
    """As wait_until(), while the event loop goes on."""
    deadline_s = time.monotonic() + HANG_S
    while not holds():
        assert time.monotonic() < deadline_s, f"not within {HANG_S:g} s: {what}"
        await asyncio.sleep(every_s)
