"""What penalties and log-probabilities add to a step of 16 sequences with a vocabulary of 152k, beside plain requests.

    python benchmarks/penalties.py [--json] [--record] [--quick] [--threads N]

Sampling alone, on the CPU and, where there is one, on the GPU; on a GPU also whole decode steps of an engine with
random weights of a 0.5B shape, where sampling is part of the step. Each case is measured at sequences of 1k, 8k and 32k
tokens. Plain and penalized steps take turns, and the fastest of each counts. Tokens are as frequent as words are
(Zipf's law), but in the cases that say "spread": there every token of the vocabulary is as likely as another.

Claim: with any penalty a decode step on a GPU takes at most 1.3 times a plain one, and so does sampling where tokens
are drawn. Greedy sampling alone is one search for the largest logit, so there a penalty is a larger part: it is stated
without a target, and so are log-probabilities.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from moonpool.bench.report import BenchReport, bench_parser
from moonpool.engine.sampler import HostAdjuster, LogitsAdjuster, SampledToken, SampleRow, sample
from moonpool.engine.sequence import SamplingParams

VOCAB, ROWS = 151_936, 16
LENGTHS = (1000, 8000, 32_000)
MAX_LEN = 32_768
AT_MOST = 1.3
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "drawn": {"temperature": 0.7, "top_p": 0.8, "top_k": 20},
}
WANTED: dict[str, dict[str, Any]] = {
    "repetition penalty": {"repetition_penalty": 1.05},
    "all penalties": {"repetition_penalty": 1.05, "presence_penalty": 0.5, "frequency_penalty": 0.3},
}


def text(num_tokens: int, seed: int, *, spread: bool = False) -> list[int]:
    """Return token ids, some of them often, or with `spread` all about equally often."""
    generator = np.random.default_rng(seed)
    if spread:
        ids: list[int] = generator.integers(300, VOCAB, num_tokens).tolist()
        return ids
    drawn = generator.zipf(1.2, 8 * num_tokens)
    ids = (drawn[drawn < VOCAB - 300][:num_tokens] + 299).tolist()
    assert len(ids) == num_tokens
    return ids


@dataclass(slots=True)
class Contender:
    """One way to sample, for the same sequences as the others."""

    rows: list[SampleRow]
    adjuster: LogitsAdjuster
    fastest_s: float = float("inf")

    def step(self, logits: torch.Tensor, *, counts: bool) -> None:
        if logits.is_cuda:
            torch.cuda.synchronize()
        started_s = time.perf_counter()
        outcomes = sample(logits, self.rows, self.adjuster)
        if counts:
            self.fastest_s = min(self.fastest_s, time.perf_counter() - started_s)
        for row, outcome in zip(self.rows, outcomes, strict=True):
            assert isinstance(outcome, SampledToken)
            assert isinstance(row.tokens, list)
            row.tokens.append(outcome.token)


def new_adjuster(device: str) -> LogitsAdjuster:
    if device == "cpu":
        return HostAdjuster(ROWS, MAX_LEN)
    from moonpool.engine.device_counts import DeviceCounts

    return DeviceCounts(torch.device(device), VOCAB, ROWS, MAX_LEN)


def sampling(report: BenchReport, device: str, num_steps: int) -> None:
    logits = (torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(1)) * 3).to(device)
    cases = [(n, kind, False) for n in LENGTHS for kind in KINDS] + [(LENGTHS[-1], "greedy", True)]
    for num_tokens, kind, spread in cases:
        texts = [text(num_tokens, seed, spread=spread) for seed in range(ROWS)]

        def contender(own: dict[str, Any], texts: list[list[int]] = texts, kind: str = kind) -> Contender:
            rows = [
                SampleRow(SamplingParams(max_tokens=999, seed=seed, **KINDS[kind], **own), [*each], len(each) // 2)
                for seed, each in enumerate(texts)
            ]
            return Contender(rows, new_adjuster(device))

        plain, others = contender({}), {name: contender(own) for name, own in WANTED.items()}
        for turn in range(num_steps + 1):
            for each in (plain, *others.values()):
                each.step(logits, counts=turn > 0)  # the first step counts the tokens
        baseline = plain.fastest_s * 1e3
        for name, each in others.items():
            case = f"sampling on {device}, {ROWS} {kind}, {num_tokens} tokens{', spread' * spread}, {name}"
            target: dict[str, Any] = {"at_most": AT_MOST * baseline} if kind == "drawn" else {}
            report.add(case, each.fastest_s * 1e3, "ms", baseline, baseline_is="plain", **target)


def decode_steps(report: BenchReport, num_steps: int) -> None:
    """Steps of an engine, launched ahead."""
    from _gpu_lab import BLOCK_TOKENS, checked, end_decoding, make_engine, step_ms

    engine = make_engine(ROWS * (LENGTHS[-1] // BLOCK_TOKENS + 12), max_num_seqs=ROWS, shape="half-b")
    contenders = {"plain": {}, **WANTED, "log-probabilities": {"logprobs": 5}, "min_tokens": {"min_tokens": 600}}
    for num_tokens in LENGTHS:
        for kind, how in KINDS.items():
            found = dict.fromkeys(contenders, float("inf"))
            for name in [*contenders] * 2:
                for number in range(ROWS):
                    params = SamplingParams(max_tokens=600, ignore_eos=True, seed=number, **how, **contenders[name])
                    if name == "min_tokens":
                        params = SamplingParams(
                            max_tokens=600, min_tokens=600, stop_token_ids=tuple(range(16)), seed=number, **how
                        )
                    engine.add_request(f"d{number}", text(num_tokens, number), params)
                started: set[str] = set()
                while len(started) < ROWS:
                    started |= {out.request_id for out in checked(engine.step())}
                step_ms(engine, 8)
                found[name] = min(found[name], *(step_ms(engine, num_steps) for _ in range(3)))
                end_decoding(engine, ROWS)
            plain = found.pop("plain")
            for name, value in found.items():
                case = f"decode step on a GPU, {ROWS} {kind}, {num_tokens} tokens, {name}"
                target: dict[str, Any] = {} if name == "log-probabilities" else {"at_most": AT_MOST * plain}
                report.add(case, value, "ms", plain, baseline_is="plain", **target)


def main() -> int:
    parser = bench_parser(__doc__)
    parser.add_argument("--quick", action="store_true", help="few steps, to see that it runs")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    report = BenchReport.from_options("penalties", options)
    sampling(report, "cpu", 3 if options.quick else 20)
    if torch.cuda.is_available():
        sampling(report, "cuda", 3 if options.quick else 50)
        decode_steps(report, 8 if options.quick else 48)
    else:
        print("penalties: no CUDA device here, the CPU only", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
