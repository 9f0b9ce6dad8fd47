"""What comes from the pool is not computed: counted in tokens that the model computes, not in what a worker reports."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from severe import check_tokens
from tiny_cluster import Oracle, greedy, prompt_of, tiny_cluster
from tiny_models import BLOCK_TOKENS
from tiny_worker import TinyWorker

from moonpool.conductor.placement.policy import PaperAlgorithm
from moonpool.engine.sequence import Chunk

PROMPT = prompt_of(5 * BLOCK_TOKENS + 10)
PARAMS = greedy(2)


def note_computed(worker: TinyWorker, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Return a list to which each chunk that the worker's model computes adds its first token and their number."""
    computed: list[tuple[int, int]] = []
    execute = worker.runner.execute

    def noted(chunks: Sequence[Chunk], hooks: Any) -> Any:
        computed.extend((chunk.start, len(chunk.tokens)) for chunk in chunks)
        return execute(chunks, hooks)

    monkeypatch.setattr(worker.runner, "execute", noted)
    return computed


@pytest.mark.parametrize(("limit", "num_pulled"), [(None, 5), (3, 3), (0, 0)])
async def test_pulled_blocks_are_not_computed(
    tiny_model: str, oracle: Oracle, limit: int | None, num_pulled: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with tiny_cluster(tiny_model) as cluster:
        computed = note_computed(cluster.prefill0, monkeypatch)
        await cluster.generate(PROMPT, PARAMS)
        assert computed == [(0, len(PROMPT))]
        await cluster.forget_pages()
        computed.clear()
        monkeypatch.setattr(PaperAlgorithm, "pool_limit", lambda *_: limit)
        answer = await cluster.generate(PROMPT, PARAMS)
        check_tokens(answer.tokens, await oracle(PROMPT, PARAMS))
        num_tokens = num_pulled * BLOCK_TOKENS
        assert answer.prefills[0].pool_tokens == num_tokens
        assert computed == [(num_tokens, len(PROMPT) - num_tokens)], "the rest, and that once"
