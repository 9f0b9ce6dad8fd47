"""Structured objects on their way: nested tensors, tensor objects, buffer pools, configs, threads, closed stores."""

from __future__ import annotations

import ctypes
import gc
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from bundle_stores import DictStore, Leases, PointerStore, column

from moonpool.integrations.mooncake import MooncakeDistributedStore, ReplicateConfig
from moonpool.integrations.mooncake.buffer_pool import BufferPool
from moonpool.integrations.mooncake.bundle_payloads import GatheredPayload, raw_destination, tensor_object_buffer
from moonpool.integrations.mooncake.payload_writes import BundleTransferPolicy
from moonpool.integrations.mooncake.structured_store import MooncakeBundleTransfer
from moonpool.integrations.mooncake.tensor_memory import deserialize_tensor, serialize_tensor
from moonpool.integrations.mooncake.write_groups import config_for_keys

torch = pytest.importorskip("torch")
KIB = 1024


# tensors


@pytest.fixture(params=["dict", "pool"])
def transfer(request: pytest.FixtureRequest) -> MooncakeBundleTransfer:
    store = DictStore() if request.param == "dict" else request.getfixturevalue("store")
    return MooncakeBundleTransfer(store, "p")


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_come_back_whole_and_by_row(transfer: MooncakeBundleTransfer) -> None:
    rows = [torch.arange(6).reshape(2, 3), torch.arange(10).reshape(2, 5), torch.arange(6).reshape(2, 3) + 9]
    for values in ([row[0] for row in rows], rows):
        nested = torch.nested.as_nested_tensor(values, layout=torch.jagged)
        ref = transfer.put_dataproto({"batch": {"n": nested}})
        for chosen in (None, [2, 0], slice(1, 3), slice(0, 3, 2), []):
            found = transfer.get_dataproto(ref, rows=chosen)["batch"]["n"]
            picked = np.arange(3)[chosen].tolist() if chosen is not None else [0, 1, 2]
            assert len(found) == len(picked)
            assert all(torch.equal(one, values[at]) for one, at in zip(found.unbind(), picked, strict=True))
    with pytest.raises(ValueError, match="destinations"):
        transfer.get_dataproto(ref, destinations={"n": np.empty(3)})
    with pytest.raises(ValueError, match="jagged"):
        transfer.put_object({"n": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])})


def test_a_nested_tensor_with_wrong_parts_is_refused() -> None:
    store = DictStore()
    transfer = MooncakeBundleTransfer(store, "p")
    ref = transfer.put_object({"n": torch.nested.as_nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)})
    meta = json.loads(store.objects[ref.manifest["meta"]["key"]])
    spec = meta["__mooncake_structured_fields__"]["n"]
    sizes = spec["part_bytes"]
    for change in ({"part_bytes": sizes[:1]}, {"part_bytes": [sizes[0], -1]}, {"part_bytes": [sizes[0], sizes[1] + 1]}):
        wrong = json.dumps(meta | {"__mooncake_structured_fields__": {"n": spec | change}}).encode()
        described = {"key": ref.manifest["meta"]["key"], "bytes": len(wrong)}
        store.objects[described["key"]] = wrong
        manifest = {**ref.manifest, "meta": {**described, "chunks": [described]}}
        with pytest.raises(ValueError, match="parts"):
            transfer.get_object({"manifest": manifest})


def test_tensor_objects_in_memory_are_stored_and_sliced(transfer: MooncakeBundleTransfer) -> None:
    tensor = torch.arange(12).reshape(6, 2)
    header, address, nbytes, owner = serialize_tensor(tensor)
    memory = bytearray(header + ctypes.string_at(address, nbytes))
    pointer = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    ref = transfer.put_dataproto({"batch": {"t": tensor_object_buffer(pointer, len(memory), (memory, owner), 6)}})
    assert torch.equal(transfer.get(ref)["batch"]["t"], tensor)
    assert torch.equal(transfer.get(ref, rows=[5, 0])["batch"]["t"], tensor[[5, 0]])
    target = bytearray(304 + 2 * 16)
    place = raw_destination(ctypes.addressof(ctypes.c_char.from_buffer(target)), len(target), target)
    assert transfer.get(ref, rows=[5, 0], destinations={"t": place})["batch"]["t"] is place
    assert torch.equal(deserialize_tensor(bytes(target)), tensor[[5, 0]])
    with pytest.raises(ValueError, match="needed"):
        transfer.get(ref, rows=[5, 0, 1], destinations={"t": place})
    with pytest.raises(ValueError):
        transfer.put_object({"t": tensor_object_buffer(16, 1000)})


def test_what_zero_copy_cannot_do_is_refused(transfer: MooncakeBundleTransfer) -> None:
    policy = BundleTransferPolicy(copy_mode="zero_copy")
    with pytest.raises(ValueError, match="tensor-object buffer"):
        transfer.put_object({"t": torch.ones(2)}, policy=policy)
    two = GatheredPayload((memoryview(b"ab"), memoryview(b"cd")))
    with pytest.raises(RuntimeError, match="zero-copy put"):
        transfer.put_object({"x": two}, policy=policy)
    assert transfer.get_object(transfer.put_object({"x": two}))["x"] == b"abcd"


# buffer pools


@pytest.fixture
def pooled_store(make_store: Any) -> Any:
    return make_store(local_buffer_size=64 * KIB)


@pytest.fixture
def buffers(pooled_store: Any) -> BufferPool:
    return BufferPool(pooled_store)


def test_arrays_are_written_from_and_read_into_the_pool(pooled_store: Any, buffers: BufferPool) -> None:
    transfer = MooncakeBundleTransfer(pooled_store, "p", default_chunk_bytes=KIB, buffer_pool=buffers)
    array = np.arange(1000).reshape(100, 10)
    ref = transfer.put_object({"x": array, "b": b"abc"})
    found = transfer.get_object(ref)
    assert np.array_equal(found["x"], array)
    assert bytes(found["b"]) == b"abc"
    with pytest.raises(RuntimeError, match="active leases"):
        buffers.close()
    transfer.release_result(found)
    transfer.release_result(found)
    part = np.asarray(transfer.materialize(transfer.read_spec(ref).slice_member("x", 0, 5, 9)).objects["x"])[1:]
    gc.collect()
    assert np.array_equal(part, array[6:9])  # any view keeps the lease
    with pytest.raises(RuntimeError, match="active leases"):
        buffers.close()
    del part
    gc.collect()
    buffers.close()


def test_a_pool_that_is_too_small_is_left_alone(pooled_store: Any, buffers: BufferPool) -> None:
    transfer = MooncakeBundleTransfer(pooled_store, "p", buffer_pool=buffers)
    arrays = {f"x{number}": np.full(6000, number) for number in range(5)}
    ref = transfer.put_object(arrays)  # one fits into the pool, all five do not
    found = transfer.get_object(ref)
    assert all(np.array_equal(found[name], array) for name, array in arrays.items())
    assert len({type(each) for each in found.values()}) == 2
    again = transfer.put_object(arrays)  # while the pool is lent
    transfer.release_result(found)
    assert np.array_equal(transfer.get_object(again)["x4"], arrays["x4"])


def test_columns_in_the_pool(pooled_store: Any, buffers: BufferPool) -> None:
    transfer = MooncakeBundleTransfer(pooled_store, "p", buffer_pool=buffers)
    rows = [np.arange(3), None, np.arange(5)]
    data = {"a": column(*rows), "w": column("x", None, "yz"), "t": column(torch.ones(2), None, torch.zeros(1))}
    ref = transfer.put_dataproto({"non_tensor_batch": data})
    found = transfer.get(ref, type="dict")
    assert [None if row is None else row.tolist() for row in found["a"]] == [[0, 1, 2], None, [0, 1, 2, 3, 4]]
    assert found["w"] == ["x", None, "yz"]
    assert torch.equal(found["t"][0], torch.ones(2))
    with pytest.raises(RuntimeError, match="active leases"):
        buffers.close()
    transfer.release_result(found)
    del found
    gc.collect()
    buffers.close()


def test_a_put_from_the_pool_that_fails_leaves_nothing() -> None:
    store, leases = PointerStore(fails_at=3), Leases()
    transfer = MooncakeBundleTransfer(store, "p", default_chunk_bytes=4, buffer_pool=leases)
    with pytest.raises(RuntimeError, match=r"batch_put_from.*-800"):
        transfer.put_object({"x": bytes(20)})
    assert store.objects == {}
    assert leases.num_out == 0
    store.fails_at = -1
    for policy in (BundleTransferPolicy(4, "parallel"), BundleTransferPolicy(4), BundleTransferPolicy(4, "batch")):
        ref = transfer.put_object({"x": bytes(range(20))}, policy=policy)
        assert transfer.get_object(ref)["x"] == bytes(range(20))
    assert leases.num_out == 0


# configs, threads, closed stores


def test_a_config_is_copied_only_where_it_must_be() -> None:
    grouped, plain = ReplicateConfig(group_ids=["g"], replica_num=2), ReplicateConfig()
    assert config_for_keys(None, 3) is None
    assert config_for_keys(plain, 3) is plain
    assert config_for_keys(grouped, 1) is grouped
    expanded = config_for_keys(grouped, 2)
    assert (list(expanded.group_ids), expanded.replica_num, list(grouped.group_ids)) == (["g", "g"], 2, ["g"])
    assert config_for_keys(ReplicateConfig(group_ids=[]), 1).group_ids is None
    with pytest.raises(ValueError, match="one group"):
        config_for_keys(ReplicateConfig(group_ids=["a", "b"]), 2)


def test_threads_share_a_transfer(store: MooncakeDistributedStore) -> None:
    transfer = MooncakeBundleTransfer(store, "p", default_chunk_bytes=KIB)
    barrier = threading.Barrier(8)

    def run(number: int) -> bool:
        barrier.wait()
        data = {"ids": np.full((20, 30), number), "t": torch.full((20,), number), "w": [f"{number}"] * 20}
        policy = BundleTransferPolicy(2, "parallel", "copy" if number % 2 else "auto")
        ref = transfer.put(data, type="dict", policy=policy)
        ref = transfer.append_dataproto_fields(ref, {"batch": {"more": np.full(20, number)}}, stage="default")
        found = transfer.get(ref, type="dict", rows=slice(3, 9))
        transfer.cleanup_dataproto(ref)
        same = all((np.asarray(found[name]) == number).all() for name in ("ids", "t", "more"))
        return same and found["w"] == [f"{number}"] * 6

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(run, range(8)))
    assert store.remove_all() == 0  # nothing is left


def test_a_closed_store_is_an_error(store: MooncakeDistributedStore) -> None:
    transfer = MooncakeBundleTransfer(store, "p")
    ref = transfer.put({"x": np.arange(3), "t": torch.arange(3), "w": ["a", "b", "c"]}, type="dict")
    stored = ref.stage_refs["default"]
    assert store.close() == 0
    for call in (
        lambda: transfer.put_object({"x": np.arange(3)}),
        lambda: transfer.put_object({"t": torch.arange(3)}),
        lambda: transfer.put_bundle(b"m", {}),
        lambda: transfer.get(ref),
        lambda: transfer.get_object(stored),
        lambda: transfer.append_dataproto_fields(ref, {"y": np.arange(3)}, stage="default"),
        lambda: transfer.dataproto_manifest_view(ref),
        lambda: transfer.cleanup_dataproto(ref),
    ):
        with pytest.raises(RuntimeError):
            call()
    with pytest.raises(ValueError, match="no bundle manifest"):
        transfer.get_object({"manifest_key": stored.manifest_key})
