"""Requests that fail inside a worker, and workers that start without a pool: nobody else notices."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from severe import check_tokens
from tiny_cluster import VOCAB, Oracle, greedy, prompt_of, tiny_cluster
from tiny_gates import Hold
from tiny_worker import TinyWorker

from moonpool.base.errors import Internal, InvalidInput
from moonpool.conductor.retries import Retries
from moonpool.engine.sequence import Chunk, SamplingParams
from moonpool.worker.messages import ALONE_STEPS

Change = Callable[[Sequence[Chunk], torch.Tensor], torch.Tensor]


def change_steps(worker: TinyWorker, change: Change) -> None:
    """Every step of the worker's model passes through `change`, which may raise."""
    execute = worker.runner.execute

    def changed(chunks: Sequence[Chunk], hooks: Any = None) -> torch.Tensor:
        return change(chunks, execute(chunks, hooks).clone())

    worker.runner.execute = changed  # type: ignore[method-assign]


def is_of(prompt: list[int]) -> Callable[[Chunk], bool]:
    """Whether a chunk belongs to the request with this first token."""
    names: set[str] = set()

    def check(chunk: Chunk) -> bool:
        if chunk.start == 0 and chunk.tokens[0] == prompt[0]:
            names.add(chunk.request_id)
        return chunk.request_id in names

    return check


async def test_vanishing_values_are_answered_like_their_limits(tiny_model: str, oracle: Oracle) -> None:
    async with tiny_cluster(tiny_model) as cluster:
        prompt = prompt_of(40)
        expected = await oracle(prompt, greedy(6))
        for temperature in (1e-300, 1e-46):
            cold = SamplingParams(max_tokens=6, temperature=temperature, ignore_eos=True)
            check_tokens((await cluster.generate(prompt, cold)).tokens, expected)
        repeating = SamplingParams(max_tokens=6, repetition_penalty=1e-40, ignore_eos=True)
        assert set((await cluster.generate(prompt, repeating)).tokens) <= {*prompt, *range(VOCAB)}


@pytest.mark.parametrize("where", ["prefill0", "decode0"])
@pytest.mark.parametrize("how", ["raises", "nan"])
async def test_a_request_that_fails_takes_nobody_along(tiny_model: str, oracle: Oracle, where: str, how: str) -> None:
    good, bad = [prompt_of(50, seed=n) for n in (1, 2, 3)], [5, *prompt_of(30, seed=9)]
    async with tiny_cluster(tiny_model, num_prefill=1, num_decode=1) as cluster:
        is_bad = is_of(bad)

        def spoil(chunks: Sequence[Chunk], logits: torch.Tensor) -> torch.Tensor:
            wanting = [chunk for chunk in chunks if chunk.wants_logits]
            found = [is_bad(chunk) or chunk.end in bad_ends for chunk in wanting]
            if any(found) and how == "raises":
                raise IndexError("a bug that this request alone triggers")
            logits[torch.tensor(found, dtype=torch.bool)] = torch.nan
            return logits

        # At the decode worker a chunk is one token long: the bad request is told by its length, which only it has.
        bad_ends = set(range(len(bad) + 1, len(bad) + 4)) if where == "decode0" else set()
        change_steps(cluster.workers[where], spoil)
        asking = [asyncio.create_task(cluster.generate(prompt, greedy(12))) for prompt in good]
        with pytest.raises(Internal, match=r"raised IndexError|no usable probabilities"):
            await cluster.generate(bad, greedy(12))
        for task, prompt in zip(asking, good, strict=True):
            check_tokens((await task).tokens, await oracle(prompt, greedy(12)))
        assert cluster.stats(where).failed_requests == 1
        await cluster.check_idle()


async def test_a_suspect_is_computed_in_batches_of_its_own(
    tiny_model: str, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with tiny_cluster(tiny_model) as cluster:
        steps: list[list[str]] = []

        def note(chunks: Sequence[Chunk], logits: torch.Tensor) -> torch.Tensor:
            steps.append([chunk.request_id for chunk in chunks])
            return logits

        change_steps(cluster.decode0, note)
        others = [prompt_of(20, seed=n) for n in (1, 2)]
        hold = Hold([cluster.decode0], 3)
        asking = [asyncio.create_task(cluster.generate(each, greedy(60))) for each in others]
        await cluster.until(lambda: cluster.decode0.stats().num_running == 2, "they decode")
        monkeypatch.setattr(Retries, "alone", True)
        suspect = prompt_of(30, seed=7)
        suspected = asyncio.create_task(cluster.generate(suspect, greedy(20)))
        await cluster.until(lambda: cluster.decode0.stats().num_running == 3, "the suspect is there too")
        hold.release()
        check_tokens((await suspected).tokens, await oracle(suspect, greedy(20)))
        for task, prompt in zip(asking, others, strict=True):
            check_tokens((await task).tokens, await oracle(prompt, greedy(60)))
        mine = max({name for step in steps for name in step}, key=lambda name: int(name.split("/")[0].lstrip("r")))
        own = [step for step in steps if mine in step]
        assert own[:ALONE_STEPS] == [[mine]] * ALONE_STEPS
        assert any(len(step) > 1 for step in own), "afterwards it runs with the others"


async def test_tokens_that_the_model_does_not_have_are_refused_at_the_door(tiny_model: str, oracle: Oracle) -> None:
    async with tiny_cluster(tiny_model) as cluster:
        for prompt in ([VOCAB], [3, 2**31]):
            with pytest.raises(InvalidInput, match=f"below {VOCAB}"):
                await cluster.generate(prompt, greedy(2))
        prompt = prompt_of(20)
        check_tokens((await cluster.generate(prompt, greedy(3))).tokens, await oracle(prompt, greedy(3)))


async def test_workers_start_and_serve_while_the_pool_is_away(tiny_model: str, oracle: Oracle) -> None:
    async with tiny_cluster(tiny_model, pool_timeout_s=0.2) as cluster:
        await cluster.stop_pool()
        for role in ("prefill", "decode"):
            await cluster.start_worker(role, 1, 48)
            await cluster.kill(f"{role}0")
        prompt = prompt_of(60)
        check_tokens((await cluster.generate(prompt, greedy(8))).tokens, await oracle(prompt, greedy(8)))
        await cluster.start_pool()
