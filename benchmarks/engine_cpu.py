"""The engine against `transformers` on the CPU: same weights, same threads, same run.

    python benchmarks/engine_cpu.py [--json] [--model smollm2] [--repeat 3] [--threads N]

Claims: prefill of 512 tokens is at least as fast (ratio >= 1); decode of 8 sequences at once is at least 3 times
`transformers` one by one and at least as fast as `transformers` with a batch of 8. The engine is measured whole,
scheduler and sampler included; `transformers` by the bare forward loop, which is faster here than its generate().
Both take turns, a decode is its median step times the number of steps, and the best turn of each is reported.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from moonpool.engine.blocks import PageManager
from moonpool.engine.config import ModelConfig
from moonpool.engine.engine import Engine
from moonpool.engine.kv_memory import KvLayout
from moonpool.engine.kv_tensor import KvMemory
from moonpool.engine.model_files import ModelFiles, read_config, resolve
from moonpool.engine.models.llama import LlamaModel
from moonpool.engine.runner import Runner
from moonpool.engine.scheduler import Scheduler, SchedulerConfig
from moonpool.engine.sequence import SamplingParams
from moonpool.engine.weight_sources import open_source
from moonpool.engine.weights import load_weights

PREFILL_TOKENS = 512
DECODE_SEQUENCES, PROMPT_TOKENS, NEW_TOKENS = 8, 128, 64
BLOCK_TOKENS, NUM_PAGES = 64, 64
Prompts = list[list[int]]


class Ours:
    """The single-process engine."""

    def __init__(self, files: ModelFiles, config: ModelConfig) -> None:
        model = LlamaModel(config, load_weights(files, config))
        layout = KvLayout.of(config, num_pages=NUM_PAGES, block_tokens=BLOCK_TOKENS, dtype="float32")
        self._runner = Runner(model, KvMemory(layout))

    def _engine(self) -> Engine:
        """A fresh one each time, so that no prompt is found in an earlier run's pages."""
        config = SchedulerConfig(max_batch_tokens=512, max_num_seqs=DECODE_SEQUENCES, max_seq_tokens=2048)
        return Engine(Scheduler(config, PageManager(NUM_PAGES, BLOCK_TOKENS)), self._runner)

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

    def __init__(self, files: ModelFiles, config: ModelConfig) -> None:
        self._model = LlamaForCausalLM(_transformers_config(config)).eval()
        with torch.no_grad(), open_source(files, config) as source:
            for name, parameter in self._model.named_parameters():
                parameter.copy_(source.read(name))

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


def _transformers_config(config: ModelConfig) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_position,
        rms_norm_eps=config.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        tie_word_embeddings=config.tied_embeddings,
    )


def measure(files: ModelFiles, repeat: int) -> dict[str, float]:
    """Best seconds of each contender, all of them taking turns."""
    config = read_config(files)
    ours, theirs = Ours(files, config), Theirs(files, config)
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


def lines(best: dict[str, float]) -> list[dict[str, object]]:
    decoded = DECODE_SEQUENCES * NEW_TOKENS
    cases = [
        (f"prefill {PREFILL_TOKENS} tokens vs transformers", PREFILL_TOKENS, "prefill", "prefill transformers"),
        ("decode 8 vs transformers one by one", decoded, "decode", "decode transformers one by one"),
        ("decode 8 vs transformers batch 8", decoded, "decode", "decode transformers batch"),
    ]
    return [
        {
            "bench": "engine_cpu",
            "case": case,
            "value": round(tokens / best[ours], 1),
            "unit": "tokens/s",
            "baseline": round(tokens / best[theirs], 1),
            "ratio": round(best[theirs] / best[ours], 2),
        }
        for case, tokens, ours, theirs in cases
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    for line in lines(measure(resolve(options.model), options.repeat)):
        if options.json:
            print(json.dumps(line))
        else:
            print(f"{line['case']:<42} {line['value']:>8} {line['unit']}  "
                  f"({line['baseline']} baseline, {line['ratio']}x)")  # fmt: skip


if __name__ == "__main__":
    main()
