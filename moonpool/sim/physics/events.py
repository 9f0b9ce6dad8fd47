"""The event queue on the virtual clock. Pure.

Events at the same time come in the order in which they were put. Cancelling costs nothing at once: the event is
emptied where it lies and skipped later; when most of the queue is such, it is swept.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import Any, Generic, TypeVar

from moonpool.base.errors import InvalidInput

T = TypeVar("T")

# [time, order, payload]: a list, so that it can be emptied; two never compare as far as their payload.
Handle = list[Any]

_CANCELLED = object()
_SWEEP_FROM = 64


class EventQueue(Generic[T]):
    """What is to happen when."""

    __slots__ = ("_entries", "_num_cancelled", "_num_put", "now_s")

    def __init__(self) -> None:
        self._entries: list[Handle] = []
        self._num_put = 0
        self._num_cancelled = 0
        self.now_s = 0.0  # the time of the latest event popped

    def put(self, time_s: float, payload: T) -> Handle:
        """Something is to happen then. Keep what is returned to cancel it."""
        if not time_s >= self.now_s:
            raise InvalidInput(f"an event at {time_s} s, when it is {self.now_s} s")
        self._num_put = order = self._num_put + 1
        entry = [time_s, order, payload]
        heappush(self._entries, entry)
        return entry

    def cancel(self, handle: Handle) -> None:
        """It will not happen. What has happened or was cancelled is left alone."""
        if handle[2] is _CANCELLED:
            return
        handle[2] = _CANCELLED
        self._num_cancelled += 1
        if self._num_cancelled > _SWEEP_FROM and 2 * self._num_cancelled > len(self._entries):
            self._sweep()

    def pop(self) -> tuple[float, T] | None:
        """The next event and its time, to which the clock moves; None when there is none."""
        entries = self._entries
        while entries:
            entry = heappop(entries)
            payload = entry[2]
            if payload is not _CANCELLED:
                entry[2] = _CANCELLED  # a handle kept beyond its event cancels nothing
                self.now_s = time_s = entry[0]
                return time_s, payload
            self._num_cancelled -= 1
        return None

    def next_s(self) -> float | None:
        """When the next event is."""
        entries = self._entries
        while entries:
            if entries[0][2] is not _CANCELLED:
                time_s: float = entries[0][0]
                return time_s
            heappop(entries)
            self._num_cancelled -= 1
        return None

    def __len__(self) -> int:
        return len(self._entries) - self._num_cancelled

    def _sweep(self) -> None:
        self._entries = [entry for entry in self._entries if entry[2] is not _CANCELLED]
        heapify(self._entries)
        self._num_cancelled = 0
