"""A pool that became slow: no request waits long for it, and the next ones leave it alone for a while."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import pytest
from severe import check_tokens
from tiny_cluster import Oracle, greedy, prompt_of, tiny_cluster

from moonpool.store.client.read_session import PieceReads

PROMPT = prompt_of(90)  # five full blocks of 16 tokens and a partial one
PARAMS = greedy(4)
PIECE_S = 0.3


async def test_a_slow_pull_is_given_up_and_teaches_the_conductor(
    tiny_model: str, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with tiny_cluster(tiny_model, pull_grace_s=0.1, pool_rest_s=600.0) as cluster:
        state = cluster.conductor.state
        await cluster.generate(PROMPT, PARAMS)
        await cluster.forget_pages()
        start_reads = PieceReads.start

        def slowly(pieces: PieceReads, reads: Sequence[Any], num_ahead: int) -> Any:
            time.sleep(PIECE_S * len(reads))
            return start_reads(pieces, reads, num_ahead)

        monkeypatch.setattr(PieceReads, "start", slowly)
        num_samples = state.costs.transfer.num_samples
        answer = await cluster.generate(PROMPT, PARAMS)
        check_tokens(answer.tokens, await oracle(PROMPT, PARAMS))
        assert answer.prefills[0].pool_tokens == 0, "five blocks would have taken seconds"
        await cluster.until(lambda: state.costs.transfer.num_samples > num_samples, "the conductor hears of it")
        await cluster.forget_pages()
        failures = cluster.stats("prefill0").pull_failures
        answer = await cluster.generate(PROMPT, PARAMS)
        check_tokens(answer.tokens, await oracle(PROMPT, PARAMS))
        assert answer.prefills[0].pool_tokens == 0
        assert cluster.stats("prefill0").pull_failures == failures, "the pool rests: nothing was tried"
