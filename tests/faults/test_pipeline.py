"""A long prompt computed by several prefill workers: the same tokens, whatever happens to a stage."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from pipelines import LONG, NUM_BLOCKS, PIPELINE, check_pool, gate_chunks, helper_of, leads
from severe import check_tokens
from tiny_cluster import Oracle, greedy, prompt_of, tiny_cluster
from tiny_gates import Gate

from moonpool.base.errors import NoSpace
from moonpool.conductor.costs import CostModels
from moonpool.store.client.put_session import PutSession
from moonpool.store.client.shared_puts import SharedPuts
from moonpool.worker.kv_link.push import Push
from moonpool.worker.kv_link.span_puts import SpanPuts
from moonpool.worker.pipeline.stage_runner import StagedPrompt


@pytest.fixture(autouse=True)
def _fixed_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The priors say that a pipeline is worth it for a long prompt, and nothing that this host measures changes it."""
    monkeypatch.setattr(CostModels, "learn", lambda *_: None)
    monkeypatch.setattr(CostModels, "learn_handoff", lambda *_: None)


@pytest.mark.parametrize("shm", [True, False])
async def test_two_stages_answer_as_one_worker(tiny_model: str, oracle: Oracle, shm: bool) -> None:
    prompt, params = prompt_of(LONG), greedy(8)
    async with tiny_cluster(tiny_model, num_prefill=2, shm=shm, **PIPELINE) as cluster:
        answer = await cluster.generate(prompt, params)
        check_tokens(answer.tokens, await oracle(prompt, params))
        assert sum(leads(cluster)) == 1
        assert answer.num_attempts == 1
        # Every stage has put its layers, and the blocks are whole: another worker computes with them.
        await check_pool(cluster, prompt, NUM_BLOCKS)
        await cluster.forget_pages()
        again = await cluster.generate(prompt, params)
        check_tokens(again.tokens, answer.tokens)
        assert again.prefills[0].pool_tokens == LONG // 16 * 16
        assert sum(leads(cluster)) == 1, "a prefix in the pool is worth more than a pipeline"


async def test_a_pipeline_s_first_token_does_not_wait_for_the_commit(
    tiny_model: str, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt, params = prompt_of(LONG, seed=3), greedy(8)
    async with tiny_cluster(tiny_model, num_prefill=2, **PIPELINE) as cluster:
        gate, seen = Gate(), asyncio.Event()
        monkeypatch.setattr(Push, "_commit", gate.around(Push._commit))
        asking = asyncio.create_task(cluster.generate(prompt, params, on_tokens=lambda _: seen.set()))
        await gate.reached()
        await cluster.until(seen.is_set, "the client has its first token")
        gate.open()
        answer = await asking
        check_tokens(answer.tokens, await oracle(prompt, params))
        assert answer.num_attempts == 1
        assert sum(leads(cluster)) == 1
        await check_pool(cluster, prompt, NUM_BLOCKS)


@pytest.mark.parametrize("victim_is_last", [False, True])
async def test_a_stage_that_dies_costs_an_attempt_and_no_token(
    tiny_model: str, oracle: Oracle, victim_is_last: bool
) -> None:
    prompt, params = prompt_of(LONG, seed=1), greedy(8)
    async with tiny_cluster(tiny_model, num_prefill=2, **PIPELINE) as cluster:
        gate = Gate(at=4)
        gate_chunks(cluster, gate, is_last=victim_is_last)
        work = asyncio.create_task(cluster.generate(prompt, params))
        await gate.reached()
        helper = helper_of(cluster)
        leader = next(name for name in ("prefill0", "prefill1") if name != helper)
        victim = leader if victim_is_last else helper
        dying = asyncio.create_task(cluster.kill(victim))
        await cluster.until(lambda: not cluster.workers[victim].stages, "the dead worker's calls have ended")
        gate.open()
        await dying
        answer = await work
        check_tokens(answer.tokens, await oracle(prompt, params))
        assert answer.num_attempts == 2
        assert sum(leads(cluster)) == 0
        assert cluster.decode0.stats().reserved_pages == 0


async def test_a_client_that_leaves_ends_all_stages(tiny_model: str, oracle: Oracle) -> None:
    async with tiny_cluster(tiny_model, num_prefill=2, **PIPELINE) as cluster:
        gate = Gate(at=3)
        gate_chunks(cluster, gate, is_last=True)
        work = asyncio.create_task(cluster.generate(prompt_of(LONG, seed=2), greedy(8)))
        await gate.reached()
        work.cancel()
        await asyncio.wait((work,))
        gate.open()
        await cluster.check_idle()
        assert not any(worker.stages for worker in cluster.workers.values())
        prompt, params = prompt_of(40), greedy(8)
        check_tokens((await cluster.generate(prompt, params)).tokens, await oracle(prompt, params))
        assert sum(leads(cluster)) == 0, "short prompts go to one worker"


async def test_a_stage_without_pages_leaves_the_prompt_to_one_worker(
    tiny_model: str, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt, params = prompt_of(LONG, seed=3), greedy(8)
    async with tiny_cluster(tiny_model, num_prefill=2, **PIPELINE) as cluster:
        for worker in (cluster.prefill0, cluster.prefill1):
            stages = worker.stage_service.tools.stages

            def refuse(staged: StagedPrompt, reserve: Any = stages.reserve) -> None:
                if not staged.is_last:
                    raise NoSpace("no pages now")
                reserve(staged)

            monkeypatch.setattr(stages, "reserve", refuse)
        answer = await cluster.generate(prompt, params)
        check_tokens(answer.tokens, await oracle(prompt, params))
        assert answer.num_attempts == 1
        assert sum(leads(cluster)) == 0
        await check_pool(cluster, prompt, NUM_BLOCKS)


async def test_other_conductors_see_the_work_of_a_stage(tiny_model: str, oracle: Oracle) -> None:
    """The last stage stands still, so the first one has chunks left that it must not compute yet: half a prompt's work
    at most, since it has some of the layers."""
    prompt, params = prompt_of(LONG, seed=5), greedy(8)
    async with tiny_cluster(tiny_model, num_prefill=2, num_conductors=2, **PIPELINE) as cluster:
        other = cluster.conductors[1].state

        def reported() -> dict[str, int]:
            return {one.info.name: one.load.waiting_tokens for one in other.workers if one.is_prefill}

        await cluster.until(lambda: len(reported()) == 2, "it knows both workers")
        gate = Gate(at=1)
        gate_chunks(cluster, gate, is_last=True)
        work = asyncio.create_task(cluster.generate(prompt, params))
        await gate.reached()
        try:
            helper = helper_of(cluster)
            await cluster.until(lambda: 0 < reported()[helper] < LONG, "the other conductor sees the stage")
            [worker] = [one for one in other.workers if one.info.name == helper]
            assert worker.backlog.wait_s(0.0) > 0
        finally:
            gate.open()
        check_tokens((await work).tokens, await oracle(prompt, params))
        await cluster.until(lambda: not any(reported().values()), "and its end")


@pytest.mark.parametrize("dies", [False, True])
async def test_blocks_of_which_a_stage_did_not_write_its_part_are_not_stored(
    tiny_model: str, oracle: Oracle, dies: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request has ended by then: only the pool goes without them, and their space is free again."""
    prompt, params = prompt_of(LONG, seed=4), greedy(8)
    async with tiny_cluster(tiny_model, num_prefill=2, **PIPELINE) as cluster:
        gate = Gate()
        write, join = SpanPuts.write_joined, SharedPuts.join

        def lose_some(*arguments: Any) -> list[Any]:
            _, *rest = write(*arguments)
            return [None, *rest]

        def join_and_stop(*arguments: Any) -> list[PutSession]:
            joined = join(*arguments)
            gate.stop_here()
            return joined

        monkeypatch.setattr(SpanPuts, "write_joined", lose_some)
        monkeypatch.setattr(SharedPuts, "join", join_and_stop)
        answer = await cluster.generate(prompt, params)
        check_tokens(answer.tokens, await oracle(prompt, params))
        await gate.reached()
        if dies:
            victim = cluster.workers[helper_of(cluster)]
            dying = asyncio.create_task(cluster.kill(helper_of(cluster)))
            await cluster.until(lambda: not victim.stages, "its calls have ended")
            assert cluster.puts_in_progress == NUM_BLOCKS, "it may still write"
            gate.open()
            await dying
        gate.open()
        await cluster.until(lambda: cluster.puts_in_progress == 0, "no put is open")
        keys = cluster.object_keys(prompt)
        found = [info is not None for info in cluster.master.state.lookup(keys, 0.0, lease=False)]
        assert found == [False] + [not dies] * (NUM_BLOCKS - 1)
