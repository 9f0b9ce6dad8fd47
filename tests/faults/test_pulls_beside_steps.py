"""A pull that stands still holds up its own prompt alone. The pulls here stand until the test lets them go on; what is
computed meanwhile is counted, and every answer is compared with that of an engine alone."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import pytest
from severe import check_tokens
from tiny_cluster import Oracle, TinyCluster, greedy, prompt_of, tiny_cluster
from tiny_models import BLOCK_TOKENS
from tiny_worker import TinyWorker
from waiting import HANG_S

from moonpool.base.cluster import PrefillSample
from moonpool.engine.sequence import Chunk
from moonpool.worker.kv_link.pull import _PieceStream
from moonpool.worker.prefill import PrefillRole

PROMPT, OTHER = prompt_of(5 * BLOCK_TOKENS + 10), prompt_of(40, seed=1)
PARAMS = greedy(4)
NUM_PULLED = 5 * BLOCK_TOKENS
PATIENCE: dict[str, Any] = {"pull_timeout_s": 600.0, "pull_grace_s": 600.0}  # no pull is given up


class HeldLayers:
    """Pulls stop before they tell of a layer, until the test has released it; one release is for all pulls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._released = 0
        self._changed = threading.Condition()
        finish = _PieceStream._finish_first

        def finish_when_released(stream: _PieceStream) -> None:
            layer = stream._under_way[0].layer
            with self._changed:
                assert self._changed.wait_for(lambda: self._released > layer, HANG_S), "a layer was never released"
            finish(stream)

        monkeypatch.setattr(_PieceStream, "_finish_first", finish_when_released)

    def release(self, num_layers: int = 1000) -> None:
        with self._changed:
            self._released = num_layers
            self._changed.notify_all()


class Steps:
    """The chunks that a worker's model computes, and the layers that it has computed of each step."""

    def __init__(self, worker: TinyWorker, monkeypatch: pytest.MonkeyPatch) -> None:
        self.chunks: list[tuple[int, int]] = []  # first token, number of tokens
        self.num_layers = 0
        execute, role = worker.runner.execute, worker.role
        after_layer = role.after_layer

        def noted(chunks: Sequence[Chunk], hooks: Any) -> Any:
            self.chunks += [(chunk.start, len(chunk.tokens)) for chunk in chunks]
            return execute(chunks, hooks)

        def layer_noted(layer: int) -> None:
            self.num_layers += 1
            after_layer(layer)

        monkeypatch.setattr(worker.runner, "execute", noted)
        monkeypatch.setattr(role, "after_layer", layer_noted)


async def computes_slowly(cluster: TinyCluster) -> None:
    """Let the worker believe that computing takes very long, so that every pull is expected in time."""
    role = cluster.prefill0.role
    await cluster.prefill0.on_engine(lambda: role.calibrate(PrefillSample(1, 0, 1e9)))


async def is_pulling(cluster: TinyCluster, number: int = 1) -> None:
    ahead = cluster.prefill0.scheduler.ahead
    await cluster.until(lambda: len(ahead) == number, f"{number} pulls are under way")


@pytest.mark.parametrize("together", [False, True])
async def test_another_prompt_is_answered_while_a_pull_stands(
    tiny_model: str, oracle: Oracle, monkeypatch: pytest.MonkeyPatch, together: bool
) -> None:
    async with tiny_cluster(tiny_model, **PATIENCE) as cluster:
        await cluster.generate(PROMPT, PARAMS)
        await cluster.forget_pages()
        held, steps = HeldLayers(monkeypatch), Steps(cluster.prefill0, monkeypatch)
        pulled = asyncio.create_task(cluster.generate(PROMPT, PARAMS))
        if not together:
            await is_pulling(cluster)
        other = await cluster.generate(OTHER, PARAMS)
        check_tokens(other.tokens, await oracle(OTHER, PARAMS))
        assert steps.chunks == [(0, len(OTHER))], "the pulled prompt is in no step"
        held.release()
        answer = await pulled
        check_tokens(answer.tokens, await oracle(PROMPT, PARAMS))
        assert answer.prefills[0].pool_tokens == NUM_PULLED, "its pull was not given up"
        assert steps.chunks[1:] == [(NUM_PULLED, len(PROMPT) - NUM_PULLED)], "the rest, and that once"


async def test_layers_are_computed_before_the_last_one_has_come(
    tiny_model: str, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with tiny_cluster(tiny_model, **PATIENCE) as cluster:
        await cluster.generate(PROMPT, PARAMS)
        await cluster.forget_pages()
        await computes_slowly(cluster)
        held, steps = HeldLayers(monkeypatch), Steps(cluster.prefill0, monkeypatch)
        pulled = asyncio.create_task(cluster.generate(PROMPT, PARAMS))
        await is_pulling(cluster)
        assert steps.num_layers == 0
        held.release(1)
        await cluster.until(lambda: steps.num_layers == 1, "one layer is computed, and the next one awaited")
        held.release(2)
        await cluster.until(lambda: steps.num_layers == 2, "two layers are computed")
        held.release()
        answer = await pulled
        check_tokens(answer.tokens, await oracle(PROMPT, PARAMS))
        reply = answer.prefills[0]
        assert (reply.pool_tokens, len(reply.pull_layers_s)) == (NUM_PULLED, 3)
        assert 0 < reply.pull_s <= reply.compute_s
        assert len(steps.chunks) == 1


async def test_a_step_goes_on_without_a_prompt_whose_layers_are_late(
    tiny_model: str, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with tiny_cluster(tiny_model, **PATIENCE) as cluster:
        await cluster.generate(PROMPT, PARAMS)
        await cluster.forget_pages()
        await computes_slowly(cluster)
        monkeypatch.setattr(PrefillRole, "_stall_limit_s", lambda *_: 0.0)
        held, steps = HeldLayers(monkeypatch), Steps(cluster.prefill0, monkeypatch)
        pulled = asyncio.create_task(cluster.generate(PROMPT, PARAMS))
        await is_pulling(cluster)
        held.release(1)
        await cluster.until(lambda: steps.num_layers == 3, "the step has ended")
        other = await cluster.generate(OTHER, PARAMS)
        check_tokens(other.tokens, await oracle(OTHER, PARAMS))
        rest = (NUM_PULLED, len(PROMPT) - NUM_PULLED)
        assert steps.chunks == [rest, (0, len(OTHER))]
        held.release()
        answer = await pulled
        check_tokens(answer.tokens, await oracle(PROMPT, PARAMS))
        assert answer.prefills[0].pool_tokens == NUM_PULLED, "what the late pull has brought is used"
        assert steps.chunks == [rest, (0, len(OTHER)), rest]


@pytest.mark.parametrize("joined", [False, True])
async def test_a_client_that_leaves_while_its_prompt_is_pulled(
    tiny_model: str, oracle: Oracle, monkeypatch: pytest.MonkeyPatch, joined: bool
) -> None:
    async with tiny_cluster(tiny_model, **PATIENCE) as cluster:
        await cluster.generate(PROMPT, PARAMS)
        await cluster.forget_pages()
        await computes_slowly(cluster)
        held, steps = HeldLayers(monkeypatch), Steps(cluster.prefill0, monkeypatch)
        pulled = asyncio.create_task(cluster.generate(PROMPT, PARAMS))
        await is_pulling(cluster)
        if joined:
            held.release(1)
            await cluster.until(lambda: steps.num_layers == 1, "it is in a step")
        pulled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await pulled
        if not joined:
            await cluster.until(lambda: not cluster.prefill0.scheduler.ahead, "its pull is given up")
            assert cluster.prefill0.pages.owned, "and keeps its pages until it has ended"
        held.release()
        await cluster.check_idle()
        answer = await cluster.generate(PROMPT, PARAMS)
        check_tokens(answer.tokens, await oracle(PROMPT, PARAMS), "what was left in the cache is right")


async def test_prompts_behind_the_pages_for_pulls_are_answered(
    tiny_model: str, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four prompts of six pages each, ten pages: the pulls of two can never be under way at once."""
    prompts = [prompt_of(5 * BLOCK_TOKENS + 10, seed) for seed in range(2, 6)]
    async with tiny_cluster(tiny_model, prefill_pages=10, **PATIENCE) as cluster:
        for prompt in prompts:
            await cluster.generate(prompt, PARAMS)
        await cluster.forget_pages()
        held = HeldLayers(monkeypatch)
        asking = [asyncio.create_task(cluster.generate(prompt, PARAMS)) for prompt in prompts]
        await cluster.until(lambda: len(cluster.prefill0.scheduler.queues.waiting) == 4, "all wait")
        held.release()
        for prompt, task in zip(prompts, asking, strict=True):
            answer = await task
            check_tokens(answer.tokens, await oracle(prompt, PARAMS))
            assert answer.prefills[0].pool_tokens == NUM_PULLED


async def test_the_pull_of_a_prompt_that_comes_during_a_step_begins_in_that_step(
    tiny_model: str, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with tiny_cluster(tiny_model, **PATIENCE) as cluster:
        await cluster.generate(PROMPT, PARAMS)
        await cluster.forget_pages()
        worker, has_come, num_pulls = cluster.prefill0, threading.Event(), list[int]()
        before_layer = worker.role.before_layer

        def noted(layer: int) -> None:
            assert layer == 0 or has_come.wait(HANG_S), "no second prompt came"
            before_layer(layer)
            num_pulls.append(len(worker.scheduler.ahead))

        monkeypatch.setattr(worker.role, "before_layer", noted)
        other = asyncio.create_task(cluster.generate(OTHER, PARAMS))
        await cluster.until(lambda: num_pulls, "a step is under way")
        pulled = asyncio.create_task(cluster.generate(PROMPT, PARAMS))
        await cluster.until(lambda: worker.num_coming, "the prompt waits for the engine's thread")
        has_come.set()
        check_tokens((await other).tokens, await oracle(OTHER, PARAMS))
        check_tokens((await pulled).tokens, await oracle(PROMPT, PARAMS))
        assert num_pulls[:3] == [0, 1, 1]
