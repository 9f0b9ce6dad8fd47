"""When are blocks used again? Learned from what happens, kept as a table: how much is a block worth at its age?

Blocks fall into classes by how often they were used (0, 1, ... NUM_CLASSES - 1 or more times after being stored), ages
into bins of half an octave. Each time between two uses is an observation; one that has not ended yet (or whose end
will not be seen) counts as "at least so long". From these the table has, for each class and age, the best rate of
hits per block and unit of time that keeping such a block can bring, over all the times for which one might keep it:
the index of the optimal stopping problem. Evicting the lowest index is the best that age and class can tell. It may be
a young block: while a user still thinks, one who was here longer ago is nearer to coming back.
"""

from __future__ import annotations

from bisect import bisect_right

import numpy as np
from numpy.typing import NDArray

NUM_CLASSES = 6
_FIRST_AGE, _NUM_OCTAVES = 16, 24
EDGES = (0, *(round(_FIRST_AGE * 2 ** (half / 2)) for half in range(2 * _NUM_OCTAVES)))  # where each bin begins
_WIDTHS = np.diff(np.array([*EDGES, 2 * EDGES[-1]], np.float64))
_EDGES = np.array(EDGES, np.int64)
NUM_BINS = len(EDGES)
# Before anything is learned: about 2 % come back within any bin, so a block's worth falls with its age, as in LRU, and
# grows with its uses. It weighs as much as so many observations.
_PRIOR = 0.08 * np.arange(1, NUM_CLASSES + 1)[:, None] * _WIDTHS / (_WIDTHS + np.array(EDGES))
_PRIOR_WEIGHT = 16.0
Counts = NDArray[np.float64]


def bin_of(age: int) -> int:
    return bisect_right(EDGES, age) - 1


def bins_of(ages: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.searchsorted(_EDGES, ages, side="right") - 1


def count(classes: NDArray[np.uint8], ages: NDArray[np.int64], each: int) -> Counts:
    """How many there are of each class and age bin, when every one of these stands for `each`."""
    flat = np.bincount(classes.astype(np.int64) * NUM_BINS + bins_of(ages), minlength=NUM_CLASSES * NUM_BINS)
    return flat.reshape(NUM_CLASSES, NUM_BINS).astype(np.float64) * each


class ReuseModel:
    def __init__(self) -> None:
        self._ended = np.zeros((NUM_CLASSES, NUM_BINS))
        self._unseen = np.zeros((NUM_CLASSES, NUM_BINS))  # lasted at least so long
        self.table: Counts = np.zeros((NUM_CLASSES, NUM_BINS))
        self.rows: list[list[float]] = []
        self.learn(np.zeros((NUM_CLASSES, NUM_BINS)))

    def ended(self, uses: int, age: int) -> None:
        """A block of this class was used again at this age."""
        self._ended[uses, bin_of(age)] += 1

    def ended_many(self, counts: Counts) -> None:
        self._ended += counts

    def unseen(self, uses: int, age: int) -> None:
        """A block of this class was not used up to this age, and what becomes of it will not be seen."""
        self._unseen[uses, bin_of(age)] += 1

    def forget_half(self) -> None:
        """Makes room for what is new: the past counts half."""
        self._ended *= 0.5
        self._unseen *= 0.5

    def learn(self, waiting: Counts) -> None:
        """Makes the table anew; `waiting` counts the times that have not ended yet."""
        not_ended = self._unseen + waiting
        reached = np.cumsum((self._ended + not_ended)[:, ::-1], axis=1)[:, ::-1]
        exposed = reached - 0.5 * not_ended  # those last seen in a bin were in it for half of it, on average
        chance = (self._ended + _PRIOR_WEIGHT * _PRIOR) / (exposed + _PRIOR_WEIGHT)
        self.table = _best_rates(np.minimum(chance, 0.95))
        self.rows = self.table.tolist()


def _best_rates(chance: Counts) -> Counts:
    """From the chance of an end in each bin: max over T of P(end in (a, T]) / E[time in (a, T] until the end]."""
    lasting = np.cumprod(np.hstack([np.ones((NUM_CLASSES, 1)), 1 - chance]), axis=1)  # P(no end before the bin)
    held = np.cumsum(np.hstack([np.zeros((NUM_CLASSES, 1)), lasting[:, :-1] * (1 - chance / 2) * _WIDTHS]), axis=1)
    begin, until = np.triu_indices(NUM_BINS)
    rates = np.zeros((NUM_CLASSES, NUM_BINS, NUM_BINS))
    hits = lasting[:, begin] - lasting[:, until + 1]
    rates[:, begin, until] = hits / (held[:, until + 1] - held[:, begin])
    return np.asarray(rates.max(axis=2), np.float64)
