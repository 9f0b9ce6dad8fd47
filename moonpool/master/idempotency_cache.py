"""Calls that must not be done twice: a copy of one may come late, by a connection its caller has given up.

The caller gives the call a number and says it again under the same number when no answer came. The first to arrive is
done; its answer is kept and given to the others. Without this a Remove could take what was stored after it. Copies
come by connections to this very process, so nothing of it need outlive it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import TypeVar

MAX_ERRANDS = 16_384
MAX_ANSWERS = 1 << 20  # in all errands together; one that has more is kept alone
R = TypeVar("R")


class IdempotencyCache:
    """Remembers the last ones: MAX_ERRANDS, or fewer with MAX_ANSWERS answers."""

    def __init__(self) -> None:
        self._done: OrderedDict[int, tuple[object, int]] = OrderedDict()
        self._num_answers = 0

    def once(self, number: int, num_answers: int, act: Callable[[], R]) -> R:
        """What `act` returned when it came first. What it raises is not kept; number 0 is none."""
        if not number:
            return act()
        if number in self._done:
            return self._done[number][0]  # type: ignore[return-value]
        result = act()
        self._done[number] = result, num_answers
        self._num_answers += num_answers
        while len(self._done) > MAX_ERRANDS or (self._num_answers > MAX_ANSWERS and len(self._done) > 1):
            _, (_, num_gone) = self._done.popitem(last=False)
            self._num_answers -= num_gone
        return result
