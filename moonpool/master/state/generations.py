"""Numbers of allocations: each higher than all before it, across restarts too. Pure."""

from __future__ import annotations

EPOCH_BITS = 32
_RANGE = (1 << EPOCH_BITS) - 1
_HALF_RANGE = 1 << (EPOCH_BITS - 1)
_QUARTER_RANGE = 1 << (EPOCH_BITS - 2)


class Generations:
    """`epoch` is higher in every life of the master, and stands in the upper half."""

    def __init__(self, epoch: int) -> None:
        self.last = epoch << EPOCH_BITS

    @property
    def limit(self) -> int:
        """The highest that can be given out for a long time: the end of the epoch's range, or of the next one once half
        of it is used. Nodes refuse writes above it, so it moves long before the numbers reach it.
        """
        return (self.last + _HALF_RANGE) | _RANGE

    def are_admitted_up_to(self, limit: int) -> bool:
        """Whether a node with that limit lets in the writers of all that are given out in the near future."""
        return limit - self.last >= _QUARTER_RANGE

    def take(self, count: int = 1) -> int:
        """The first of `count` new ones."""
        first = self.last + 1
        self.last += count
        return first
