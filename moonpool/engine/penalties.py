"""How often each sequence has each token, kept from step to step: what penalties are computed from.

Repetition penalties look at prompt and output, presence and frequency penalties at the output. To count the tokens of a
sequence again in each step would take longer than the rest of sampling (27 times as long for 16 sequences of 32k
tokens), so counts are kept and each new token is added.

The counts of a sequence are one number per token of the vocabulary: how often the output has the token. Where the
prompt has it too, the number is inverted (~n, which is below 0), so one array tells both.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from moonpool.engine.sequence import SamplingParams

Counts = npt.NDArray[Any]  # of one sequence: [vocab] int16 or int32
Floats = npt.NDArray[np.float32]

# Stronger penalties act as this one: they would not change the order of tokens, but may overflow.
_STRONGEST = 1e30
_HUGE = np.finfo(np.float32).max
_MOST_OF_16_BITS = 2**15 - 1


class Penalties(NamedTuple):
    """Penalties as sampling applies them."""

    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0

    @classmethod
    def of(cls, params: SamplingParams) -> Penalties:
        if not params.penalizes:
            return NO_PENALTIES
        return cls(
            min(max(params.repetition_penalty, 1 / _STRONGEST), _STRONGEST),
            min(max(params.presence_penalty, -_STRONGEST), _STRONGEST),
            min(max(params.frequency_penalty, -_STRONGEST), _STRONGEST),
        )


NO_PENALTIES = Penalties()


def fits_16_bits(max_seq_tokens: int) -> bool:
    """Return whether counts of sequences of that length fit into 16 bits. One of their tokens is the prompt's."""
    return max_seq_tokens - 1 <= _MOST_OF_16_BITS


def count_tokens(tokens: Sequence[int], num_prompt_tokens: int, vocab_size: int, *, wide: bool) -> Counts:
    """Return the counts of a sequence: int32 if `wide`, otherwise int16."""
    each = np.asarray(tokens, dtype=np.int64)
    prompt, output = each[:num_prompt_tokens], each[num_prompt_tokens:]
    counts: Counts = np.bincount(output, minlength=vocab_size).astype(np.int32 if wide else np.int16)
    counts[prompt] = ~counts[prompt]
    return counts


class CountPlace(NamedTuple):
    """Where the counts of a sequence are, and what has to be done before they are used."""

    slot: int
    is_new: bool  # the slot has no counts of this sequence: count the tokens that the host knows
    is_due: bool  # then, or otherwise, count the newest token


@dataclass(slots=True)
class _Counted:
    tokens: Sequence[int]
    slot: int
    num_counted: int


class CountSlots:
    """Which slot has the counts of which sequence, and how many of its tokens they include.

    A sequence is recognized by its list of tokens, which grows. One that has no slot takes a free one, or that of the
    sequence that was sampled least recently. So no call has to report that a sequence has ended, and a sequence that
    comes back after a preemption is counted again if its slot was taken.
    """

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._known: OrderedDict[tuple[int, int], _Counted] = OrderedDict()  # least recently sampled first

    def clear(self) -> None:
        """Forget all counts: an error may have come between place() and the counting that it asked for."""
        self._known.clear()

    def place(self, sequences: Sequence[tuple[Sequence[int], int]], num_ahead: int = 0) -> list[CountPlace]:
        """Return the places of sequences, at most as many as there are slots; each is given as its tokens and how many
        of them are its prompt. The caller counts what the places say. Then the counts include all tokens, and the
        `num_ahead` (0 or 1) newest ones that are not read yet.
        """
        keys = [(id(tokens), num_prompt_tokens) for tokens, num_prompt_tokens in sequences]
        for key in keys:  # first, so that none of these takes the slot of another one
            if key in self._known:
                self._known.move_to_end(key)
        return [self._place(key, tokens, num_ahead) for key, (tokens, _) in zip(keys, sequences, strict=True)]

    def _place(self, key: tuple[int, int], tokens: Sequence[int], num_ahead: int) -> CountPlace:
        total, known = len(tokens) + num_ahead, self._known.get(key)
        if known is None:
            is_full = len(self._known) == self._num_slots
            slot = self._known.popitem(last=False)[1].slot if is_full else len(self._known)
            known = self._known[key] = _Counted(tokens, slot, -1)  # holds `tokens`, so that no other list has its id
        # More than `total`: a step that counted its token was dropped, and the token is sampled again.
        is_new = not total - 1 <= known.num_counted <= total or known.num_counted < 0
        if is_new:
            known.num_counted = len(tokens)
        is_due, known.num_counted = known.num_counted < total, total
        return CountPlace(known.slot, is_new, is_due)


class _Growing:
    """Token ids, in an array that doubles when it is full."""

    def __init__(self, values: npt.NDArray[np.int64]) -> None:
        self._values, self._size = values, len(values)

    @property
    def values(self) -> npt.NDArray[np.int64]:
        return self._values[: self._size]

    def append(self, value: int) -> None:
        if self._size == len(self._values):
            self._values = np.resize(self._values, max(64, 2 * self._size))
        self._values[self._size] = value
        self._size += 1


class SeenTokens:
    """The counts of one sequence in main memory, with the tokens that have one. A penalty then touches these tokens
    alone: a pass over the whole vocabulary takes about as long as the rest of sampling."""

    def __init__(self, counts: Counts) -> None:
        self._counts = counts
        self._seen = _Growing(np.flatnonzero(counts))
        self._written = _Growing(np.flatnonzero(np.where(counts < 0, ~counts, counts)))  # by the model

    def add(self, token: int) -> None:
        """Count a token of the output."""
        count = int(self._counts[token])
        if count == 0:
            self._seen.append(token)
        if count in (0, -1):
            self._written.append(token)
        self._counts[token] = count - 1 if count < 0 else count + 1

    def penalize(self, logits: Floats, penalties: Penalties) -> tuple[npt.NDArray[np.int64], Floats]:
        """Change logits [vocab] in place. Return the tokens whose logits were changed, and those logits before."""
        repeats = penalties.repetition != 1.0
        tokens = self._seen.values if repeats else self._written.values
        before = values = logits[tokens]
        if repeats:
            values = _repeated(before, np.float32(penalties.repetition))
        if penalties.frequency or penalties.presence:
            values = _bounded(values - self._decrease(tokens, penalties), values)
        logits[tokens] = values
        return tokens, before

    def _decrease(self, tokens: npt.NDArray[np.int64], penalties: Penalties) -> Floats:
        counts = self._counts[tokens]
        times: Floats = np.where(counts < 0, ~counts, counts).astype(np.float32)
        decrease: Floats = np.float32(penalties.frequency) * times + np.float32(penalties.presence)
        decrease[times == 0] = 0.0  # tokens of the prompt alone
        return decrease


def _repeated(values: Floats, factor: np.float32) -> Floats:
    """Return x / factor for values x above 0, x * factor for others: that is the smaller of both for a factor above 1,
    and the larger one below. Choosing by sign takes twice as long."""
    choose = np.minimum if factor > 1 else np.maximum
    return _bounded(choose(values / factor, values * factor), values)


def _bounded(penalized: Floats, before: Floats) -> Floats:
    """Return the logits with overflows made finite. Those that were not finite before stay as they were: a token that
    the model excluded stays excluded, and NaN or infinity still tells that the row is unusable."""
    if np.isfinite(penalized).all():
        return penalized
    return np.where(np.isfinite(before), np.clip(penalized, -_HUGE, _HUGE), before)
