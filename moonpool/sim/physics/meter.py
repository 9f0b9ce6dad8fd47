"""Bytes that crossed a link: in all, and over time in bounded memory. Pure.

Time is cut into equal buckets, at most 256 of them; when it runs past them, pairs are merged and each is twice as
wide. A change of rate within a bucket costs an addition.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_MAX_BUCKETS = 256
_FIRST_BUCKET_S = 1.0


class Meter:
    """Follows one rate, in bytes per second, that changes now and then."""

    __slots__ = ("_before_nbytes", "_bucket_end_s", "_bucket_s", "_closed", "_nbytes", "_since_s", "rate")

    def __init__(self) -> None:
        self.rate = 0.0
        self._since_s = 0.0
        self._nbytes = 0.0  # until since_s
        self._bucket_s = _FIRST_BUCKET_S
        self._bucket_end_s = _FIRST_BUCKET_S  # of the bucket that is filling
        self._before_nbytes = 0.0  # in all buckets before it
        self._closed: list[float] = []

    def set_rate(self, rate: float, now_s: float) -> None:
        """From now on that many bytes cross per second."""
        if now_s >= self._bucket_end_s:
            self._close_until(now_s)
        if self.rate:
            self._nbytes += self.rate * (now_s - self._since_s)
        self._since_s = now_s
        self.rate = rate

    def over_time(self, now_s: float) -> tuple[float, NDArray[np.float64]]:
        """(seconds per bucket, bytes in each) from time 0 until now; the last bucket may be part of one."""
        self.set_rate(self.rate, now_s)
        return self._bucket_s, np.array([*self._closed, self._nbytes - self._before_nbytes])

    def _close_until(self, now_s: float) -> None:
        while now_s >= self._bucket_s * _MAX_BUCKETS:
            self._merge_pairs()
        while now_s >= self._bucket_end_s:
            self._nbytes += self.rate * (self._bucket_end_s - self._since_s)
            self._since_s = self._bucket_end_s
            self._closed.append(self._nbytes - self._before_nbytes)
            self._before_nbytes = self._nbytes
            self._bucket_end_s += self._bucket_s

    def _merge_pairs(self) -> None:
        closed = self._closed
        if len(closed) % 2:
            self._before_nbytes -= closed.pop()  # the first half of what is now the bucket that is filling
        self._closed = [one + other for one, other in zip(closed[::2], closed[1::2], strict=True)]
        self._bucket_s *= 2
        self._bucket_end_s = (len(self._closed) + 1) * self._bucket_s
