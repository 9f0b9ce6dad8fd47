"""Complaints about what goes wrong a thousand times a second: said once a minute."""

from __future__ import annotations

import logging
import time

_EVERY_S = 60.0


class RateLimitedWarning:
    """Says the first one at once, and others only when a minute has passed."""

    def __init__(self, log: logging.Logger, text: str) -> None:
        """`text` has one place for the error."""
        self._log = log
        self._text = text
        self._said_s = -_EVERY_S

    def warn(self, error: Exception) -> None:
        now_s = time.monotonic()
        if now_s >= self._said_s + _EVERY_S:
            self._said_s = now_s
            self._log.warning(self._text + " (said once a minute at most)", error)
