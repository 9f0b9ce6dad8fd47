"""Large copies within this machine by two threads: each takes the next object when it is done with one.

Copying and checking let other threads run, so a second processor nearly halves the time. What is small is done sooner
than another thread could be woken.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeVar

from moonpool.base.checksum import runs_beside_others
from moonpool.store.client.transfer_window import TransferThreads

T = TypeVar("T")

_LEAST_NBYTES = 2 * 1024 * 1024  # in all
_LEAST_ITEM_NBYTES = 128 * 1024  # on average: of small ones most of the time is Python's, which has one lock


def is_large(nbytes: int, num_items: int) -> bool:
    """Whether a second thread helps with so much."""
    return num_items > 1 and nbytes >= max(_LEAST_NBYTES, _LEAST_ITEM_NBYTES * num_items) and runs_beside_others()


def side_by_side(crew: TransferThreads, items: Sequence[T], nbytes: int, work: Callable[[T], None]) -> None:
    """Does the work for every item, of `nbytes` together, in any order. Raises what it raises, when all has ended."""
    if not is_large(nbytes, len(items)):
        for item in items:
            work(item)
        return
    left = deque(items)

    def take_turns() -> None:
        while left:
            try:
                item = left.popleft()
            except IndexError:  # the other one was quicker
                return
            work(item)

    crew.together(take_turns, left.clear)
