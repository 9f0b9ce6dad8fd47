"""Answers that are under way when their decode worker leaves, changes its role or dies go on at another one with the
same tokens, and with their KV from the pool."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest
from test_role_changes import change
from tiny_cluster import Answer, Oracle, TinyCluster, greedy, prompt_of, tiny_cluster
from tiny_models import BLOCK_TOKENS

from moonpool.base.cluster import WorkerRole
from moonpool.engine.sequence import SamplingParams

NUM_TOKENS = 200
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


def slow_down(cluster: TinyCluster) -> None:
    """Let each step of a decode worker take a while, so that answers are under way when something happens."""
    for name in cluster.workers.keys() & {"decode0", "decode1"}:
        engine = cluster.workers[name]._loop._engine

        def step(compute: Callable[[], Any] = engine.step) -> Any:
            time.sleep(0.02)
            return compute()

        setattr(engine, "step", step)  # noqa: B010 - mypy does not let a method be assigned


class Running:
    """Answers under way, each at the worker that the conductor chose."""

    def __init__(self, cluster: TinyCluster, params: list[SamplingParams]) -> None:
        self._cluster = cluster
        self.num_tokens = [0] * len(params)
        self._tasks = [
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
        return list(await asyncio.gather(*self._tasks))


def check(answers: list[Answer], oracle: Oracle, params: list[SamplingParams]) -> None:
    for answer, prompt, each in zip(answers, PROMPTS, params, strict=True):
        assert answer.tokens == oracle(prompt, each)
        assert len(answer.prefills) == 1, "no prefill worker computes it again"
        wants = each.logprobs is not None
        assert all((out.logprob is not None) is wants and len(out.top) == (each.logprobs or 0) for out in answer.outs)


def check_recomputed(cluster: TinyCluster, names: list[str], num_resumed: int) -> None:
    """At most one block of each answer was computed again."""
    stats = [cluster.stats(name) for name in names]
    assert sum(each.resumed_answers for each in stats) == num_resumed
    assert sum(each.recomputed_tokens for each in stats) <= num_resumed * BLOCK_TOKENS


async def test_a_worker_that_leaves(tiny_model: str, oracle: Oracle) -> None:
    async with tiny_cluster(tiny_model, num_decode=2, decode_pages=PAGES) as cluster:
        slow_down(cluster)
        running = Running(cluster, PARAMS)
        await running.all_have(20)
        num_there = cluster.stats("decode0").num_running
        assert num_there > 0
        await cluster.decode0.drain()
        answers = await running.answers()
        check(answers, oracle, PARAMS)
        moved = [answer for answer in answers if answer.num_moves]
        assert [answer.num_moves for answer in moved] == [1] * num_there
        assert [answer.num_attempts for answer in answers] == [1] * 4
        check_recomputed(cluster, ["decode1"], num_there)
        print(f"longest pauses of moved answers: {[round(answer.longest_gap_s, 4) for answer in moved]} s")


async def test_logprobs_are_those_of_an_undisturbed_answer(tiny_model: str) -> None:
    async with tiny_cluster(tiny_model, num_decode=2, decode_pages=PAGES) as cluster:
        alone = await cluster.generate(PROMPTS[0], SAMPLED)
        await cluster.forget_pages()
        slow_down(cluster)
        running = Running(cluster, [SAMPLED] * 4)
        await running.all_have(20)
        for name in ("decode0", "decode1"):  # the first answer is at one of them
            await change(cluster, name, WorkerRole.PREFILL)
            await cluster.until(lambda name=name: cluster.stats(name).num_running == 0, "its answers go on elsewhere")  # type: ignore[misc]
            await change(cluster, name, WorkerRole.DECODE)
        moved = (await running.answers())[0]
        assert moved.num_moves > 0
        assert [out.token for out in moved.outs] == [out.token for out in alone.outs]
        assert [out.logprob for out in moved.outs] == pytest.approx([out.logprob for out in alone.outs], abs=1e-4)


async def test_a_worker_that_computes_prompts_from_now_on(tiny_model: str, oracle: Oracle) -> None:
    """Its answers go to the other one, and then, when the roles change again, back."""
    async with tiny_cluster(tiny_model, num_decode=2, decode_pages=PAGES) as cluster:
        slow_down(cluster)
        running = Running(cluster, PARAMS)
        await running.all_have(20)
        await change(cluster, "decode0", WorkerRole.PREFILL)
        await cluster.until(lambda: cluster.stats("decode0").num_running == 0, "its answers go on elsewhere")
        await change(cluster, "decode0", WorkerRole.DECODE)
        await change(cluster, "decode1", WorkerRole.PREFILL)
        answers = await running.answers()
        check(answers, oracle, PARAMS)
        assert max(answer.num_moves for answer in answers) == 2
        check_recomputed(cluster, ["decode0", "decode1"], sum(answer.num_moves for answer in answers))


async def test_a_worker_that_dies(tiny_model: str, oracle: Oracle) -> None:
    """What it had put is used: the answers go on at the other decode worker, and no prefill worker is asked."""
    async with tiny_cluster(tiny_model, num_decode=2, decode_pages=PAGES) as cluster:
        running = Running(cluster, PARAMS)
        await running.all_have(60)
        num_there = cluster.stats("decode0").num_running
        assert num_there > 0
        await cluster.kill("decode0")
        check(await running.answers(), oracle, PARAMS)
        stats = cluster.stats("decode1")
        assert stats.resumed_answers == num_there
        assert stats.recomputed_tokens <= num_there * 5 * BLOCK_TOKENS, "blocks that were not put yet are computed"
        assert stats.pool_read_nbytes > 0


async def test_the_only_decode_worker_ends_its_answers_itself(tiny_model: str, oracle: Oracle) -> None:
    async with tiny_cluster(tiny_model, num_decode=1, decode_pages=PAGES) as cluster:
        running = Running(cluster, PARAMS)
        await running.all_have(20)
        await cluster.decode0.drain()
        answers = await running.answers()
        check(answers, oracle, PARAMS)
        assert [answer.num_moves for answer in answers] == [0] * 4


async def test_a_worker_that_drains_still_does_after_its_conductor_has_started_again(
    tiny_model: str, oracle: Oracle
) -> None:
    """The new conductor learns from the worker's registration that it leaves, and in which role."""
    async with tiny_cluster(tiny_model, num_decode=1, decode_pages=PAGES) as cluster:
        slow_down(cluster)
        state = cluster.conductor._state
        await cluster.until(lambda: state.roles.lease() is not None, "it may change workers")
        running = Running(cluster, PARAMS)
        await running.all_have(5)
        state.roles.drain("decode0", state.workers, force=True)
        await cluster.until(lambda: "decode0" in state.roles.leaving, "it drains")
        former = cluster.connections
        await cluster.conductor.close()
        await cluster.start_conductor()
        state = cluster.conductor._state
        await cluster.until(lambda: len(state.workers) == 1 and bool(state.roles.leaving), "both register again")
        assert [worker.info.name for worker in state.workers] == ["prefill0"], "no request is sent to it"
        assert (info := state.roles.leaving["decode0"]).role is WorkerRole.DECODE
        assert info.incarnation == cluster.decode0.incarnation
        assert cluster.stats("decode0").num_running > 0
        check(await running.answers(), oracle, PARAMS)
        await asyncio.wait_for(cluster.decode0.left(), 20)
        assert state.roles.left == {"decode0"}
        await cluster.kill("decode0")
        await cluster.until(lambda: not state.roles.leaving, "it is gone")
        await former.close()


async def test_without_the_pool_answers_end_where_they_are(tiny_model: str, oracle: Oracle) -> None:
    async with tiny_cluster(tiny_model, num_decode=2, decode_pages=PAGES, pool_timeout_s=0.2) as cluster:
        running = Running(cluster, PARAMS)
        await running.all_have(20)
        await cluster.stop_pool()
        await cluster.decode0.drain()
        answers = await running.answers()
        check(answers, oracle, PARAMS)
        assert [answer.num_moves for answer in answers] == [0] * 4
        await cluster.start_pool()


async def test_a_client_that_leaves_while_its_answer_moves(tiny_model: str, oracle: Oracle) -> None:
    async with tiny_cluster(tiny_model, num_decode=2, decode_pages=PAGES) as cluster:
        running = Running(cluster, PARAMS)
        await running.all_have(30)
        draining = asyncio.create_task(cluster.decode0.drain())
        await asyncio.sleep(0.01)
        for task in running._tasks[::2]:
            task.cancel()
        await draining
        rest = await asyncio.gather(*running._tasks[1::2])
        assert [answer.tokens for answer in rest] == [oracle(PROMPTS[n], PARAMS[n]) for n in (1, 3)]
