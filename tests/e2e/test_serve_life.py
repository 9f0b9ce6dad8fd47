"""The service is good to its clients: those that ask, that leave, that are wrong, and those whose worker is killed."""

from __future__ import annotations

import httpx
import openai
import pytest
from e2e_service import Service
from random_model import token_prompt
from waiting import HANG_S, wait_until


@pytest.mark.model
def test_an_openai_client_gets_a_sensible_answer_streamed(smollm2: Service) -> None:
    client = openai.OpenAI(base_url=f"{smollm2.url}/v1", api_key="unused")
    with client.chat.completions.create(
        model="smollm2",
        messages=[{"role": "user", "content": "What is the capital of France?"}],
        temperature=0,
        max_tokens=40,
        stream=True,
    ) as chunks:
        pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    client.close()
    assert "Paris" in "".join(pieces)
    assert len([piece for piece in pieces if piece]) >= 5, "it came in pieces"


def test_a_client_that_leaves_gives_its_pages_back(one_each: Service) -> None:
    """Checked by count, on both workers, after disconnects during decode and during prefill."""
    names = ("prefill-0", "decode-0")

    def gone() -> bool:
        now = {name: one_each.stats(name) for name in names}
        return all(
            (s.num_running, s.num_waiting, s.reserved_pages) == (0, 0, 0) and s.free_pages == s.num_pages
            for s in now.values()
        )

    wait_until(gone, "everything is free before")
    body = {"model": "small", "max_tokens": 2000, "ignore_eos": True, "temperature": 0}
    events = one_each.stream("/v1/completions", {**body, "prompt": token_prompt(300, 9)})
    for _ in range(4):
        next(events)
    assert one_each.stats("decode-0").num_running == 1
    events.close()  # mid-stream
    wait_until(gone, "a request cancelled while decoding is forgotten")
    long = {**body, "max_tokens": 200, "prompt": token_prompt(3800, 11)}
    with one_each.raw_request("/v1/completions", long):
        wait_until(lambda: not gone(), "it is being computed")
    wait_until(gone, "a request cancelled while prefilling is forgotten")


@pytest.mark.parametrize("victim", ["decode-0", "prefill-0"])
def test_a_killed_worker_costs_time_but_no_token(one_each: Service, victim: str) -> None:
    """The stream goes on with the very tokens it would have had."""
    prompt = token_prompt(200, 13)
    body = {"model": "small", "prompt": prompt, "max_tokens": 80, "temperature": 0.8, "seed": 7, "ignore_eos": True}
    whole = "".join(event["choices"][0]["text"] for event in one_each.stream("/v1/completions", body))
    before, events = one_each.worker_incarnation(victim), one_each.stream("/v1/completions", body)
    text = "".join(next(events)["choices"][0]["text"] for _ in range(10))
    one_each.role(victim).kill()
    text += "".join(event["choices"][0]["text"] for event in events)
    assert text == whole
    wait_until(lambda: one_each.worker_incarnation(victim) not in (None, before), f"{victim} is back")


def test_bad_requests_reach_no_worker(one_each: Service) -> None:
    before = [one_each.stats(name) for name in ("prefill-0", "decode-0")]
    good = {"model": "small", "messages": [{"role": "user", "content": "hi"}]}
    bad = [
        (b"{", 400),
        ({**good, "model": "gpt-9"}, 404),
        ({**good, "messages": "hi"}, 400),
        ({**good, "temperature": -1}, 400),
        ({**good, "top_p": 0}, 400),
        ({**good, "n": 0}, 400),
        ({**good, "max_tokens": "many"}, 400),
        ({**good, "messages": [{"role": "user", "content": "word " * 20_000}]}, 400),
    ]
    for body, status in bad:
        url = f"{one_each.url}/v1/chat/completions"
        reply = httpx.post(url, content=body) if isinstance(body, bytes) else httpx.post(url, json=body, timeout=HANG_S)
        assert reply.status_code == status, (body, reply.text)
        assert reply.json()["error"]["message"]
    after = [one_each.stats(name) for name in ("prefill-0", "decode-0")]
    assert [s.handoff_nbytes for s in before] == [s.handoff_nbytes for s in after]
