"""How much lies at or before a moment: weights on a time line, added, taken away and summed in O(log time). Pure.

A binary indexed tree over ticks of 1/1024 s that keeps only its nodes that are not zero, so that memory follows what
is there (at most one node per doubling of time and entry) and a process may run for years. Moments are rounded down
to their tick.
"""

from __future__ import annotations

TICKS_PER_S = 1024


def tick_of(at_s: float) -> int:
    return int(at_s * TICKS_PER_S // 1)


class TimeSums:
    """Weights are integers; those that belong together can share one (see decode_forecast)."""

    __slots__ = ("_nodes", "_size", "_total")

    def __init__(self) -> None:
        self._nodes: dict[int, int] = {}
        self._size = 1 << 16  # a power of two; nodes have the numbers 1.._size
        self._total = 0

    @property
    def total(self) -> int:
        return self._total

    def add(self, at_s: float, weight: int) -> None:
        """A negative weight takes away what was added at that moment."""
        place = tick_of(at_s) + 1
        assert place > 0, "time starts at zero"
        while place > self._size:
            self._grow()
        self._total += weight
        nodes = self._nodes
        while place <= self._size:
            value = nodes.get(place, 0) + weight
            if value:
                nodes[place] = value
            else:
                nodes.pop(place, None)
            place += place & -place

    def until(self, at_s: float) -> int:
        """The sum of all weights at or before that moment."""
        place = tick_of(at_s) + 1
        if place >= self._size:
            return self._total
        total, nodes = 0, self._nodes
        while place > 0:
            total += nodes.get(place, 0)
            place &= place - 1
        return total

    def _grow(self) -> None:
        # The top node sums all; those between the old and the new top are zero.
        self._size *= 2
        if self._total:
            self._nodes[self._size] = self._total
