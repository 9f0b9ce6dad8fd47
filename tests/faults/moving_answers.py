"""Answers that are under way when something happens to their decode worker."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from tiny_cluster import Answer, TinyCluster, greedy, prompt_of
from tiny_gates import Hold

from moonpool.engine.sequence import SamplingParams

NUM_TOKENS = 110
NUM_HELD = 8  # of four answers that come to a worker one after another, the first may have 4 x 8 tokens from it
PAGES = 96  # enough for all of them at one worker, so that none is preempted
# What depends on the tokens before, and on the place of each: all of it must go along.
SAMPLED = SamplingParams(
    max_tokens=NUM_TOKENS,
    temperature=0.9,
    top_p=0.95,
    seed=7,
    presence_penalty=0.4,
    frequency_penalty=0.2,
    repetition_penalty=1.1,
    logprobs=2,
    ignore_eos=True,
)
PARAMS = [greedy(NUM_TOKENS), SAMPLED, greedy(NUM_TOKENS), SAMPLED]
PROMPTS = [prompt_of(20 + 9 * n, n) for n in range(4)]


def hold_answers(cluster: TinyCluster, num_tokens: int = NUM_HELD) -> Hold:
    """Keep answers under way until the test lets them go on."""
    return Hold([worker for name, worker in cluster.workers.items() if name in ("decode0", "decode1")], num_tokens)


class Running:
    """Answers under way, each at the worker that the conductor chose."""

    def __init__(self, cluster: TinyCluster, params: list[SamplingParams]) -> None:
        self._cluster = cluster
        self.num_tokens = [0] * len(params)
        self.tasks = [
            asyncio.create_task(cluster.generate(prompt, each, on_tokens=self._count(number)))
            for number, (prompt, each) in enumerate(zip(PROMPTS, params, strict=True))
        ]

    def _count(self, number: int) -> Callable[[Answer], None]:
        def count(answer: Answer) -> None:
            self.num_tokens[number] = len(answer.tokens)

        return count

    async def all_have(self, num_tokens: int) -> None:
        await self._cluster.until(lambda: min(self.num_tokens) >= num_tokens, f"{num_tokens} tokens each")

    async def answers(self) -> list[Answer]:
        return list(await asyncio.gather(*self.tasks))
