"""Mean time to first token by policy, on live CPU workers: conversations that share a system prompt, turn after turn.

    python benchmarks/serve_policies.py [--json] [--repeat 5]

Starts the service with four prefill workers of one thread and one decode worker, and a random llama of 8 layers. Every
round runs the same shape of load, with tokens nobody has seen, once under each policy, in an order that changes; only
the conductor is started anew in between. Ratios are of the medians of the rounds' means. The claims: global / random at
most 0.6, global / local at most 1.05.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import sys
import tempfile
from pathlib import Path

from _live_load import VOCAB, Service, ask, llama

from moonpool.bench.report import BenchReport, bench_parser

POLICIES = ("random", "local", "paper", "cost")
CLAIMS = (("random", 0.6), ("local", 1.05))
NUM_PREFILL = 4
NUM_CONVERSATIONS = 4
NUM_AT_ONCE = 2
NUM_TURNS = 8
SYSTEM_TOKENS = 256
TURN_TOKENS = 192
SHAPE = llama(256, 704)  # about 6 million weights, so that a prompt takes a second or so of one core
ANSWER_TOKENS = 4
THINKING_S = 0.1


async def mean_ttft_s(url: str, seed: int) -> float:
    rng = random.Random(seed)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(3, VOCAB) for _ in range(count)]

    system = tokens(SYSTEM_TOKENS)
    scripts = [[tokens(TURN_TOKENS) for _ in range(NUM_TURNS)] for _ in range(NUM_CONVERSATIONS)]
    at_once = asyncio.Semaphore(NUM_AT_ONCE)

    async def talk(script: list[list[int]]) -> list[float]:
        prompt, found = list(system), []
        async with at_once:
            for turn in script:
                prompt = prompt + turn
                found.append((await ask(url, prompt, ANSWER_TOKENS)).ttft_s)
                # Stand-ins for the answer's tokens: what was said does not matter, how much does.
                prompt = prompt + list(range(3, 3 + ANSWER_TOKENS))
                await asyncio.sleep(THINKING_S)
        return found

    for _ in range(NUM_PREFILL):
        await ask(url, tokens(64), ANSWER_TOKENS)  # connections, and something to learn from
    return statistics.mean([ttft_s for found in await asyncio.gather(*map(talk, scripts)) for ttft_s in found])


def measure(repeat: int) -> dict[str, list[float]]:
    means: dict[str, list[float]] = {policy: [] for policy in POLICIES}
    with tempfile.TemporaryDirectory(prefix="mp-") as folder:
        service = Service(Path(folder), SHAPE, prefill=NUM_PREFILL, decode=1)
        try:
            service.start()
            for round_ in range(repeat):
                for place in range(len(POLICIES)):
                    policy = POLICIES[(round_ + place) % len(POLICIES)]
                    service.use(policy)
                    means[policy].append(asyncio.run(mean_ttft_s(service.url, seed=1000 * round_ + place)))
                    print(
                        f"round {round_ + 1}/{repeat} {policy} {means[policy][-1]:.3f} s", file=sys.stderr, flush=True
                    )
        finally:
            service.close()
    return means


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--repeat", type=int, default=5)
    options = parser.parse_args()
    report = BenchReport.from_options("serve_policies", options)
    medians = {policy: statistics.median(found) for policy, found in measure(options.repeat).items()}
    for policy in POLICIES:
        report.add(f"mean TTFT, {policy}", medians[policy], "s", medians["random"])
    for other, limit in CLAIMS:
        ours, theirs = medians["paper"], medians[other]
        report.add(f"paper / {other}", ours, "s", theirs, limit=limit, ok=ours / theirs <= limit)


if __name__ == "__main__":
    main()
