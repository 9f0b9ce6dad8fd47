"""Hand-offs from prefill to decode: the bytes that arrive are the bytes that left, or the request starts over."""

from __future__ import annotations

from tiny_cluster import Oracle, greedy, prompt_of, tiny_cluster


async def test_hello(tiny_model: str, oracle: Oracle) -> None:
    async with tiny_cluster(tiny_model) as cluster:
        for seed in range(3):
            prompt, params = prompt_of(70, seed), greedy(20)
            answer = await cluster.generate(prompt, params)
            assert answer.tokens == oracle(prompt, params)
