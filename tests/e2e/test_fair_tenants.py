"""Two tenants of a real service, one of which floods it: whose first tokens come between those of the other one."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from e2e_service import Service, running
from random_model import small_model
from severe import check_tokens
from waiting import HANG_S, until

KEYS = {"flood": "key-flood", "calm": "key-calm"}
NUM_FLOOD, NUM_CALM = 60, 3
FLOOD_TOKENS, CALM_TOKENS = 200, 8


@pytest.fixture(scope="module", params=[None, "600"], ids=["no target", "a target"])
def tenants(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Service]:
    """One prefill, one decode worker with 16 pages each, and two tenants. Prefill gets a prompt at a time."""
    model = small_model(tmp_path_factory.mktemp("model") / "small")
    folder = tmp_path_factory.mktemp("tenants")
    names = folder / "tenants.json"
    names.write_text(json.dumps({"tenants": [{"name": name, "api_keys": [key]} for name, key in KEYS.items()]}))
    settings = folder / "moonpool.toml"
    settings.write_text("[serve]\n[conductor]\npolicy_worker_backlog_s = 0.000001\n")
    options = ("--model", str(model), "--random-weights", "--kv", "4MB", "--tenants-file", str(names))
    target = () if request.param is None else ("--ttft-slo-s", request.param)
    with running(folder, *options, "-c", str(settings), *target) as service:
        yield service


class Client:
    """Notes whose first tokens came, in order."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.first: list[str] = []

    async def ask(self, tenant: str, number: int, num_tokens: int, priority: int = 0) -> str:
        """Return the text of a streamed completion."""
        body: dict[str, Any] = {"model": "small", "prompt": f"{tenant} {number} " * 10, "max_tokens": num_tokens}
        body |= {"seed": number, "ignore_eos": True, "stream": True, "priority": priority}
        headers, text = {"authorization": f"Bearer {KEYS[tenant]}"}, ""
        async with (
            httpx.AsyncClient(timeout=HANG_S) as http,
            http.stream("POST", f"{self._url}/v1/completions", json=body, headers=headers) as reply,
        ):
            assert reply.status_code == 200, await reply.aread()
            async for line in reply.aiter_lines():
                if line.startswith("data: {"):
                    if not text:
                        self.first.append(tenant)
                    text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
        return text


async def flooded(url: str) -> tuple[list[int], list[str]]:
    """Return how many first tokens of the flood came between each calm prompt and its first token, and the texts."""
    client = Client(url)
    flood = [asyncio.create_task(client.ask("flood", number, FLOOD_TOKENS, -10)) for number in range(NUM_FLOOD)]
    try:
        await until(lambda: len(client.first) >= 6, "the flood is served")
        between, texts = [], []
        for number in range(NUM_CALM):
            before = len(client.first)
            texts.append(await client.ask("calm", number, CALM_TOKENS, 10))
            between.append(client.first[before:].index("calm"))
        assert not all(task.done() for task in flood), "the flood goes on"
        return between, texts
    finally:
        for task in flood:
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*flood, return_exceptions=True)


def test_beside_a_flood_a_tenant_is_served_in_turn_with_the_tokens_that_it_has_alone(tenants: Service) -> None:
    between, texts = asyncio.run(flooded(tenants.url))
    assert max(between) <= 4, between
    alone = Client(tenants.url)
    for number, text in enumerate(texts):
        wanted = asyncio.run(alone.ask("calm", number, CALM_TOKENS))
        check_tokens(text.split(), wanted.split(), "of an answer beside a flood")
