"""More requests than pages: they queue, they are preempted, and all of them end with the right tokens."""

from __future__ import annotations

import asyncio

from severe import check_tokens
from tiny_cluster import PAGE_NBYTES, Oracle, TinyCluster, greedy, prompt_of, tiny_cluster
from tiny_gates import steps_wait_for_puts
from tiny_models import BLOCK_TOKENS

from moonpool.engine.sequence import SamplingParams


async def ask_all(cluster: TinyCluster, oracle: Oracle, prompts: list[list[int]], params: SamplingParams) -> None:
    answers = await asyncio.gather(*(cluster.generate(prompt, params) for prompt in prompts))
    for prompt, answer in zip(prompts, answers, strict=True):
        check_tokens(answer.tokens, await oracle(prompt, params))
        assert answer.num_attempts == 1


async def test_requests_queue_for_the_pages_of_a_decode_worker(tiny_model: str, oracle: Oracle) -> None:
    most_reserved = 0
    async with tiny_cluster(tiny_model, decode_pages=12) as cluster:
        decode, most_waiting = cluster.decode0, 0

        def watch() -> None:
            nonlocal most_reserved, most_waiting
            most_waiting = max(most_waiting, decode.num_waiting_for_pages)
            most_reserved = max(most_reserved, decode.num_reserved_pages)

        decode.before_steps(watch)
        # Each needs five pages from its first token to its last, so that none is preempted.
        await ask_all(cluster, oracle, [prompt_of(65 + n, n) for n in range(10)], greedy(6))
        assert most_waiting >= 3
        assert most_reserved <= 12
        assert decode.num_preemptions == 0
        assert cluster.stats("decode0").pull_failures == {}


async def test_long_answers_preempt_each_other_and_come_back_from_the_pool(tiny_model: str, oracle: Oracle) -> None:
    async with tiny_cluster(tiny_model, decode_pages=12) as cluster:
        steps_wait_for_puts(cluster.decode0)  # otherwise an answer may come back before all of its blocks are there
        await ask_all(cluster, oracle, [prompt_of(20 + n, n) for n in range(6)], greedy(60))
        assert cluster.decode0.num_preemptions > 0
        stats = cluster.stats("decode0")
        assert stats.resumed_answers > 0
        # The block that was in progress, and now and then one that gave its page to another answer's pull; without
        # pulls, all that was computed before: three blocks and more.
        assert stats.recomputed_tokens <= stats.resumed_answers * 2 * BLOCK_TOKENS
        assert stats.pool_read_nbytes > 0
        assert stats.pull_failures == {}


async def test_preempted_answers_are_computed_again_when_the_pool_is_away(tiny_model: str, oracle: Oracle) -> None:
    async with tiny_cluster(tiny_model, decode_pages=12, pool_timeout_s=0.2) as cluster:
        asking = ask_all(cluster, oracle, [prompt_of(20 + n, n) for n in range(6)], greedy(60))
        task = asyncio.create_task(asking)
        await cluster.until(lambda: cluster.stats("decode0").num_running > 2, "they decode")
        await cluster.stop_pool()
        await task
        assert cluster.decode0.num_preemptions > 0
        stats = cluster.stats("decode0")
        assert stats.recomputed_tokens > stats.resumed_answers * BLOCK_TOKENS
        await cluster.start_pool()


async def test_prompts_queue_for_the_pages_of_a_prefill_worker(tiny_model: str, oracle: Oracle) -> None:
    """Sharing a prefix, so that pages are shared, evicted and pulled back all the time."""
    shared = prompt_of(40, seed=77)
    async with tiny_cluster(
        tiny_model, prefill_pages=9, decode_pages=20, max_batch_tokens=24, max_num_seqs=8
    ) as cluster:
        prompts = [(shared if n % 2 else []) + prompt_of(60 + n, n) for n in range(12)]
        await ask_all(cluster, oracle, prompts, greedy(8))
        await ask_all(cluster, oracle, prompts, greedy(8))
        assert cluster.stats("prefill0").pool_read_nbytes > 0


async def test_blocks_of_a_prompt_come_while_it_waits(tiny_model: str, oracle: Oracle) -> None:
    """A long prompt is computed in many steps; the one behind it has its blocks when its turn comes, and a step never
    waits for them. Those of a prompt that is cancelled are given back."""
    async with tiny_cluster(tiny_model, prefill_pages=40, max_batch_tokens=16, max_num_seqs=1) as cluster:
        known, other, params = prompt_of(70, 1), prompt_of(70, 2), greedy(4)
        for prompt in (known, other):
            await cluster.generate(prompt, params)
        await cluster.forget_pages("prefill0")
        scheduler = cluster.prefill0.scheduler
        before, most = cluster.stats("prefill0").pool_read_nbytes, 0

        def has_begun() -> bool:
            nonlocal most
            most = max(most, scheduler.ahead.num_pages)
            return cluster.stats("prefill0").pool_read_nbytes > before

        long = asyncio.create_task(cluster.generate(prompt_of(300, 3), params))
        await cluster.until(lambda: cluster.stats("prefill0").num_running == 1, "it is computed")
        waiting = asyncio.create_task(cluster.generate(known, params))
        leaving = asyncio.create_task(cluster.generate(other, params))
        await cluster.until(has_begun, "a pull begins")
        assert not long.done()
        leaving.cancel()
        await asyncio.wait((leaving,))
        answer = await waiting
        check_tokens(answer.tokens, await oracle(known, params))
        assert (answer.prefills[0].local_tokens, answer.prefills[0].pool_tokens) == (0, 64)
        assert answer.prefills[0].pool_nbytes == 4 * PAGE_NBYTES
        await long
        assert most <= 10, "a quarter of the pages"
