"""Columns of Python values as buffers, and back: one value per row, of any shape that column_structure.py knows.

Each leaf of a column becomes a few buffers: the values one after the other (`data`), where each row ends (`offsets`),
and which rows have no value (`states`: 0 a value, 1 None, 2 missing). What else is needed to decode is in JSON.
"""

from __future__ import annotations

import importlib
import io
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import msgspec
import numpy as np

from moonpool.integrations.mooncake.column_structure import (
    MISSING,
    ColumnNode,
    Leaf,
    Missing,
    infer_structure,
    is_image,
    rebuild_rows,
)
from moonpool.integrations.mooncake.tensor_memory import in_main_memory, tensor_bytes, torch_module

Buffers = dict[str, Any]  # by name
_VALUE, _NONE, _MISSING = 0, 1, 2


def encode_column(name: str, values: Sequence[Any]) -> tuple[dict[str, Any], Buffers]:
    """Return what decode_column() needs, JSON and buffers. TypeError when a value cannot be stored."""
    leaves: list[Leaf] = []
    nodes: list[ColumnNode] = []
    infer_structure(name, values, leaves, nodes)
    buffers: Buffers = {}
    described = []
    for number, leaf in enumerate(leaves):
        codec, details, parts = _encode_leaf(leaf)
        described.append({"path": leaf.path, "codec": codec, "details": details, "parts": sorted(parts)})
        buffers.update({f"{number}.{part}": value for part, value in parts.items()})
    return {"rows": len(values), "leaves": described, "nodes": [asdict(node) for node in nodes]}, buffers


def decode_column(name: str, described: Mapping[str, Any], read: Callable[[str], memoryview]) -> list[Any]:
    """Return the rows. `read` returns a buffer by its name."""
    columns = {}
    for number, leaf in enumerate(described["leaves"]):
        parts = {part: read(f"{number}.{part}") for part in leaf["parts"]}
        columns[leaf["path"]] = _decode_leaf(leaf["codec"], leaf["details"], parts)
    nodes = {each["path"]: ColumnNode(**each) for each in described["nodes"]}
    return rebuild_rows(name, described["rows"], columns, nodes)


def _encode_leaf(leaf: Leaf) -> tuple[str, dict[str, Any], Buffers]:
    states = np.array([_state(value) for value in leaf.values], np.uint8)
    present = [value for value in leaf.values if _state(value) == _VALUE]
    codec = leaf.decision.codec if leaf.decision.accepted else "msgpack_ragged"
    try:
        details, parts = _ENCODERS[codec](present)
    except (TypeError, ValueError, OverflowError) as error:
        if codec == "msgpack_ragged":
            raise TypeError(f"unsupported values in {leaf.path}: {error}") from error
        codec = "msgpack_ragged"
        details, parts = _ENCODERS[codec](present)
    return codec, details, {"states": states, **parts}


def _decode_leaf(codec: str, details: Mapping[str, Any], parts: Mapping[str, memoryview]) -> list[Any]:
    present = iter(_DECODERS[codec](details, parts))
    states = np.frombuffer(parts["states"], np.uint8).tolist() if parts["states"].nbytes else []
    return [next(present) if state == _VALUE else (None if state == _NONE else MISSING) for state in states]


def _state(value: Any) -> int:
    return _MISSING if isinstance(value, Missing) else (_NONE if value is None else _VALUE)


# numbers, and arrays of numbers


def _encode_numbers(values: Sequence[Any]) -> tuple[dict[str, Any], Buffers]:
    array = np.array(values)
    if array.dtype.kind not in "biufc" or array.tolist() != list(values):
        raise TypeError("numbers that an array does not hold exactly")
    kinds = "".join(
        "b" if isinstance(each, bool | np.bool_) else "i" if isinstance(each, int) else "f" for each in values
    )
    return {"dtype": array.dtype.str, "kinds": _short(kinds)}, {"data": array}


def _decode_numbers(details: Mapping[str, Any], parts: Mapping[str, memoryview]) -> list[Any]:
    values = _array(parts["data"], details["dtype"]).tolist()
    types: dict[str, type] = {"b": bool, "i": int, "f": float}
    return [types[kind](value) for kind, value in zip(_long(details["kinds"], len(values)), values, strict=True)]


def _encode_arrays(values: Sequence[Any]) -> tuple[dict[str, Any], Buffers]:
    arrays = [np.asarray(value) for value in values]
    dtype = np.result_type(*[array.dtype for array in arrays]) if arrays else np.dtype(np.int64)
    if dtype.kind not in "biufc":
        raise TypeError("rows that are no arrays of numbers")
    if any(not isinstance(value, np.ndarray) and np.asarray(value, dtype).tolist() != list(value) for value in values):
        raise TypeError("rows that an array does not hold exactly")
    flat = [array.astype(dtype, copy=False).reshape(-1) for array in arrays]
    kinds = "".join(
        "a" if isinstance(value, np.ndarray) else "t" if isinstance(value, tuple) else "l" for value in values
    )
    data = np.concatenate(flat) if flat else np.zeros(0, dtype)
    return {"dtype": dtype.str, "kinds": _short(kinds)}, {"data": data, **_shapes(arrays)}


def _decode_arrays(details: Mapping[str, Any], parts: Mapping[str, memoryview]) -> list[Any]:
    flat = _array(parts["data"], details["dtype"])
    rows: list[Any] = []
    at = 0
    shapes = _read_shapes(parts)
    for shape, kind in zip(shapes, _long(details["kinds"], len(shapes)), strict=True):
        size = math.prod(shape)
        row = flat[at : at + size].reshape(shape)
        rows.append(row if kind == "a" else tuple(row.tolist()) if kind == "t" else row.tolist())
        at += size
    return rows


def _encode_tensors(values: Sequence[Any]) -> tuple[dict[str, Any], Buffers]:
    parts = [bytes(tensor_bytes(in_main_memory(value))) for value in values]
    return {"dtype": str(values[0].dtype).removeprefix("torch.")}, {"data": b"".join(parts), **_shapes(values)}


def _decode_tensors(details: Mapping[str, Any], parts: Mapping[str, memoryview]) -> list[Any]:
    torch = torch_module()
    dtype = getattr(torch, details["dtype"])
    data = np.frombuffer(bytearray(parts["data"]), np.uint8) if parts["data"].nbytes else np.zeros(0, np.uint8)
    rows, at = [], 0
    for shape in _read_shapes(parts):
        size = math.prod(shape) * dtype.itemsize
        row = torch.from_numpy(data[at : at + size]) if size else torch.empty(0, dtype=torch.uint8)
        rows.append(row.view(dtype).reshape(shape))
        at += size
    return rows


def _shapes(rows: Sequence[Any]) -> Buffers:
    shapes = [tuple(row.shape) for row in rows]
    return {
        "ndims": np.array([len(shape) for shape in shapes], "<i8"),
        "shapes": np.array([size for shape in shapes for size in shape], "<i8"),
    }


def _read_shapes(parts: Mapping[str, memoryview]) -> list[tuple[int, ...]]:
    sizes = iter(_array(parts["shapes"], "<i8").tolist())
    return [tuple(next(sizes) for _ in range(ndim)) for ndim in _array(parts["ndims"], "<i8").tolist()]


def _short(kinds: str) -> str:
    """One letter per row, or one letter when all rows have the same."""
    return kinds if len(set(kinds)) > 1 else kinds[:1]


def _long(kinds: str, num_rows: int) -> str:
    return kinds * num_rows if len(kinds) == 1 else kinds


# rows of bytes


def _ragged(rows: Sequence[bytes | bytearray | memoryview]) -> Buffers:
    return {"data": b"".join(rows), "offsets": np.cumsum([0, *[len(row) for row in rows]], dtype="<i8")}


def _rows(parts: Mapping[str, memoryview]) -> list[bytes]:
    ends = _array(parts["offsets"], "<i8").tolist()
    data = parts["data"]
    return [bytes(data[start:end]) for start, end in itertools.pairwise(ends)]


def _encode_bytes(values: Sequence[Any]) -> tuple[dict[str, Any], Buffers]:
    return {}, _ragged([bytes(value) for value in values])


def _encode_text(values: Sequence[str]) -> tuple[dict[str, Any], Buffers]:
    return {}, _ragged([value.encode() for value in values])


def _encode_msgpack(values: Sequence[Any]) -> tuple[dict[str, Any], Buffers]:
    return {}, _ragged([msgspec.msgpack.encode(value, enc_hook=_plain) for value in values])


def _encode_media(values: Sequence[Any]) -> tuple[dict[str, Any], Buffers]:
    """Images become PNG files; each item says whether it was one."""
    rows = [value if isinstance(value, list | tuple) else [value] for value in values]
    return {}, _ragged([msgspec.msgpack.encode([[is_image(item), _file_of(item)] for item in row]) for row in rows])


def _decode_media_lists(details: Mapping[str, Any], parts: Mapping[str, memoryview]) -> list[Any]:
    rows = [msgspec.msgpack.decode(row) for row in _rows(parts)]
    return [[_open_image(data) if was_image else data for was_image, data in row] for row in rows]


def _file_of(item: Any) -> bytes:
    if not is_image(item):
        return bytes(item)
    file = io.BytesIO()
    item.save(file, format="PNG")
    return file.getvalue()


def _open_image(data: bytes) -> Any:
    return importlib.import_module("PIL.Image").open(io.BytesIO(data))


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"objects of type {type(value).__name__} cannot be stored")


def _array(data: memoryview, dtype: str) -> np.ndarray[Any, Any]:
    return np.frombuffer(data, np.dtype(dtype)) if data.nbytes else np.zeros(0, np.dtype(dtype))


_Encoder = Callable[[Sequence[Any]], tuple[dict[str, Any], Buffers]]
_Decoder = Callable[[Mapping[str, Any], Mapping[str, memoryview]], list[Any]]
_ENCODERS: dict[str, _Encoder] = {
    "ndarray": _encode_numbers,
    "typed_ragged": _encode_arrays,
    "ragged_tensor": _encode_tensors,
    "bytes_ragged": _encode_bytes,
    "utf8_ragged": _encode_text,
    "msgpack_ragged": _encode_msgpack,
    "media_bytes": _encode_media,
    "media_list_ragged": _encode_media,
}
_DECODERS: dict[str, _Decoder] = {
    "ndarray": _decode_numbers,
    "typed_ragged": _decode_arrays,
    "ragged_tensor": _decode_tensors,
    "bytes_ragged": lambda details, parts: list(_rows(parts)),
    "utf8_ragged": lambda details, parts: [row.decode() for row in _rows(parts)],
    "msgpack_ragged": lambda details, parts: [msgspec.msgpack.decode(row) for row in _rows(parts)],
    "media_bytes": lambda details, parts: [row[0] for row in _decode_media_lists(details, parts)],
    "media_list_ragged": _decode_media_lists,
}
