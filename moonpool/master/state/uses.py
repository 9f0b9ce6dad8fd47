"""How often objects were used lately: counted per window of time, in one column by slot. Pure.

A look-up only appends its slots to a list, as for the eviction policies; many uses are counted in one numpy step. A
cell of the column has the number of the window of the last use (32 bits), the uses in the window before that (16) and
those in it (16): eight bytes per object. An object that is used for the first time in a window starts from zero there;
nothing is swept. A use of an object that is gone when it is counted counts for the next object in its slot.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from moonpool.master.rules import PoolRules
from moonpool.master.state.key_index import Slots
from moonpool.master.state.table import ObjectTable

_MOST_PENDING = 8192
_MOST_WINDOWS = 0xFFFF_FFFF
_BITS = 0xFFFF
_WINDOW, _COUNT, _MASK = np.uint64(32), np.uint64(16), np.uint64(_BITS)
_FULL = np.uint64(_BITS - _MOST_PENDING)


class Counted(NamedTuple):
    """Uses that were counted together: the slot of each, and its uses in the window before and after that."""

    slots: Slots
    before: NDArray[np.uint64]
    after: NDArray[np.uint64]


class UseCounts:
    def __init__(self, rules: PoolRules, table: ObjectTable) -> None:
        self._window_s = rules.hot_window_s
        # numpy counts three times as fast in its own type: "Q" is another one of the same size
        self._cells, self._column = table.use, table.uses.view(np.uint64)
        self._pending = array("I")
        self._since_s = 0.0  # when the first of these was noted

    def add(self, slots: Sequence[int], now_s: float) -> bool:
        """Note a use of each. Return whether it is time to count()."""
        if not self._pending:
            self._since_s = now_s
        self._pending.extend(slots)
        return len(self._pending) > _MOST_PENDING

    def count(self) -> list[Counted]:
        """Count the uses that were noted, in the window of the first one. More than some 50,000 in it are not told
        apart.
        """
        if not self._pending:
            return []
        pending, self._pending = self._pending, array("I")
        noted = np.frombuffer(pending, np.uint32).astype(np.int64)
        window = self.window(self._since_s)
        starts = range(0, len(noted), _MOST_PENDING)
        return [self._count(noted[start : start + _MOST_PENDING], window) for start in starts]

    def _count(self, slots: Slots, window: int) -> Counted:
        cells = self._column[slots]
        late = cells >> _WINDOW != np.uint64(window)
        if late.any():
            old = cells[late]
            follows = old >> _WINDOW == np.uint64(window - 1 & _MOST_WINDOWS)
            cells[late] = np.uint64(window) << _WINDOW | np.where(follows, (old & _MASK) << _COUNT, np.uint64(0))
            self._column[slots] = cells
        before = cells & _MASK
        np.add.at(self._column, slots[before < _FULL], np.uint64(1))  # one slot may be there as often as all together
        return Counted(slots, before, self._column[slots] & _MASK)

    def window(self, now_s: float) -> int:
        """Return the number of the present window."""
        return int(now_s // self._window_s) & _MOST_WINDOWS

    def in_window(self, slot: int, now_s: float) -> int:
        """Return the uses in the present window so far."""
        cell: int = self._cells[slot]
        return cell & _BITS if self._age(cell, now_s) == 0 else 0

    def lately(self, slot: int, now_s: float) -> int:
        """Return the uses in the last whole window, or in the present one if these are more."""
        cell: int = self._cells[slot]
        age = self._age(cell, now_s)
        if age == 0:
            return max(cell & _BITS, cell >> 16 & _BITS)
        return cell & _BITS if age == 1 else 0

    def rate(self, slot: int, now_s: float) -> float:
        """Return the uses per second: those in the window of the last use and in the one before, over the time since
        then, until the end of the present window.
        """
        cell: int = self._cells[slot]
        uses = (cell & _BITS) + (cell >> 16 & _BITS)
        return uses / ((self._age(cell, now_s) + 2) * self._window_s)

    def _age(self, cell: int, now_s: float) -> int:
        """Return how many windows ago the last use was."""
        return self.window(now_s) - (cell >> 32) & _MOST_WINDOWS
