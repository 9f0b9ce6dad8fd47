"""Bad input gets a 4xx with a reason in OpenAI's shape, and no worker ever hears of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from frontend_cluster import MAX_MODEL_LEN, MODEL, ToyCluster
from waiting import until

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[ToyCluster]:
    async with ToyCluster(tmp_path, max_body_nbytes=100_000) as cluster:
        yield cluster


def chat(**fields: object) -> dict[str, Any]:
    return {"model": MODEL, "messages": HELLO, **fields}


def text(**fields: object) -> dict[str, Any]:
    return {"model": MODEL, "prompt": "hello", **fields}


def message(content: object, **fields: object) -> dict[str, Any]:
    return chat(messages=[{"role": "user", "content": content, **fields}])


# (path, body, param, part of the message)
BAD_VALUES = [
    (CHAT, chat(model="gpt-none"), "model", "does not exist"),
    (CHAT, chat(model=None), "model", "string"),
    (CHAT, {"messages": HELLO}, "model", "required"),
    (CHAT, {"model": MODEL}, "messages", "required"),
    (CHAT, chat(messages=[]), "messages", "at least 1"),
    (CHAT, chat(messages="hello"), "messages", "list"),
    (CHAT, chat(messages=[1]), "messages.0", "object"),
    (CHAT, chat(messages=[{"role": "robot", "content": "x"}]), "messages.0.role", "system"),
    (CHAT, chat(messages=[{"role": "user"}]), "messages.0.content", "required"),
    (CHAT, chat(messages=[{"role": "tool", "content": "x"}]), "messages.0", "tool"),
    (CHAT, message(None), "messages.0.content", "string"),
    (CHAT, message(5), "messages.0.content", "string"),
    (CHAT, message([]), "messages.0.content", "empty"),
    (CHAT, message([{"type": "image_url", "image_url": {"url": "x"}}]), "messages.0.content", "image_url"),
    (CHAT, message([{"type": "text"}]), "messages.0.content", "text"),
    (CHAT, message("\ud800"), "messages.0.content", "surrogate"),
    (CHAT, message([{"type": "text", "text": "\udfff"}]), "messages.0.content", "surrogate"),
    (CHAT, chat(stop="\ud800"), "stop", "surrogate"),
    (CHAT, chat(model="\ud800"), "model", "does not exist"),
    (TEXT, text(prompt=["x", "\ud800"]), "prompt", "surrogate"),
    (CHAT, message("x", tool_calls=[{"id": "1"}]), "messages.0.tool_calls", "tool"),
    (CHAT, message("x", nam="zoe"), "messages.0.nam", "unknown field"),
    (CHAT, message([{"type": "text", "text": "x", "tone": 1}]), "messages.0.content.tone", "unknown field"),
    (CHAT, message("x" * MAX_MODEL_LEN), "messages", "context"),
    (CHAT, chat(max_tokens=MAX_MODEL_LEN), "max_tokens", "context"),
    (CHAT, chat(max_tokens=0), "max_tokens", "greater"),
    (CHAT, chat(max_tokens="10"), "max_tokens", "integer"),
    (CHAT, chat(max_tokens=1.5), "max_tokens", "integer"),
    (CHAT, chat(max_tokens=True), "max_tokens", "integer"),
    (CHAT, chat(max_completion_tokens=-1), "max_completion_tokens", "greater"),
    (CHAT, chat(min_tokens=9, max_tokens=3), "min_tokens", "min_tokens"),
    (CHAT, chat(temperature=-0.1), "temperature", "greater"),
    (CHAT, chat(temperature=2.1), "temperature", "less"),
    (CHAT, chat(temperature="hot"), "temperature", "number"),
    (CHAT, chat(temperature=float("nan")), "temperature", "finite"),
    (CHAT, chat(temperature=float("inf")), "temperature", ""),
    (CHAT, chat(top_p=0), "top_p", "greater"),
    (CHAT, chat(top_p=1.01), "top_p", "less"),
    (CHAT, chat(top_k=-2), "top_k", "greater"),
    (CHAT, chat(min_p=2), "min_p", "less"),
    (CHAT, chat(seed=2**70), "seed", "allowed: -9223372036854775808 to 9223372036854775807"),
    (CHAT, chat(temperature=1e-300), "temperature", "0 (greedy) or from 1e-05 to 2"),
    (CHAT, chat(top_p=1e-46), "top_p", "allowed: 1e-06 to 1"),
    (CHAT, chat(repetition_penalty=1e-40), "repetition_penalty", "allowed: 0.01 to 100"),
    (CHAT, chat(top_k=2**64), "top_k", "allowed: -1 to 2147483647"),
    (CHAT, chat(max_tokens=2**70), "max_tokens", "allowed: 1 to 2147483647"),
    (CHAT, chat(max_completion_tokens=2**70), "max_completion_tokens", "allowed: 1 to"),
    (CHAT, chat(min_tokens=2**70), "min_tokens", "allowed: 0 to 2147483647"),
    (CHAT, chat(n=2**70), "n", "allowed: 1 to 16"),
    (CHAT, chat(priority=2**70), "priority", "allowed: -10 to 10"),
    (CHAT, chat(top_logprobs=2**70, logprobs=True), "top_logprobs", "allowed: 0 to 20"),
    (CHAT, chat(stop_token_ids=[2**70]), "stop_token_ids.0", "allowed: 0 to 2147483647"),
    (CHAT, chat(stop_token_ids=[-1]), "stop_token_ids.0", "allowed: 0 to"),
    (CHAT, chat(stop_token_ids=[512]), "stop_token_ids", "below 512"),
    (CHAT, chat(temprature=1), "temprature", "did you mean 'temperature'"),
    (CHAT, chat(**{"\ud800" * 200: 1}), ("\\ud800" * 14)[:80], "unknown field"),
    (CHAT, chat(stream=True, stream_options={"\ud800": 1}), "stream_options", "unicode"),
    (CHAT, chat(structured_outputs={"json": {}}), "structured_outputs", "not supported"),
    (CHAT, chat(guided_json={"type": "object"}), "guided_json", "not supported"),
    (CHAT, chat(tool_choice="required"), "tool_choice", "not supported"),
    (CHAT, chat(skip_special_tokens=False), "skip_special_tokens", "only skip_special_tokens true"),
    (CHAT, chat(stream=True, stream_options={"include_usag": True}), "stream_options.include_usag", "unknown field"),
    (TEXT, text(prompt=[2**70]), "prompt", "below 512"),
    (TEXT, text(best_of=2**70), "best_of", "allowed: 1 to 16"),
    (TEXT, text(prompt=[[5] * 401, [5]]), "prompt", "401 tokens"),
    (CHAT, chat(n=0), "n", "greater"),
    (CHAT, chat(n=1000), "n", "less"),
    (CHAT, chat(stop=[""]), "stop", "characters"),
    (CHAT, chat(stop=["x"] * 17), "stop", "at most"),
    (CHAT, chat(stop=5), "stop", "list of strings"),
    (CHAT, chat(presence_penalty=3), "presence_penalty", "less"),
    (CHAT, chat(frequency_penalty=-3), "frequency_penalty", "greater"),
    (CHAT, chat(repetition_penalty=0), "repetition_penalty", "greater"),
    (CHAT, chat(top_logprobs=2), "top_logprobs", "logprobs"),
    (CHAT, chat(logprobs=True, top_logprobs=21), "top_logprobs", "less"),
    (CHAT, chat(logprobs=5), "logprobs", "boolean"),
    (CHAT, chat(stream="yes"), "stream", "boolean"),
    (CHAT, chat(stream_options={"include_usage": True}), "stream_options", "stream"),
    (CHAT, chat(tools=[{"type": "function"}]), "tools", "not supported"),
    (CHAT, chat(functions=[{}]), "functions", "not supported"),
    (CHAT, chat(logit_bias={"5": 1}), "logit_bias", "not supported"),
    (CHAT, chat(response_format={"type": "json_object"}), "response_format", "text"),
    (CHAT, chat(modalities=["text", "audio"]), "modalities", "text"),
    (TEXT, {"model": MODEL}, "prompt", "required"),
    (TEXT, text(prompt=""), "prompt", "empty"),
    (TEXT, text(prompt=[]), "prompt", "prompt must be"),
    (TEXT, text(prompt=["x", 5]), "prompt", "prompt must be"),
    (TEXT, text(prompt=[[]]), "prompt", "prompt must be"),
    (TEXT, text(prompt=[-1]), "prompt", "prompt must be"),
    (TEXT, text(prompt=[512]), "prompt", "below 512"),
    (TEXT, text(prompt=["x"] * 65), "prompt", "at most"),
    (TEXT, text(prompt=["x"] * 60, n=16), "n", "at most"),
    (TEXT, text(prompt=[5] * MAX_MODEL_LEN), "prompt", "context"),
    (TEXT, text(echo=True), "echo", "not supported"),
    (TEXT, text(suffix="x"), "suffix", "not supported"),
    (TEXT, text(best_of=3), "best_of", "not supported"),
    (TEXT, text(logprobs=True), "logprobs", "integer"),
    (TEXT, text(logprobs=21), "logprobs", "less"),
]


async def test_bad_values(cluster: ToyCluster) -> None:
    async with cluster.client() as http:
        for path, body, param, reason in BAD_VALUES:
            reply = await http.post(path, content=json.dumps(body), headers={"content-type": "application/json"})
            error = _error(reply, f"{path} {body}")
            assert reply.status_code == (404 if param == "model" and "exist" in reason else 400), (body, error)
            assert error["param"] == param, (body, error)
            assert reason in error["message"], (body, error)
            assert error["type"] == "invalid_request_error"
    assert cluster.num_seen == 0


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", ""),
        (b"{", "JSON"),
        (b'{"model": "toy", "messages": [}', "JSON"),
        (b"[1, 2]", ""),
        (b'"text"', ""),
        (b"null", ""),
        (b"\xff\xfe{}", ""),
        (b"[" * 50_000, ""),
    ],
)
async def test_bodies_that_are_no_request(cluster: ToyCluster, content: bytes, reason: str) -> None:
    async with cluster.client() as http:
        for path in (CHAT, TEXT):
            reply = await http.post(path, content=content, headers={"content-type": "application/json"})
            assert reply.status_code == 400
            assert reason in _error(reply, path)["message"]
    assert cluster.num_seen == 0


async def test_too_large_a_body_is_not_read(cluster: ToyCluster) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(11):
            yield b" " * 10_000

    async with cluster.client() as http:
        headers = {"content-type": "application/json"}
        for content in (b" " * 100_001, chunks()):
            reply = await http.post(CHAT, content=content, headers=headers)
            assert reply.status_code == 413
            assert "larger than" in _error(reply, "large")["message"]


async def test_the_largest_body_follows_from_the_model(tmp_path: Path) -> None:
    async with ToyCluster(tmp_path) as cluster, cluster.client() as http:
        messages = [{"role": "user", "content": ""}]
        for body in (chat(messages=messages * 500_000), message("x" * 16_000_000)):
            reply = await http.post(CHAT, json=body)
            assert reply.status_code == 413
            assert "larger than 66736 bytes" in _error(reply, "large")["message"]
        reply = await http.post(CHAT, json=chat(messages=messages * 1000))
        assert reply.status_code == 400
        assert "1000 messages" in _error(reply, "many")["message"]
    assert cluster.num_seen == 0


async def test_large_bodies_have_bounded_memory_together(cluster: ToyCluster) -> None:
    """Bodies that are still arriving count, whatever their headers say."""
    server = cluster.frontend._server
    assert server is not None
    gate: Any = server.config.app
    gate._max_held_nbytes = 150_000

    def held_nbytes() -> int:
        return int(gate._held_nbytes)

    started = asyncio.Event()

    async def slow() -> AsyncIterator[bytes]:
        yield b" " * 90_000
        started.set()
        await asyncio.sleep(60)

    async with cluster.client() as http:
        first = asyncio.create_task(http.post(CHAT, content=slow()))
        await started.wait()
        await until(lambda: held_nbytes() == 90_000, "the first body has arrived")
        reply = await http.post(CHAT, content=b" " * 90_000)
        assert (reply.status_code, reply.headers["retry-after"]) == (503, "1")
        assert "large requests" in _error(reply, "memory")["message"]
        first.cancel()
        await asyncio.wait((first,))
        await until(lambda: held_nbytes() == 0, "it is forgotten")
        assert (await http.post(CHAT, json=chat(max_tokens=1))).status_code == 200


async def test_unknown_paths_and_methods(cluster: ToyCluster) -> None:
    async with cluster.client() as http:
        for method, path, status in (
            ("GET", "/v1/nothing", 404),
            ("GET", CHAT, 405),
            ("GET", "/v1/records?limit=0", 400),
            ("GET", "/v1/records?limit=x", 400),
            ("GET", f"/v1/records?limit={2**70}", 400),
            ("GET", f"/v1/records/trace?block_tokens={2**70}", 400),
            ("GET", f"/v1/records/trace?block_tokens={'9' * 5000}", 400),
        ):
            reply = await http.request(method, path)
            assert reply.status_code == status
            assert _error(reply, path)["message"]


async def test_a_prompt_that_no_worker_has_pages_for(tmp_path: Path) -> None:
    async with ToyCluster(tmp_path) as cluster:
        for worker in cluster.workers.values():
            await worker.kill()
        for worker in cluster.workers.values():
            worker.num_pages = 10  # of 4 tokens
            await worker.start()
        async with cluster.client() as http:
            reply = await http.post(TEXT, json=text(prompt="x" * 40, max_tokens=1))
            assert reply.status_code == 400
            assert _error(reply, "pages")["code"] == "context_length_exceeded"
        assert cluster.num_seen == 0


def _error(reply: httpx.Response, what: str) -> dict[str, Any]:
    assert reply.headers["x-request-id"], what
    body = reply.json()
    assert set(body) == {"error"}, what
    error: dict[str, Any] = body["error"]
    assert set(error) == {"message", "type", "param", "code"}, what
    return error
