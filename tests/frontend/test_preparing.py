"""Bodies become prompts beside the event loop, and what is too large is refused before it costs anything."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable
from typing import Any

import psutil
import pytest
from frontend_cluster import MODEL, load_toy
from letter_codec import LetterCodec
from waiting import until

from moonpool.base.errors import InvalidInput, MoonpoolError, Overloaded, PromptTooLong, Unavailable
from moonpool.frontend import preparing, prompt_process, prompts
from moonpool.frontend.preparing import SHORT_NBYTES, Preparer, load_call
from moonpool.frontend.prompts import CHAT, COMPLETION, Endpoint, Prepared, ServedModel, prepare

MAX_LEN = 200_000
LONG = "long text " * 10_000
assert len(LONG) > SHORT_NBYTES


class ForbiddenCodec(LetterCodec):
    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        raise AssertionError("a long prompt was tokenized by the front end itself")


def chat(content: object = "x", **fields: object) -> bytes:
    return json.dumps({"model": MODEL, "messages": [{"role": "user", "content": content}], **fields}).encode()


def text(prompt: object, **fields: object) -> bytes:
    return json.dumps({"model": MODEL, "prompt": prompt, **fields}).encode()


def prompt_processes() -> list[psutil.Process]:
    """The children of this process that prepare prompts; other tests of the same process may have left helpers."""
    return [child for child in psutil.Process().children() if prompt_process.MODULE in child.cmdline()]


@pytest.fixture
async def preparer() -> AsyncIterator[Preparer]:
    """Its own model must not be used for long prompts."""
    preparer = Preparer(ServedModel(MODEL, ForbiddenCodec(), MAX_LEN), load_call(load_toy, MODEL, None, MAX_LEN))
    yield preparer
    await preparer.close()
    assert prompt_processes() == []


BODIES: list[tuple[Endpoint[Any], bytes]] = [
    (CHAT, chat(LONG, stop=["a", "b"], temperature=0.5, stream=True, stream_options={"include_usage": True})),
    (CHAT, chat([{"type": "text", "text": LONG}], user="zoe", seed=3, logprobs=True, top_logprobs=2)),
    (COMPLETION, text([LONG, "short"], n=2, max_tokens=7, logprobs=3)),
    (COMPLETION, text([[5] * 40_000, [6]], stop="x")),
    (CHAT, chat(LONG, temprature=1)),
    (CHAT, chat(LONG, model="other")),
    (CHAT, chat("x" * MAX_LEN)),
    (COMPLETION, text([512] * 40_000)),
    (CHAT, b"[" * 100_000),
]


async def outcome(work: Awaitable[Prepared[Any]]) -> object:
    try:
        prepared = await work
    except MoonpoolError as error:
        return type(error), str(error), getattr(error, "param", None)
    fields = prepared.body.model_dump(exclude_unset=True, exclude={"messages", "prompt"})
    return fields, prepared.prompts


async def test_a_process_gives_what_a_thread_gives(preparer: Preparer) -> None:
    model = ServedModel(MODEL, LetterCodec(), MAX_LEN)
    for endpoint, raw in BODIES:
        assert len(raw) > SHORT_NBYTES
        here = await outcome(asyncio.to_thread(prepare, model, endpoint, raw))
        there = await outcome(preparer.prepare(endpoint, raw))
        assert there == here, raw[:80]


async def until_busy(preparer: Preparer) -> None:
    process = preparer._process
    assert process is not None
    await until(process._lock.locked, "the process has a prompt")


async def test_a_process_that_dies_costs_one_request(preparer: Preparer) -> None:
    assert (await preparer.prepare(CHAT, chat(LONG))).prompts
    (child,) = prompt_processes()
    child.suspend()
    asking = asyncio.create_task(preparer.prepare(CHAT, chat(LONG)))
    await until_busy(preparer)
    child.kill()
    with pytest.raises(Unavailable, match="try again"):
        await asking
    assert (await preparer.prepare(CHAT, chat(LONG))).prompts


async def test_a_client_that_leaves_does_not_mix_up_answers(preparer: Preparer) -> None:
    leaving = asyncio.create_task(preparer.prepare(CHAT, chat(LONG)))
    await until_busy(preparer)
    leaving.cancel()
    await asyncio.wait((leaving,))
    prompt = "y" * 100_000
    assert (await preparer.prepare(COMPLETION, text(prompt))).prompts == [LetterCodec().encode(prompt)]


async def test_only_so_many_long_prompts_wait(preparer: Preparer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparing, "MAX_WAITING", 2)
    asking = [asyncio.create_task(preparer.prepare(CHAT, chat(LONG))) for _ in range(3)]
    results = await asyncio.gather(*asking, return_exceptions=True)
    assert [isinstance(one, Overloaded) for one in results] == [False, False, True]


MODEL_400 = ServedModel(MODEL, LetterCodec(), 400)


@pytest.mark.parametrize(
    ("endpoint", "raw", "reason"),
    [
        (CHAT, json.dumps({"messages": [{"role": "user", "content": ""}] * 500_000}).encode(), "500000 messages"),
        (CHAT, json.dumps({"messages": [{}] * 401}).encode(), "401 messages"),
        (CHAT, chat([{"type": "text", "text": ""}] * 401), "401 messages or parts"),
        (CHAT, chat("x" * 401), "401 characters"),
        (CHAT, json.dumps({"messages": [{"content": "x" * 100, "name": "y" * 301}]}).encode(), "401 characters"),
        (COMPLETION, text("x" * 401), "401 characters"),
        (COMPLETION, text(["x", "x" * 401]), "401 characters"),
        (COMPLETION, text([1] * 401), "401 tokens"),
        (COMPLETION, text([[1], [1] * 401]), "401 tokens"),
    ],
)
def test_too_much_is_refused_before_it_is_validated(
    endpoint: Endpoint[Any], raw: bytes, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompts, "validated", None)
    with pytest.raises(PromptTooLong, match=reason):
        prepare(MODEL_400, endpoint, raw)


def test_the_limits_follow_from_the_context() -> None:
    assert MODEL_400.max_prompt_chars == 400
    assert MODEL_400.max_messages == 400
    assert MODEL_400.max_body_nbytes == 3 * 400 + 64 * 1024
    longest = chat("\u0436" * 399, max_tokens=1)  # the longest that fits, as JSON writes it at its longest
    assert len(longest) < MODEL_400.max_body_nbytes
    with pytest.raises(InvalidInput, match="context"):
        prepare(MODEL_400, CHAT, longest)  # not for its size: the template adds to it
