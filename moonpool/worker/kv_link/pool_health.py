"""Whether the pool is worth asking now: one that did not answer in time is left alone for a while.

A pool that is gone says so at once and costs nothing. One that hangs costs whoever asks it the whole timeout, and
hand-offs wait behind puts; so after the first such wait nobody asks before `rest_s` have passed. A node that does not
let this worker in answers at once too, but says what to do: that goes to the log.
"""

from __future__ import annotations

import logging
import math

from moonpool.base.clock import Clock, SystemClock
from moonpool.base.errors import DeadlineExceeded, MoonpoolError, Unauthorized
from moonpool.base.log import RateLimitedLog

_LOG = logging.getLogger(__name__)


class PoolHealth:
    """Shared by all who use the pool, on any thread."""

    def __init__(self, rest_s: float = 10.0, clock: Clock | None = None) -> None:
        self.rest_s = rest_s
        self._clock: Clock = clock or SystemClock()
        self._rests_until_s: float | None = None
        self._refusal_log = RateLimitedLog(_LOG, interval_s=math.inf)  # a refusal lasts until a setting changes

    @property
    def rests(self) -> bool:
        """True while the pool is better left alone; to the user that is a miss."""
        return self._rests_until_s is not None and self._clock.now_s() < self._rests_until_s

    def note(self, error: MoonpoolError | None) -> None:
        """Every error that the pool caused; None and all but a missed deadline change nothing."""
        if isinstance(error, Unauthorized):
            self._refusal_log.warning(
                "%s; its blocks are misses and none is put there until this setting is corrected", error, key=str(error)
            )
        if isinstance(error, DeadlineExceeded):
            self._rests_until_s = self._clock.now_s() + self.rest_s
