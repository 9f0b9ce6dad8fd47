"""KV is reused through the pool: across a killed worker, across workers, across turns.

A hit in a worker's own pages does not count here: the bytes that workers read from the pool are what is checked.
"""

from __future__ import annotations

import re
from typing import Any

import httpx
import pytest
from e2e_service import BLOCK_TOKENS, Answer, Service, keys_of
from random_model import token_prompt
from waiting import HANG_S, wait_until

from moonpool.base.keys import object_key
from moonpool.store.messages import SERVICE as STORE
from moonpool.store.messages import Exist, Tier


def long_prompt(seed: int, num_tokens: int = 1500) -> list[int]:
    return token_prompt(num_tokens, seed)


def wait_stored(service: Service, tokens: list[int]) -> None:
    """Putting is behind the answer; a reuse that is asked for must have something to reuse."""
    keys = [object_key(key) for key in keys_of(tokens)]

    def are_stored() -> bool:
        found: list[bool] = service.ask(service.address("master"), STORE, Exist(keys=keys))
        return all(found)

    wait_until(are_stored, "all blocks are in the pool")


def test_after_kill_9_the_pool_answers_for_the_lost_pages(one_each: Service) -> None:
    prompt = long_prompt(1)
    cold = one_each.generate(prompt)
    wait_stored(one_each, prompt)
    one_each.kill_and_wait_back("prefill-0")
    assert one_each.stats("prefill-0").cached_pages == 0
    warm = one_each.generate(prompt)
    check_reused(one_each, "prefill-0", cold, warm, prompt)


def test_a_prefix_that_only_the_ssd_has_is_read_from_there(one_each: Service) -> None:
    """Over HTTP. The node dies, and what it had in memory; so does the worker, with its pages."""
    prompt, num_blocks = long_prompt(6), 1500 // BLOCK_TOKENS
    body = {"model": "small", "prompt": prompt, "max_tokens": 16, "temperature": 0, "ignore_eos": True}
    num_before = num_objects(one_each)[Tier.SSD]
    cold = completion(one_each, body)
    wait_until(lambda: num_objects(one_each)[Tier.SSD] >= num_before + num_blocks, "its blocks are on SSD")
    node = one_each.role_pid("node")
    one_each.role("node").kill()
    wait_until(lambda: one_each.role_pid("node") not in (None, node), "the node is started again")
    one_each.kill_and_wait_back("prefill-0")
    wait_until(lambda: num_objects(one_each).keys() == {Tier.DRAM, Tier.SSD}, "its memory and its disk are in the pool")
    assert num_objects(one_each)[Tier.DRAM] == 0
    worker, pulled_before = one_each.role("prefill-0"), pulled_tokens(one_each)
    read_before = worker.io_counters().read_chars
    warm = completion(one_each, body)
    assert warm["choices"] == cold["choices"]
    assert [each["usage"]["prompt_tokens_details"]["cached_tokens"] for each in (cold, warm)] == [0, num_blocks * 64]
    pulled = {tier: number - pulled_before[tier] for tier, number in pulled_tokens(one_each).items()}
    assert pulled == {"dram": 0.0, "ssd": num_blocks * 64.0, "remote": 0.0}
    nbytes = num_blocks * one_each.status().workers[0].info.page_nbytes
    assert one_each.stats("prefill-0").pool_read_nbytes >= nbytes, "this process has read nothing from the pool before"
    assert worker.io_counters().read_chars - read_before >= nbytes, "by system calls that read files"


def completion(service: Service, body: dict[str, Any]) -> dict[str, Any]:
    reply = httpx.post(f"{service.url}/v1/completions", json=body, timeout=HANG_S)
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


def num_objects(service: Service) -> dict[Tier, int]:
    """The replicas on segments that are in use, by tier."""
    with service.store() as store:
        return {each.tier: each.num_objects for each in store.stats().segments if each.status == "ok"}


def pulled_tokens(service: Service) -> dict[str, float]:
    page = httpx.get(f"{service.url}/metrics", timeout=HANG_S).text
    found = re.findall(r'^moonpool_pulled_tokens_total{.*tier="(\w+)".*} (\S+)$', page, re.M)
    return {tier: float(number) for tier, number in found}


def test_another_prefill_worker_takes_it(two_each: Service) -> None:
    prompt = long_prompt(2)
    cold = two_each.generate(prompt)
    wait_stored(two_each, prompt)
    first = two_each.records(cold.request_id)[-1].prefill
    assert first is not None
    other = {"prefill-0": "prefill-1", "prefill-1": "prefill-0"}[first]
    read_before = two_each.stats(other).pool_read_nbytes
    two_each.role(first).suspend()  # it stays registered but answers nobody: only the other one can take it
    try:
        two_each.role(first).kill()
        wait_until(lambda: two_each.worker_incarnation(first) is None, f"{first} is gone")
        warm = two_each.generate(prompt)
    finally:
        wait_until(lambda: two_each.worker_incarnation(first) is not None, f"{first} is back")
    check_reused(two_each, other, cold, warm, prompt, read_before)


def check_reused(service: Service, worker: str, cold: Answer, warm: Answer, prompt: list[int], before: int = 0) -> None:
    assert warm.tokens == cold.tokens
    reply = warm.prefill
    assert reply is not None
    assert reply.local_tokens == 0, "this worker had nothing of its own"
    assert reply.pool_tokens == (len(prompt) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    stats = service.stats(worker)
    page_nbytes = reply.pool_nbytes // (reply.pool_tokens // BLOCK_TOKENS)
    assert stats.pool_read_nbytes - before >= reply.pool_tokens // BLOCK_TOKENS * page_nbytes


def test_the_next_turn_hits_what_decoding_produced(one_each: Service) -> None:
    prompt = long_prompt(3, 100)
    first = one_each.generate(prompt, 160, ignore_eos=True)
    turn = prompt + first.tokens
    produced = len(turn) - 1  # the last token's KV is never computed
    wait_stored(one_each, turn[: produced // BLOCK_TOKENS * BLOCK_TOKENS])
    one_each.kill_and_wait_back("prefill-0")
    second = one_each.generate([*turn, *long_prompt(4, 30)])
    assert second.prefill is not None
    assert second.prefill.local_tokens == 0
    assert second.prefill.pool_tokens == produced // BLOCK_TOKENS * BLOCK_TOKENS > len(prompt)


@pytest.mark.model
def test_the_next_chat_turn_starts_warm(smollm2: Service) -> None:
    """Over HTTP, as a person talks: the second turn's prompt contains the first answer, rendered and tokenized anew."""
    messages = [{"role": "user", "content": "Tell me a story about a lighthouse keeper and a storm, at length."}]
    body = {"model": "smollm2", "messages": messages, "max_tokens": 80, "temperature": 0}
    num_before = smollm2.status().pool_blocks
    first = httpx.post(f"{smollm2.url}/v1/chat/completions", json=body, timeout=HANG_S).json()
    full_blocks = (first["usage"]["total_tokens"] - 1) // BLOCK_TOKENS
    assert full_blocks > first["usage"]["prompt_tokens"] // BLOCK_TOKENS, "decoding filled at least one block"
    wait_until(lambda: smollm2.status().pool_blocks >= num_before + full_blocks, "the blocks are in the pool")
    answer = first["choices"][0]["message"]["content"]
    messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "What happened next?"}]
    second = httpx.post(f"{smollm2.url}/v1/chat/completions", json={**body, "max_tokens": 1}, timeout=HANG_S).json()
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= full_blocks * BLOCK_TOKENS


def test_usage_reports_cached_tokens_over_http(one_each: Service) -> None:
    body = {"model": "small", "prompt": long_prompt(5, 700), "max_tokens": 4, "temperature": 0}
    cached = []
    for _ in range(2):
        events = list(one_each.stream("/v1/completions", {**body, "stream_options": {"include_usage": True}}))
        cached.append(events[-1]["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert cached == [0, 640]
