"""Columns of arrays and tensors, a row each, as few buffers, in upstream's form.

    data      the elements of all rows, one after the other
    offsets   where each row begins and the last one ends, in elements
    shapes    the shape of each row, filled up with 0; ndims says how many of the numbers count
    nulls     which rows are None

`encode_arrays` is the codec typed_ragged, `encode_tensors` ragged_tensor, `encode_tensor_dicts` ragged_tensor_dict.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from moonpool.integrations.mooncake.bundle_payloads import GatheredPayload
from moonpool.integrations.mooncake.tensor_memory import in_main_memory, torch_module

Buffers = dict[str, Any]  # by name
Encoded = tuple[Buffers, dict[str, Any]]  # buffers, and JSON that decoding needs
RAGGED_PARTS = ("data", "offsets", "shapes", "ndims", "nulls")
_DEFAULT_TENSOR_TYPE = "torch.float32"


def encode_arrays(values: Sequence[Any], dtype_hint: Any = None) -> Encoded:
    """Rows are arrays, or lists that become arrays. ValueError when they have no type in common."""
    arrays = [None if value is None else np.asarray(value) for value in values]
    dtype = np.dtype(dtype_hint) if dtype_hint is not None else _common_dtype(values, arrays)
    if dtype.hasobject:
        raise ValueError("rows of typed_ragged are numbers, not Python objects")
    rows = [None if array is None else np.asarray(array, dtype, order="C") for array in arrays]
    max_ndim = max((row.ndim for row in rows if row is not None), default=0)
    shapes = np.zeros((len(rows), max(max_ndim, 1)), np.int64)
    ndims, sizes = np.zeros(len(rows), np.int16), np.zeros(len(rows) + 1, np.int64)
    for at, row in enumerate(rows):
        if row is not None:
            ndims[at], sizes[at + 1] = row.ndim, row.size
            shapes[at, : row.ndim] = row.shape
    flat = [row.reshape(-1) for row in rows if row is not None]
    buffers = {
        "data": GatheredPayload.from_flat_arrays(flat, dtype, int(sizes.sum())),
        "offsets": np.cumsum(sizes),
        "shapes": shapes,
        "ndims": ndims,
        "nulls": np.array([row is None for row in rows], np.bool_),
    }
    return buffers, {"dtype": str(dtype), "max_ndim": max_ndim, "shape_policy": "ragged", **_row_format(values)}


def decode_arrays(parts: Mapping[str, Any], num_rows: int, metadata: Mapping[str, Any] | None = None) -> list[Any]:
    """Return the rows. Those that were arrays share the memory of `data`."""
    known = metadata or {}
    data = as_array(parts["data"], np.dtype(known.get("dtype", "int64")))
    ends, ndims, shapes = parts["offsets"].tolist(), parts["ndims"].tolist(), parts["shapes"]
    check_rows("typed_ragged", parts["offsets"], parts["nulls"], num_rows)
    kind, kinds = known.get("row_format"), known.get("ndarray_rows")
    rows: list[Any] = []
    for at, is_null in enumerate(parts["nulls"].tolist()):
        if is_null:
            rows.append(None)
            continue
        row = data[ends[at] : ends[at + 1]].reshape(tuple(shapes[at, : ndims[at]].tolist()))
        is_array = kind == "ndarray" or (kind == "mixed" and kinds is not None and kinds[at])
        rows.append(row if is_array else row.tolist())
    return rows


def encode_regular_arrays(values: Sequence[Any], dtype: Any) -> Encoded | None:
    """encode_arrays() of two or more contiguous arrays of one shape and of this type; None for other rows."""
    first = values[0] if len(values) > 1 else None
    for value in values:
        same = isinstance(value, np.ndarray) and isinstance(first, np.ndarray) and value.shape == first.shape
        if not same or value.dtype != np.dtype(dtype) or not value.flags.c_contiguous:
            return None
    return encode_arrays(values, dtype) if first is not None else None


def encode_tensors(values: Sequence[Any]) -> Encoded:
    """Rows are tensors or arrays. ValueError for mixed types, and for bfloat16, which no array holds."""
    torch = torch_module()
    tensors = [None if value is None else _tensor_of(value) for value in values]
    dtypes = sorted({str(tensor.dtype) for tensor in tensors if tensor is not None})
    if len(dtypes) > 1:
        raise ValueError(f"mixed tensor dtypes: {', '.join(dtypes)}")
    dtype = dtypes[0] if dtypes else _DEFAULT_TENSOR_TYPE
    if dtype == str(torch.bfloat16):
        raise ValueError("rows of ragged_tensor cannot be torch.bfloat16, which numpy does not have")
    arrays = [None if tensor is None else in_main_memory(tensor).numpy() for tensor in tensors]
    buffers, metadata = encode_arrays(arrays, _numpy_type(dtype))
    return buffers, {**metadata, "dtype": dtype}


def decode_tensors(parts: Mapping[str, Any], num_rows: int, metadata: Mapping[str, Any] | None = None) -> list[Any]:
    known = dict(metadata or {})
    dtype = _numpy_type(known.get("dtype", _DEFAULT_TENSOR_TYPE))
    rows = decode_arrays(parts, num_rows, {**known, "dtype": dtype, "row_format": "ndarray"})
    return [None if row is None else _tensor_over(row) for row in rows]


def encode_tensor_dicts(values: Sequence[Any], declared: Any = None) -> Encoded:
    """Rows are dicts of tensors, with the keys `declared` if there are such. Each key becomes a ragged column."""
    keys = None if declared is None else _checked_keys(declared)
    found: set[str] = set()
    for at, value in enumerate(values):
        if value is None:
            continue
        if not isinstance(value, Mapping):
            raise TypeError(f"rows of ragged_tensor_dict are dicts or None, row {at} is {type(value).__name__}")
        empty = sorted(str(key) for key, each in value.items() if each is None)
        if empty:
            raise TypeError(f"row {at} of a ragged_tensor_dict has an explicit None for {empty}; leave the key out")
        found.update(_checked_keys(value))
        if keys is not None and not set(value) <= set(keys):
            raise ValueError(
                f"row {at} of a ragged_tensor_dict has keys not declared: {sorted(set(value) - set(keys))}"
            )
    keys = sorted(found) if keys is None else keys
    buffers: Buffers = {"null_mask": np.array([value is None for value in values], np.bool_)}
    details = {}
    for key in keys:
        try:
            parts, details[key] = encode_tensors([None if value is None else value.get(key) for value in values])
        except (TypeError, ValueError, AttributeError, RuntimeError) as error:
            raise ValueError(f"the key {key!r} of a ragged_tensor_dict cannot be stored: {error}") from error
        buffers.update({f"{key}.{part}": buffer for part, buffer in parts.items()})
    return buffers, {"keys": keys, "key_codecs": details}


def decode_tensor_dicts(parts: Mapping[str, Any], num_rows: int, metadata: Mapping[str, Any] | None) -> list[Any]:
    known = metadata or {}
    columns = {}
    for key in _checked_keys(known.get("keys", [])):
        missing = [part for part in RAGGED_PARTS if f"{key}.{part}" not in parts]
        if missing:
            raise ValueError(f"the key {key!r} of a ragged_tensor_dict lacks {missing}")
        own = {part: parts[f"{key}.{part}"] for part in RAGGED_PARTS}
        columns[key] = decode_tensors(own, num_rows, known.get("key_codecs", {}).get(key))
    nulls = parts["null_mask"].tolist()
    return [
        None if is_null else {key: column[at] for key, column in columns.items() if column[at] is not None}
        for at, is_null in enumerate(nulls)
    ]


def check_rows(codec: str, offsets: Any, nulls: Any, num_rows: int) -> None:
    """ValueError unless offsets and nulls are those of so many rows."""
    if len(offsets) != num_rows + 1:
        raise ValueError(f"{codec} has an offsets length of {len(offsets)} for {num_rows} rows")
    if len(nulls) != num_rows:
        raise ValueError(f"{codec} has a nulls length of {len(nulls)} for {num_rows} rows")


def as_array(data: Any, dtype: np.dtype[Any]) -> Any:
    """Return a buffer of any kind as a flat array."""
    if isinstance(data, np.ndarray):
        return data if data.dtype == dtype else data.reshape(-1).view(dtype)
    return np.frombuffer(data, dtype) if len(data) else np.zeros(0, dtype)


def _common_dtype(values: Sequence[Any], arrays: Sequence[Any]) -> np.dtype[Any]:
    """Return the type that holds all rows. An empty list has no type of its own."""
    present = [
        array.dtype
        for value, array in zip(values, arrays, strict=True)
        if array is not None and (array.size or isinstance(value, np.ndarray))
    ]
    return np.result_type(*present) if present else np.dtype(np.int64)


def _row_format(values: Sequence[Any]) -> dict[str, Any]:
    kinds = [isinstance(value, np.ndarray) for value in values]
    if all(is_array or value is None for value, is_array in zip(values, kinds, strict=True)):
        return {"row_format": "ndarray", "ndarray_rows": None, "physical_layout": "contiguous_flat"}
    if any(kinds):
        return {"row_format": "mixed", "ndarray_rows": kinds}
    return {"row_format": "list", "ndarray_rows": None}


def _tensor_of(value: Any) -> Any:
    if not isinstance(value, np.ndarray):
        return value.detach()
    if value.dtype.hasobject:
        raise ValueError("rows of ragged_tensor are numbers, not Python objects")
    return torch_module().from_numpy(np.array(value))


def _tensor_over(row: Any) -> Any:
    """Return a tensor over an array; torch takes writable memory only."""
    return torch_module().from_numpy(row if row.flags.writeable else row.copy())


def _numpy_type(name: str) -> str:
    dtype = getattr(torch_module(), name.removeprefix("torch."), None)
    if not isinstance(dtype, torch_module().dtype):
        raise ValueError(f"there is no tensor type {name!r}")
    return str(torch_module().empty(0, dtype=dtype).numpy().dtype)


def _checked_keys(keys: Any) -> list[str]:
    names = list(keys)
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"keys of a ragged_tensor_dict are text, not {name!r}")
        if not name:
            raise ValueError("keys of a ragged_tensor_dict must not be empty")
        if any(letter in name for letter in "./\\"):
            raise ValueError(f"keys of a ragged_tensor_dict must not contain '.', '/' or a backslash: {name!r}")
    if len(set(names)) < len(names):
        raise ValueError(f"keys of a ragged_tensor_dict are there twice: {names}")
    return names
