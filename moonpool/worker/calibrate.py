"""A few seconds of measuring before a worker is known: the conductor's first predictions stand on these samples.

Runs prefills of growing length, cold and behind a prefix, or decode steps of growing batches, on pages that hold
nothing yet and are empty again afterwards. Stops before the next run would overstep the time it was given.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from moonpool.base.clock import Clock
from moonpool.base.cluster import DecodeSample, PrefillSample
from moonpool.engine.sequence import Chunk

_PREFILLS = ((32, 0), (128, 0), (256, 128), (256, 0), (512, 384), (512, 0), (1024, 768), (1024, 0), (2048, 0))
_DECODES = ((1, 32), (1, 512), (4, 128), (8, 128), (8, 512), (16, 256), (32, 512))  # (sequences, tokens of each)


class Compute(Protocol):
    """Runs the chunks and returns when they are computed."""

    def __call__(self, chunks: list[Chunk], /) -> object: ...


@dataclass(frozen=True, slots=True)
class Limits:
    num_pages: int
    block_tokens: int
    max_batch_tokens: int
    max_num_seqs: int
    max_seq_tokens: int


class Calibration:
    """`budget_s` bounds the whole, as far as each run takes no longer per token than the one before."""

    def __init__(self, compute: Compute, limits: Limits, clock: Clock, budget_s: float) -> None:
        self._compute, self._limits, self._clock = compute, limits, clock
        self._ends_s = clock.now_s() + budget_s
        self._per_token_s = 0.0
        self.num_pages_used = 0  # the first ones

    def prefills(self) -> Iterator[PrefillSample]:
        limits = self._limits
        for tokens, prefix in _PREFILLS:
            if tokens > min(limits.max_seq_tokens, limits.num_pages * limits.block_tokens):
                return
            seconds = self._measure(self._prompt(tokens, prefix), tokens - prefix)
            if seconds is None:
                return
            yield PrefillSample(tokens, prefix, seconds)

    def decodes(self) -> Iterator[DecodeSample]:
        limits = self._limits
        for num_seqs, tokens in _DECODES:
            pages_each = -(-tokens // limits.block_tokens)
            if num_seqs > limits.max_num_seqs or tokens > limits.max_seq_tokens:
                continue
            if num_seqs * pages_each > limits.num_pages:
                continue
            steps = [
                Chunk(f"calibrate-{i}", tokens - 1, (0,), tuple(range(i * pages_each, (i + 1) * pages_each)), True)
                for i in range(num_seqs)
            ]
            seconds = self._measure([steps], num_seqs)
            if seconds is None:
                return
            yield DecodeSample(num_seqs, num_seqs * tokens, seconds)

    def _prompt(self, tokens: int, prefix: int) -> list[list[Chunk]]:
        """In steps of no more than a batch, as the engine would compute it."""
        pages = tuple(range(-(-tokens // self._limits.block_tokens)))
        starts = range(prefix, tokens, self._limits.max_batch_tokens)
        ends = [min(start + self._limits.max_batch_tokens, tokens) for start in starts]
        return [
            [Chunk("calibrate", start, (0,) * (end - start), pages, end == tokens)]
            for start, end in zip(starts, ends, strict=True)
        ]

    def _measure(self, steps: Iterable[list[Chunk]], num_tokens: int) -> float | None:
        """None when there is no time for it."""
        started_s = self._clock.now_s()
        if started_s + self._per_token_s * num_tokens > self._ends_s:
            return None
        for chunks in steps:
            self.num_pages_used = max(self.num_pages_used, *(max(chunk.pages) + 1 for chunk in chunks))
            self._compute(chunks)
        seconds = self._clock.now_s() - started_s
        self._per_token_s = seconds / num_tokens
        return max(seconds, 1e-9)
