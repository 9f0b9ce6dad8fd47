"""Segments that this client could not read, remembered until they can be read again.

Whatever lies only there does not exist for this client meanwhile: asking would cost every caller a failed transfer. A
thread looks again, soon at first and then every few seconds; it runs while something is remembered. An incarnation that
the master does not list any more is forgotten: what its node offers now is another one.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import NamedTuple

from moonpool.base.backoff import Backoff
from moonpool.base.errors import BreakerOpen, Cancelled, HandleClosed, MoonpoolError, Unauthorized, Unavailable
from moonpool.store.messages import Placement

_LOG = logging.getLogger(__name__)
_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 2.0
_JOIN_TIMEOUT_S = 2.0
_NOT_THE_SEGMENTS = (BreakerOpen, Cancelled, HandleClosed)  # errors of this side, or of the master

SegmentKey = tuple[str, int]  # name and incarnation


class _Failure(NamedTuple):
    error: MoonpoolError
    place: Placement  # where it was noticed


class UnreadableSegments:
    """Thread-safe. `is_over(place)` finds out, on a thread of its own, whether a segment can be read again or its
    incarnation is gone.
    """

    def __init__(self, is_over: Callable[[Placement], bool]) -> None:
        self._is_over = is_over
        self._lock = threading.Lock()
        self._failures: dict[SegmentKey, _Failure] = {}
        self.listed: tuple[SegmentKey, ...] = ()  # what is remembered now
        self._looking: threading.Thread | None = None
        self._ended = threading.Event()

    def note(self, place: Placement, error: MoonpoolError) -> None:
        """A read there failed. Errors that say nothing about reaching the segment are ignored."""
        if not isinstance(error, Unavailable | Unauthorized) or isinstance(error, _NOT_THE_SEGMENTS):
            return
        key = (place.segment, place.incarnation)
        with self._lock:
            if key in self._failures or self._ended.is_set():
                return
            self._change({**self._failures, key: _Failure(error, place)})
            if self._looking is None or not self._looking.is_alive():
                self._looking = threading.Thread(target=self._look_again, name="store-segments", daemon=True)
                self._looking.start()
        # An owner that refuses this process says what to do, and the caller gets that error: once is enough.
        level = logging.DEBUG if isinstance(error, Unauthorized) else logging.WARNING
        _LOG.log(level, "segment %s cannot be read, so what lies only there is a miss: %s", place.segment, error)

    def failure(self, segment: str, incarnation: int) -> MoonpoolError | None:
        """Why it could not be read; None when it could be, as far as known."""
        found = self._failures.get((segment, incarnation))
        return None if found is None else type(found.error)(str(found.error))

    def close(self) -> None:
        """Idempotent."""
        with self._lock:
            self._ended.set()
            looking = self._looking
        if looking is not None:
            looking.join(_JOIN_TIMEOUT_S)

    def _look_again(self) -> None:
        backoff = Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)
        while not self._ended.wait(backoff.next_s()):
            over = [key for key, failure in list(self._failures.items()) if self._is_over(failure.place)]
            for segment, _ in over:
                _LOG.info("segment %s can be read again, or its node has come back with another", segment)
            with self._lock:
                self._change({key: each for key, each in self._failures.items() if key not in over})
                if not self._failures:
                    self._looking = None
                    return

    def _change(self, failures: dict[SegmentKey, _Failure]) -> None:
        self._failures, self.listed = failures, tuple(failures)
