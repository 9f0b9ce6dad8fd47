"""What a worker on a GPU learns that its work costs, beside what it costs. Needs a CUDA device.

    python benchmarks/gpu_costs.py --json [--record] [--shape 8b]

Random weights, an engine as in a worker, whose steps are timed as the roles of a worker time them
(moonpool/engine/step_times.py). The baseline is measured from outside, with the device idle before and after: a prompt
from its arrival to its first token, and decode steps, as many as in a second or so, by their number. Two figures each:
the sample that the worker reports, and what the conductor's cost model says once it has learnt all samples.

Claim: both lie within 10 % of what was measured, for prompts in steps of several sizes, behind several prefixes, and
for batches of several sizes.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Mapping, Sequence

import torch
from _gpu_lab import checked, end_decoding, greedy, make_engine, prompt, start_decoding

from moonpool.base.cluster import DecodeSample, PrefillSample
from moonpool.bench.report import BenchReport, bench_parser
from moonpool.conductor.costs import CostModels
from moonpool.engine.engine import Engine
from moonpool.engine.sequence import AdmittedSequence, Chunk, FullBlock
from moonpool.engine.step_times import StepTime

STEP_TOKENS = (512, 2048, 8192)
PROMPTS = ((512, 0), (1024, 0), (4096, 0), (4096, 2048), (8192, 0), (16_384, 0), (16_384, 12_288), (32_000, 30_016))
BATCHES = ((1, 1024), (4, 1024), (16, 1024), (16, 4096), (64, 1024))
REPEATS = 5
NUM_STEPS = 96
WITHIN = 0.1


class Times:
    """The engine's link: what its steps took."""

    def __init__(self) -> None:
        self.steps: list[StepTime] = []

    def begin_step(self, chunks: Sequence[Chunk], admitted: Sequence[AdmittedSequence]) -> None:
        return None

    def end_step(self) -> Mapping[str, int]:
        return {}

    def completed(self, full_blocks: Sequence[FullBlock]) -> None:
        pass

    def computed(self, time: StepTime) -> None:
        self.steps.append(time)


def add(report: BenchReport, case: str, learnt_s: float, measured_s: float) -> None:
    is_near = abs(learnt_s / measured_s - 1) <= WITHIN
    report.add(case, learnt_s * 1e3, "ms", measured_s * 1e3, baseline_is="measured", within=WITHIN, ok=is_near)


def prefill(engine: Engine, times: Times, num_tokens: int, prefix: int, seed: int) -> tuple[float, float]:
    """Return the time of a new prompt with a prefix in the engine's pages, as the worker and as we measured it."""
    tokens = prompt(num_tokens, seed)
    if prefix:
        run(engine, tokens[: prefix + 1])
    torch.cuda.synchronize()
    times.steps.clear()
    began_s = time.perf_counter()
    run(engine, tokens)
    return sum(each.seconds for each in times.steps), time.perf_counter() - began_s


def run(engine: Engine, tokens: list[int]) -> None:
    engine.add_request("p", tokens, greedy(1))
    while engine.has_work():
        checked(engine.step())


def prefills(report: BenchReport, shape: str) -> None:
    for step_tokens in STEP_TOKENS:
        times = Times()
        engine = make_engine(2 * 520, 8, shape, step_tokens=step_tokens, link=times)
        costs, found = CostModels(), dict[tuple[int, int], float]()
        for number, (num_tokens, prefix) in enumerate(PROMPTS):
            runs = [prefill(engine, times, num_tokens, prefix, 100 * number + n) for n in range(REPEATS + 1)][1:]
            learnt_s, measured_s = (statistics.median(each) for each in zip(*runs, strict=True))
            found[num_tokens, prefix] = measured_s
            costs.learn(prefills=[PrefillSample(num_tokens, prefix, sample_s) for sample_s, _ in runs])
            name = f"prefill of {num_tokens} tokens, {prefix} reused, in steps of {step_tokens}"
            add(report, f"{name}: sample", learnt_s, measured_s)
        for (num_tokens, prefix), measured_s in found.items():
            name = f"prefill of {num_tokens} tokens, {prefix} reused, in steps of {step_tokens}"
            add(report, f"{name}: model", costs.prefill_s(num_tokens, prefix), measured_s)
        del engine


def decodes(report: BenchReport, shape: str) -> None:
    times = Times()
    pages = max(num_seqs * (context // 64 + 8) for num_seqs, context in BATCHES)
    engine = make_engine(pages, max(num_seqs for num_seqs, _ in BATCHES), shape, link=times)
    costs, found = CostModels(), dict[tuple[int, int], tuple[float, float]]()
    for num_seqs, context in BATCHES:
        start_decoding(engine, num_seqs, context, 2 * NUM_STEPS)
        for _ in range(8):
            checked(engine.step())
        times.steps.clear()
        began_s = time.perf_counter()
        for _ in range(NUM_STEPS):
            checked(engine.step())
        measured_s = (time.perf_counter() - began_s) / NUM_STEPS
        samples = [DecodeSample(num_seqs, sum(c.end for c in each.chunks), each.period_s) for each in times.steps]
        learnt_s = statistics.fmean(each.seconds for each in samples)
        found[num_seqs, context] = statistics.fmean(each.kv_tokens for each in samples), measured_s
        costs.learn(decodes=samples)
        add(report, f"decode of {num_seqs} sequences of {context} tokens: sample", learnt_s, measured_s)
        end_decoding(engine, num_seqs)
    for (num_seqs, context), (kv_tokens, measured_s) in found.items():
        name = f"decode of {num_seqs} sequences of {context} tokens: model"
        add(report, name, costs.decode_step_s(num_seqs, kv_tokens), measured_s)


def main() -> int:
    parser = bench_parser(__doc__)
    parser.add_argument("--shape", default="8b", help="of benchmarks/_random_model.py")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("gpu_costs: no CUDA device here, nothing to do", file=sys.stderr)
        return 0
    report = BenchReport.from_options("gpu_costs", options)
    prefills(report, options.shape)
    decodes(report, options.shape)
    return 0


if __name__ == "__main__":
    sys.exit(main())
