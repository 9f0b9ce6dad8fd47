"""Three priorities of transfers, and the rule by which none of them starves. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

DEFAULT_PROMOTE_AFTER_S = 0.1
_EVERY = 4


class Priority(IntEnum):
    """Smaller goes first."""

    HANDOFF = 0  # a request's KV on its way to decode: a user waits for the next token
    PREFETCH = 1  # KV that will be needed soon
    REPLICATION = 2  # copies for later


_ALL = tuple(Priority)  # looked at for every slice, and faster than the class


class PriorityOrder:
    """Chooses among the priorities that have work: the highest one. But while a lower priority has waited longer than
    `promote_after_s`, and longer than the highest, it gets every fourth turn; several such priorities share that turn
    round-robin. So the highest priority keeps three quarters of the turns, and nothing waits for ever.
    """

    def __init__(self, promote_after_s: float = DEFAULT_PROMOTE_AFTER_S) -> None:
        self._promote_after_s = promote_after_s
        self._passed_over = 0  # turns in a row that overdue work did not get
        self._promoted_last: Priority | None = None

    def order(self, since_s: Sequence[float | None], now_s: float) -> list[Priority]:
        """Return the priorities that have work, first choice first. `since_s` says since when each one waits; None: it
        has no work.
        """
        waiting = [priority for priority in _ALL if since_s[priority] is not None]
        if len(waiting) < 2:
            return waiting
        overdue = self._overdue(since_s, now_s)
        if overdue and self._passed_over >= _EVERY - 1:
            waiting.remove(overdue[0])
            waiting.insert(0, overdue[0])
        return waiting

    def served(self, chosen: Priority, since_s: Sequence[float | None], now_s: float) -> None:
        """Record that `chosen` had a turn; `since_s` as given to order()."""
        overdue = self._overdue(since_s, now_s)
        if chosen in overdue:
            self._passed_over, self._promoted_last = 0, chosen
        else:
            self._passed_over = self._passed_over + 1 if overdue else 0

    def _overdue(self, since_s: Sequence[float | None], now_s: float) -> list[Priority]:
        """Return the lower priorities that have waited too long, the next one to be served first."""
        if since_s.count(None) >= len(since_s) - 1:
            return []
        waits = [(since, priority) for priority in _ALL if (since := since_s[priority]) is not None]
        before_s = min(waits[0][0], now_s - self._promote_after_s)
        late = [(priority is self._promoted_last, since, priority) for since, priority in waits[1:] if since < before_s]
        return [priority for _, _, priority in sorted(late)]
