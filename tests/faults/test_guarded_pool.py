"""Workers that the pool does not let in: every block is a miss, the tokens are right, and somebody says why."""

from __future__ import annotations

from pathlib import Path

import pytest
from severe import check_tokens
from tiny_cluster import Oracle, greedy, prompt_of, tiny_cluster

PROMPT = prompt_of(70)
PARAMS = greedy(20)


async def test_a_pool_with_a_secret_that_the_workers_lack(
    tiny_model: str, oracle: Oracle, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("0123456789abcdef")
    secret.chmod(0o600)
    async with tiny_cluster(tiny_model, shm=False, node_secret=str(secret)) as cluster:
        for _ in range(2):
            answer = await cluster.generate(PROMPT, PARAMS)
            check_tokens(answer.tokens, await oracle(PROMPT, PARAMS))
            await cluster.forget_pages()
        for name in ("prefill0", "decode0"):
            assert cluster.stats(name).pull_failures.keys() == {"invalid_api_key"}, "counted, each time"
        assert cluster.master.state.stats().num_objects == 0
    said = [record.getMessage() for record in caplog.records if "secret_file" in record.getMessage()]
    by_workers = [text for text in said if text.startswith("no access to segment 'n.dram'")]
    assert len(by_workers) == 2, "one line of each worker, whatever the number of blocks"


async def test_a_pool_whose_blocks_are_there_but_guarded_is_a_miss_with_a_reason(
    tiny_model: str, oracle: Oracle, tmp_path: Path
) -> None:
    """The look-up promises blocks that cannot be had: the request computes them."""
    secret = tmp_path / "secret"
    secret.write_text("0123456789abcdef")
    secret.chmod(0o600)
    async with tiny_cluster(tiny_model, shm=False, node_secret=str(secret), secret_file=str(secret)) as cluster:
        await cluster.generate(PROMPT, PARAMS)
        await cluster.forget_pages()
        assert cluster.master.state.stats().num_objects == 5
        await cluster.kill("prefill0")
        cluster.settings = {}  # the next worker's operator forgot the secret
        await cluster.start_worker("prefill", 1, 48)
        await cluster.kill("decode0")
        await cluster.start_worker("decode", 1, 48)
        answer = await cluster.generate(PROMPT, PARAMS)
        check_tokens(answer.tokens, await oracle(PROMPT, PARAMS))
        assert answer.prefills[0].pool_tokens == 0
        assert cluster.stats("prefill1").pull_failures["invalid_api_key"] == 1
