"""How much of one prompt's beginning is where, as the prefix index tells the policies."""

from __future__ import annotations

from bisect import bisect_left
from typing import NamedTuple


class Leading(NamedTuple):
    """`pool` blocks are in the pool, those at the positions `on_ssd` on SSD alone.

    `groups` are (run, mask of slots): every worker asked about is in one of them, by its number of leading blocks.
    """

    pool: int
    on_ssd: tuple[int, ...]
    groups: tuple[tuple[int, int], ...]

    def run_of(self, slot: int) -> int:
        return next(run for run, mask in self.groups if mask >> slot & 1)

    def num_on_ssd(self, start: int, end: int) -> int:
        """Among the blocks start..end of the pool's run."""
        return bisect_left(self.on_ssd, end) - bisect_left(self.on_ssd, start) if self.on_ssd else 0
