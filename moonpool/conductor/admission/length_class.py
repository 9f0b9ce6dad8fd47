"""Requests whose answers are about equally long: how long answers go on, and how many are at which age. Pure.

Time is cut in steps of 1/4 s, up to 256 s back and ahead. Whoever decodes is counted by its age, whoever is still to
come by its moment; both lie in arrays that shift as time goes by, so what is expected later is one product with the
survival of answers: P(an answer still goes on), at steps of its age. Each answers in microseconds, whatever the number
of requests. Older than 256 s is counted as that old.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from moonpool.conductor.admission.output_lengths import LengthHistogram

STEP_S = 0.25
NUM_STEPS = 1024
_GUESS_WEIGHT = 8.0  # the first guess counts as this many answers
_RELEARN = 16  # answers after which the table is made anew

Counts = NDArray[np.float64]  # (sequences, tokens of their KV) in rows, steps in columns


def step_of(at_s: float) -> int:
    return int(at_s // STEP_S)


class LengthClass:
    """The first guess is P(longer than x) = (mean / (mean + x))^2: what has gone on for long may go on for as long.
    It never falls to nothing, so that an answer longer than any before it is still one that goes on."""

    def __init__(self, mean_tokens: float, now_step: int) -> None:
        self._mean_tokens = mean_tokens
        self._lengths = LengthHistogram()
        self._num_new = _RELEARN  # a table is to be made
        self._survival = np.ones(2 * NUM_STEPS)
        self._now = now_step
        self.num_open = 0
        self._decoding: Counts = np.zeros((2, NUM_STEPS))  # by age
        self._coming: Counts = np.zeros((2, NUM_STEPS))  # by steps from now; who is late comes at the next step

    def learn(self, num_tokens: int) -> None:
        self._lengths.add(num_tokens)
        self._num_new += 1

    def count_coming(self, starts: int, kv_tokens: int, sign: int) -> None:
        """One more for sign 1, one less for -1."""
        self.num_open += sign
        self._coming[:, max(1, starts - self._now)] += (sign, sign * kv_tokens)

    def count_decoding(self, started: int, kv_tokens: int, sign: int) -> None:
        self.num_open += sign
        self._decoding[:, min(NUM_STEPS - 1, self._now - started)] += (sign, sign * kv_tokens)

    def advance(self, now_step: int) -> None:
        passed = min(now_step - self._now, NUM_STEPS - 1)
        if passed <= 0:
            return
        self._now = now_step
        if not self.num_open:
            return
        decoding, coming = np.zeros_like(self._decoding), np.zeros_like(self._coming)
        decoding[:, passed:] = self._decoding[:, :-passed]
        decoding[:, -1] += self._decoding[:, -passed:].sum(axis=1)
        coming[:, :-passed] = self._coming[:, passed:]
        coming[:, 1] += coming[:, 0] + self._coming[:, :passed].sum(axis=1)
        coming[:, 0] = 0.0
        self._decoding, self._coming = decoding, coming

    def expected(self, ahead: int, token_s: float) -> Counts:
        """(sequences, tokens of KV) that many steps from now."""
        if self._num_new >= _RELEARN:
            self._make_table(token_s)
        survival, ahead = self._survival, min(ahead, NUM_STEPS - 1)
        stays = survival[ahead : ahead + NUM_STEPS] / survival[:NUM_STEPS]
        load: Counts = self._decoding @ stays
        if ahead:
            load += self._coming[:, 1 : ahead + 1] @ survival[ahead - 1 :: -1]
        return load

    def _make_table(self, token_s: float) -> None:
        tokens: NDArray[np.float64] = np.arange(2 * NUM_STEPS, dtype=np.float64) * (STEP_S / token_s)
        guess = (self._mean_tokens / (self._mean_tokens + tokens)) ** 2
        weight = self._lengths.weight
        learnt = self._lengths.longer_than(tokens)
        self._survival = (_GUESS_WEIGHT * guess + weight * learnt) / (_GUESS_WEIGHT + weight)
        self._num_new = 0
