"""Which puts a client has in its hands. Pure, thread-safe.

An answer to a PutStart may be lost, and with it the knowledge of space that was granted; the master would keep it for
as long as this process lives. So every PutStart says up to which generation this client has nothing in its hands.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable


class Grants:
    """Generations rise, so what a call is granted is above all that was known when it was begun."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: set[int] = set()
        self._asking: list[int] = []  # per call under way: the last generation that was known when it was begun
        self._last = 0
        self._is_doubtful = False

    def ask(self) -> tuple[int, int]:
        """A call begins: what to end it with, and up to which generation nothing is in anybody's hands."""
        with self._lock:
            self._asking.append(self._last)
            return self._last, min((self._last, *self._asking, *(each - 1 for each in self._open)))

    def end_ask(self, began_at: int) -> None:
        """It ended, however; what it was granted is taken up before."""
        with self._lock:
            self._asking.remove(began_at)

    def doubt(self) -> None:
        """An answer was lost."""
        self._is_doubtful = True

    def take_doubt(self) -> bool:
        """Whether an answer was lost since this was last asked."""
        was, self._is_doubtful = self._is_doubtful, False
        return was

    def take_up(self, generations: Iterable[int], last: int) -> None:
        """These were granted (0: not), and `last` was the last one given to anybody."""
        with self._lock:
            self._open.update(each for each in generations if each)
            self._last = max(self._last, last)

    def let_go(self, generations: Iterable[int]) -> None:
        """They were ended or given back; nobody writes there any more."""
        with self._lock:
            self._open.difference_update(generations)
