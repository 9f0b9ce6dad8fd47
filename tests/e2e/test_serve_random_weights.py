"""`moonpool serve --random-weights` with a folder that has no weights: prompts of token ids, answers, and reuse."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from e2e_service import running
from random_model import small_model, token_prompt

pytestmark = pytest.mark.timeout(180)


def test_a_folder_without_weights_is_served(tmp_path: Path) -> None:
    folder = small_model(tmp_path / "small")
    options = ("--model", str(folder), "--random-weights", "--kv", "64MB", "--dram", "64MB")
    with running(tmp_path, *options) as service:
        body = {"model": "small", "prompt": token_prompt(300), "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        events = list(service.stream("/v1/completions", body))
        text = "".join(event["choices"][0]["text"] for event in events if event["choices"])
        assert text
        assert len([event for event in events if event["choices"]]) > 1, "tokens are streamed one by one"
        again = httpx.post(f"{service.url}/v1/completions", json=body, timeout=60).json()
        assert again["choices"][0]["text"] == text
        assert again["usage"]["prompt_tokens"] == 300
        first, second = (service.generate(token_prompt(200, seed=2)) for _ in range(2))
        assert first.tokens == second.tokens
        assert second.prefill is not None
        assert second.prefill.local_tokens + second.prefill.pool_tokens == 192
