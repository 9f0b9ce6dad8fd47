"""Workers as columns, one row per slot, so that one request is weighed against all of them at once. Pure.

Rows without a worker are infinitely far in every column that is minimised.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from moonpool.conductor.placement.backlog import Backlog

Column = NDArray[np.float64]
FULL_S = 1e6  # a decode worker without room comes after all others


class PrefillTable:
    """Each worker's backlog: what a newcomer waits for, and how many it waits behind."""

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
        """After every change of the backlog."""
        self.assigned[slot] = len(backlog)
        self._total_s[slot], self._head_s[slot], self._since_s[slot] = backlog.terms

    def wait_s(self, now_s: float) -> Column:
        """Backlog.wait_s of all; a fresh column."""
        wait = now_s - self._since_s
        np.minimum(wait, self._head_s, out=wait)
        np.subtract(self._total_s, wait, out=wait)
        np.maximum(wait, 0.0, out=wait)
        return wait


class DecodeTable:
    """Each decode worker's batch, the requests on their way to it included."""

    def __init__(self) -> None:
        self.mask = 0
        self.names: dict[int, str] = {}
        self.num_seqs, self.kv_tokens, self.free_pages = np.zeros(1), np.zeros(1), np.zeros(1)
        self._max_num_seqs = np.zeros(1)
        self._rank_s = np.full(1, np.inf)
        self._nobody_s = np.full(1, np.inf)  # 0 where there is a worker
        self._terms: tuple[float, ...] = (0.0, 0.0, 0.0)  # that the ranks were made with

    def add(self, slot: int, name: str, max_num_seqs: int) -> None:
        self.num_seqs, self.kv_tokens = _grown(self.num_seqs, slot), _grown(self.kv_tokens, slot)
        self.free_pages, self._max_num_seqs = _grown(self.free_pages, slot), _grown(self._max_num_seqs, slot)
        self._rank_s, self._nobody_s = _grown(self._rank_s, slot, np.inf), _grown(self._nobody_s, slot, np.inf)
        self._nobody_s[slot] = 0.0
        self._max_num_seqs[slot] = max_num_seqs
        self.names[slot] = name
        self.mask |= 1 << slot
        self.update(slot, 0, 0, 0)

    def drop(self, slot: int) -> None:
        del self.names[slot]
        self.mask &= ~(1 << slot)
        self._max_num_seqs[slot] = 0
        self._rank_s[slot] = self._nobody_s[slot] = np.inf

    def update(self, slot: int, num_seqs: int, kv_tokens: int, free_pages: int) -> None:
        self.num_seqs[slot], self.kv_tokens[slot], self.free_pages[slot] = num_seqs, kv_tokens, free_pages
        _, per_seq_s, per_token_s = self._terms
        full_s = FULL_S if num_seqs >= self._max_num_seqs.item(slot) else 0.0
        self._rank_s[slot] = per_seq_s * num_seqs + per_token_s * kv_tokens + full_s

    def rank_s(self, terms: tuple[float, ...]) -> Column:
        """What the batch adds to a step by these coefficients, and FULL_S where no sequence fits. Not to be changed."""
        if terms is not self._terms:
            self._terms = terms
            _, per_seq_s, per_token_s = terms
            rank = per_seq_s * self.num_seqs + per_token_s * self.kv_tokens
            rank += (self.num_seqs >= self._max_num_seqs) * FULL_S
            rank += self._nobody_s
            self._rank_s = rank
        return self._rank_s


def _grown(column: Column, slot: int, fill: float = 0.0) -> Column:
    """With a row for that slot; the columns of a table always have the same length."""
    if slot < len(column):
        return column
    return np.concatenate([column, np.full(max(16, slot + 1 - len(column), len(column)), fill)])
