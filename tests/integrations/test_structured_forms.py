"""Structured objects as they lie in the store: upstream's keys, manifests and codecs, and what they refuse."""

from __future__ import annotations

import io
import json
from typing import Any

import numpy as np
import pytest
from bundle_stores import DictStore, column

from moonpool.integrations.mooncake.batch_refs import FieldSchema
from moonpool.integrations.mooncake.column_codecs import decode_msgpack, encode_msgpack
from moonpool.integrations.mooncake.column_encoding import decode_column, encode_column
from moonpool.integrations.mooncake.ragged_codecs import encode_regular_arrays
from moonpool.integrations.mooncake.structured_objects import StructuredObjectPayload
from moonpool.integrations.mooncake.structured_store import MooncakeBundleTransfer

torch = pytest.importorskip("torch")


# keys, manifests, codecs


def test_a_bundle_has_upstreams_keys_and_manifest() -> None:
    store = DictStore()
    transfer = MooncakeBundleTransfer(store, "p")
    payload = StructuredObjectPayload({"a": 1}, {"x": np.arange(3, dtype="<i2"), "b": b"abcdefgh", "e": b""})
    ref = transfer.put_structured_object(payload, partition="q", chunk_bytes=200)
    base = f"p/{ref.manifest['object_id']}"
    assert set(store.objects) == {f"{base}/{name}" for name in ("manifest", "meta", "buffer/x", "buffer/b")}
    assert json.loads(store.objects[f"{base}/manifest"]) == ref.manifest
    assert json.loads(store.objects[f"{base}/meta"]) == {
        "layout": "structured",
        "a": 1,
        "__mooncake_structured_fields__": {
            "x": {"encoding": "ndarray", "dtype": "<i2", "shape": [3]},
            "b": {"encoding": "bytes"},
            "e": {"encoding": "bytes"},
        },
    }
    assert ref.manifest["buffers"]["e"] == {"key": f"{base}/buffer/e", "bytes": 0, "chunks": []}
    assert store.objects[f"{base}/buffer/x"] == np.arange(3, dtype="<i2").tobytes()
    chunked = transfer.put_bundle(b"m", {"x": b"abcde"}, chunk_bytes=2)
    keys = [chunk["key"] for chunk in chunked.manifest["buffers"]["x"]["chunks"]]
    assert keys == [f"p/{chunked.manifest['object_id']}/buffer/x/chunk/{number}" for number in range(3)]
    assert [store.objects[key] for key in keys] == [b"ab", b"cd", b"e"]


def test_a_batch_that_was_written_by_hand_is_read() -> None:
    """The form that upstream's module writes, from its keys on."""
    store = DictStore()
    saved = io.BytesIO()
    torch.save(torch.arange(3), saved)
    members = {
        "batch.t": saved.getvalue(),
        "non_tensor_batch.w.data": "aüz".encode(),
        "non_tensor_batch.w.offsets": np.array([0, 1, 3, 4], "<i8").tobytes(),
        "non_tensor_batch.w.nulls": bytes(3),
        "non_tensor_batch.m.data": np.array([1, 2, 3], "<i4").tobytes(),
        "non_tensor_batch.m.offsets": np.array([0, 2, 3, 3], "<i8").tobytes(),
        "non_tensor_batch.m.shapes": np.array([[2], [1], [0]], "<i8").tobytes(),
        "non_tensor_batch.m.ndims": np.array([1, 1, 0], "<i2").tobytes(),
        "non_tensor_batch.m.nulls": bytes([0, 0, 1]),
    }
    kinds = {"data": ("<i4", [3]), "offsets": ("<i8", [4]), "shapes": ("<i8", [3, 1]), "ndims": ("<i2", [3])}
    specs: dict[str, Any] = {"batch.t": {"encoding": "torch_tensor", "dtype": "torch.int64", "shape": [3]}}
    for name in members:
        part = name.rpartition(".")[2]
        dtype, shape = kinds.get(part, ("|b1", [3]))
        if name not in ("batch.t", "non_tensor_batch.w.data"):
            specs[name] = {"encoding": "ndarray", "dtype": dtype, "shape": shape}
    meta = json.dumps({"layout": "dataproto_stage", "__mooncake_structured_fields__": specs}).encode()
    values = {"meta": meta, **{f"buffer/{name}": value for name, value in members.items()}}
    described = {}
    for name, value in values.items():
        key = f"p/q/id/{name}"
        store.objects[key] = value
        described[name] = {"key": key, "bytes": len(value), "chunks": [{"key": key, "bytes": len(value)}]}
    described["buffer/batch.t"]["format"] = "torch_save"
    buffers = {name: described[f"buffer/{name}"] for name in members}
    manifest = {"version": 1, "layout": "bundle", "object_id": "q/id", "meta": described["meta"], "buffers": buffers}
    store.objects["p/q/id/manifest"] = json.dumps(manifest).encode()
    details = {"dtype": "int32", "max_ndim": 1, "row_format": "mixed", "ndarray_rows": [True, False, False]}
    parts = {"w": ("data", "offsets", "nulls"), "m": ("data", "offsets", "shapes", "ndims", "nulls")}
    handle = {
        "type": "mooncake_dataproto_ref",
        "version": 1,
        "kind": "bundle_stages",
        "batch_size": 3,
        "stage_refs": {"s": {"manifest_key": "p/q/id/manifest"}},
        "field_index": {
            "t": {"stage": "s", "member": "batch.t", "section": "batch"},
            "w": {"stage": "s", "member": "non_tensor_batch.w", "section": "non_tensor_batch"},
            "m": {"stage": "s", "member": "non_tensor_batch.m", "section": "non_tensor_batch"},
        },
        "encoded_non_tensor": {
            name: {
                "codec": "utf8_ragged" if name == "w" else "typed_ragged",
                "rows": 3,
                "metadata": {} if name == "w" else details,
                "payload_members": {part: f"non_tensor_batch.{name}.{part}" for part in own},
            }
            for name, own in parts.items()
        },
    }
    transfer = MooncakeBundleTransfer(store, "p")
    found = transfer.get(handle, type="dict")
    assert torch.equal(found["t"], torch.arange(3))
    assert found["w"] == ["a", "ü", "z"]
    assert isinstance(found["m"][0], np.ndarray)
    assert (found["m"][0].tolist(), found["m"][1:]) == ([1, 2], [[3], None])
    some = transfer.get(handle, type="dict", rows=[2, 1])
    assert (some["w"], some["m"], some["t"].tolist()) == (["z", "ü"], [None, [3]], [2, 1])
    transfer.cleanup_dataproto(handle)
    assert store.objects == {}


@pytest.mark.parametrize(
    ("codec", "rows", "parts"),
    [
        ("ndarray", [1, None, 3], {"data": [1, 0, 3], "nulls": [False, True, False]}),
        ("utf8_ragged", ["a", None, "ü"], {"data": "aü".encode(), "offsets": [0, 1, 1, 3]}),
        ("bytes_ragged", [b"ab", b"", None], {"data": b"ab", "offsets": [0, 2, 2, 2]}),
        ("json_ragged", [None, None], {"data": b"", "offsets": [0, 0, 0]}),
        ("typed_ragged", [[1, 2], [], None], {"offsets": [0, 2, 2, 2], "shapes": [[2], [0], [0]], "ndims": [1, 1, 0]}),
        ("media_list_ragged", [[b"a", b"bc"], None], {"row_offsets": [0, 2, 2], "byte_offsets": [0, 1, 3]}),
        ("msgpack_ragged", [1, 2.5, "x"], {}),
        ("msgpack_ragged", [[1, 2.5], [3]], {}),
        ("msgpack_ragged", [-1, 2**64 - 1], {}),
    ],
)
def test_the_codec_follows_from_the_values(codec: str, rows: list[Any], parts: dict[str, Any]) -> None:
    encoded = encode_column("c", rows)
    assert (encoded.codec, encoded.rows) == (codec, len(rows))
    stored = {name: stored_form(each) for name, each in encoded.payload.items()}
    for name, expected in parts.items():
        assert (stored[name] if isinstance(expected, bytes) else stored[name].tolist()) == expected
    found = decode_column(json.loads(json.dumps(encoded.described({}))), stored)
    assert repr(found) == repr(rows)


def stored_form(buffer: Any) -> Any:
    if isinstance(buffer, np.ndarray):
        return buffer
    data = b"".join(buffer.buffers)
    return data if buffer.dtype is None else np.frombuffer(data, buffer.dtype)


def test_arrays_of_one_shape_and_msgpack_alone() -> None:
    rows = [np.ones((2, 3), np.int32), np.zeros((2, 3), np.int32)]
    regular = encode_regular_arrays(rows, np.int32)
    assert regular is not None
    assert regular[0]["data"].shape == (12,)
    for others in (rows[:1], [rows[0], None], [rows[0], rows[1].T], [rows[0], rows[1].astype(np.int64)]):
        assert encode_regular_arrays(others, np.int32) is None
    parts, _ = encode_msgpack("c", [{"a": 1}, None])
    assert decode_msgpack({**parts, "data": stored_form(parts["data"])}, 2) == [{"a": 1}, None]
    for wrong in (1, 3):
        with pytest.raises(ValueError, match="offsets length"):
            decode_msgpack({**parts, "data": b""}, wrong)
    with pytest.raises(ValueError, match="field c"):
        encode_msgpack("c", [object()])


SCHEMAS: list[tuple[str, dict[str, Any], list[Any]]] = [
    ("typed_ragged", {"dtype": "int16"}, [[1, 2], None, [3]]),
    ("ndarray", {"dtype": "float32"}, [1.0, None, 0.5]),
    ("ndarray", {}, [1, 2, 3]),
    ("bytes_ragged", {}, [b"a", None, b""]),
    ("media_bytes", {}, [b"a", None, b""]),
    ("media_list_ragged", {}, [[b"a"], None, []]),
    ("utf8_ragged", {}, ["a", None, "b"]),
    ("msgpack_ragged", {}, [{"a": [1]}, None, 3]),
    ("json_ragged", {}, [{"a": [1]}, None, "x"]),
    ("auto", {}, ["a", None, "b"]),
]


@pytest.mark.parametrize(("codec", "metadata", "rows"), SCHEMAS)
def test_a_schema_names_the_codec(codec: str, metadata: dict[str, Any], rows: list[Any]) -> None:
    transfer = MooncakeBundleTransfer(DictStore(), "p")
    schemas = {"f": FieldSchema(codec, metadata={"section": "non_tensor_batch", **metadata})}
    ref = transfer.put({"f": rows}, type="dict", field_schemas=schemas)
    assert transfer.get(ref, type="dict")["f"] == rows
    assert transfer.get(ref, type="dict", rows=[2, 0])["f"] == [rows[2], rows[0]]
    if codec not in ("auto", "ndarray"):
        assert ref.encoded_non_tensor["f"]["codec"] == codec


def test_dicts_of_tensors_by_schema() -> None:
    transfer = MooncakeBundleTransfer(DictStore(), "p")
    rows = [{"a": torch.ones(2, 2)}, None, {}, {"a": torch.zeros(3), "b": torch.arange(2)}]
    ref = transfer.put_dataproto(
        {"non_tensor_batch": {"f": rows}}, field_schemas={"f": FieldSchema("ragged_tensor_dict")}
    )
    found = transfer.get_dataproto(ref, rows=[3, 2, 1, 0])["non_tensor_batch"]["f"]
    assert torch.equal(found[0]["a"], torch.zeros(3))
    assert torch.equal(found[0]["b"], torch.arange(2))
    assert (found[1], found[2]) == ({}, None)
    assert torch.equal(found[3]["a"], torch.ones(2, 2))


@pytest.mark.parametrize(
    ("rows", "schema", "error", "text"),
    [
        ([object()], FieldSchema("utf8_ragged"), AttributeError, "'f'.*utf8_ragged"),
        ([{"a.b": 1}], FieldSchema("ragged_tensor_dict"), ValueError, "must not contain"),
        ([{"": 1}], FieldSchema("ragged_tensor_dict"), ValueError, "must not be empty"),
        ([{1: 1}], FieldSchema("ragged_tensor_dict"), TypeError, "text"),
        ([{"a": None}], FieldSchema("ragged_tensor_dict"), TypeError, "explicit None"),
        ([[1]], FieldSchema("ragged_tensor_dict"), TypeError, "dicts"),
        ([{"a": "x"}], FieldSchema("ragged_tensor_dict"), ValueError, "'a'"),
        ([{"a": 1}], FieldSchema("ragged_tensor_dict", metadata={"keys": ["b"]}), ValueError, "not declared"),
        ([{}], FieldSchema("ragged_tensor_dict", metadata={"keys": ["b", "b"]}), ValueError, "twice"),
        ([None], FieldSchema("auto", nullable=False), ValueError, "not nullable"),
        ([1], FieldSchema("nothing"), ValueError, "unsupported schema codec"),
        ([1], FieldSchema("ndarray", metadata={"dtype": "nothing"}), ValueError, "element type"),
        ([1], FieldSchema("ndarray", metadata={"dtype": "U1"}), ValueError, "element type"),
        ([1], FieldSchema("ndarray", metadata={"section": "batch"}), ValueError, "declares section"),
        ([object()], FieldSchema("auto"), ValueError, "unable to infer a safe codec"),
        ([torch.ones(1), torch.ones(1).int()], None, ValueError, "mixed tensor dtype"),
        ([torch.ones(1, dtype=torch.bfloat16)], None, ValueError, "bfloat16"),
    ],
)
def test_what_a_schema_or_codec_refuses(
    rows: list[Any], schema: FieldSchema | None, error: type[Exception], text: str
) -> None:
    store = DictStore()
    transfer = MooncakeBundleTransfer(store, "p")
    with pytest.raises(error, match=text):
        transfer.put_dataproto({"non_tensor_batch": {"f": column(*rows)}}, field_schemas=schema and {"f": schema})
    assert store.objects == {}


def test_images_come_back() -> None:
    pil = pytest.importorskip("PIL.Image")
    plain, palette = pil.new("RGB", (3, 2), (1, 2, 3)), pil.new("RGB", (2, 2), (9, 9, 9)).convert("P")
    transfer = MooncakeBundleTransfer(DictStore(), "p")
    rows = {"one": column(plain, None, palette), "many": column([plain, palette], [], None)}
    found = transfer.get(transfer.put_dataproto({"non_tensor_batch": rows}))["non_tensor_batch"]
    assert found["one"][0].tobytes() == plain.tobytes()
    assert found["one"][2].convert("RGB").tobytes() == palette.convert("RGB").tobytes()
    assert (found["one"][1], found["many"][1], found["many"][2]) == (None, [], None)
    assert [each.size for each in found["many"][0]] == [(3, 2), (2, 2)]
