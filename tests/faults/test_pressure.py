"""More requests than pages: they queue, they are preempted, and all of them end with the right tokens."""

from __future__ import annotations

import asyncio

from tiny_cluster import Oracle, TinyCluster, greedy, prompt_of, tiny_cluster

from moonpool.engine.sequence import SamplingParams


async def ask_all(cluster: TinyCluster, oracle: Oracle, prompts: list[list[int]], params: SamplingParams) -> None:
    answers = await asyncio.gather(*(cluster.generate(prompt, params) for prompt in prompts))
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.tokens == oracle(prompt, params)
        assert answer.num_attempts == 1


async def test_requests_queue_for_the_pages_of_a_decode_worker(tiny_model: str, oracle: Oracle) -> None:
    most_reserved = 0
    async with tiny_cluster(tiny_model, decode_pages=12) as cluster:
        role = cluster.decode0.role
        at_boundary, waited = role.at_boundary, []

        def watch() -> None:
            nonlocal most_reserved
            at_boundary()
            waited.append(len(role._waiting))
            most_reserved = max(most_reserved, cluster.decode0._reservations.num_pages)

        cluster.decode0._loop._at_boundary = watch
        await ask_all(cluster, oracle, [prompt_of(60 + n, n) for n in range(10)], greedy(6))
        assert max(waited) >= 3
        assert most_reserved <= 12
        assert cluster.stats("decode0").pull_failures == {}


async def test_long_answers_preempt_each_other(tiny_model: str, oracle: Oracle) -> None:
    async with tiny_cluster(tiny_model, decode_pages=12) as cluster:
        await ask_all(cluster, oracle, [prompt_of(20 + n, n) for n in range(6)], greedy(90))
        assert cluster.decode0.num_preemptions > 0


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
