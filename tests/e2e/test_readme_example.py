"""The question that README and `moonpool serve` show: the default model answers it rightly, however it is sampled."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from e2e_service import Service
from waiting import HANG_S

pytestmark = pytest.mark.model
ROOT = Path(__file__).parents[2]
QUESTION, ANSWER = "What is the capital of Japan?", "Tokyo"


@pytest.mark.parametrize("file", ["README.md", "README.zh-CN.md", "moonpool/launch/serve.py"])
def test_it_is_the_question_that_is_shown(file: str) -> None:
    assert QUESTION in (ROOT / file).read_text()


def test_it_is_answered_rightly_every_time(smollm2: Service) -> None:
    body = {"model": "smollm2", "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 16}
    with httpx.Client(base_url=smollm2.url, trust_env=False, timeout=HANG_S) as client:
        for seed in range(10):
            reply = client.post("/v1/chat/completions", json={**body, "seed": seed})
            assert ANSWER in reply.json()["choices"][0]["message"]["content"], f"seed {seed}: {reply.text}"
