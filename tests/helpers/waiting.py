"""Waiting in tests: for a condition, never for a time.

HANG_S is the one limit of all tests. It says "this hangs", and nothing about how fast something is: a host that takes
most of the processor time away makes a test slower by several times.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator

HANG_S = 120.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.002, 0.1


def wait_until(holds: Callable[[], object], what: str) -> None:
    """Return when `holds()` is true. Raise AssertionError, which names what did not happen, after HANG_S."""
    for pause_s in _pauses_s(what):
        if holds():
            return
        time.sleep(pause_s)


async def until(holds: Callable[[], object], what: str) -> None:
    """As wait_until(), while the event loop goes on."""
    for pause_s in _pauses_s(what):
        if holds():
            return
        await asyncio.sleep(pause_s)


def _pauses_s(what: str) -> Iterator[float]:
    """Yield growing pauses: what comes soon is seen soon, and waiting for long takes no processor time from others."""
    began_s, pause_s = time.monotonic(), _FIRST_PAUSE_S
    while time.monotonic() < began_s + HANG_S:
        yield pause_s
        pause_s = min(_LONGEST_PAUSE_S, 1.3 * pause_s)
    raise AssertionError(f"not within {HANG_S:g} s: {what}")
