"""Every one of some hundred requests is answered, once and whole: a service that loses one in a hundred fails here."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
from frontend_cluster import MODEL, ToyCluster, expected
from waiting import HANG_S

NUM_CLIENTS, NUM_EACH = 20, 15
NUM_REQUESTS = NUM_CLIENTS * NUM_EACH
MAX_TOKENS = 6
Answer = tuple[str, str]  # text and finish reason


def read_stream(lines: list[str]) -> Answer:
    """The answer of a stream, which must end with [DONE]."""
    *events, last = [line.removeprefix("data: ") for line in lines if line]
    assert last == "[DONE]", f"the stream ends with {last}"
    choices: list[dict[str, Any]] = [json.loads(event)["choices"][0] for event in events]
    return "".join(choice["text"] for choice in choices), choices[-1]["finish_reason"]


async def ask(http: httpx.AsyncClient, number: int) -> Answer:
    """Every second answer is streamed."""
    body = {"model": MODEL, "prompt": f"request {number}", "seed": number, "max_tokens": MAX_TOKENS}
    reply = await http.post("/v1/completions", json={**body, "stream": number % 2 == 1})
    assert reply.status_code == 200, reply.text
    if number % 2:
        return read_stream(reply.text.split("\n"))
    choice = reply.json()["choices"][0]
    return choice["text"], choice["finish_reason"]


async def test_every_request_is_answered_once_and_whole(tmp_path: Path) -> None:
    answers: dict[int, Answer] = {}

    async def client(http: httpx.AsyncClient, first: int) -> None:
        for number in range(first, NUM_REQUESTS, NUM_CLIENTS):
            answers[number] = await ask(http, number)

    async with ToyCluster(tmp_path) as cluster, httpx.AsyncClient(base_url=cluster.url, timeout=None) as http:
        clients = [asyncio.create_task(client(http, first)) for first in range(NUM_CLIENTS)]
        ended, hanging = await asyncio.wait(clients, timeout=HANG_S)
        for task in hanging:
            task.cancel()
        await asyncio.gather(*hanging, return_exceptions=True)
        for task in ended:
            task.result()
        assert not hanging, f"{len(hanging)} clients wait for an answer; {len(answers)} answers came"
        right = {n: expected(f"request {n}", MAX_TOKENS, seed=n) for n in range(NUM_REQUESTS)}
        assert answers == right
        for worker in (cluster.prefill, cluster.decode):
            asked = Counter((spec.request_id, spec.epoch) for spec in worker.specs)
            assert len(asked) == NUM_REQUESTS
            assert {(epoch, count) for (_, epoch), count in asked.items()} == {(1, 1)}, "each is computed once"
        await cluster.until_idle()
