"""Mooncake's API on our pool: numbers, leases, pointers, buffers, and memory offered by the client itself."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from mooncake_arena import Arena, value_of
from store_pool import MIB, LocalPool
from waiting import HANG_S, wait_until

from moonpool.integrations.mooncake import MooncakeDistributedStore, ReplicateConfig, SoftPinAction, shadow_path

MakeStore = Callable[..., MooncakeDistributedStore]
INVALID, NOT_FOUND, LEASED, NO_SPACE, CHECKSUM = -600, -704, -706, -200, -801


def put_parts(store: MooncakeDistributedStore, arena: Arena, key: str, value: bytes, sizes: Sequence[int]) -> int:
    pointers = arena.pointers(sizes)
    arena.write(pointers, sizes, value)
    return store.batch_put_from_multi_buffers([key], [pointers], [list(sizes)])[0]


# whole values


def test_puts_and_gets(store: MooncakeDistributedStore) -> None:
    value = value_of(10_000)
    assert store.put("k", value) == 0
    assert store.get("k") == value
    assert store.get_size("k") == 10_000
    assert store.is_exist("k") == 1


def test_what_is_missing_says_so(store: MooncakeDistributedStore) -> None:
    assert store.get("k") == b""
    assert store.is_exist("k") == 0
    assert store.get_size("k") == NOT_FOUND
    assert store.remove("k") == NOT_FOUND
    assert store.get_replica_desc("k") == []


def test_a_put_on_a_taken_key_succeeds_and_keeps_the_old_value(store: MooncakeDistributedStore) -> None:
    assert store.put("k", b"old") == 0
    assert store.put("k", b"new") == 0
    assert store.get("k") == b"old"


@pytest.mark.parametrize(("key", "value"), [("k", b""), ("", b"v"), ("k" * 2000, b"v")])
def test_refuses_what_cannot_be_stored(store: MooncakeDistributedStore, key: str, value: bytes) -> None:
    assert store.put(key, value) == INVALID


def test_a_full_pool_is_the_code_for_back_pressure(store: MooncakeDistributedStore) -> None:
    assert store.put("large", bytes(5 * MIB)) == NO_SPACE


def test_a_full_pool_is_logged_once_in_a_while(
    store: MooncakeDistributedStore, caplog: pytest.LogCaptureFixture
) -> None:
    assert [store.put(key, bytes(5 * MIB)) for key in ("a", "b", "c")] == [NO_SPACE] * 3
    assert len([record for record in caplog.records if "the pool is full" in record.getMessage()]) == 1


def test_nothing_works_before_setup_or_after_close(make_store: MakeStore) -> None:
    closed = make_store()
    assert closed.close() == 0
    assert closed.close() == 0
    for store in (MooncakeDistributedStore(), closed):
        assert store.put("k", b"v") == INVALID
        assert store.get("k") == b""
        assert store.batch_is_exist(["a", "b"]) == [INVALID, INVALID]
        assert store.register_buffer(4096, 1) == INVALID
        assert store.health_check() == 1
        assert store.get_hostname() == ""


# leases and removal


def test_exist_leases_so_that_removal_waits(store: MooncakeDistributedStore, pool: LocalPool) -> None:
    assert store.put("k", b"v") == 0
    assert store.batch_is_exist(["k", "none"]) == [1, 0]
    assert store.remove("k") == LEASED
    pool.advance(60)
    assert store.remove("k") == 0
    assert store.remove("k") == NOT_FOUND


def test_a_put_grants_no_lease_and_force_ends_one(store: MooncakeDistributedStore) -> None:
    assert store.put("fresh", b"v") == 0
    assert store.remove("fresh") == 0
    assert store.put("leased", b"v") == 0
    assert store.is_exist("leased") == 1
    assert store.remove("leased", force=True) == 0


def test_what_was_found_is_not_evicted(store: MooncakeDistributedStore) -> None:
    assert store.put("found", bytes(MIB)) == 0
    assert store.is_exist("found") == 1
    for number in range(20):
        assert store.put(f"other-{number}", bytes(MIB)) in (0, NO_SPACE)
    assert store.get("found") == bytes(MIB)


def test_remove_all_spares_leased_objects_other_tenants_and_the_pools_own(
    make_store: MakeStore, pool: LocalPool
) -> None:
    store, tenant = make_store(), make_store(tenant_id="other")
    assert pool.client().put(b"a block of ours", b"v")
    assert tenant.put("theirs", b"v") == 0
    for key in ("a", "b", "leased"):
        assert store.put(key, b"v") == 0
    assert store.is_exist("leased") == 1
    assert store.remove_all() == 2
    assert store.batch_is_exist(["a", "b", "leased"]) == [0, 0, 1]
    assert store.remove_all(force=True) == 1
    assert store.remove_all(force=True) == 0
    assert tenant.get("theirs") == b"v"
    assert pool.client().get(b"a block of ours") == b"v"


# registered memory


def test_gathers_and_scatters_several_buffers(store: MooncakeDistributedStore) -> None:
    arena, sizes, value = Arena(store), [4096, 1, 5000], value_of(9097)
    assert put_parts(store, arena, "k", value, sizes) == 0
    assert store.get("k") == value
    pointers = arena.pointers(sizes, at=100_000)
    assert store.batch_get_into_multi_buffers(["k"], [pointers], [sizes]) == [9097]
    assert arena.read(pointers, sizes) == value


@pytest.mark.parametrize("sizes", [[9000], [1, 8999], [3000, 3000, 3000], [4000, 5000, 600], [10_000], [8999, 1, 1]])
def test_scatters_over_buffers_cut_otherwise(store: MooncakeDistributedStore, sizes: list[int]) -> None:
    arena, value = Arena(store), value_of(9000)
    assert put_parts(store, arena, "k", value, [4000, 0, 3000, 2000]) == 0
    pointers = arena.pointers(sizes, at=100_000)
    assert store.batch_get_into_multi_buffers(["k"], [pointers], [sizes]) == [9000]
    assert arena.read(pointers, sizes)[:9000] == value


def test_one_bad_key_of_a_batch_fails_alone(store: MooncakeDistributedStore) -> None:
    arena, value = Arena(store), value_of(1000)
    assert put_parts(store, arena, "k", value, [1000]) == 0
    good, strange = arena.address + 50_000, arena.address + arena.bytes.nbytes - 10
    results = store.batch_get_into_multi_buffers(
        ["none", "k", "k", "k", "k"],
        [[good], [good], [strange], [good, good], [good]],
        [[1000], [999], [1000], [1000], [1000]],
    )
    assert results == [NOT_FOUND, INVALID, INVALID, INVALID, 1000]
    assert store.batch_put_from_multi_buffers(["a", "b"], [[good], [strange]], [[1000], [1000]]) == [0, INVALID]
    assert store.batch_put_from_multi_buffers(["", "c"], [[good], [good]], [[1000], [1000]]) == [INVALID, 0]
    assert store.batch_is_exist(["a", "b", "", "c"]) == [1, 0, 0, 1]


def test_lists_that_do_not_fit_are_refused(store: MooncakeDistributedStore) -> None:
    assert store.batch_put_from_multi_buffers(["a", "b"], [[1]], [[1]]) == [INVALID, INVALID]
    assert store.batch_get_into_multi_buffers(["a"], [], []) == [INVALID]
    assert store.batch_get_into_multi_buffers([], [], []) == []
    assert store.batch_is_exist([]) == []


def test_a_taken_key_in_a_batch_keeps_its_value(store: MooncakeDistributedStore) -> None:
    arena = Arena(store)
    assert store.put("k", b"old") == 0
    results = store.batch_put_from_multi_buffers(["k", "n", "n"], [[arena.address]] * 3, [[8]] * 3)
    assert results == [0, 0, 0]
    assert store.get("k") == b"old"
    assert store.get("n") == bytes(8)


def test_only_registered_memory_is_touched(store: MooncakeDistributedStore) -> None:
    free = np.zeros(8192, dtype=np.uint8)
    address = int(free.ctypes.data)
    assert store.batch_put_from_multi_buffers(["k"], [[address]], [[8192]]) == [INVALID]
    assert store.register_buffer(address, 4096) == 0
    assert store.register_buffer(address + 100, 10) == INVALID
    assert store.batch_put_from_multi_buffers(["k"], [[address]], [[4097]]) == [INVALID]
    assert store.batch_put_from_multi_buffers(["k"], [[address - 1]], [[10]]) == [INVALID]
    assert store.batch_put_from_multi_buffers(["k"], [[address]], [[4096]]) == [0]
    assert store.unregister_buffer(address) == 0
    assert store.unregister_buffer(address) == INVALID
    assert store.batch_get_into_multi_buffers(["k"], [[address]], [[4096]]) == [INVALID]


@pytest.mark.parametrize(("address", "nbytes"), [(0, 10), (4096, 10), (-5, 10), (4096, 0)])
def test_memory_that_is_not_there_is_refused(store: MooncakeDistributedStore, address: int, nbytes: int) -> None:
    assert store.register_buffer(address, nbytes) == INVALID


# wrong bytes


def test_wrong_bytes_are_refused_and_then_a_miss(store: MooncakeDistributedStore, pool: LocalPool) -> None:
    arena, value = Arena(store), value_of(8192)
    assert put_parts(store, arena, "k", value, [4096, 4096]) == 0
    replica = store.get_replica_desc("k")[0].get_memory_descriptor().buffer_descriptor
    end = replica.buffer_address + replica.size
    pool.nodes[0].segment.memory[end - 100 : end] = bytes(100)
    pointers = arena.pointers([4096, 4096], at=100_000)
    sizes = [[4096, 4096]]
    assert store.batch_get_into_multi_buffers(["k"], [pointers], sizes) == [CHECKSUM]
    assert store.counters()["corrupt_replicas"] == 1
    assert store.batch_get_into_multi_buffers(["k"], [pointers], sizes) == [NOT_FOUND]
    assert put_parts(store, arena, "k", value, [4096, 4096]) == 0
    assert store.get("k") == value


# setup


def test_setup_by_position_with_a_tcp_master(tmp_path: Path, pool: LocalPool) -> None:
    store = MooncakeDistributedStore()
    assert store.setup("127.0.0.1:4711", "P2PHANDSHAKE", 0, 1, "rdma", "", pool.address) == 0
    assert store.health_check() == 0
    assert store.get_hostname() == "127.0.0.1:4711"
    assert store.setup("127.0.0.1", "", 0, 1, "tcp", "", pool.address) == INVALID
    assert store.close() == 0


@pytest.mark.parametrize(
    "change",
    [
        {"master_server_addr": "etcd://10.0.0.1:2379"},
        {"master_server_addr": "nowhere"},
        {"global_segment_size": "50%"},
        {"local_hostname": ""},
        {"tenant_id": "a/b"},
        {"no_such_setting": 1},
    ],
)
def test_setup_refuses_wrong_settings(tmp_path: Path, change: dict[str, object]) -> None:
    settings = {
        "local_hostname": "127.0.0.1",
        "metadata_server": "",
        "global_segment_size": 0,
        "master_server_addr": f"unix:{tmp_path}/none.sock",
    }
    assert MooncakeDistributedStore().setup(settings | change) == INVALID


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("10.0.0.1", "10.0.0.1:PORT"),
        ("10.0.0.1:5", "10.0.0.1:5"),
        ("::1", "[::1]:PORT"),
        ("[::1]", "[::1]:PORT"),
        ("[::1]:5", "[::1]:5"),
    ],
)
def test_a_client_is_named_by_host_and_port(make_store: MakeStore, given: str, expected: str) -> None:
    named = make_store(local_hostname=given).get_hostname()
    port = named.rpartition(":")[2]
    assert named == expected.replace("PORT", port)
    assert given == expected or 12300 <= int(port) <= 14300


def test_setup_without_a_master_fails_soon(tmp_path: Path) -> None:
    store = MooncakeDistributedStore()
    assert store.setup("127.0.0.1", "", 0, 1, "tcp", "", f"unix:{tmp_path}/none.sock") == -900
    assert store.health_check() == 1


def test_a_lost_master_is_a_number_too(make_store: MakeStore, pool: LocalPool) -> None:
    store = make_store()
    arena = Arena(store)
    pool.loop.run(pool.master.close())
    assert store.health_check() == 2
    assert store.batch_is_exist(["a", "b"]) == [-900, -900]
    assert store.batch_put_from_multi_buffers(["a"], [[arena.address]], [[10]]) == [-900]
    assert store.batch_get_into_multi_buffers(["a"], [[arena.address]], [[10]]) == [-900]
    assert store.remove_all() == -900


# memory offered by the client


def test_a_store_offers_memory_until_it_is_closed(make_store: MakeStore, pool: LocalPool) -> None:
    owner, user = make_store(global_segment_size="2MB"), make_store()
    config = ReplicateConfig()
    config.preferred_segment = owner.get_hostname()
    assert owner.get_hostname() != user.get_hostname()
    value = value_of(100_000)
    assert owner.put("k", value, config) == 0
    (replica,) = user.get_replica_desc("k")
    assert replica.is_memory_replica()
    assert replica.get_memory_descriptor().buffer_descriptor.transport_endpoint == owner.get_hostname()
    assert user.get("k") == owner.get("k") == value
    assert owner.close() == 0
    assert user.get("k") == b""
    assert user.put("k", value) == 0


def test_a_process_that_just_exits_takes_its_memory_along(pool: LocalPool) -> None:
    script = (
        "import sys; from mooncake.store import MooncakeDistributedStore as Store; store = Store();"
        "sys.exit(store.setup('127.0.0.1', '', 1 << 20, 1, 'tcp', '', sys.argv[1]) or store.put('k', b'v'))"
    )
    path = os.pathsep.join([shadow_path(), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run([sys.executable, "-c", script, pool.address], env={**os.environ, "PYTHONPATH": path})
    assert done.returncode == 0
    wait_until(lambda: len(pool.on_loop(pool.master.state.stats).segments) == 1, "its segment is gone")


def test_the_module_prints_what_belongs_on_the_path() -> None:
    told = subprocess.run(
        [sys.executable, "-m", "moonpool.integrations.mooncake"], capture_output=True, text=True, check=True
    ).stdout.strip()
    assert (Path(told) / "mooncake" / "store.py").is_file()


# ReplicateConfig


def test_replicas_and_pins_are_asked_for(make_store: MakeStore, pool: LocalPool) -> None:
    pool.start_node("n1", 4 * MIB)
    store = make_store()
    config = ReplicateConfig()
    config.replica_num = 2
    config.with_hard_pin = True
    assert store.put("k", b"v", config) == 0
    assert len(store.get_replica_desc("k")) == 2
    pool.advance(60)
    assert store.remove("k") == LEASED
    assert store.remove("k", force=True) == 0


def test_fewer_replicas_than_asked_for_have_a_code(store: MooncakeDistributedStore) -> None:
    """The pool has one node. The value is stored all the same."""
    assert store.put("k", b"v", ReplicateConfig(replica_num=2)) == -703
    assert store.get("k") == b"v"
    assert store.counters()["fewer_replicas"] == 1
    assert store.put("k", b"w", ReplicateConfig(replica_num=2)) == 0, "the key is taken, as ever"


def test_an_engine_that_exits_without_close_takes_its_memory_along_in_silence(pool: LocalPool) -> None:
    program = f"""
from moonpool.integrations.mooncake import MooncakeDistributedStore
store = MooncakeDistributedStore()
assert store.setup("127.0.0.1", "", 4 << 20, 1, "tcp", "", "{pool.address}") == 0
assert store.put("k", b"v") == 0
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=HANG_S)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert [each.name for each in pool.master.state.stats().segments] == ["n0.dram"], "it has said goodbye"


def test_members_of_a_group_and_soft_pins_are_asked_for(store: MooncakeDistributedStore) -> None:
    config = ReplicateConfig(group_ids=["g", "h"], soft_pin_action=SoftPinAction.ENABLE, soft_pin_ttl_ms=1000)
    arena = Arena(store)
    pointers = [[arena.address]] * 2
    assert store.batch_put_from_multi_buffers(["a", "b"], pointers, [[8], [8]], config) == [0, 0]
    assert store.batch_put_from_multi_buffers(["c"], pointers[:1], [[8]], config) == [INVALID]


def test_wishes_that_cannot_be_are_refused(store: MooncakeDistributedStore) -> None:
    config = ReplicateConfig(replica_num=0)
    assert store.put("k", b"v", config) == INVALID
    assert store.put("k", b"v", ReplicateConfig(prefer_alloc_in_same_node=True)) == INVALID
    assert store.put("k", b"v", ReplicateConfig(soft_pin_ttl_ms=5)) == INVALID
    assert store.put("k", b"v", ReplicateConfig(soft_pin_ttl_ms=5, soft_pin_action=SoftPinAction.ENABLE)) == 0
    assert store.put("k", b"v", ReplicateConfig(nof_replica_num=1)) == -1012
    with pytest.raises(TypeError):
        config.soft_pin_ttl_ms = -1
    with pytest.raises(AttributeError):
        config.with_soft_pin = True
    assert "replica_num=0" in str(config)


def close_engine(pool: LocalPool) -> None:
    """As if the node had died, before the master knows."""
    engine = pool.nodes[0]._engine
    assert engine is not None
    engine.close()


def test_what_cannot_be_read_does_not_exist_so_that_an_engine_does_not_ask_again(
    make_store: MakeStore, pool: LocalPool, caplog: pytest.LogCaptureFixture
) -> None:
    store = make_store()
    arena = Arena(store)
    assert put_parts(store, arena, "k", value_of(100), [100]) == 0
    assert store.is_exist("k") == 1
    close_engine(pool)
    with caplog.at_level("WARNING", "moonpool"):
        assert store.batch_get_into_multi_buffers(["k"], [[arena.address]], [[100]]) == [-800]
        assert [store.is_exist("k") for _ in range(100)] == [0] * 100
        assert store.batch_get_into_multi_buffers(["k"], [[arena.address]], [[100]]) == [-800]
    assert len(caplog.records) == 1, "one line per outage"


def test_a_put_whose_node_cannot_be_reached_or_is_gone_is_a_failed_transfer(
    make_store: MakeStore, pool: LocalPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make_store()
    session = store._session
    assert session is not None
    directory = session.client.directory
    with monkeypatch.context() as gone:  # the master forgets the node between allotting its memory and the write
        gone.setattr(directory, "_known", {})
        gone.setattr(directory, "_list_segments", list)
        assert [store.put("k", b"v"), store.upsert("u", b"v")] == [-800, -800]
    assert store.put("k", b"v") == 0
    close_engine(pool)
    assert [store.put("l", b"v"), store.put("m", bytes(300_000)), store.put_batch(["n"], [b"v"])] == [-800] * 3


def test_an_outage_of_the_master_fails_calls_at_once_and_is_logged_once(
    make_store: MakeStore, pool: LocalPool, caplog: pytest.LogCaptureFixture
) -> None:
    store = make_store()
    assert store.put("k", b"v") == 0
    pool.loop.run(pool.master.close())
    with caplog.at_level("WARNING", "moonpool.base.rpc"), caplog.at_level("WARNING", "moonpool.integrations"):
        assert [store.is_exist("k") for _ in range(100)] == [-900] * 100, "never a false 0"
        assert store.get("k") == b""
    ours = [each for each in caplog.records if not each.name.startswith("moonpool.node")]
    assert len(ours) == 1
    assert store.counters()["master_outages"] == 1
    pool.start_master()
    wait_until(lambda: store.is_exist("k") == 1, "the master is back")
    assert store.get("k") == b"v"
