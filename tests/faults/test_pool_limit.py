"""The conductor's word on the pool reaches the worker, and what workers measure reaches the conductor's models."""

from __future__ import annotations

import pytest
from severe import check_tokens
from tiny_cluster import Oracle, greedy, prompt_of, tiny_cluster

from moonpool.base.cluster import CONDUCTOR_SERVICE
from moonpool.base.rpc import AsyncClient
from moonpool.conductor.messages import Status
from moonpool.conductor.placement.policy import PaperAlgorithm

PROMPT = prompt_of(90)  # five full blocks of 16 tokens and a partial one
PARAMS = greedy(6)


@pytest.mark.parametrize(("limit", "pool_tokens"), [(None, 80), (3, 48), (0, 0), (9, 80)])
async def test_a_worker_pulls_no_more_than_it_is_told(
    tiny_model: str, oracle: Oracle, limit: int | None, pool_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with tiny_cluster(tiny_model) as cluster:
        await cluster.generate(PROMPT, PARAMS)
        await cluster.check_idle()
        await cluster.forget_pages()
        monkeypatch.setattr(PaperAlgorithm, "pool_limit", lambda *_: limit)
        before = cluster.stats("prefill0").pool_read_nbytes
        answer = await cluster.generate(PROMPT, PARAMS)
        check_tokens(answer.tokens, await oracle(PROMPT, PARAMS))
        assert answer.prefills[0].pool_tokens == pool_tokens
        assert (cluster.stats("prefill0").pool_read_nbytes > before) == (pool_tokens > 0)


async def test_models_know_the_machine_before_the_first_request_and_are_judged_after_it(tiny_model: str) -> None:
    async with tiny_cluster(tiny_model) as cluster:
        costs = cluster.conductor.state.costs
        assert costs.prefill.num_samples >= 3
        assert costs.decode.num_samples >= 3
        assert costs.transfer.num_samples >= 1
        await cluster.generate(PROMPT, PARAMS)
        await cluster.check_idle()
        client = await AsyncClient.connect(cluster.address_of("c.sock"), CONDUCTOR_SERVICE)
        status = await client.call(Status())
        client.close()
        assert status.policy == "paper"
        assert status.fetch_or_compute is not None
        counts = {one.model: one.count for one in status.predictions}
        assert counts["prefill"] >= 3
        assert (counts["ttft"], counts["tbt"]) == (1, 1)
