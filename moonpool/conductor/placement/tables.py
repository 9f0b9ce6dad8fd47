"""Workers as numpy columns, one row per slot, so that one request is compared with all workers at once. Pure.

A slot is a small number that stands for a worker (or for a tier of the pool) in columns and in bit masks. A row without
a worker is infinite in every column whose minimum is searched.
"""

from __future__ import annotations

import heapq
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Backlog:
    """Predicted work, in seconds, of the requests sent to one prefill worker, in order. The worker computes the first
    one (the head), so the time since the head became the first counts as done. The requests of other conductors count
    as their worker reports them (other_requests.py)."""

    def __init__(self) -> None:
        self._work_s: dict[str, float] = {}
        self._total_s = 0.0
        self._head_since_s = 0.0
        self._others = _NO_OTHERS

    def __len__(self) -> int:
        return len(self._work_s)

    @property
    def num_requests(self) -> int:
        """All requests, those of other conductors too."""
        return len(self._work_s) + self._others.number

    def add(self, request_id: str, work_s: float, now_s: float) -> None:
        assert request_id not in self._work_s, "a request is sent to a worker once"
        if not self._work_s:
            self._total_s, self._head_since_s = 0.0, now_s
        self._work_s[request_id] = work_s
        self._total_s += work_s

    def remove(self, request_id: str, now_s: float) -> None:
        """Ignore a request that is not here."""
        if request_id not in self._work_s:
            return
        if request_id == next(iter(self._work_s)):
            self._head_since_s = now_s
        self._total_s -= self._work_s.pop(request_id)

    def set_others(self, number: int, work_s: float, first_s: float, now_s: float) -> None:
        """Count the requests of other conductors: their number and work, and the work of the worker's first request if
        it is one of them. Then this conductor's own head has still to begin."""
        if self._others.first_s and not first_s:
            self._head_since_s = now_s
        self._others = _Others(number, work_s, first_s, now_s)

    @property
    def own_s(self) -> float:
        """The work of the requests known here."""
        return self._total_s if self._work_s else 0.0

    @property
    def terms(self) -> tuple[float, float, float]:
        """Return (all predicted work, the head's work, when the head became the first), in seconds."""
        others, total_s = self._others, self.own_s + self._others.work_s
        if others.first_s:
            return total_s, others.first_s, others.since_s
        return total_s, next(iter(self._work_s.values()), 0.0), self._head_since_s

    def wait_s(self, now_s: float) -> float:
        """Return the work ahead of a new request; a head that takes longer than predicted counts as about to end."""
        total_s, head_s, since_s = self.terms
        return max(0.0, total_s - min(now_s - since_s, head_s))


class _Others(NamedTuple):
    number: int = 0
    work_s: float = 0.0
    first_s: float = 0.0
    since_s: float = 0.0


_NO_OTHERS = _Others()


class Slots:
    """Allocates slots, the lowest free one first.

    The bits of a retired slot are still set in the prefix index, which clears them in sweeps. The slot becomes free
    after the first whole sweep that began after it was retired.
    """

    def __init__(self) -> None:
        self.num_slots = 0  # one more than the highest slot ever allocated
        self.sweeping = 0  # mask of the retired slots that the current sweep clears
        self._next = 0  # mask of the retired slots that the next sweep clears
        self._free: list[int] = []

    def allocate(self) -> int:
        if self._free:
            return heapq.heappop(self._free)
        self.num_slots += 1
        return self.num_slots - 1

    def retire(self, *slots: int) -> None:
        for slot in slots:
            self._next |= 1 << slot
        if not self.sweeping:
            self.sweeping, self._next = self._next, 0

    def free(self, slot: int) -> None:
        """Free a slot at once; no mask may have its bit."""
        heapq.heappush(self._free, slot)

    def finish_sweep(self) -> None:
        """Free the slots in `sweeping`, whose bits are gone from all masks, and begin the next sweep."""
        for slot in slots_in(self.sweeping):
            self.free(slot)
        self.sweeping, self._next = self._next, 0


def slots_in(mask: int) -> list[int]:
    """Return the slots whose bits are set, ascending."""
    found = []
    while mask:
        lowest = mask & -mask
        found.append(lowest.bit_length() - 1)
        mask ^= lowest
    return found


def slot_index(mask: int) -> NDArray[np.intp]:
    """Return the same slots as an index into columns; faster for many slots."""
    packed = np.frombuffer(mask.to_bytes(-(-mask.bit_length() // 8), "little"), dtype=np.uint8)
    return np.unpackbits(packed, bitorder="little").nonzero()[0]


Column = NDArray[np.float64]
FULL_S = 1e6  # added to the rank of a decode worker without room, so that it comes after all others


class PrefillTable:
    """Each prefill worker's backlog: how long a new request waits there, and behind how many others."""

    def __init__(self) -> None:
        self.mask = 0  # of the slots that have a worker
        self.names: dict[int, str] = {}
        self.assigned = np.zeros(1)
        self._total_s, self._head_s, self._since_s = np.full(1, np.inf), np.zeros(1), np.zeros(1)

    def add(self, slot: int, name: str) -> None:
        self.assigned, self._total_s = _grown(self.assigned, slot), _grown(self._total_s, slot, np.inf)
        self._head_s, self._since_s = _grown(self._head_s, slot), _grown(self._since_s, slot)
        self.names[slot] = name
        self.mask |= 1 << slot
        self.update(slot, Backlog())

    def drop(self, slot: int) -> None:
        del self.names[slot]
        self.mask &= ~(1 << slot)
        self._total_s[slot] = np.inf

    def update(self, slot: int, backlog: Backlog) -> None:
        """Must be called after every change of the backlog."""
        self.assigned[slot] = backlog.num_requests
        self._total_s[slot], self._head_s[slot], self._since_s[slot] = backlog.terms

    def wait_s(self, now_s: float) -> Column:
        """Return each worker's work ahead of a new request, as a new column: 0 when idle. A head that takes longer than
        predicted counts as about to end."""
        wait = now_s - self._since_s
        np.minimum(wait, self._head_s, out=wait)
        np.subtract(self._total_s, wait, out=wait)
        np.maximum(wait, 0.0, out=wait)
        return wait

    def room_at_s(self, most_s: float) -> float:
        """Return when a worker first has at most `most_s` of work ahead of a new request although none of its requests
        is reported as ended before; infinite: never."""
        left = self._total_s - most_s  # of the head's work
        return float(np.where(left <= self._head_s, self._since_s + left, np.inf).min())


class DecodeTable:
    """Each decode worker's batch, including requests that are still at their prefill worker."""

    def __init__(self) -> None:
        self.mask = 0
        self.names: dict[int, str] = {}
        self.num_seqs, self.kv_tokens, self.free_pages = np.zeros(1), np.zeros(1), np.zeros(1)
        self._max_num_seqs = np.zeros(1)
        self._rank_s = np.full(1, np.inf)
        self._vacant_s = np.full(1, np.inf)  # 0 where there is a worker
        self._terms: tuple[float, ...] = (0.0, 0.0, 0.0)  # coefficients that the ranks were computed with

    def add(self, slot: int, name: str, max_num_seqs: int) -> None:
        self.num_seqs, self.kv_tokens = _grown(self.num_seqs, slot), _grown(self.kv_tokens, slot)
        self.free_pages, self._max_num_seqs = _grown(self.free_pages, slot), _grown(self._max_num_seqs, slot)
        self._rank_s, self._vacant_s = _grown(self._rank_s, slot, np.inf), _grown(self._vacant_s, slot, np.inf)
        self._vacant_s[slot] = 0.0
        self._max_num_seqs[slot] = max_num_seqs
        self.names[slot] = name
        self.mask |= 1 << slot
        self.update(slot, 0, 0, 0)

    def drop(self, slot: int) -> None:
        del self.names[slot]
        self.mask &= ~(1 << slot)
        self._max_num_seqs[slot] = 0
        self._rank_s[slot] = self._vacant_s[slot] = np.inf

    def update(self, slot: int, num_seqs: int, kv_tokens: int, free_pages: int) -> None:
        self.num_seqs[slot], self.kv_tokens[slot], self.free_pages[slot] = num_seqs, kv_tokens, free_pages
        _, per_seq_s, per_token_s = self._terms
        full_s = FULL_S if num_seqs >= self._max_num_seqs.item(slot) else 0.0
        self._rank_s[slot] = per_seq_s * num_seqs + per_token_s * kv_tokens + full_s

    @property
    def is_full(self) -> NDArray[np.bool_]:
        """Whether no sequence fits into the batch."""
        return self.num_seqs >= self._max_num_seqs

    def rank_s(self, terms: tuple[float, ...]) -> Column:
        """Return the step time that each batch adds by these coefficients, plus FULL_S where no sequence fits. The
        caller must not change the column."""
        if terms is not self._terms:
            self._terms = terms
            _, per_seq_s, per_token_s = terms
            rank = per_seq_s * self.num_seqs + per_token_s * self.kv_tokens
            rank += self.is_full * FULL_S
            rank += self._vacant_s
            self._rank_s = rank
        return self._rank_s


def _grown(column: Column, slot: int, fill: float = 0.0) -> Column:
    """Return the column, extended if it has no row for that slot; all columns of a table keep the same length."""
    if slot < len(column):
        return column
    return np.concatenate([column, np.full(max(16, slot + 1 - len(column), len(column)), fill)])
