"""A service with a target for the time to first token: what it refuses, and what it answers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from e2e_service import Service, running
from random_model import small_model
from severe import check_tokens
from waiting import HANG_S

NUM_CHATS = 16


@pytest.fixture(scope="module")
def one_context(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """One prefill, one decode worker. The 16 pages of each hold one context of 1,024 tokens."""
    model = small_model(tmp_path_factory.mktemp("model") / "small")
    options = ("--model", str(model), "--random-weights", "--kv", "4MB", "--ttft-slo-s", "4")
    with running(tmp_path_factory.mktemp("one_context"), *options) as service:
        yield service


async def chats(url: str, numbers: range, stop: str) -> list[dict[str, Any]]:
    """Send short chats all at once, without a limit of tokens, as most clients do. Each has a seed of its own."""

    async def ask(client: httpx.AsyncClient, number: int) -> httpx.Response:
        messages = [{"role": "user", "content": f"Say {number}."}]
        body = {"model": "small", "messages": messages, "stop": stop, "seed": number}
        return await client.post(f"{url}/v1/chat/completions", json=body)

    async with httpx.AsyncClient(timeout=HANG_S) as client:
        replies = await asyncio.gather(*(ask(client, number) for number in numbers))
    assert [reply.text for reply in replies if reply.status_code != 200] == []
    return [reply.json() for reply in replies]


def num_tokens(answers: list[dict[str, Any]]) -> int:
    return sum(answer["usage"]["completion_tokens"] for answer in answers)


def test_chats_that_set_no_limit_are_all_answered_on_an_idle_service(one_context: Service) -> None:
    """Each may take all pages of the decode worker. Every tenth of the model's tokens ends these answers."""
    answers = asyncio.run(chats(one_context.url, range(NUM_CHATS), stop="7;"))
    assert num_tokens(answers) > 2 * NUM_CHATS, "they were decoded"


@pytest.mark.soak
def test_answers_that_become_longer_than_expected_preempt_each_other_and_none_is_refused_or_changed(
    one_context: Service,
) -> None:
    """Answers were short so far. Now every hundredth token ends one: together they need three times the pages."""
    before = one_context.stats("decode-0").resumed_answers
    answers = asyncio.run(chats(one_context.url, range(NUM_CHATS), stop="77;"))
    assert num_tokens(answers) > 50 * NUM_CHATS
    assert one_context.stats("decode-0").resumed_answers > before, "some were preempted"
    longest = max(range(NUM_CHATS), key=lambda number: len(answers[number]["choices"][0]["message"]["content"]))
    [alone] = asyncio.run(chats(one_context.url, range(longest, longest + 1), stop="77;"))
    found, wanted = (answer["choices"][0]["message"]["content"].split() for answer in (answers[longest], alone))
    check_tokens(found, wanted, "of an answer beside others")
