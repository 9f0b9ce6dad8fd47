"""Which transfer goes first: three priorities, and the rule that lets none of them starve. Pure."""

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


class PriorityOrder:
    """Whose turn it is among those that wait: the highest priority; but while lower ones have waited longer than
    `promote_after_s`, and longer than the highest, every fourth turn is theirs, each in turn. So high priority keeps
    three quarters of the work whatever there is, what came first is not held up by what came later, and nothing waits
    for ever.
    """

    def __init__(self, promote_after_s: float = DEFAULT_PROMOTE_AFTER_S) -> None:
        self._promote_after_s = promote_after_s
        self._passed_over = 0  # turns in a row that overdue work did not get
        self._promoted_last: Priority | None = None

    def order(self, since_s: Sequence[float | None], now_s: float) -> list[Priority]:
        """Who may go now, first choice first, given since when each priority waits (None: nothing of it does)."""
        waiting = [priority for priority in Priority if since_s[priority] is not None]
        overdue = self._overdue(since_s, now_s)
        if overdue and self._passed_over >= _EVERY - 1:
            waiting.remove(overdue[0])
            waiting.insert(0, overdue[0])
        return waiting

    def served(self, chosen: Priority, since_s: Sequence[float | None], now_s: float) -> None:
        """`chosen` had a turn; `since_s` is what order() was asked with."""
        overdue = self._overdue(since_s, now_s)
        if chosen in overdue:
            self._passed_over, self._promoted_last = 0, chosen
        else:
            self._passed_over = self._passed_over + 1 if overdue else 0

    def _overdue(self, since_s: Sequence[float | None], now_s: float) -> list[Priority]:
        """Those below the highest that have waited too long, whose turn it is first."""
        waits = [(since, priority) for priority in Priority if (since := since_s[priority]) is not None]
        if len(waits) < 2:
            return []
        before_s = min(waits[0][0], now_s - self._promote_after_s)
        late = [(priority is self._promoted_last, since, priority) for since, priority in waits[1:] if since < before_s]
        return [priority for _, _, priority in sorted(late)]
