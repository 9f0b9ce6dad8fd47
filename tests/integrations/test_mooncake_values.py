"""Mooncake's calls on bytes: parts, batches, buffers with an address, upserts and removal."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from mooncake_arena import value_of
from store_pool import MIB, LocalPool

from moonpool.integrations.mooncake import BufferHandle, MooncakeDistributedStore, ReplicateConfig, SoftPinAction

MakeStore = Callable[..., MooncakeDistributedStore]
INVALID, NOT_FOUND, LEASED, PREEMPTED, NO_SPACE = -600, -704, -706, -707, -200


@pytest.mark.parametrize("write", ["put_parts", "upsert_parts"])
def test_parts_are_one_value(store: MooncakeDistributedStore, write: str) -> None:
    call = getattr(store, write)
    assert call("k", b"one ", bytearray(b"two "), memoryview(b"three"), np.frombuffer(b" four", np.uint8)) == 0
    assert store.get("k") == b"one two three four"
    assert call("empty") == 0
    assert call("empty", b"", b"") == 0, "nothing to store is no error, and nothing is stored"
    assert store.is_exist("empty") == 0
    with pytest.raises(RuntimeError):
        call("words", np.zeros(2, np.int32))
    assert call("k2", b"v", config=ReplicateConfig(prefer_alloc_in_same_node=True)) == INVALID


def test_a_batch_returns_the_first_error_and_stores_the_rest(store: MooncakeDistributedStore) -> None:
    assert store.put_batch(["a", "b"], [b"1", b"2"]) == 0
    assert store.put_batch(["a", "c"], [b"other", b"3"]) == 0, "a taken key keeps its value"
    assert store.put_batch(["d", "large", ""], [b"4", bytes(5 * MIB), b"5"]) == NO_SPACE
    assert store.put_batch(["e"], []) == INVALID
    assert store.put_batch([], []) == 0
    assert store.get_batch(["a", "none", "c", "d", ""]) == [b"1", b"", b"3", b"4", b""]


def test_an_upsert_replaces_and_a_put_does_not(store: MooncakeDistributedStore) -> None:
    assert store.upsert("k", b"first") == 0
    assert store.put("k", b"second") == 0
    assert store.get("k") == b"first"
    assert store.upsert("k", b"a longer third value") == 0
    assert store.get("k") == b"a longer third value"
    assert store.upsert_batch(["k", "n"], [b"fourth", b"new"]) == 0
    assert store.get_batch(["k", "n"]) == [b"fourth", b"new"]
    assert store.upsert("k", b"") == INVALID
    assert store.upsert_batch(["k"], []) == INVALID
    assert store.get("k") == b"fourth"


def test_an_upsert_keeps_the_pins_of_the_old_value(store: MooncakeDistributedStore, pool: LocalPool) -> None:
    assert store.put("k", b"old", ReplicateConfig(with_hard_pin=True)) == 0
    assert store.upsert("k", b"new") == 0
    pool.advance(60)
    assert store.remove("k") == LEASED
    assert store.upsert("k", b"newer", ReplicateConfig(soft_pin_action=SoftPinAction.DISABLE)) == 0
    assert store.remove("k") == 0


def test_a_buffer_has_bytes_and_an_address(store: MooncakeDistributedStore) -> None:
    value = value_of(10_000)
    assert store.put("k", value) == 0
    buffer = store.get_buffer("k")
    assert isinstance(buffer, BufferHandle)
    assert (buffer.size(), len(buffer), bytes(buffer)) == (10_000, 10_000, value)
    assert ctypes.string_at(buffer.ptr(), buffer.size()) == value
    assert np.frombuffer(buffer, np.uint8).tobytes() == value
    assert store.get_buffer("none") is None
    assert [each and bytes(each) for each in store.batch_get_buffer(["none", "k"])] == [None, value]
    assert store.batch_get_buffer([]) == []


def test_removes_a_batch_with_a_code_each(store: MooncakeDistributedStore, pool: LocalPool) -> None:
    for key in ("a", "b", "leased"):
        assert store.put(key, b"v") == 0
    assert store.is_exist("leased") == 1
    assert store.batch_remove(["a", "none", "leased", "a"]) == [0, NOT_FOUND, LEASED, 0]
    assert store.batch_remove(["leased", "a"], force=True) == [0, NOT_FOUND]
    assert store.batch_remove([]) == []
    assert store.batch_is_exist(["a", "b", "leased"]) == [0, 1, 0]


def test_removes_by_an_expression_that_sees_the_callers_key_alone(make_store: MakeStore) -> None:
    store, tenant = make_store(), make_store(tenant_id="other")
    for key in ("test_1", "test_2", "a_test_3", "mooncake"):
        assert store.put(key, b"v") == 0
        assert tenant.put(key, b"v") == 0
    assert store.remove_by_regex("^test_[0-9]+$") == 2
    assert store.remove_by_regex("mooncake/") == 0, "the name of the tenant is no part of the key"
    assert store.remove_by_regex("cake|_3") == 2
    assert store.remove_by_regex("(unclosed") == INVALID
    assert store.remove_by_regex(r"(a)\1") == INVALID, "needs backtracking"
    assert tenant.batch_is_exist(["test_1", "test_2", "a_test_3", "mooncake"]) == [1, 1, 1, 1]
    assert tenant.remove_by_regex("test") == 0, "they are leased"
    assert tenant.remove_by_regex("test", force=True) == 3


def test_calls_on_bytes_before_setup_are_refused() -> None:
    store = MooncakeDistributedStore()
    assert store.put_parts("k", b"v") == INVALID
    assert store.put_batch(["k"], [b"v"]) == INVALID
    assert store.upsert("k", b"v") == INVALID
    assert store.upsert_parts("k", b"v") == INVALID
    assert store.upsert_batch(["k"], [b"v"]) == INVALID
    assert store.get_batch(["k"]) == [b""]
    assert store.get_buffer("k") is None
    assert store.batch_remove(["k"]) == [INVALID]
    assert store.remove_by_regex("k") == INVALID


def test_eight_threads_share_a_store(store: MooncakeDistributedStore) -> None:
    start = threading.Barrier(8)

    def work(thread: int) -> None:
        start.wait()
        for number in range(20):
            key, value = f"{thread}-{number}", value_of(3000, seed=thread * 100 + number)
            assert store.put_parts(key, value[:1000], value[1000:]) == 0
            assert store.upsert("shared", value) in (0, PREEMPTED), "a later upsert ends an unfinished one"
            assert store.get(key) == value
            assert store.batch_remove([key, "none"], force=True) == [0, NOT_FOUND]

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(work, range(8)))
    assert len(store.get("shared")) == 3000
