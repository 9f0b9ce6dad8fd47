"""The engine against `transformers` on the CPU: same weights, same threads, same run.

    python benchmarks/engine_cpu.py [--json] [--model smollm2] [--repeat 3] [--threads N]

Claims: prefill of 512 tokens is at least as fast (ratio >= 1); decode of 8 sequences at once is at least 3 times
`transformers` one by one and at least as fast as `transformers` with a batch of 8. The engine is measured whole,
scheduler and sampler included; `transformers` by the bare forward loop, which is faster here than its generate().
Both take turns, a decode is its median step times the number of steps, and the best turn of each is reported.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from transformers import AutoModelForCausalLM

from moonpool.bench.report import BenchReport, bench_parser
from moonpool.engine.config import EngineConfig, ModelConfig
from moonpool.engine.engine import Engine
from moonpool.engine.load import load_runner, make_scheduler
from moonpool.engine.model_files import ModelFiles, read_config, resolve
from moonpool.engine.sequence import SamplingParams

PREFILL_TOKENS = 512
DECODE_SEQUENCES, PROMPT_TOKENS, NEW_TOKENS = 8, 128, 64
NUM_PAGES = 64
Prompts = list[list[int]]


class Ours:
    """The single-process engine."""

    def __init__(self, files: ModelFiles, config: ModelConfig) -> None:
        self._model = config
        self._config = EngineConfig(num_pages=NUM_PAGES, max_num_seqs=DECODE_SEQUENCES, max_model_len=2048)
        self._runner = load_runner(files, config, self._config)

    def _engine(self) -> Engine:
        """A fresh one each time, so that no prompt is found in an earlier run's pages."""
        return Engine(make_scheduler(self._model, self._config), self._runner)

    def prefill_s(self, prompts: Prompts) -> float:
        engine = self._engine()
        start = time.perf_counter()
        _submit(engine, prompts[:1], max_tokens=1)
        while engine.has_work():
            engine.step()
        return time.perf_counter() - start

    def decode_s(self, prompts: Prompts) -> float:
        engine = self._engine()
        _submit(engine, prompts, max_tokens=NEW_TOKENS + 1)
        started: set[str] = set()
        while len(started) < len(prompts):
            started |= {out.request_id for out in engine.step()}
        steps = []
        while engine.has_work():
            start = time.perf_counter()
            if len(engine.step()) == len(prompts):  # the last steps are smaller: some started earlier
                steps.append(time.perf_counter() - start)
        return statistics.median(steps) * NEW_TOKENS


def _submit(engine: Engine, prompts: Prompts, max_tokens: int) -> None:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    for index, prompt in enumerate(prompts):
        engine.add_request(str(index), prompt, params)


class Theirs:
    """`transformers` with our weights and its defaults (sdpa attention, dynamic cache)."""

    def __init__(self, files: ModelFiles) -> None:
        path = files.root
        self._model = AutoModelForCausalLM.from_pretrained(
            str(path.parent), gguf_file=path.name, dtype=torch.float32
        ).eval()

    def prefill_s(self, prompts: Prompts) -> float:
        start = time.perf_counter()
        self._forward(torch.tensor(prompts[:1]), None)
        return time.perf_counter() - start

    def decode_batch_s(self, prompts: Prompts) -> float:
        tokens, cache = self._forward(torch.tensor(prompts), None)
        steps = []
        for _ in range(NEW_TOKENS):
            start = time.perf_counter()
            tokens, cache = self._forward(tokens, cache)
            steps.append(time.perf_counter() - start)
        return statistics.median(steps) * NEW_TOKENS

    def decode_one_by_one_s(self, prompts: Prompts) -> float:
        return sum(self.decode_batch_s([prompt]) for prompt in prompts)

    @torch.inference_mode()
    def _forward(self, tokens: torch.Tensor, cache: object) -> tuple[torch.Tensor, object]:
        out = self._model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return out.logits[:, -1:].argmax(-1), out.past_key_values


def measure(files: ModelFiles, repeat: int) -> dict[str, float]:
    """Best seconds of each contender, all of them taking turns."""
    config = read_config(files)
    ours, theirs = Ours(files, config), Theirs(files)
    contenders: dict[str, Callable[[Prompts], float]] = {
        "prefill": ours.prefill_s,
        "prefill transformers": theirs.prefill_s,
        "decode": ours.decode_s,
        "decode transformers batch": theirs.decode_batch_s,
        "decode transformers one by one": theirs.decode_one_by_one_s,
    }
    best = dict.fromkeys(contenders, float("inf"))
    for turn in range(repeat):
        for name, contender in contenders.items():
            length = PREFILL_TOKENS if name.startswith("prefill") else PROMPT_TOKENS
            best[name] = min(best[name], contender(_prompts(length, config.vocab_size, turn)))
    return best


def _prompts(length: int, vocab_size: int, seed: int) -> Prompts:
    generator = torch.Generator().manual_seed(seed)
    prompts: Prompts = torch.randint(vocab_size, (DECODE_SEQUENCES, length), generator=generator).tolist()
    return prompts


def add_all(report: BenchReport, best: dict[str, float]) -> None:
    decoded = DECODE_SEQUENCES * NEW_TOKENS
    cases = [
        (f"prefill {PREFILL_TOKENS} tokens vs transformers", PREFILL_TOKENS, "prefill", "prefill transformers"),
        ("decode 8 vs transformers one by one", decoded, "decode", "decode transformers one by one"),
        ("decode 8 vs transformers batch 8", decoded, "decode", "decode transformers batch"),
    ]
    for case, tokens, ours, theirs in cases:
        report.add(case, tokens / best[ours], "tokens/s", tokens / best[theirs])


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    report = BenchReport.from_options("engine_cpu", options)
    add_all(report, measure(resolve(options.model), options.repeat))


if __name__ == "__main__":
    main()
