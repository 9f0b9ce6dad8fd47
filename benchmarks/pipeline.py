"""A long prompt at two prefill workers together (`serve --pipeline 2`) and at one, with the same chunks, in one run.

    python benchmarks/pipeline.py            # SmolLM2, 1,500 tokens, workers of one thread each
    python benchmarks/pipeline.py --json

Two services run side by side and answer in turn, so that both see the same machine; the client's time to the first
token counts. Both must give the same tokens. Without the default model on this machine its shape is used, with random
weights.
"""

from __future__ import annotations

import json
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import httpx
from _live_load import Service

from moonpool.base.cluster import CONDUCTOR_SERVICE
from moonpool.base.errors import ModelError
from moonpool.base.rpc import BlockingClient
from moonpool.bench.report import BenchReport, bench_parser
from moonpool.conductor.messages import DecisionRecord, Records
from moonpool.engine.model_fetch import DEFAULT_MODEL
from moonpool.engine.model_files import require_weights, resolve

_SMOLLM2 = {
    "vocab_size": 2000,  # of the random one: its tokenizer has as many words
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
}
_TIMEOUT_S = 120.0


class Reply(NamedTuple):
    ttft_s: float
    text: str


def ask(service: Service, prompt: Sequence[int], num_output: int) -> Reply:
    """Stream one greedy answer."""
    body = {
        "model": Path(service.config.model).name,
        "prompt": prompt,
        "max_tokens": num_output,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    began_s, first_s, text = time.perf_counter(), 0.0, ""
    with httpx.stream("POST", f"{service.url}/v1/completions", json=body, timeout=_TIMEOUT_S) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                first_s = first_s or time.perf_counter() - began_s
                text += json.loads(line[6:])["choices"][0]["text"]
    return Reply(first_s, text)


def last_record(service: Service) -> DecisionRecord:
    with closing(BlockingClient(service.conductor_address, CONDUCTOR_SERVICE)) as conductor:
        return conductor.call(Records(limit=1))[-1]


def run(report: BenchReport, num_tokens: int, repeat: int, num_output: int) -> None:
    shape: str | dict[str, int] = _SMOLLM2
    try:
        require_weights(resolve(DEFAULT_MODEL))
        shape = DEFAULT_MODEL
    except ModelError:
        pass
    rng = random.Random(5)
    prompts = [[rng.randrange(100, 1900) for _ in range(num_tokens)] for _ in range(repeat + 2)]
    with tempfile.TemporaryDirectory(prefix="mp") as first, tempfile.TemporaryDirectory(prefix="mp") as second:
        with closing(Service(Path(first), shape, prefill=2, pipeline=2, dram="2GB")) as several:
            several.start()
            several.wait_ready()
            ask(several, prompts[0], num_output)
            chunk_tokens = last_record(several).candidates[0].chunk_tokens
            if not chunk_tokens:
                raise SystemExit(f"the conductor sent {num_tokens} tokens to one worker")
            with closing(Service(Path(second), shape, dram="2GB", max_batch_tokens=chunk_tokens)) as alone:
                alone.start()
                alone.wait_ready()
                ask(alone, prompts[0], num_output)
                _compare(report, several, alone, prompts[1:], num_output, chunk_tokens, str(shape))


def _compare(
    report: BenchReport,
    several: Service,
    alone: Service,
    prompts: list[list[int]],
    num_output: int,
    chunk_tokens: int,
    model: str,
) -> None:
    ask(several, prompts[0], num_output)
    ask(alone, prompts[0], num_output)
    pairs, num_equal = [], 0
    for prompt in prompts[1:]:
        together = ask(several, prompt, num_output)
        record = last_record(several)
        if record.candidates[0].chunk_tokens != chunk_tokens:
            print(f"skipped: chunks of {record.candidates[0].chunk_tokens} tokens instead of {chunk_tokens}")
            continue
        single = ask(alone, prompt, num_output)
        num_equal += together.text == single.text
        pairs.append((together.ttft_s, single.ttft_s))
    if not pairs:
        raise SystemExit("no prompt had the same chunks in both services")
    report.add(
        f"TTFT of {len(prompts[0])} tokens, two workers in a pipeline",
        statistics.median(each for each, _ in pairs),
        "s",
        statistics.median(each for _, each in pairs),
        ratio=statistics.median(each / other for each, other in pairs),
        baseline_is="one worker",
        model=model if len(model) < 20 else "random weights in SmolLM2's shape",
        chunk_tokens=chunk_tokens,
        num_prompts=len(pairs),
        num_equal_answers=num_equal,
    )


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--tokens", type=int, default=1500)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--output", type=int, default=16)
    options = parser.parse_args()
    report = BenchReport.from_options("pipeline", options)
    run(report, options.tokens, options.repeat, options.output)


if __name__ == "__main__":
    main()
