"""Least recently used: what was stored or looked up longest ago goes first, and of one look-up the end of the chain.

Exact while there are at most sweep.SAMPLE slots; above, the oldest thirty-second of a fair sample (see sweep.py).
"""

from __future__ import annotations

from array import array

import numpy as np
from numpy.typing import NDArray

from moonpool.master.policies.columns import view
from moonpool.master.policies.sweep import SweepPolicy


class LeastRecentlyUsed(SweepPolicy):
    def __init__(self) -> None:
        super().__init__()
        self._clock = 0  # counts references

    def insert(self, slot: int, parent: int | None, nbytes: int, fingerprint: int) -> None:
        if self._pending:
            self._account()
        self._enter(slot)
        self._clock += 1
        self._stamps[slot] = self._clock
        self._candidates.add(slot)

    def remove(self, slot: int) -> None:
        if self._pending:
            self._account()
        self._leave(slot)

    def _account(self) -> None:
        pending, self._pending = self._pending, array("I")
        # Where a slot comes twice, the later stamp stays.
        view(self._stamps)[view(pending)] = np.arange(self._clock + 1, self._clock + 1 + len(pending))
        self._clock += len(pending)

    def _ranks(self, slots: NDArray[np.uint32]) -> NDArray[np.float64]:
        return view(self._stamps)[slots].astype(np.float64)
