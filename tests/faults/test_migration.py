"""Answers that are under way when their decode worker leaves, changes its role or dies go on at another one with the
same tokens, and with their KV from the pool."""

from __future__ import annotations

import asyncio

import pytest
from moving_answers import NUM_HELD, PAGES, PARAMS, PROMPTS, SAMPLED, Running, hold_answers
from role_changes import change
from severe import check_tokens
from tiny_cluster import Answer, Oracle, TinyCluster, tiny_cluster
from tiny_models import BLOCK_TOKENS
from waiting import HANG_S

from moonpool.base.cluster import WorkerRole
from moonpool.engine.sequence import SamplingParams


async def check(answers: list[Answer], oracle: Oracle, params: list[SamplingParams]) -> None:
    for answer, prompt, each in zip(answers, PROMPTS, params, strict=True):
        check_tokens(answer.tokens, await oracle(prompt, each))
        assert len(answer.prefills) == 1, "no prefill worker computes it again"
        wants = each.logprobs is not None
        assert all((out.logprob is not None) is wants and len(out.top) == (each.logprobs or 0) for out in answer.outs)


def check_recomputed(cluster: TinyCluster, names: list[str], num_resumed: int) -> None:
    """At most one block of each answer was computed again."""
    stats = [cluster.stats(name) for name in names]
    assert sum(each.resumed_answers for each in stats) == num_resumed
    assert sum(each.recomputed_tokens for each in stats) <= num_resumed * BLOCK_TOKENS


async def empty(cluster: TinyCluster, name: str) -> None:
    """The worker computes prompts from now on, and its answers go on elsewhere."""
    await change(cluster, name, WorkerRole.PREFILL)
    await cluster.until(lambda: cluster.stats(name).num_running == 0, "its answers go on elsewhere")


async def test_a_worker_that_leaves(tiny_model: str, oracle: Oracle) -> None:
    async with tiny_cluster(tiny_model, num_decode=2, decode_pages=PAGES) as cluster:
        hold = hold_answers(cluster)
        running = Running(cluster, PARAMS)
        await running.all_have(NUM_HELD)
        num_there = cluster.stats("decode0").num_running
        assert num_there > 0
        await cluster.decode0.drain()
        hold.release()
        answers = await running.answers()
        await check(answers, oracle, PARAMS)
        moved = [answer for answer in answers if answer.num_moves]
        assert [answer.num_moves for answer in moved] == [1] * num_there
        assert [answer.num_attempts for answer in answers] == [1] * 4
        check_recomputed(cluster, ["decode1"], num_there)


async def test_logprobs_are_those_of_an_undisturbed_answer(tiny_model: str) -> None:
    async with tiny_cluster(tiny_model, num_decode=2, decode_pages=PAGES) as cluster:
        alone = await cluster.generate(PROMPTS[0], SAMPLED)
        await cluster.forget_pages()
        hold = hold_answers(cluster)
        running = Running(cluster, [SAMPLED] * 4)
        await running.all_have(NUM_HELD)
        for name in ("decode0", "decode1"):  # the first answer is at one of them
            await empty(cluster, name)
            await change(cluster, name, WorkerRole.DECODE)
        hold.release()
        moved = (await running.answers())[0]
        assert moved.num_moves > 0
        assert [out.token for out in moved.outs] == [out.token for out in alone.outs]
        assert [out.logprob for out in moved.outs] == pytest.approx([out.logprob for out in alone.outs], abs=1e-4)


async def test_a_worker_that_computes_prompts_from_now_on(tiny_model: str, oracle: Oracle) -> None:
    """Its answers go to the other one, and then, when the roles change again, back."""
    async with tiny_cluster(tiny_model, num_decode=2, decode_pages=PAGES) as cluster:
        hold = hold_answers(cluster)
        running = Running(cluster, PARAMS)
        await running.all_have(NUM_HELD)
        await empty(cluster, "decode0")
        await change(cluster, "decode0", WorkerRole.DECODE)
        await empty(cluster, "decode1")
        hold.release()
        answers = await running.answers()
        await check(answers, oracle, PARAMS)
        assert max(answer.num_moves for answer in answers) == 2
        check_recomputed(cluster, ["decode0", "decode1"], sum(answer.num_moves for answer in answers))


async def test_a_worker_that_dies(tiny_model: str, oracle: Oracle) -> None:
    """What it had put is used: the answers go on at the other decode worker, and no prefill worker is asked."""
    async with tiny_cluster(tiny_model, num_decode=2, decode_pages=PAGES) as cluster:
        hold = hold_answers(cluster, 20)  # so that blocks that it computed are in the pool
        running = Running(cluster, PARAMS)
        await running.all_have(20)
        await cluster.until(lambda: cluster.puts_in_progress == 0, "the blocks are put")
        num_there = cluster.stats("decode0").num_running
        assert num_there > 0
        await cluster.kill("decode0")
        hold.release()
        await check(await running.answers(), oracle, PARAMS)
        stats = cluster.stats("decode1")
        assert stats.resumed_answers == num_there
        assert stats.recomputed_tokens <= num_there * 2 * BLOCK_TOKENS, "blocks that were not put yet are computed"
        assert stats.pool_read_nbytes > 0


async def test_the_only_decode_worker_ends_its_answers_itself(tiny_model: str, oracle: Oracle) -> None:
    async with tiny_cluster(tiny_model, num_decode=1, decode_pages=PAGES) as cluster:
        hold = hold_answers(cluster)
        running = Running(cluster, PARAMS)
        await running.all_have(NUM_HELD)
        draining = asyncio.create_task(cluster.decode0.drain())
        await cluster.until(lambda: cluster.decode0.assigned.leaves, "it leaves")
        hold.release()
        answers = await running.answers()
        await draining
        await check(answers, oracle, PARAMS)
        assert [answer.num_moves for answer in answers] == [0] * 4


async def test_a_worker_that_drains_still_does_after_its_conductor_has_started_again(
    tiny_model: str, oracle: Oracle
) -> None:
    """The new conductor learns from the worker's registration that it leaves, and in which role."""
    async with tiny_cluster(tiny_model, num_decode=1, decode_pages=PAGES) as cluster:
        hold = hold_answers(cluster)
        state = cluster.conductor.state
        await cluster.until(lambda: state.roles.lease() is not None, "it may change workers")
        running = Running(cluster, PARAMS)
        await running.all_have(5)
        state.roles.drain("decode0", state.workers, force=True)
        await cluster.until(lambda: "decode0" in state.roles.leaving, "it drains")
        former = cluster.connections
        await cluster.conductor.close()
        await cluster.start_conductor()
        state = cluster.conductor.state
        await cluster.until(lambda: len(state.workers) == 1 and bool(state.roles.leaving), "both register again")
        assert [worker.info.name for worker in state.workers] == ["prefill0"], "no request is sent to it"
        assert (info := state.roles.leaving["decode0"]).role is WorkerRole.DECODE
        assert info.incarnation == cluster.decode0.incarnation
        assert cluster.stats("decode0").num_running > 0
        hold.release()
        await check(await running.answers(), oracle, PARAMS)
        await asyncio.wait_for(cluster.decode0.left(), HANG_S)
        assert state.roles.left == {"decode0"}
        await cluster.kill("decode0")
        await cluster.until(lambda: not state.roles.leaving, "it is gone")
        await former.close()


async def test_without_the_pool_answers_end_where_they_are(tiny_model: str, oracle: Oracle) -> None:
    async with tiny_cluster(tiny_model, num_decode=2, decode_pages=PAGES, pool_timeout_s=0.2) as cluster:
        hold = hold_answers(cluster)
        running = Running(cluster, PARAMS)
        await running.all_have(NUM_HELD)
        await cluster.stop_pool()
        draining = asyncio.create_task(cluster.decode0.drain())
        await cluster.until(lambda: cluster.decode0.assigned.leaves, "it leaves")
        hold.release()
        await draining
        answers = await running.answers()
        await check(answers, oracle, PARAMS)
        assert [answer.num_moves for answer in answers] == [0] * 4
        await cluster.start_pool()


async def test_a_client_that_leaves_while_its_answer_moves(tiny_model: str, oracle: Oracle) -> None:
    async with tiny_cluster(tiny_model, num_decode=2, decode_pages=PAGES) as cluster:
        hold = hold_answers(cluster)
        running = Running(cluster, PARAMS)
        await running.all_have(NUM_HELD)
        draining = asyncio.create_task(cluster.decode0.drain())
        await cluster.until(lambda: cluster.decode0.assigned.leaves, "it leaves")
        for task in running.tasks[::2]:
            task.cancel()
        await draining
        hold.release()
        rest = await asyncio.gather(*running.tasks[1::2])
        check_tokens([answer.tokens for answer in rest], [await oracle(PROMPTS[n], PARAMS[n]) for n in (1, 3)])
