"""Conversations on one GPU over real HTTP, against transformers' continuous batching on the same random 8B weights.

    python benchmarks/gpu_serve.py --json [--conversations 64] [--turns 4] [--no-transformers]

Conversations of several turns share system prompts in groups; each sends its next message when its answer has ended.
Prints output tokens per second, the share of prompt tokens that were reused, and percentiles of the time to first
token, with the pool and without it (policy `local`: workers reuse their own pages only). The baseline is
`generate_batch`: paged attention, prefix sharing, all conversations of a turn at once, no HTTP. Needs a CUDA device.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import torch
from _gpu_lab import prompt
from _gpu_service import Answer, Service, end_with_parent, serving, stream

from moonpool.bench.report import BenchReport, bench_parser

_TRANSFORMERS_S = 300.0


@dataclass(frozen=True)
class Workload:
    """`messages` is [conversation][turn] -> token ids; conversation i starts with system prompt i % number of them."""

    systems: list[list[int]]
    messages: list[list[list[int]]]
    answer_tokens: int

    @classmethod
    def make(
        cls, conversations: int, turns: int, lengths: tuple[int, int, int], seed: int = 0, num_ids: int = 100_000
    ) -> Workload:
        """`lengths` are the tokens of a system prompt, a message and an answer."""
        system_tokens, message_tokens, answer_tokens = lengths
        systems = [prompt(system_tokens, seed + number + 1, num_ids) for number in range(8)]
        messages = [
            [prompt(message_tokens, seed + 1000 + 100 * one + turn, num_ids) for turn in range(turns)]
            for one in range(conversations)
        ]
        return cls(systems, messages, answer_tokens)

    @property
    def num_output_tokens(self) -> int:
        return sum(len(own) for own in self.messages) * self.answer_tokens


async def converse(url: str, workload: Workload) -> list[tuple[int, Answer]]:
    """Run all conversations at once; return (prompt tokens, answer) of every turn."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=120.0, limits=limits) as client, asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(_conversation(client, url, workload, number)) for number in range(len(workload.messages))
        ]
    return [turn for task in tasks for turn in task.result()]


async def _conversation(
    client: httpx.AsyncClient, url: str, workload: Workload, number: int
) -> list[tuple[int, Answer]]:
    history, turns = list(workload.systems[number % len(workload.systems)]), []
    for message in workload.messages[number]:
        history += message
        answer = await stream(client, url, history, workload.answer_tokens)
        turns.append((len(history), answer))
        history += answer.token_ids
    return turns


def measure(service: Service, workload: Workload, report: BenchReport, name: str, baseline: float | None) -> None:
    asyncio.run(converse(service.url, Workload.make(len(workload.messages), 1, (256, 64, 8), seed=50_000)))
    began_s = time.perf_counter()
    turns = asyncio.run(converse(service.url, workload))
    seconds = time.perf_counter() - began_s
    ttfts_ms = sorted(answer.ttft_s * 1e3 for _, answer in turns)
    hit_rate = sum(answer.cached_tokens for _, answer in turns) / sum(count for count, _ in turns)
    target: dict[str, Any] = (
        {} if baseline is None else {"at_least": round(3 * baseline, 1), "baseline_is": "generate_batch"}
    )
    report.add(
        f"{len(workload.messages)} conversations, {name}", workload.num_output_tokens / seconds, "tokens/s", baseline,
        hit_rate=round(hit_rate, 3), seconds=round(seconds, 2),
        ttft_ms={f"p{p}": round(ttfts_ms[min(len(ttfts_ms) - 1, len(ttfts_ms) * p // 100)], 1) for p in (50, 90, 99)},
        **target,
    )  # fmt: skip


def transformers_tokens_s(workload: Workload, report: BenchReport) -> float:
    """Measure the baseline in a process of its own, which gives the GPU's memory back."""
    script = Path(__file__).with_name("_gpu_transformers.py")
    given: dict[str, Any] = {
        "systems": workload.systems, "messages": workload.messages, "answer_tokens": workload.answer_tokens
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, str(script)], input=json.dumps(given), stdout=subprocess.PIPE, text=True, check=True,
        timeout=_TRANSFORMERS_S, preexec_fn=end_with_parent,
    )  # fmt: skip
    found = json.loads(done.stdout.splitlines()[-1])
    report.add("transformers generate_batch", found["tokens_s"], "tokens/s", seconds=round(found["seconds"], 2))
    return float(found["tokens_s"])


def main() -> int:
    parser = bench_parser(__doc__)
    parser.add_argument("--conversations", type=int, default=64)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--system-tokens", type=int, default=1024)
    parser.add_argument("--message-tokens", type=int, default=128)
    parser.add_argument("--answer-tokens", type=int, default=128)
    parser.add_argument("--kv", default="24GB", help="memory for KV pages, per worker")
    parser.add_argument("--no-transformers", action="store_true", help="leave the baseline out")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        print("gpu_serve: no CUDA device here, nothing to do", file=sys.stderr)
        return 0
    report = BenchReport.from_options("gpu_serve", given)
    lengths = given.system_tokens, given.message_tokens, given.answer_tokens
    workload = Workload.make(given.conversations, given.turns, lengths)
    baseline = None if given.no_transformers else transformers_tokens_s(workload, report)
    options = ("--kv", given.kv, "--dram", "32GB", "--max-num-seqs", str(given.conversations))
    for name, policy in (("with the pool", "cost"), ("without the pool", "local")):
        with serving(*options, "--policy", policy) as service:
            measure(service, workload, report, name, baseline)
    return 0


if __name__ == "__main__":
    sys.exit(main())
