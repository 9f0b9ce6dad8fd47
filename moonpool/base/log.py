"""Logging: one line per event on standard error, and a limit for warnings that may repeat thousands of times."""

from __future__ import annotations

import logging
import sys
import threading
from math import inf

from moonpool.base.clock import Clock, SystemClock


def setup_logging(role: str, level: str = "INFO") -> None:
    """Set up the root logger, once per process. Lines have time, level, role and text.

    `role` names the process in every line, so that a launcher's mixed output can be read.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"%(asctime)s %(levelname).1s {role:<10} %(message)s", datefmt="%H:%M:%S"))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


class RateLimitedLog:
    """Logs warnings at most once per key and `interval_s` (inf: once per key). Thread-safe.

    At most `max_keys` keys are logged within one interval: a peer that causes warnings cannot fill the disk.
    """

    def __init__(
        self, log: logging.Logger, *, interval_s: float = 60.0, max_keys: int = 64, clock: Clock | None = None
    ) -> None:
        self._log = log
        self._interval_s, self._max_keys = interval_s, max_keys
        self._clock: Clock = clock or SystemClock()
        self._lock = threading.Lock()
        self._logged_s: dict[str, float] = {}
        self._hint = "" if interval_s == inf else f" (logged at most once per {interval_s:g} s)"

    def warning(self, text: str, *args: object, key: str | None = None) -> None:
        """Log `text % args`, unless a warning with the same key was logged lately. The key is `text` by default."""
        if self._is_due(text if key is None else key):
            self._log.warning(text + self._hint, *args)

    def _is_due(self, key: str) -> bool:
        now_s = self._clock.now_s()
        with self._lock:
            self._logged_s = {each: at_s for each, at_s in self._logged_s.items() if now_s - at_s < self._interval_s}
            if key in self._logged_s or len(self._logged_s) >= self._max_keys:
                return False
            self._logged_s[key] = now_s
            return True
