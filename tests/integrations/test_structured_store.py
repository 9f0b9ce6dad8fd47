"""Structured objects and batches of samples: on a store in memory and on a real pool, by field, by row, by stage."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool.integrations.mooncake import MooncakeDistributedStore, ReplicateConfig
from moonpool.integrations.mooncake.batch_refs import FieldSchema, export_dataproto_ref, import_dataproto_ref
from moonpool.integrations.mooncake.bundle_payloads import raw_destination, tensor_object_buffer
from moonpool.integrations.mooncake.bundles import RemoteBundleRef
from moonpool.integrations.mooncake.column_encoding import decode_column, encode_column
from moonpool.integrations.mooncake.column_structure import MISSING, infer_structure, rebuild_rows
from moonpool.integrations.mooncake.payload_writes import BundleTransferPolicy
from moonpool.integrations.mooncake.structured_objects import StructuredObjectPayload
from moonpool.integrations.mooncake.structured_store import MooncakeBundleTransfer

torch = pytest.importorskip("torch")


class FakeStore:
    """Only what every store has."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.configs: list[Any] = []
        self.num_puts_left = -1

    def put(self, key: str, value: Any, config: Any = None) -> int:
        if self.num_puts_left == 0:
            return -200
        self.num_puts_left -= 1
        self.configs.append(config)
        self.objects[key] = bytes(value)
        return 0

    def get(self, key: str) -> bytes:
        return self.objects.get(key, b"")

    def remove(self, key: str, force: bool = False) -> int:
        return 0 if self.objects.pop(key, None) is not None else -704


MakeTransfer = Callable[..., MooncakeBundleTransfer]


@pytest.fixture(params=["fake", "pool"])
def transfer(request: pytest.FixtureRequest) -> MooncakeBundleTransfer:
    store = FakeStore() if request.param == "fake" else request.getfixturevalue("store")
    return MooncakeBundleTransfer(store, "test", default_chunk_bytes=100)


# columns

scalars = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text(max_size=5) | st.binary(max_size=5)
values = st.recursive(
    scalars | st.floats(allow_nan=False),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


def through_bytes(rows: list[Any]) -> list[Any]:
    column = encode_column("c", rows)
    stored = {name: _stored(each) for name, each in column.payload.items()}
    return decode_column(json.loads(json.dumps(column.described({}))), stored)


def _stored(buffer: Any) -> Any:
    """What a member of a bundle is when it is read."""
    if isinstance(buffer, np.ndarray):
        return buffer
    data = b"".join(buffer.buffers)
    return data if buffer.dtype is None else np.frombuffer(data, buffer.dtype)


@given(st.lists(values, max_size=6))
def test_rows_of_python_values_come_back(rows: list[Any]) -> None:
    found = through_bytes(rows)
    assert found == rows
    assert [type(each) for each in found] == [type(each) for each in rows]


@given(st.lists(values, min_size=1, max_size=5))
def test_the_leaves_of_a_column_rebuild_its_rows(rows: list[Any]) -> None:
    leaves: list[Any] = []
    nodes: list[Any] = []
    infer_structure("c", rows, leaves, nodes)
    columns = {leaf.path: leaf.values for leaf in leaves}
    assert rebuild_rows("c", len(rows), columns, {node.path: node for node in nodes}) == rows


def test_arrays_and_tensors_in_rows_come_back() -> None:
    rows = [{"a": np.arange(3), "t": torch.arange(2)}, {"t": torch.ones(2, 2, dtype=torch.int64)}, None, {"a": None}]
    found = through_bytes(rows)
    assert found[0]["a"].tolist() == [0, 1, 2]
    assert torch.equal(found[1]["t"], torch.ones(2, 2, dtype=torch.int64))
    assert "a" not in found[1]
    assert found[2] is None
    assert found[3] == {"a": None}
    assert repr(MISSING) == "<MISSING>"


def test_what_cannot_be_stored_is_named() -> None:
    with pytest.raises(ValueError, match=r"field c: .*object"):
        encode_column("c", [{"x": object()}])
    with pytest.raises(ValueError, match=r"field c\.x: .*object"):
        encode_column("c", [{"x": object(), "b": b"1"}])
    deep: Any = 1
    for _ in range(40):
        deep = {"a": deep}
    with pytest.raises(ValueError, match="nested"):
        encode_column("c", [deep])


# structured objects


def test_members_come_back_whole_and_by_row(transfer: MooncakeBundleTransfer) -> None:
    array, tensor = np.arange(60, dtype=np.int16).reshape(12, 5), torch.arange(48, dtype=torch.bfloat16).reshape(12, 4)
    ref = transfer.put_structured_object(StructuredObjectPayload({"a": 1}, {"x": array, "t": tensor, "b": b"abc"}))
    result = transfer.materialize(transfer.read_spec(ref))
    assert result.metadata["a"] == 1
    assert np.array_equal(result.objects["x"], array)
    assert torch.equal(result.objects["t"], tensor)
    assert result.objects["b"] == b"abc"
    spec = transfer.read_spec({"manifest_key": ref.manifest_key}).select_members(["x", "t"])
    spec = spec.slice_member("x", 0, 3, 9).slice_member("t", 0, 1, 12, 4)
    result = transfer.materialize(spec)
    assert np.array_equal(result.objects["x"], array[3:9])
    assert torch.equal(result.objects["t"], tensor[1:12:4])
    transfer.remove_bundle(ref)
    assert transfer.store.get(ref.manifest_key) == b""


def test_objects_of_any_shape_come_back(transfer: MooncakeBundleTransfer) -> None:
    for value in (np.array(3.5), np.zeros((0, 4)), np.arange(6).reshape(2, 3).T, b"", b"x" * 1000):
        found = transfer.get_object(transfer.put_object(value))
        assert np.array_equal(found, value) if isinstance(value, np.ndarray) else found == value
    for value in (torch.tensor(2.5), torch.empty(0, 3), torch.arange(500)):
        assert torch.equal(transfer.get_object(transfer.put_object({"t": value}))["t"], value)


def test_members_are_read_into_the_callers_memory(transfer: MooncakeBundleTransfer) -> None:
    array, tensor = np.arange(24, dtype=np.float32).reshape(6, 4), torch.arange(12).reshape(6, 2)
    ref = transfer.put_object({"x": array, "t": tensor})
    target = np.empty((2, 4), np.float32)
    spec = transfer.read_spec(ref).select_members(["x"]).slice_member("x", 0, 1, 3)
    assert transfer.materialize_into(spec, {"x": target}).objects["x"] is target
    assert np.array_equal(target, array[1:3])
    memory = np.zeros(1024, np.uint8)
    place = tensor_object_buffer(memory.ctypes.data, 1024, memory)
    found = transfer.materialize_into(transfer.read_spec(ref).select_members(["t"]), {"t": place}).objects["t"]
    assert torch.equal(found, tensor)
    assert found.data_ptr() == memory.ctypes.data + 304
    again = transfer.put_object({"t": tensor_object_buffer(memory.ctypes.data, 304 + tensor.nbytes, memory)})
    assert torch.equal(transfer.get_object(again)["t"], tensor)
    raw = raw_destination(memory.ctypes.data, 1024, memory)
    found = transfer.materialize_into(transfer.read_spec(ref).select_members(["x"]), {"x": raw}).objects["x"]
    assert np.array_equal(found, array)


def test_wrong_reads_are_refused(transfer: MooncakeBundleTransfer) -> None:
    ref = transfer.put_object({"x": np.arange(6).reshape(3, 2), "b": b"abc", "t": torch.arange(4)})
    spec = transfer.read_spec(ref)
    for wrong, reason in [
        (spec.slice_member("x", 1, 0, 1), "axis=0"),
        (spec.slice_member("x", 0, 0, 1, 0), "positive"),
        (spec.slice_member("b", 0, 0, 1), "slicing"),
        (spec.select_members([]), "no members"),
    ]:
        with pytest.raises(ValueError, match=reason):
            transfer.materialize(wrong)
    with pytest.raises(KeyError):
        transfer.materialize(spec.select_members(["y"]))
    frozen = np.empty((3, 2), np.int64)
    frozen.flags.writeable = False
    for target in (np.empty((2, 2), np.int64), np.empty((3, 2), np.int32), frozen, [1], raw_destination(16, 1000)):
        with pytest.raises(ValueError):
            transfer.materialize_into(spec.select_members(["x"]), {"x": target})
    with pytest.raises(ValueError):
        transfer.materialize_into(spec.select_members(["t"]), {"t": np.empty(4)})
    with pytest.raises(ValueError):
        transfer.materialize_into(spec.select_members(["b"]), {"b": bytearray(3)})


@pytest.mark.parametrize("value", [object(), np.array([object()]), "text", torch.zeros(2, dtype=torch.complex64)])
def test_other_values_are_no_members(transfer: MooncakeBundleTransfer, value: Any) -> None:
    with pytest.raises(TypeError):
        transfer.put_object({"x": value})


def test_wrong_metadata_names_and_settings_are_refused() -> None:
    transfer = MooncakeBundleTransfer(FakeStore(), "test")
    for metadata in (["x"], {"x": object()}):
        with pytest.raises(TypeError):
            transfer.put_structured_object(StructuredObjectPayload(metadata, {}))  # type: ignore[arg-type]
    for call in (
        lambda: transfer.put_bundle(b"", {"a/b": b"x"}),
        lambda: transfer.put_bundle(b"", {"a": b"x"}, partition="a/b"),
        lambda: transfer.put_bundle(b"", {"a": b"x"}, chunk_bytes=0),
        lambda: transfer.put_bundle(b"", {"a": b"x"}, max_inflight_put=0),
        lambda: transfer.put_bundle(b"", {"a": b"x"}, policy=BundleTransferPolicy(put_mode="x")),  # type: ignore[arg-type]
        lambda: transfer.put_structured_object(StructuredObjectPayload({"__mooncake_structured_fields__": 1}, {})),
        lambda: MooncakeBundleTransfer(FakeStore(), ""),
        lambda: MooncakeBundleTransfer(FakeStore(), "a", default_chunk_bytes=-1),
    ):
        with pytest.raises(ValueError):
            call()
    with pytest.raises(RuntimeError, match="zero-copy"):
        transfer.put_bundle(b"m", {"a": b"x"}, policy=BundleTransferPolicy(copy_mode="zero_copy"))


def test_a_put_that_fails_leaves_nothing() -> None:
    store = FakeStore()
    store.num_puts_left = 3
    transfer = MooncakeBundleTransfer(store, "test", default_chunk_bytes=10)
    with pytest.raises(RuntimeError, match="-200"):
        transfer.put_object({"x": bytes(100)})
    assert store.objects == {}


def test_a_manifest_that_names_other_keys_is_refused() -> None:
    store = FakeStore()
    transfer = MooncakeBundleTransfer(store, "test", default_chunk_bytes=2)
    ref = transfer.put_bundle(b"meta", {"x": b"abcdef"})
    for change in (
        {"buffers": {"x": {**ref.manifest["buffers"]["x"], "chunks": [{"key": "other", "bytes": 6}]}}},
        {"buffers": {"x": {**ref.manifest["buffers"]["x"], "bytes": 7}}},
        {"cleanup_keys": ["other"]},
        {"version": 2},
        {"object_id": "default/other"},
    ):
        wrong = {**ref.manifest, **change}
        with pytest.raises(ValueError):
            transfer.remove_bundle(RemoteBundleRef(ref.manifest_key, wrong))
    store.objects[ref.manifest_key] = b"[]"
    with pytest.raises(ValueError):
        transfer.remove_bundle({"manifest_key": ref.manifest_key})
    with pytest.raises(ValueError):
        transfer.remove_bundle({})


def test_zero_copy_puts_read_registered_memory(store: MooncakeDistributedStore) -> None:
    transfer = MooncakeBundleTransfer(store, "test", default_chunk_bytes=1000)
    array = np.arange(4000, dtype=np.int32)
    ref = transfer.put_object({"x": array}, policy=BundleTransferPolicy(copy_mode="zero_copy"))
    assert np.array_equal(transfer.get_object(ref)["x"], array)
    assert store.register_buffer(array.ctypes.data, array.nbytes) == 0  # nothing of it is registered any more


# batches


def sample_batch() -> dict[str, Any]:
    return {
        "ids": np.arange(12).reshape(4, 3),
        "probs": torch.arange(4.0),
        "text": ["a", "bb", None, "dddd"],
        "tools": [{"name": "x", "args": [1, 2]}, {}, None, {"name": "y"}],
        "tags": ["one", "two"],
        "step": 7,
    }


def test_a_flat_dict_comes_back(transfer: MooncakeBundleTransfer) -> None:
    data = sample_batch()
    ref = transfer.put(data, type="dict", config=ReplicateConfig())
    found = transfer.get(import_dataproto_ref(json.loads(json.dumps(export_dataproto_ref(ref)))), type="dict")
    assert np.array_equal(found["ids"], data["ids"])
    assert torch.equal(found["probs"], data["probs"])
    for name in ("text", "tools", "tags", "step"):
        assert found[name] == data[name]
    transfer.cleanup_dataproto(ref)
    assert transfer.store.get(ref.stage_refs["default"].manifest_key) == b""


@pytest.mark.parametrize("rows", [slice(1, 3), slice(0, 4, 2), [3, 0, 3], [], [-1], slice(4, 9)])
def test_rows_are_selected(transfer: MooncakeBundleTransfer, rows: Any) -> None:
    data = sample_batch()
    ref = transfer.put(data, type="dict")
    found = transfer.get(ref, type="dict", rows=rows, fields=["ids", "probs", "text"])
    assert np.array_equal(found["ids"], data["ids"][rows])
    assert torch.equal(found["probs"], data["probs"][rows])
    text = np.array(data["text"], dtype=object)
    assert found["text"] == text[rows].tolist()


@pytest.mark.parametrize(
    ("rows", "error"), [([4], IndexError), ([1.5], TypeError), ("ab", TypeError), (slice(3, 0, -1), ValueError)]
)
def test_wrong_rows_are_refused(transfer: MooncakeBundleTransfer, rows: Any, error: type[Exception]) -> None:
    ref = transfer.put(sample_batch(), type="dict")
    with pytest.raises(error):
        transfer.get(ref, rows=rows)


def test_stages_add_fields(transfer: MooncakeBundleTransfer) -> None:
    ref = transfer.put({"batch": {"ids": np.arange(4)}, "meta_info": {"a": 1}}, stage="rollout")
    more = transfer.append_dataproto_fields(ref, {"batch": {"reward": np.ones(4)}}, stage="reward")
    same = transfer.append_dataproto_fields(
        more, {"batch": {"extra": np.zeros(4)}, "meta_info": {"b": 2}}, stage="reward"
    )
    found = transfer.get(same)
    assert set(found["batch"]) == {"ids", "reward", "extra"}
    assert found["meta_info"] == {"a": 1, "b": 2}
    assert set(transfer.get(ref)["batch"]) == {"ids"}
    view = transfer.dataproto_manifest_view(same)
    assert view["batch_fields"]["extra"]["stage"] == "reward"
    assert view["batch_fields"]["ids"]["spec"]["shape"] == [4]
    for wrong in ({"batch": {"ids": np.arange(4)}}, {"batch": {"x": np.arange(3)}}):
        with pytest.raises(ValueError):
            transfer.append_dataproto_fields(same, wrong, stage="late")
    with pytest.raises(ValueError, match="include existing"):
        transfer.append_dataproto_fields(same, {"batch": {"reward": np.ones(4)}}, stage="reward", overwrite=True)
    late = transfer.append_dataproto_fields(ref, {"batch": {"ids": np.ones(4)}}, stage="rollout", overwrite=True)
    assert transfer.get(late)["batch"]["ids"].tolist() == [1.0] * 4
    transfer.cleanup_dataproto(same if late is same else transfer.append_dataproto_fields(late, {}, stage="x"))


def test_schemas_place_and_type_fields(transfer: MooncakeBundleTransfer) -> None:
    schemas = {
        "tokens": FieldSchema("typed_ragged", metadata={"section": "non_tensor_batch", "dtype": "int32"}),
        "sizes": FieldSchema("auto", metadata={"section": "meta_info"}),
    }
    ref = transfer.put({"tokens": [[1, 2], [3]], "sizes": [1, 2]}, type="dict", field_schemas=schemas)
    found = transfer.get(ref, type="dict")
    assert found["tokens"] == [[1, 2], [3]]
    view = transfer.dataproto_manifest_view(ref)["non_tensor_fields"]["tokens"]["spec"]
    assert (view["codec"], view["payload_specs"]["data"]) == (
        "typed_ragged",
        {"encoding": "ndarray", "dtype": np.dtype(np.int32).str, "shape": [3]},
    )
    assert found["sizes"] == [1, 2]
    strict = {"t": FieldSchema("auto", nullable=False, metadata={"section": "non_tensor_batch"})}
    with pytest.raises(ValueError, match="None"):
        transfer.put({"t": ["a", None]}, type="dict", field_schemas=strict)
    with pytest.raises(ValueError, match="section"):
        transfer.put({"t": ["a"]}, type="dict", field_schemas={"t": FieldSchema("auto", metadata={"section": "x"})})


def test_a_batch_is_one_group() -> None:
    store = FakeStore()
    transfer = MooncakeBundleTransfer(store, "test")
    config = ReplicateConfig(replica_num=2)
    ref = transfer.put(sample_batch(), type="dict", config=config)
    assert {tuple(each.group_ids) for each in store.configs} == {(ref.group,)}
    assert {each.replica_num for each in store.configs} == {2}
    assert config.group_ids is None
    with pytest.raises(ValueError, match="conflicts"):
        transfer.append_dataproto_fields(ref, {"x": np.arange(4)}, stage="s", config=ReplicateConfig(group_ids=["g"]))
    with pytest.raises(ValueError, match="one group"):
        transfer.put(sample_batch(), type="dict", config=ReplicateConfig(group_ids=["a", "b"]))


def test_wrong_batches_and_handles_are_refused() -> None:
    transfer = MooncakeBundleTransfer(FakeStore(), "test")
    ref = transfer.put({"x": np.arange(4)}, type="dict")
    handle = export_dataproto_ref(ref)
    for change in ({"version": 9}, {"kind": "x"}, {"stage_refs": 3}, {"storage_group_id": ""}, {"global_indexes": "0"}):
        with pytest.raises(ValueError):
            import_dataproto_ref({**handle, **change})
    with pytest.raises(TypeError):
        transfer.get({"type": "other"})
    with pytest.raises(ValueError, match="type"):
        transfer.put({}, type="x")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="overlap"):
        transfer.put({"batch": {"x": np.arange(2)}, "non_tensor_batch": {"x": ["a", "b"]}})
    with pytest.raises(ValueError, match="inconsistent"):
        transfer.put({"x": np.arange(2), "y": np.arange(3)})
    with pytest.raises(ValueError, match="ambiguous"):
        transfer.put({"x": np.arange(2), "y": np.arange(3)}, type="dict")
    with pytest.raises(KeyError, match="unknown"):
        transfer.get(ref, fields=["y"])
    with pytest.raises(ValueError, match="combined"):
        transfer.get(ref, fields=["x"], batch_fields=["x"])
    clash = transfer.put({"batch": {"x": np.arange(2)}, "meta_info": {"x": 1}})
    with pytest.raises(ValueError, match="Duplicate"):
        transfer.get(clash, type="dict")
