"""The official client against the front end, over a real port."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NoReturn

import openai
import pytest
from frontend_cluster import MAX_MODEL_LEN, MODEL, ToyCluster, chat_prompt, expected
from letter_codec import LetterCodec
from openai.types import Completion, CompletionUsage
from openai.types.chat import (
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionContentPartTextParam,
    ChatCompletionMessageParam,
    ChatCompletionTokenLogprob,
)
from openai.types.chat.chat_completion import ChoiceLogprobs
from openai.types.chat.chat_completion_chunk import ChoiceLogprobs as ChunkLogprobs
from openai.types.completion_choice import Logprobs

from moonpool.base.errors import Overloaded


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[ToyCluster]:
    async with ToyCluster(tmp_path) as cluster:
        yield cluster


@pytest.fixture
async def client(cluster: ToyCluster) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="any", max_retries=0) as client:
        yield client


def messages(content: str = "hello") -> list[ChatCompletionMessageParam]:
    return [{"role": "user", "content": content}]


def usage(answer: ChatCompletion | Completion | ChatCompletionChunk) -> CompletionUsage:
    assert answer.usage is not None
    return answer.usage


def cached_tokens(answer: ChatCompletion | Completion) -> int | None:
    details = usage(answer).prompt_tokens_details
    assert details is not None
    cached: int | None = details.cached_tokens
    return cached


async def test_chat(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(model=MODEL, messages=messages(), seed=0, max_tokens=20)
    text, reason = expected(chat_prompt("hello"), 20)
    assert answer.choices[0].message.content == text
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == reason
    assert answer.choices[0].logprobs is None
    assert answer.id.startswith("chatcmpl-")
    assert usage(answer).prompt_tokens == len(chat_prompt("hello"))
    assert usage(answer).completion_tokens == len(text) + (reason == "stop")
    assert cached_tokens(answer) == 12
    assert answer._request_id is not None
    assert answer._request_id in answer.id


async def test_chat_streamed(client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model=MODEL, messages=messages(), seed=0, max_tokens=20, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    text, reason = expected(chat_prompt("hello"), 20)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == text
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1] if chunk.choices[0].finish_reason] == [reason]
    assert chunks[-1].choices == []
    assert usage(chunks[-1]).total_tokens == len(chat_prompt("hello")) + len(text) + (reason == "stop")
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1


async def test_without_max_tokens_a_chat_may_fill_the_context(client: openai.AsyncOpenAI, cluster: ToyCluster) -> None:
    await client.chat.completions.create(model=MODEL, messages=messages(), seed=0)
    params = cluster.decode.specs[0].params
    assert params.max_tokens == MAX_MODEL_LEN - len(chat_prompt("hello"))


async def test_parts_system_and_developer_messages(client: openai.AsyncOpenAI, cluster: ToyCluster) -> None:
    parts: list[ChatCompletionContentPartTextParam] = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    await client.chat.completions.create(
        model=MODEL,
        messages=[
            {"role": "system", "content": "s"},
            {"role": "developer", "content": "d"},
            {"role": "user", "content": parts},
            {"role": "assistant", "content": "a"},
            {"role": "user", "content": "u", "name": "zoe"},
        ],
        max_completion_tokens=1,
        user="zoe",
        metadata={"x": "1"},
        store=True,
    )
    spec = cluster.prefill.specs[0]
    assert "".join(map(chr, spec.tokens)) == "<system>s<system>d<user>one\ntwo<assistant>a<user>u<assistant>"
    assert spec.params.max_tokens == 1


async def test_a_first_token_that_is_the_last(client: openai.AsyncOpenAI, cluster: ToyCluster) -> None:
    answer = await client.chat.completions.create(model=MODEL, messages=messages(), max_tokens=1, seed=0)
    assert usage(answer).completion_tokens == 1
    await cluster.until_idle()


async def test_n_choices_have_seeds_of_their_own_and_the_first_has_the_seed_itself(
    client: openai.AsyncOpenAI, cluster: ToyCluster
) -> None:
    answer, again = [
        await client.chat.completions.create(model=MODEL, messages=messages(), max_tokens=12, n=3, seed=5)
        for _ in range(2)
    ]
    texts = [choice.message.content for choice in answer.choices]
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert texts[0] == expected(chat_prompt("hello"), 12, seed=5)[0]
    assert len(set(texts)) == 3
    assert texts == [choice.message.content for choice in again.choices]
    assert len({spec.request_id for spec in cluster.decode.specs}) == 6
    assert usage(answer).prompt_tokens == len(chat_prompt("hello"))
    assert cached_tokens(answer) == 12


async def test_n_choices_streamed(client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model=MODEL, messages=messages(), max_tokens=12, n=3, seed=5, stream=True
    )
    texts = ["", "", ""]
    async for chunk in stream:
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    whole = await client.chat.completions.create(model=MODEL, messages=messages(), max_tokens=12, n=3, seed=5)
    assert texts == [choice.message.content for choice in whole.choices]


async def test_without_a_seed_answers_differ(client: openai.AsyncOpenAI) -> None:
    texts = {
        (await client.chat.completions.create(model=MODEL, messages=messages(), max_tokens=12))
        .choices[0]
        .message.content
        for _ in range(3)
    }
    assert len(texts) > 1


@pytest.mark.parametrize("stream", [False, True])
async def test_stop_strings_end_the_text_and_the_work(
    client: openai.AsyncOpenAI, cluster: ToyCluster, stream: bool
) -> None:
    whole, _ = expected(chat_prompt("hello"), 20)
    stop = whole[4:7]  # spans three tokens
    answer = await client.chat.completions.create(
        model=MODEL, messages=messages(), seed=0, max_tokens=300, stop=[stop, "~"], stream=stream
    )
    text: str | None
    if stream:
        assert isinstance(answer, openai.AsyncStream)
        chunks = [chunk.choices[0] async for chunk in answer]
        text, reason = "".join(chunk.delta.content or "" for chunk in chunks), chunks[-1].finish_reason
    else:
        assert isinstance(answer, ChatCompletion)
        text, reason = answer.choices[0].message.content, answer.choices[0].finish_reason
        assert usage(answer).completion_tokens == whole.index(stop) + 3
    assert (text, reason) == (whole[: whole.index(stop)], "stop")
    await cluster.until_idle()


@pytest.mark.parametrize("stream", [False, True])
async def test_chat_logprobs(client: openai.AsyncOpenAI, stream: bool) -> None:
    answer = await client.chat.completions.create(
        model=MODEL, messages=messages(), seed=0, max_tokens=5, logprobs=True, top_logprobs=2, stream=stream
    )
    if stream:
        assert isinstance(answer, openai.AsyncStream)
        content = [entry async for chunk in answer for entry in _content(chunk.choices[0].logprobs)]
    else:
        assert isinstance(answer, ChatCompletion)
        content = _content(answer.choices[0].logprobs)
    assert "".join(entry.token for entry in content) == expected(chat_prompt("hello"), 5)[0]
    assert content[0].logprob == -0.5
    assert [(top.token, top.bytes) for top in content[0].top_logprobs] == [("a", [97]), ("b", [98])]


def _content(logprobs: ChunkLogprobs | ChoiceLogprobs | None) -> list[ChatCompletionTokenLogprob]:
    return [] if logprobs is None else logprobs.content or []


@pytest.mark.parametrize(
    "prompt",
    [
        "once upon",
        ["once upon"],
        [111, 110, 99, 101, 32, 117, 112, 111, 110],
        [[111, 110, 99, 101, 32, 117, 112, 111, 110]],
    ],
)
async def test_completions_take_text_and_tokens(client: openai.AsyncOpenAI, prompt: Any) -> None:
    answer = await client.completions.create(model=MODEL, prompt=prompt, seed=0)
    assert answer.choices[0].text == expected("once upon", 16)[0]
    assert usage(answer).prompt_tokens == 9
    assert cached_tokens(answer) == 12


async def test_completions_of_several_prompts(client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(model=MODEL, prompt=["one", "two!"], n=2, seed=3, max_tokens=6)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.choices[0].text == expected("one", 6, seed=3)[0]
    assert answer.choices[2].text == expected("two!", 6, seed=3)[0]
    assert usage(answer).prompt_tokens == 7
    assert cached_tokens(answer) == 24


@pytest.mark.parametrize("stream", [False, True])
async def test_completion_logprobs(client: openai.AsyncOpenAI, stream: bool) -> None:
    answer = await client.completions.create(
        model=MODEL, prompt="once", seed=0, max_tokens=5, logprobs=2, stream=stream
    )
    text = expected("once", 5)[0]
    found: list[Logprobs | None]
    if stream:
        assert isinstance(answer, openai.AsyncStream)
        chunks = [chunk.choices[0] async for chunk in answer]
        assert "".join(chunk.text for chunk in chunks) == text
        found = [chunk.logprobs for chunk in chunks if chunk.logprobs is not None]
    else:
        assert isinstance(answer, Completion)
        found = [answer.choices[0].logprobs]
    logprobs = [one for one in found if one is not None]
    assert "".join(token for one in logprobs for token in one.tokens or ()) == text
    assert [offset for one in logprobs for offset in one.text_offset or ()] == [0, 1, 2, 3, 4]
    assert logprobs[0].top_logprobs is not None
    assert logprobs[0].top_logprobs[0] == {"a": -0.5, "b": -1.5}


async def test_sampling_values_reach_the_workers(client: openai.AsyncOpenAI, cluster: ToyCluster) -> None:
    await client.chat.completions.create(
        model=MODEL,
        messages=messages(),
        max_tokens=3,
        temperature=0.5,
        top_p=0.9,
        seed=-7,
        presence_penalty=0.1,
        frequency_penalty=-0.2,
        extra_body={"top_k": 40, "min_p": 0.05, "min_tokens": 2, "ignore_eos": True, "repetition_penalty": 1.1},
    )
    params = cluster.decode.specs[0].params
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.5, 0.9, 40, 0.05)
    assert (params.seed, params.min_tokens, params.ignore_eos) == (-7, 2, True)
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (0.1, -0.2, 1.1)


async def test_nulls_and_switched_off_values_are_defaults(client: openai.AsyncOpenAI, cluster: ToyCluster) -> None:
    nulls = dict.fromkeys(["temperature", "top_p", "n", "stop", "seed", "logit_bias", "tools", "stream_options"])
    await client.chat.completions.create(
        model=MODEL, messages=messages(), max_tokens=3, extra_body={**nulls, "top_k": -1, "logprobs": False}
    )
    params = cluster.decode.specs[0].params
    assert (params.temperature, params.top_p, params.top_k, params.logprobs) == (1.0, 1.0, None, None)


async def test_many_at_once(client: openai.AsyncOpenAI, cluster: ToyCluster) -> None:
    cluster.decode.token_s = 0.001
    answers = await asyncio.gather(
        *(
            client.chat.completions.create(model=MODEL, messages=messages(str(number)), seed=number, max_tokens=10)
            for number in range(40)
        )
    )
    for number, answer in enumerate(answers):
        assert answer.choices[0].message.content == expected(chat_prompt(str(number)), 10, seed=number)[0]
    await cluster.until_idle()


async def test_models(client: openai.AsyncOpenAI) -> None:
    listed = await client.models.list()
    assert [model.id for model in listed.data] == [MODEL]
    assert (await client.models.retrieve(MODEL)).id == MODEL
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("gpt-none")


async def test_overload_is_429_with_a_time_to_come_back(
    client: openai.AsyncOpenAI, cluster: ToyCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object) -> NoReturn:
        raise Overloaded("too much to do", retry_after_s=2.5)

    monkeypatch.setattr(cluster.state, "_choose", refuse)
    with pytest.raises(openai.RateLimitError) as caught:
        await client.chat.completions.create(model=MODEL, messages=messages(), stream=True)
    assert caught.value.response.headers["retry-after"] == "3"
    assert "too much to do" in str(caught.value)
    assert cluster.num_seen == 0


async def test_a_tenants_blocks_have_roots_of_their_own(tmp_path: Path) -> None:
    file = tmp_path / "tenants.json"
    file.write_text('{"tenants": [{"name": "a", "api_keys": ["ka"]}, {"name": "b", "api_keys": ["kb"]}]}')
    async with ToyCluster(tmp_path, tenants_file=str(file)) as cluster:
        async with cluster.client() as http:
            body = {"model": MODEL, "prompt": "x", "max_tokens": 1}
            for key, status in (("ka", 200), ("kb", 200), ("ka", 200), ("kc", 401)):
                reply = await http.post("/v1/completions", json=body, headers={"authorization": f"Bearer {key}"})
                assert reply.status_code == status
            assert reply.json()["error"]["code"] == "invalid_api_key"
            assert (await http.get("/v1/models")).status_code == 401
            assert (await http.get("/health")).status_code == 200
        roots = [spec.root for spec in cluster.prefill.specs]
        assert roots[0] == roots[2] != roots[1]


def test_the_toy_codec_is_reversible() -> None:
    codec = LetterCodec()
    assert "".join(map(codec.token_text, codec.encode("abc"))) == "abc"
