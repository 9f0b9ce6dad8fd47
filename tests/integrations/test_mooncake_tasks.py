"""Mooncake's replicas and tasks: descriptors, copies, moves, and the removal of single replicas."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from mooncake_arena import value_of
from store_pool import MIB, LocalPool
from waiting import wait_until

from moonpool.integrations.mooncake import (
    MooncakeDistributedStore,
    QueryTaskResponse,
    ReplicateConfig,
    TaskStatus,
    TaskType,
)
from moonpool.integrations.mooncake.segment_names import endpoint_of, node_name, segments_of

MakeStore = Callable[..., MooncakeDistributedStore]
INVALID, NOT_FOUND, TASK_NOT_FOUND = -600, -704, -1400


def endpoints(store: MooncakeDistributedStore, key: str) -> list[str]:
    found = [each.get_memory_descriptor().buffer_descriptor for each in store.get_replica_desc(key)]
    return sorted(each.transport_endpoint for each in found)


def finish(store: MooncakeDistributedStore, created: tuple[tuple[int, int], int]) -> QueryTaskResponse:
    """Wait for the end of a task that was created."""
    task_id, code = created
    assert code == 0
    found: list[QueryTaskResponse] = []

    def has_ended() -> bool:
        response, code = store.query_task(task_id)
        assert code == 0
        assert response is not None
        assert response.id == task_id
        found[:] = [response]
        return response.status in (TaskStatus.SUCCESS, TaskStatus.FAILED)

    wait_until(has_ended, "the task has ended")
    return found[0]


@pytest.fixture
def owners(make_store: MakeStore) -> list[MooncakeDistributedStore]:
    """Stores that offer memory under names of their own."""
    return [make_store(local_hostname=f"127.0.0.1:{port}", global_segment_size="2MB") for port in (10001, 10002)]


@pytest.mark.parametrize("hostname", ["localhost:10001", "[::1]:5", "a-b-c:1", "x" * 60 + ":7"])
def test_segments_go_by_the_name_of_their_client(hostname: str) -> None:
    segment = f"{node_name(hostname, 4711, 2)}.dram"
    assert len(segment) < 75
    assert segments_of(hostname, ["n0.dram", segment]) == (segment,)
    assert segments_of(endpoint_of(segment), [segment]) == (segment,)
    assert endpoint_of("n0.dram") == "n0.dram"
    assert endpoint_of("n0.ssd") == "n0.ssd"


def test_puts_prefer_the_segments_that_others_offer(
    store: MooncakeDistributedStore, owners: list[MooncakeDistributedStore]
) -> None:
    names = [each.get_hostname() for each in owners]
    assert store.put("one", b"v", ReplicateConfig(preferred_segment=names[1])) == 0
    assert endpoints(store, "one") == [names[1]]
    assert store.put("two", b"v", ReplicateConfig(replica_num=2, preferred_segments=names)) == 0
    assert endpoints(store, "two") == names
    assert store.put("three", b"v", ReplicateConfig(preferred_segment="unknown:1")) == 0
    assert owners[0].put("mine", b"v") == 0
    assert endpoints(store, "mine") == names[:1], "memory of its own comes first"


def test_copies_and_moves(store: MooncakeDistributedStore, owners: list[MooncakeDistributedStore]) -> None:
    one, two = (each.get_hostname() for each in owners)
    value = value_of(100_000)
    assert store.put("k", value, ReplicateConfig(preferred_segment=one)) == 0
    before_ms = time.time() * 1000
    copied = finish(store, store.create_copy_task("k", [two]))
    assert (copied.type, copied.status) == (TaskType.REPLICA_COPY, TaskStatus.SUCCESS)
    assert abs(copied.created_at_ms_epoch - before_ms) < 60_000
    assert copied.created_at_ms_epoch <= copied.last_updated_at_ms_epoch
    assert endpoints(store, "k") == [one, two]
    again = finish(store, store.create_copy_task("k", [two]))
    assert again.status is TaskStatus.SUCCESS, "it is there already"
    moved = finish(store, store.create_move_task("k", one, "n0.dram"))
    assert (moved.type, moved.status) == (TaskType.REPLICA_MOVE, TaskStatus.SUCCESS)
    assert endpoints(store, "k") == [two, "n0.dram"]
    assert store.get("k") == value


def test_tasks_that_cannot_be_have_a_code(
    store: MooncakeDistributedStore, owners: list[MooncakeDistributedStore]
) -> None:
    one, two = (each.get_hostname() for each in owners)
    assert store.put("k", b"v", ReplicateConfig(preferred_segment=one)) == 0
    assert store.create_copy_task("none", [two]) == ((0, 0), NOT_FOUND)
    assert store.create_copy_task("k", ["unknown:1"]) == ((0, 0), INVALID)
    assert store.create_copy_task("k", []) == ((0, 0), INVALID)
    assert store.create_move_task("none", one, two) == ((0, 0), NOT_FOUND)
    assert store.create_move_task("k", one, one) == ((0, 0), INVALID)
    assert store.create_move_task("k", two, one) == ((0, 0), INVALID), "it has no replica to move"
    assert store.create_move_task("k", one, "unknown:1") == ((0, 0), INVALID)
    assert store.query_task((99, 0)) == store.query_task((0, 7)) == (None, TASK_NOT_FOUND)
    closed = MooncakeDistributedStore()
    assert closed.create_copy_task("k", [two]) == closed.create_move_task("k", one, two) == ((0, 0), INVALID)
    assert closed.query_task((1, 0)) == (None, INVALID)


def test_clears_objects_that_are_not_leased(store: MooncakeDistributedStore, pool: LocalPool) -> None:
    for key in ("a", "b", "leased", "pinned"):
        assert store.put(key, b"v", ReplicateConfig(with_hard_pin=key == "pinned")) == 0
    assert store.is_exist("leased") == 1
    assert store.batch_replica_clear(["a", "leased", "pinned", "none", "b"]) == ["a", "b"]
    assert store.batch_replica_clear([]) == []
    assert store.batch_is_exist(["a", "b", "leased", "pinned"]) == [0, 0, 1, 1]
    assert MooncakeDistributedStore().batch_replica_clear(["a"]) == []


def test_clears_the_replica_of_one_segment(
    store: MooncakeDistributedStore, owners: list[MooncakeDistributedStore], pool: LocalPool
) -> None:
    one, two = (each.get_hostname() for each in owners)
    config, value = ReplicateConfig(replica_num=2, preferred_segments=[one, two]), value_of(MIB // 2)
    assert store.put("k", value, config) == 0
    assert store.put("alone", b"v", ReplicateConfig(preferred_segment=one)) == 0
    assert store.batch_replica_clear(["k", "alone"], "unknown:1") == []
    assert store.batch_replica_clear(["k", "none"], one) == ["k"]
    assert endpoints(store, "k") == [two]
    assert store.get("k") == value
    assert store.batch_replica_clear(["k"], two) == [], "it is leased now"
    assert store.batch_replica_clear(["alone"], one) == ["alone"]
    assert store.is_exist("alone") == 0
    pool.check_integrity()


def test_its_own_name_is_its_own_memory_even_if_another_store_has_the_name(
    store: MooncakeDistributedStore, make_store: MakeStore
) -> None:
    """Upstream's tests set up two stores as localhost:12345, and a put may place a replica on each of them."""
    name, value = "127.0.0.1:10001", value_of(100_000)
    one, other = (make_store(local_hostname=name, global_segment_size="2MB") for _ in range(2))
    for key in ("k", "both"):
        assert store.put(key, value, ReplicateConfig(replica_num=2, preferred_segment=name)) == 0
    assert one.batch_replica_clear(["k"], name) == ["k"]
    assert other.get("k") == value
    assert endpoints(store, "k") == [name]
    assert store.batch_replica_clear(["both"], name) == ["both"], "for others the name stands for both"
    assert store.is_exist("both") == 0
