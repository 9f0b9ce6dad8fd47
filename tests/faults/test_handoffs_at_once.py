"""Many hand-offs to one decode worker at the same time: none waits for another one, for a step, or holds a token up."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from severe import check_tokens
from tiny_cluster import Answer, Oracle, TinyCluster, greedy, prompt_of, tiny_cluster
from tiny_gates import Gate, Hold
from tiny_worker import TinyWorker

from moonpool.engine.sequence import Chunk

NUM_PROMPTS = 8
PROMPTS = [prompt_of(40, seed) for seed in range(NUM_PROMPTS)]
PARAMS = greedy(6)
OLD, OLD_PARAMS = prompt_of(20, seed=99), greedy(40)


class Steps:
    """Notes which requests each step of a worker computes, and stops in the middle of its first one."""

    def __init__(self, worker: TinyWorker) -> None:
        self.computed: list[set[str]] = []
        self._gate, execute = Gate(), worker.runner.execute

        def noted(chunks: Sequence[Chunk], hooks: Any = None) -> torch.Tensor:
            self.computed.append({chunk.request_id for chunk in chunks})
            self._gate.stop_here()
            return execute(chunks, hooks)

        worker.runner.execute = noted  # type: ignore[method-assign]

    async def stopped(self) -> None:
        await self._gate.reached()

    def go_on(self) -> None:
        self._gate.open()


class Client:
    def __init__(self, cluster: TinyCluster, prompt: list[int]) -> None:
        self.num_tokens = 0
        self.asking = asyncio.create_task(cluster.generate(prompt, PARAMS, on_tokens=self._count))

    def _count(self, answer: Answer) -> None:
        self.num_tokens = len(answer.tokens)


async def test_prompts_that_end_during_a_step_enter_the_next_one_together(
    tiny_model: str, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with tiny_cluster(tiny_model) as cluster:
        decode, role = cluster.decode0, cluster.decode0.role
        hold = Hold([decode], 2)
        old = asyncio.create_task(cluster.generate(OLD, OLD_PARAMS))
        await cluster.until(lambda: decode.stats().num_running == 1, "an answer is being decoded")
        prefill_steps = Steps(cluster.prefill0)
        clients = [Client(cluster, prompt) for prompt in PROMPTS]
        await cluster.until(lambda: len(role.streams) == NUM_PROMPTS + 1, "all have asked for pages")
        await cluster.until(lambda: not decode.num_waiting_for_pages, "all have pages")
        steps, adoptions = Steps(decode), list[object]()
        on_engine = role._on_engine

        def counted(turn: object) -> Any:
            adoptions.append(turn)
            return on_engine(turn)

        monkeypatch.setattr(role, "_on_engine", counted)
        hold.release()
        await steps.stopped()
        prefill_steps.go_on()
        await cluster.until(
            lambda: all(client.num_tokens == 1 for client in clients), "each client has its first token, by no step"
        )
        await cluster.until(lambda: decode.num_commits == NUM_PROMPTS, "all commits are under way")
        assert all(client.num_tokens == 1 for client in clients)
        assert len(steps.computed) == 1, "the one that stands still"
        await cluster.until(lambda: len(adoptions) == NUM_PROMPTS, "all are checked and wait for one turn each")
        steps.go_on()
        for client, prompt in zip(clients, PROMPTS, strict=True):
            check_tokens((await client.asking).tokens, await oracle(prompt, PARAMS))
        assert len(steps.computed[1]) == NUM_PROMPTS + 1, "the very next step computes all of them"
        check_tokens((await old).tokens, await oracle(OLD, OLD_PARAMS))
