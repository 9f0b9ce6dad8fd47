"""Measures a worker before the conductor knows it: how long prefills and decode steps take here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from moonpool.base.clock import Clock, SystemClock, ThreadClock
from moonpool.base.cluster import DecodeSample, PrefillSample
from moonpool.engine.runner import Runner
from moonpool.engine.sampler import SampleRow
from moonpool.engine.sequence import Chunk, SamplingParams
from moonpool.worker.build import Built
from moonpool.worker.config import WorkerConfig
from moonpool.worker.metrics import Samples

# Runs of a calibration: (tokens, of which prefix) of a prompt, (sequences, tokens of each) of a decode step. A CPU has
# no time for the last ones.
_PREFILLS = (
    *((32, 0), (128, 0), (256, 128), (256, 0), (512, 384), (512, 0), (1024, 768), (1024, 0), (2048, 0)),
    *((8192, 6144), (8192, 0), (32_768, 30_720), (32_768, 0)),
)
_DECODES = (
    *((1, 32), (1, 512), (4, 128), (8, 128), (8, 512), (16, 256), (32, 512)),
    *((1, 8192), (32, 2048), (64, 2048), (128, 1024)),
)


_PREPARING_RATIO = 2.0  # a first run that takes so many times what was expected has prepared kernels
_GREEDY = SampleRow(SamplingParams(max_tokens=1, temperature=0.0), tokens=(0,), num_prompt_tokens=1)


class Compute(Protocol):
    """Runs the chunks and returns when the device has computed them."""

    def __call__(self, chunks: list[Chunk], /) -> object: ...


def compute(runner: Runner, chunks: list[Chunk]) -> None:
    """Run the chunks as the engine would, and wait for the device."""
    rows = [_GREEDY] * len(chunks)
    if runner.launcher is not None and runner.launcher.fits(chunks, rows):
        runner.launcher.launch(chunks, rows).outcomes()
    else:
        runner.execute(chunks, None)
        runner.synchronize()


@dataclass(frozen=True, slots=True)
class Limits:
    num_pages: int
    block_tokens: int
    max_batch_tokens: int
    max_num_seqs: int
    max_seq_tokens: int


class Calibration:
    """Times prefills or decode steps before the conductor knows this worker: its first predictions use these samples.

    The runs use pages that hold nothing yet, the first `num_pages_used`; the caller clears them afterwards. A run is
    left out if all together would take longer than `budget_s`, at the time per token of the run before. Each run is
    done `repeats` times and the fastest counts: on a GPU the first run of a shape may also prepare its kernels, which
    counts neither as a result nor in the budget.
    """

    def __init__(self, compute: Compute, limits: Limits, clock: Clock, budget_s: float, repeats: int = 1) -> None:
        self._compute, self._limits, self._clock, self._repeats = compute, limits, clock, repeats
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
        """Return the prompt's steps, each of at most one batch, as the engine would compute them."""
        pages = tuple(range(-(-tokens // self._limits.block_tokens)))
        starts = range(prefix, tokens, self._limits.max_batch_tokens)
        ends = [min(start + self._limits.max_batch_tokens, tokens) for start in starts]
        return [
            [Chunk("calibrate", start, (0,) * (end - start), pages, end == tokens)]
            for start, end in zip(starts, ends, strict=True)
        ]

    def _measure(self, steps: Sequence[list[Chunk]], num_tokens: int) -> float | None:
        """Return the seconds that the steps took; None, with nothing run, when the time left is too short."""
        fastest_s: float | None = None
        for repeat in range(self._repeats):
            started_s, expected_s = self._clock.now_s(), self._per_token_s * num_tokens
            if started_s + expected_s > self._ends_s:
                break
            for chunks in steps:
                self.num_pages_used = max(self.num_pages_used, *(max(chunk.pages) + 1 for chunk in chunks))
                self._compute(chunks)
            seconds = max(self._clock.now_s() - started_s, 1e-9)
            if repeat == 0 and self._repeats > 1 and seconds > _PREPARING_RATIO * expected_s:
                self._ends_s += seconds
                continue
            fastest_s = seconds if fastest_s is None else min(fastest_s, seconds)
            self._per_token_s = fastest_s / num_tokens
        return fastest_s


def calibrate(built: Built, config: WorkerConfig, samples: Samples) -> None:
    """Measure what the worker's first role needs: the conductor's cost models are the same for all workers. The pages
    that it used are cleared."""
    limits, pages = built.scheduler.config, built.scheduler.pages
    run = Calibration(
        lambda chunks: compute(built.runner, chunks),
        Limits(
            num_pages=pages.num_pages,
            block_tokens=pages.block_tokens,
            max_batch_tokens=limits.max_batch_tokens,
            max_num_seqs=limits.max_num_seqs,
            max_seq_tokens=limits.max_seq_tokens,
        ),
        # All roles of a service start together: by the wall clock a step takes two or three times as long as later.
        ThreadClock() if config.gpu is None else SystemClock(),
        config.calibration_s,
        repeats=1 if config.gpu is None else 2,
    )
    if config.role == "prefill":
        samples.prefills.extend(run.prefills())
    else:
        samples.decodes.extend(run.decodes())
    built.runner.kv.clear(list(range(run.num_pages_used)))
