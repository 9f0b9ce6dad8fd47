"""The prefix-aware policy: a block outlives its children, and its worth is learned from when blocks are used again.

- Only blocks without a stored child are candidates. After the last child is evicted, its parent follows at once if it
  is worth no more than the present victims; so a cold conversation is evicted whole, from its end, without a hole.
- The worth of a block is the rate of hits that keeping it can bring (ReuseModel), times what a hit saves per byte.
  Computing a block costs in proportion to its bytes, and more the longer its prefix: 1 + cost_growth * depth.
- insert() names the parent. A block without a named parent is ranked by its own uses and age.

ReuseModel learns when blocks are used again. Blocks fall into classes by the number of their uses (0, 1, ...
NUM_CLASSES - 1 or more after being stored), ages into bins of half an octave. Each time between two uses is an
observation; a time that has not ended, or whose end will not be seen, counts as "at least this long".
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from moonpool.master.policies.columns import Ghosts, grow, view
from moonpool.master.policies.sweep import SweepPolicy

NUM_CLASSES = 6
_FIRST_AGE, _NUM_OCTAVES = 16, 24
EDGES = (0, *(round(_FIRST_AGE * 2 ** (half / 2)) for half in range(2 * _NUM_OCTAVES)))  # the first age of each bin
_WIDTHS = np.diff(np.array([*EDGES, 2 * EDGES[-1]], np.float64))
_EDGES = np.array(EDGES, np.int64)
NUM_BINS = len(EDGES)
# Before anything is learned: about 2 % are used again within any bin, so a block's worth falls with its age, as in LRU,
# and grows with its uses. The prior weighs as much as _PRIOR_WEIGHT observations.
_PRIOR = 0.08 * np.arange(1, NUM_CLASSES + 1)[:, None] * _WIDTHS / (_WIDTHS + np.array(EDGES))
_PRIOR_WEIGHT = 16.0
Counts = NDArray[np.float64]


def bin_of(age: int) -> int:
    return bisect_right(EDGES, age) - 1


def bins_of(ages: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.searchsorted(_EDGES, ages, side="right") - 1


def count(classes: NDArray[np.uint8], ages: NDArray[np.int64], each: int) -> Counts:
    """Count the blocks of each class and age bin; each item stands for `each` blocks."""
    flat = np.bincount(classes.astype(np.int64) * NUM_BINS + bins_of(ages), minlength=NUM_CLASSES * NUM_BINS)
    return flat.reshape(NUM_CLASSES, NUM_BINS).astype(np.float64) * each


class ReuseModel:
    def __init__(self) -> None:
        self._ended = np.zeros((NUM_CLASSES, NUM_BINS))
        self._unseen = np.zeros((NUM_CLASSES, NUM_BINS))  # times of which only the beginning was seen
        self.table: Counts = np.zeros((NUM_CLASSES, NUM_BINS))
        self.rows: list[list[float]] = []
        self.learn(np.zeros((NUM_CLASSES, NUM_BINS)))

    def ended(self, uses: int, age: int) -> None:
        """Count a block of this class that was used again at this age."""
        self._ended[uses, bin_of(age)] += 1

    def ended_many(self, counts: Counts) -> None:
        self._ended += counts

    def unseen(self, uses: int, age: int) -> None:
        """Count a block of this class that was not used up to this age and is not watched any longer."""
        self._unseen[uses, bin_of(age)] += 1

    def forget_half(self) -> None:
        """Let the past count half."""
        self._ended *= 0.5
        self._unseen *= 0.5

    def learn(self, waiting: Counts) -> None:
        """Recompute the table; `waiting` counts the times that have not ended yet."""
        not_ended = self._unseen + waiting
        reached = np.cumsum((self._ended + not_ended)[:, ::-1], axis=1)[:, ::-1]
        exposed = reached - 0.5 * not_ended  # a block last seen in a bin was there for half of it, on average
        chance = (self._ended + _PRIOR_WEIGHT * _PRIOR) / (exposed + _PRIOR_WEIGHT)
        self.table = _best_rates(np.minimum(chance, 0.95))
        self.rows = self.table.tolist()


def _best_rates(chance: Counts) -> Counts:
    """Return the best rates, from the chance of an end in each bin: max over T of P(end in (a, T]) / E[time in (a, T]
    until the end].
    """
    lasting = np.cumprod(np.hstack([np.ones((NUM_CLASSES, 1)), 1 - chance]), axis=1)  # P(no end before the bin)
    held = np.cumsum(np.hstack([np.zeros((NUM_CLASSES, 1)), lasting[:, :-1] * (1 - chance / 2) * _WIDTHS]), axis=1)
    begin, until = np.triu_indices(NUM_BINS)
    rates = np.zeros((NUM_CLASSES, NUM_BINS, NUM_BINS))
    hits = lasting[:, begin] - lasting[:, until + 1]
    rates[:, begin, until] = hits / (held[:, until + 1] - held[:, begin])
    return np.asarray(rates.max(axis=2), np.float64)


_FEW_PENDING, _MOST_OBSERVED = 24, 1024
_MAX_DEPTH = 65_535
_SURVEY = 8192  # stored blocks, and as many ghosts, sampled when the model learns
# cost_growth per token of a block for LLaMA3-70B (from prefill times in Mooncake, FAST'25, figure 14). It is not the
# default: on the conversation trace it loses hits at some capacities, and the prefill time saved changes by -2 % to
# +4 % without a clear direction (benchmarks/eviction.py).
COST_GROWTH_PER_TOKEN = 2 * 7.79e-4 / 0.1123 / 1024


class PrefixAware(SweepPolicy):
    def __init__(self, cost_growth: float = 0.0) -> None:
        super().__init__()
        self._cost_growth = cost_growth
        self._clock = 0  # counts inserts
        self._uses = bytearray()  # after the first, up to NUM_CLASSES - 1
        self._fingerprints = array("I")
        self._lives = array("I")  # by slot: how many objects have used it
        self._parents, self._parent_lives = (
            array("I"),
            array("I"),
        )  # the parent's slot + 1 (0: none), and its count in _lives
        self._children = array("I")  # how many slots in the policy have it as parent
        self._depths = array("H")
        self._model, self._ghosts = ReuseModel(), Ghosts()
        self._watch_mask = 0  # keys whose fingerprints have none of these bits are watched
        self._survey_phase = 0
        self._learn_at, self._forget_at = 1024, 4096

    def insert(self, slot: int, parent: int | None, nbytes: int, fingerprint: int) -> None:
        if self._pending:
            self._apply_pending()
        if parent is not None and parent >= len(self._present):
            self._reserve(parent)
        self._clock += 1
        self._enter(slot)
        if self._fingerprints[slot] != fingerprint or not self._lives[slot]:
            self._start_object(slot, fingerprint)
        self._stamps[slot] = self._clock
        self._link(slot, None if parent == slot else parent)
        if self._clock >= self._learn_at:
            self._learn()

    def insert_many(
        self, slots: Sequence[int], parents: Sequence[int | None] | None, fingerprints: Sequence[int]
    ) -> None:
        if self._pending:
            self._apply_pending()
        highest = max(max(slots), max((each for each in parents or () if each is not None), default=0))
        if highest >= len(self._present):
            self._reserve(highest)
        at, marks = np.array(slots, np.int64), np.array(fingerprints, np.uint32)
        stamps = np.arange(self._clock + 1, self._clock + 1 + len(slots))
        self._clock += len(slots)
        self._count += len(slots)
        assert not view(self._present)[at].any(), "none of the slots is in the policy"
        view(self._present)[at] = 1
        view(self._fingerprints)[at] = marks
        view(self._lives)[at] += np.uint32(1)
        view(self._stamps)[at] = stamps
        for column in (self._uses, self._children, self._depths, self._parents):
            view(column)[at] = 0
        self._recognise(at, marks, stamps)
        if parents is not None:
            self._link_many(slots, parents)
            at = at[view(self._children)[at] == 0]
        self._candidates.add_many(at)
        if self._clock >= self._learn_at:
            self._learn()

    def remove(self, slot: int) -> None:
        if self._pending:
            self._apply_pending()
        is_victim = slot == self._offered
        self._leave(slot)
        if not self._fingerprints[slot] & self._watch_mask:
            age = self._clock - self._stamps[slot]
            old = self._ghosts.put(self._fingerprints[slot], self._uses[slot], self._clock, age)
            if old is not None:
                self._model.unseen(*old)
        parent = self._parent(slot)
        if parent is not None:
            self._unlink(slot, parent, is_victim)

    def check_integrity(self) -> None:
        super().check_integrity()
        children = Counter[int]()  # of the slots that have some: columns are much longer than what they hold
        for slot in np.flatnonzero(view(self._present)).tolist():
            parent = self._parent(slot)
            if parent is not None:
                children[parent] += 1
                assert self._depths[parent] < self._depths[slot], "a parent is nearer to the root"
        for slot in np.flatnonzero(view(self._present)).tolist():
            assert self._children[slot] == children[slot], "a parent knows how many children it has"
            assert (slot in self._candidates) == (not children[slot]), "candidates are those without a child"

    # the chain

    def _parent(self, slot: int) -> int | None:
        """Return the parent's slot, None if there is none or another object uses that slot now."""
        parent = self._parents[slot] - 1
        if parent < 0 or self._lives[parent] != self._parent_lives[slot]:
            return None
        return parent

    def _link(self, slot: int, parent: int | None) -> None:
        """Link the slot to its parent, and make it a candidate in place of the parent. The depth grows along every
        link, even a wrong one, so there is no cycle.
        """
        is_leaf = not self._children[slot]
        if parent is None or self._depths[parent] >= (_MAX_DEPTH if is_leaf else self._depths[slot]):
            self._parents[slot] = 0
            if is_leaf:
                self._candidates.add(slot)
            return
        self._parents[slot], self._parent_lives[slot] = parent + 1, self._lives[parent]
        self._children[parent] += 1
        if is_leaf:
            self._depths[slot] = self._depths[parent] + 1
            self._candidates.replace(parent, slot)
        else:
            self._candidates.discard(parent)

    def _link_many(self, slots: Sequence[int], parents: Sequence[int | None]) -> None:
        """Link new slots to their parents, as _link(). The caller adds the candidates when all are linked."""
        children, depths, lives = self._children, self._depths, self._lives
        for slot, parent in zip(slots, parents, strict=True):
            if parent is None or parent == slot or depths[parent] >= _MAX_DEPTH:
                continue
            self._parents[slot], self._parent_lives[slot] = parent + 1, lives[parent]
            if not children[parent]:
                self._candidates.discard(parent)
            children[parent] += 1
            depths[slot] = depths[parent] + 1

    def _unlink(self, slot: int, parent: int, is_victim: bool) -> None:
        self._parents[slot] = 0
        self._children[parent] -= 1
        if self._children[parent] or not self._present[parent]:
            return
        self._candidates.add(parent)
        if is_victim and self._rank(parent) <= self._worst_rank:
            self._batch.append((parent, self._stamps[parent]))

    def _held_back(self, kept: set[int]) -> Iterator[int]:
        """Yield the other slots of chains that end in kept slots, those nearest to the end first."""
        for end in tuple(kept):
            slot = self._parent(end) if end in self else None
            while slot is not None and slot in self and slot not in kept:
                kept.add(slot)
                above = self._parent(slot)
                yield slot
                slot = above

    # uses and ages

    def _num_uses(self, slot: int) -> int:
        return self._uses[slot] if slot < len(self._uses) else 0

    def _rank(self, slot: int) -> float:
        rate = self._model.rows[self._uses[slot]][bin_of(self._clock - self._stamps[slot])]
        return rate * (1 + self._cost_growth * self._depths[slot])

    def _ranks(self, slots: NDArray[np.uint32]) -> NDArray[np.float64]:
        ages = self._clock - view(self._stamps)[slots]
        rates = self._model.table[view(self._uses)[slots], bins_of(ages)]
        costs = 1 + self._cost_growth * view(self._depths)[slots]
        return np.asarray(rates * costs, np.float64)

    def _start_object(self, slot: int, fingerprint: int) -> None:
        """Start a slot with another object, which is new or comes back. (An object that was only pinned in between
        keeps its columns.)
        """
        self._fingerprints[slot] = fingerprint
        self._lives[slot] = self._lives[slot] + 1 & 0xFFFF_FFFF
        self._uses[slot] = self._children[slot] = self._depths[slot] = 0
        ghost = None if fingerprint & self._watch_mask else self._ghosts.pop(fingerprint, self._clock)
        if ghost is not None:
            self._model.ended(*ghost)
            self._uses[slot] = min(ghost[0] + 1, NUM_CLASSES - 1)

    def _recognise(self, slots: NDArray[np.int64], fingerprints: NDArray[np.uint32], stamps: NDArray[np.int64]) -> None:
        """Restore the uses of objects that come back."""
        watched = np.flatnonzero(fingerprints & np.uint32(self._watch_mask) == 0)
        found, uses, ages = self._ghosts.pop_many(fingerprints[watched], stamps[watched])
        if len(found):
            self._model.ended_many(count(uses, ages, each=1))
            view(self._uses)[slots[watched[found]]] = np.minimum(uses + np.uint8(1), np.uint8(NUM_CLASSES - 1))

    def _apply_pending(self) -> None:
        pending, self._pending = self._pending, array("I")
        if len(pending) <= _FEW_PENDING:
            for slot in pending:
                self._apply_one(slot)
            return
        slots, uses, stamps = view(pending), view(self._uses), view(self._stamps)
        step = -(-len(slots) // _MOST_OBSERVED)  # all count as uses, the model learns from a part
        watched = slots[::step]
        watched = watched[view(self._fingerprints)[watched] & np.uint32(self._watch_mask) == 0]
        self._model.ended_many(count(uses[watched], self._clock - stamps[watched], each=step))
        uses[slots] = np.minimum(uses[slots] + np.uint8(1), np.uint8(NUM_CLASSES - 1))
        stamps[slots] = self._clock

    def _apply_one(self, slot: int) -> None:
        if not self._fingerprints[slot] & self._watch_mask:
            self._model.ended(self._uses[slot], self._clock - self._stamps[slot])
        self._uses[slot] = min(self._uses[slot] + 1, NUM_CLASSES - 1)
        self._stamps[slot] = self._clock

    def _learn(self) -> None:
        self._learn_at = self._clock + max(1024, self._count // 8)
        if self._clock >= self._forget_at:
            self._forget_at = self._clock + max(4096, 8 * self._count)
            self._model.forget_half()
        # The ghosts should cover two turnovers of the pool; if the table is too small, watch only a part of the keys.
        self._watch_mask = (1 << ((2 * self._count - 1) // self._ghosts.size).bit_length()) - 1
        self._survey_phase += 1
        self._model.learn(self._ghosts_waiting() + self._residents_waiting())

    def _residents_waiting(self) -> Counts:
        """Count how long the watched slots have waited for their next use, from a sample."""
        part = self._sampled(len(self._present))
        there = view(self._present)[part].astype(bool)
        there &= view(self._fingerprints)[part] & np.uint32(self._watch_mask) == 0
        uses, stamps = view(self._uses)[part][there], view(self._stamps)[part][there]
        return count(uses, self._clock - stamps, each=part.step)

    def _ghosts_waiting(self) -> Counts:
        part = self._sampled(self._ghosts.size)
        uses, ages = self._ghosts.sample(part, self._clock)
        return count(uses, ages, each=part.step)

    def _sampled(self, num: int) -> slice:
        step = -(-num // _SURVEY)
        return slice(self._survey_phase % step, None, step)

    def _reserve(self, slot: int) -> None:
        super()._reserve(slot)
        grow(slot, self._uses, self._fingerprints, self._lives)
        grow(slot, self._parents, self._parent_lives, self._children, self._depths)
        size = Ghosts.size_for(len(self._uses))
        if size > self._ghosts.size:
            self._ghosts = Ghosts(size)
