"""vLLM's in-tree MooncakeStoreConnector, as it is shipped, on our pool: real engines, real KV, equal page bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from store_pool import MIB
from vllm_pool import FEWEST_LOADED, NUM_BLOCKS, Pool, prompt_of
from vllm_process import Answer, NodeProcess, VllmProcess, assert_same_text
from waiting import wait_until

pytestmark = pytest.mark.vllm
StartVllm = Callable[..., VllmProcess]
CHECKSUM_MISMATCH = -801


def hashes(rows: list[dict[str, Any]]) -> dict[str, str]:
    return {row["key"]: row["sha256"] for row in rows}


def counters(engine: VllmProcess) -> dict[str, int]:
    (row,) = engine.records("counters")
    return row


def object_nbytes(pool: Pool, keys: list[str]) -> int:
    sizes = [pool.store.get_size(key) for key in keys]
    assert min(sizes) > 0
    return sum(sizes)


def store_prompt(start_vllm: StartVllm, pool: Pool, right: Answer, seed: int = 1) -> VllmProcess:
    """An engine that computed and stored a prompt, and has ended."""
    engine = start_vllm("first", pool.connector())
    engine.wait_ready()
    answer = engine.generate(prompt_of(seed))
    engine.finish()
    assert_same_text(answer, right)
    assert answer.cached == answer.external_hits == 0
    return engine


def spoil(pool: Pool, node: NodeProcess, key: str) -> None:
    """Overwrite an object's bytes with zeros, all but its header."""
    replica = pool.store.get_replica_desc(key)[0].get_memory_descriptor().buffer_descriptor
    nbytes = pool.store.get_size(key)
    node.zero(replica.buffer_address + replica.size - nbytes, nbytes)


def test_the_second_engine_loads_what_the_first_stored(
    start_vllm: StartVllm, pool: Pool, right_answers: dict[int, Answer]
) -> None:
    first = store_prompt(start_vllm, pool, right_answers[1])
    put = first.records("put")
    assert {row["code"] for row in put} == {0}
    stored_nbytes = object_nbytes(pool, [row["key"] for row in put])
    assert counters(first)["bytes_written"] == stored_nbytes

    second = start_vllm("second", pool.connector())
    second.wait_ready()
    answer = second.generate(prompt_of(1))
    second.finish()
    assert_same_text(answer, right_answers[1])
    assert FEWEST_LOADED <= answer.external_hits == answer.cached  # vLLM's count
    loaded = second.records("get")
    assert sum(row["code"] for row in loaded) == counters(second)["bytes_read"] == stored_nbytes  # the pool's count
    assert hashes(loaded) == hashes(put)  # the bytes in the pages of both
    assert len(set(hashes(put).values())) == len(put)  # of which no two are alike
    assert second.records("put") == []


def test_wrong_bytes_are_computed_anew(
    start_vllm: StartVllm, pool: Pool, node: NodeProcess, right_answers: dict[int, Answer]
) -> None:
    put = store_prompt(start_vllm, pool, right_answers[1]).records("put")
    spoiled = put[len(put) // 2]["key"]
    spoil(pool, node, spoiled)

    second = start_vllm("second", pool.connector())
    second.wait_ready()
    answer = second.generate(prompt_of(1))
    second.finish()
    assert_same_text(answer, right_answers[1])
    codes = {row["key"]: row["code"] for row in second.records("get")}
    assert codes.pop(spoiled) == CHECKSUM_MISMATCH
    assert min(codes.values()) > 0
    assert counters(second)["corrupt_replicas"] == 1
    assert hashes(second.records("put"))[spoiled] != ""  # stored again, from what was computed
    assert pool.store.is_exist(spoiled) == 1


def test_without_the_policy_vllm_fails_the_request(start_vllm: StartVllm, pool: Pool, node: NodeProcess) -> None:
    """What docs/vllm.md warns of."""
    engine = start_vllm("engine", pool.connector(policy=None))
    engine.wait_ready()
    assert engine.generate(prompt_of(1)).finish_reason == "length"
    wait_until(lambda: len(engine.records("put")) == NUM_BLOCKS, "all blocks are put")
    engine.forget()
    spoil(pool, node, engine.records("put")[0]["key"])
    assert engine.generate(prompt_of(1)).finish_reason == "error"
    engine.finish()


def test_two_engines_at_once_share_memory_that_one_of_them_offers(
    start_vllm: StartVllm, bare_pool: Pool, right_answers: dict[int, Answer]
) -> None:
    owner = start_vllm("owner", bare_pool.connector(offered_nbytes=64 * MIB))
    other = start_vllm("other", bare_pool.connector())
    owner.wait_ready()
    other.wait_ready()
    assert_same_text(owner.generate(prompt_of(2)), right_answers[2])
    wait_until(lambda: len(owner.records("put")) == NUM_BLOCKS, "all blocks are put")
    answer = other.generate(prompt_of(2))
    assert_same_text(answer, right_answers[2])
    assert answer.external_hits >= FEWEST_LOADED
    assert hashes(other.records("get")) == hashes(owner.records("put"))

    numbers = [engine.begin(prompt_of(3)) for engine in (owner, other)]
    for engine, number in zip((owner, other), numbers, strict=True):
        assert_same_text(engine.result(number), right_answers[3])
    for engine in (other, owner):  # the memory goes last
        engine.finish()
    assert {row["code"] for engine in (owner, other) for row in engine.records("put")} == {0}
