"""Tells the person at the terminal how a start is going: a line per role, and a sign of life every two seconds.

Coloured on a terminal, plain lines anywhere else. Everything goes to standard error, between the roles' own lines.
"""

from __future__ import annotations

import asyncio
import sys

from moonpool.base.clock import Clock, SystemClock

_ALIVE_EVERY_S = 2.0


class Progress:
    """One start of the whole service."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._begin_s = self._clock.now_s()
        self._since_s: dict[str, float] = {}  # roles that are starting now

    @property
    def elapsed_s(self) -> float:
        return self._clock.now_s() - self._begin_s

    def starting(self, name: str) -> None:
        self._since_s[name] = self._clock.now_s()

    def ready(self, name: str) -> None:
        since_s = self._since_s.pop(name, None)
        if since_s is not None:
            say(f"{name} is ready ({self._clock.now_s() - since_s:.1f} s)", "green")

    def ended(self, name: str) -> None:
        self._since_s.pop(name, None)

    async def keep_alive(self) -> None:
        """Says what is being waited for, until cancelled."""
        while True:
            await asyncio.sleep(_ALIVE_EVERY_S)
            if self._since_s:
                longest_s = self._clock.now_s() - min(self._since_s.values())
                say(f"starting {', '.join(self._since_s)} ... {longest_s:.0f} s")


def say(text: str, colour: str | None = None) -> None:
    """One line on standard error."""
    if sys.stderr.isatty():
        from rich.console import Console  # here: only a terminal needs it

        Console(stderr=True, highlight=False).print(f"moonpool: {text}", style=colour, markup=False)
    else:
        print(f"moonpool: {text}", file=sys.stderr, flush=True)
