"""Memory that a Mooncake store offers while it runs, other ways to set one up, and memory for callers."""

from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Callable

import pytest
from mooncake_arena import value_of
from store_pool import MIB, LocalPool
from waiting import wait_until

from moonpool.integrations.mooncake import MooncakeDistributedStore, ReplicateConfig
from moonpool.integrations.mooncake.host_memory import (
    MooncakeHostMemAllocator,
    bind_to_numa_node,
    get_alloc_func_addr,
    get_free_func_addr,
)
from moonpool.integrations.mooncake.nof_register import MooncakeDistributedNoFRegister

MakeStore = Callable[..., MooncakeDistributedStore]
INVALID, NOT_SUPPORTED, NO_SPACE = -600, -1012, -200


def segments(pool: LocalPool) -> list[str]:
    return [each.name for each in pool.on_loop(pool.master.state.stats).segments]


def test_memory_is_offered_and_taken_back(store: MooncakeDistributedStore, pool: LocalPool) -> None:
    mounted = store.allocate_and_mount_segment(MIB + 1)
    assert (mounted["ret"], mounted["allocated_size"]) == (0, MIB + 4096)
    (segment,) = mounted["segment_ids"]
    assert set(segments(pool)) == {"n0.dram", segment}
    assert store.put("k", value_of(1000), ReplicateConfig(preferred_segment=store.get_hostname())) == 0
    (replica,) = store.get_replica_desc("k")
    assert replica.get_memory_descriptor().buffer_descriptor.transport_endpoint == store.get_hostname()
    assert store.unmount_and_free_segment([segment]) == 0
    assert segments(pool) == ["n0.dram"]
    assert store.get("k") == b"", "it was only there"
    assert store.unmount_and_free_segment([segment]) == -1
    assert store.unmount_and_free_segment([]) == 0


def test_a_grace_period_moves_the_objects_first(store: MooncakeDistributedStore, pool: LocalPool) -> None:
    (segment,) = store.allocate_and_mount_segment(MIB)["segment_ids"]
    assert store.put("k", value_of(1000), ReplicateConfig(preferred_segment=segment)) == 0
    assert store.unmount_and_free_segment([segment], grace_period_seconds=60) == 0
    wait_until(lambda: segments(pool) == ["n0.dram"], "its segment is gone")
    assert store.get("k") == value_of(1000)


def test_a_store_that_closes_takes_all_its_memory_back(make_store: MakeStore, pool: LocalPool) -> None:
    store = make_store(global_segment_size=MIB)
    assert store.allocate_and_mount_segment(MIB)["ret"] == 0
    (draining,) = store.allocate_and_mount_segment(MIB)["segment_ids"]
    assert len(segments(pool)) == 4
    assert store.unmount_and_free_segment([draining], grace_period_seconds=3600) == 0
    assert store.close() == 0
    assert segments(pool) == ["n0.dram"]


def test_a_forgotten_store_takes_its_memory_back(pool: LocalPool) -> None:
    store = MooncakeDistributedStore()
    assert store.setup("127.0.0.1", "", MIB, 0, "tcp", "", pool.address) == 0
    assert len(segments(pool)) == 2
    del store
    gc.collect()
    wait_until(lambda: segments(pool) == ["n0.dram"], "its segment is gone")


def test_what_cannot_be_mounted_has_a_code(store: MooncakeDistributedStore) -> None:
    nothing = {"ret": -1, "segment_ids": [], "allocated_size": 0}
    assert store.allocate_and_mount_segment(0) == nothing
    assert store.allocate_and_mount_segment(MIB, location="cuda:0") == nothing | {"ret": INVALID}
    assert store.allocate_and_mount_segment(MIB, location="cpu:9999") == nothing | {"ret": INVALID}
    assert store.allocate_and_mount_segment(1 << 50) == nothing | {"ret": NO_SPACE}
    assert store.mount_segment("/dev/shm/none", MIB) == {"ret": NOT_SUPPORTED, "segment_ids": []}
    assert (store.unmount_segment(["x"]), store.unmount_segment([])) == (-1, 0)
    assert store.unmount_local_disk_segment() == 0
    closed = MooncakeDistributedStore()
    assert closed.allocate_and_mount_segment(MIB) == nothing
    assert closed.mount_segment("/x", 1)["ret"] == -1
    assert (
        closed.unmount_and_free_segment([]) == closed.unmount_segment([]) == closed.unmount_local_disk_segment() == -1
    )
    assert MooncakeDistributedNoFRegister().real_register("nqn") == NOT_SUPPORTED
    assert MooncakeDistributedNoFRegister().real_unregister_by_endpoint("nqn") == NOT_SUPPORTED


def test_a_dummy_client_has_registered_memory(pool: LocalPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOONCAKE_MASTER", pool.address)
    store = MooncakeDistributedStore()
    try:
        assert store.alloc_from_mem_pool(10) == 0
        assert store.setup_dummy(MIB, 0, "127.0.0.1:50052") == 0
        address = store.alloc_from_mem_pool(1000)
        ctypes.memmove(address, value_of(1000), 1000)
        assert store.put_from("k", address, 1000) == 0
        other = store.alloc_from_mem_pool(1000)
        assert other >= address + 1000
        assert store.get_into("k", other, 1000) == 1000
        assert ctypes.string_at(other, 1000) == value_of(1000)
        assert store.alloc_from_mem_pool(MIB) == store.alloc_from_mem_pool(0) == 0, "no room"
        assert store.setup_dummy(0, 0, "127.0.0.1:50052") == INVALID, "it is set up already"
        assert segments(pool) == ["n0.dram"]
    finally:
        assert store.close() == 0
    assert store.alloc_from_mem_pool(10) == 0
    assert store.setup_dummy(-1, 0, "127.0.0.1:50052") == INVALID
    assert store.get_offload_rpc_read_count() == 0


def test_init_all_needs_a_store_that_is_not_set_up(store: MooncakeDistributedStore) -> None:
    assert store.init_all("tcp", "", MIB) == INVALID


def test_memory_by_address_can_be_registered(store: MooncakeDistributedStore) -> None:
    allocator = MooncakeHostMemAllocator()
    address = allocator.alloc(10_000)
    ctypes.memmove(address, value_of(10_000), 10_000)
    assert store.register_buffer(address, 10_000) == 0
    assert store.put_from("k", address, 10_000) == 0
    assert store.get("k") == value_of(10_000)
    assert store.unregister_buffer(address) == 0
    assert allocator.free(address) == 0
    assert allocator.free(address) == -1
    assert allocator.alloc(0) == allocator.alloc(-1) == allocator.alloc(1 << 62) == 0


def test_allocators_are_c_functions() -> None:
    alloc = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t)(get_alloc_func_addr())
    free = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(get_free_func_addr())
    address = alloc(5000)
    assert address
    ctypes.memset(address, 7, 5000)
    free(address)
    free(None)


def test_a_thread_runs_on_the_cpus_of_its_numa_node() -> None:
    before = os.sched_getaffinity(0)
    try:
        bind_to_numa_node(9999)
        assert os.sched_getaffinity(0) == before
        bind_to_numa_node(0)
        assert os.sched_getaffinity(0)
    finally:
        os.sched_setaffinity(0, before)


def test_the_module_has_upstreams_names() -> None:
    """Every name of upstream's `mooncake.store`, without EngramStore and what only its C++ uses."""
    import importlib.util
    from pathlib import Path

    from moonpool.integrations.mooncake import TaskStatus, shadow_path

    spec = importlib.util.spec_from_file_location("shadow_store", Path(shadow_path()) / "mooncake" / "store.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert (module.FAILED, module.PROCESSING) == (TaskStatus.FAILED, TaskStatus.PROCESSING)
    assert {name for name in module.__all__ if not hasattr(module, name)} == set()
    assert len(module.__all__) >= 50
