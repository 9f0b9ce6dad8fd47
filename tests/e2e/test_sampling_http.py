"""Sampling as clients ask for it, on random weights: n, seeds, logprobs, stop strings, penalties; `moonpool chat`."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Iterator

import openai
import pytest
from e2e_service import Service
from waiting import HANG_S

PROMPT = "Once upon a time in a small village by the sea there lived"


@pytest.fixture
def client(one_each: Service) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{one_each.url}/v1", api_key="unused") as made:
        yield made


def texts(reply: openai.types.Completion) -> list[str]:
    return [choice.text for choice in reply.choices]


def test_choices_differ_and_a_seed_repeats_them(client: openai.OpenAI) -> None:
    replies = [
        client.completions.create(model="small", prompt=PROMPT, n=3, seed=11, temperature=1.0, max_tokens=12)
        for _ in range(2)
    ]
    assert len(set(texts(replies[0]))) == 3
    assert texts(replies[0]) == texts(replies[1])
    assert replies[0].usage is not None
    assert replies[0].usage.completion_tokens == 36


def test_logprobs_are_those_of_the_model(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(
        model="small",
        messages=[{"role": "user", "content": "What is the capital of France?"}],
        temperature=0,
        max_tokens=6,
        logprobs=True,
        top_logprobs=3,
    )
    logprobs = reply.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert "".join(entry.token for entry in logprobs.content) == reply.choices[0].message.content
    for entry in logprobs.content:
        tops = [top.logprob for top in entry.top_logprobs]
        assert len(tops) == 3
        assert tops == sorted(tops, reverse=True)
        assert entry.logprob == tops[0], "greedy takes the most likely one"
        assert sum(math.exp(top) for top in tops) <= 1.0 + 1e-6


def test_a_stop_string_ends_the_text_before_itself(client: openai.OpenAI) -> None:
    whole = texts(client.completions.create(model="small", prompt=PROMPT, temperature=0, max_tokens=30))[0]
    stop = whole[20:26]  # crosses token boundaries
    reply = client.completions.create(model="small", prompt=PROMPT, temperature=0, max_tokens=30, stop=[stop])
    assert texts(reply)[0] == whole[: whole.index(stop)]
    assert reply.choices[0].finish_reason == "stop"


def test_penalties_and_filters_change_what_is_said(client: openai.OpenAI) -> None:
    def say(**options: object) -> str:
        return texts(
            client.completions.create(
                model="small", prompt="la la la la la la la la", max_tokens=20, temperature=0, extra_body=options
            )
        )[0]

    assert say() != say(repetition_penalty=1.8)
    assert say() != say(frequency_penalty=2.0)

    def draw(**options: object) -> str:
        reply = client.completions.create(
            model="small", prompt=PROMPT, max_tokens=16, temperature=1.5, seed=3, extra_body=options
        )
        return texts(reply)[0]

    greedy = texts(client.completions.create(model="small", prompt=PROMPT, max_tokens=16, temperature=0))[0]
    assert draw(top_k=1) == greedy
    assert draw(top_p=1e-6) == greedy
    assert draw(min_p=1.0) == greedy
    assert draw() != greedy


@pytest.mark.model
def test_chat_in_a_pipe(smollm2: Service) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "moonpool", "chat", "--url", smollm2.url, "--temperature", "0"],
        input="What is the capital of France?\n/exit\n",
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "The capital of France is Paris." in done.stdout
