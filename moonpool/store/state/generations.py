"""Numbers of allocations: each higher than all before it, across restarts too. Pure."""

from __future__ import annotations

EPOCH_BITS = 32


class Generations:
    """`epoch` is higher in every life of the master, and stands in the upper half."""

    def __init__(self, epoch: int) -> None:
        self.last = epoch << EPOCH_BITS

    def take(self, count: int = 1) -> int:
        """The first of `count` new ones."""
        first = self.last + 1
        self.last += count
        return first
