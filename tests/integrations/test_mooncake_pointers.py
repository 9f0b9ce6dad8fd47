"""Mooncake's calls on registered memory with one buffer per value."""

from __future__ import annotations

import pytest
from mooncake_arena import Arena, value_of

from moonpool.integrations.mooncake import MooncakeDistributedStore, ReplicateConfig

INVALID, NOT_FOUND = -600, -704


def test_puts_and_gets_by_address(store: MooncakeDistributedStore) -> None:
    arena, value = Arena(store), value_of(9000)
    (source,) = arena.pointers([9000])
    arena.write([source], [9000], value)
    assert store.put_from("k", source, 9000) == 0
    target = arena.address + 100_000
    assert store.get_into("k", target, 12_000) == 9000, "a larger buffer is filled as far as needed"
    assert arena.read([target], [9000]) == value
    assert store.get_into("k", target, 8999) == INVALID
    assert store.get_into("none", target, 9000) == NOT_FOUND
    assert store.put_from("empty", source, 0) == 0, "nothing to store is no error"
    assert store.is_exist("empty") == 0


def test_metadata_comes_before_the_value(store: MooncakeDistributedStore) -> None:
    arena = Arena(store)
    data, metadata = arena.pointers([100, 10])
    arena.write([data, metadata], [100, 10], value_of(110))
    assert store.put_from_with_metadata("k", data, metadata, 100, 10) == 0
    assert store.get("k") == value_of(110)[100:] + value_of(110)[:100]
    assert store.put_from_with_metadata("empty", data, metadata, 0, 10) == 0
    assert store.is_exist("empty") == 0


def test_upserts_by_address(store: MooncakeDistributedStore) -> None:
    arena = Arena(store)
    first, second = arena.pointers([50, 60])
    arena.write([first, second], [50, 60], value_of(110))
    assert store.put("a", b"old") == 0
    assert store.upsert_from("a", first, 50) == 0
    assert store.get("a") == value_of(110)[:50]
    assert store.batch_upsert_from(["a", "b"], [second, first], [60, 50]) == [0, 0]
    assert store.get_batch(["a", "b"]) == [value_of(110)[50:], value_of(110)[:50]]


def test_batches_by_address(store: MooncakeDistributedStore) -> None:
    arena, sizes = Arena(store), [1000, 2000, 3000]
    pointers, keys = arena.pointers(sizes), ["a", "b", "c"]
    arena.write(pointers, sizes, value_of(6000))
    assert store.batch_put_from(keys, pointers, sizes) == [0, 0, 0]
    targets = arena.pointers(sizes, at=100_000)
    assert store.batch_get_into([*keys, "none"], [*targets, targets[0]], [*sizes, 10]) == [*sizes, NOT_FOUND]
    assert arena.read(targets, sizes) == value_of(6000)
    assert store.batch_put_from(["x", "y"], pointers, sizes) == [INVALID, INVALID], "lists of other lengths"
    assert store.batch_put_from(["x", "y"], pointers[:2], [0, 5]) == [INVALID, 0]
    assert store.batch_put_from([], [], []) == store.batch_get_into([], [], []) == []


@pytest.mark.parametrize("address", [0, 1, -5, 2**64])
def test_wild_pointers_are_refused(store: MooncakeDistributedStore, address: int) -> None:
    assert store.put_from("k", address, 100) == INVALID
    assert store.upsert_from("k", address, 100) == INVALID
    assert store.get_into("k", address, 100) == INVALID
    assert store.put_from_with_metadata("k", address, address, 100, 100) == INVALID


def test_unregistered_memory_and_closed_stores_are_refused(store: MooncakeDistributedStore) -> None:
    arena = Arena(store)
    assert store.unregister_buffer(arena.address) == 0
    assert store.put_from("k", arena.address, 10) == INVALID
    assert store.get_into("k", arena.address, 10) == INVALID
    assert store.close() == 0
    assert store.put_from("k", arena.address, 10) == INVALID
    assert store.batch_put_from(["k"], [arena.address], [10]) == [INVALID]
    assert store.batch_get_into(["k"], [arena.address], [10]) == [INVALID]


def test_single_buffers_cannot_be_bound_to_one_node(store: MooncakeDistributedStore) -> None:
    arena, config = Arena(store), ReplicateConfig(prefer_alloc_in_same_node=True)
    assert store.put_from("k", arena.address, 10, config) == INVALID
    assert store.batch_put_from(["k"], [arena.address], [10], config) == [INVALID]
    assert store.batch_put_from_multi_buffers(["k"], [[arena.address]], [[10]], config) == [0]
