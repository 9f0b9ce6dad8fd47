"""Codecs of columns: values of one kind, a row each, as a few buffers and JSON, in upstream's form, and back.

    ndarray            numbers: data, nulls
    typed_ragged, ragged_tensor, ragged_tensor_dict: ragged_codecs.py
    bytes_ragged, utf8_ragged, msgpack_ragged, json_ragged, media_bytes: data, offsets (in bytes), nulls
    media_list_ragged  lists of files or images: data, byte_offsets per item, row_offsets per row, nulls

A codec that cannot hold a value exactly raises TypeError or ValueError, and another one is taken.
"""

from __future__ import annotations

import importlib
import io
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from moonpool.integrations.mooncake.bundle_payloads import GatheredPayload
from moonpool.integrations.mooncake.column_structure import is_image
from moonpool.integrations.mooncake.ragged_codecs import (
    Encoded,
    check_rows,
    decode_arrays,
    decode_tensor_dicts,
    decode_tensors,
    encode_arrays,
    encode_tensors,
)

_PALETTE_MODES = ("P", "PA")  # their colours are not in the pixels


def encode_leaf(codec: str, values: Sequence[Any]) -> Encoded:
    """Return the buffers and the JSON of a column of values and None."""
    if codec not in _ENCODERS:
        raise ValueError(f"unsupported schema codec: {codec!r}")
    return _ENCODERS[codec](values)


def decode_leaf(codec: str, parts: Mapping[str, Any], num_rows: int, metadata: Mapping[str, Any] | None) -> list[Any]:
    """Return the rows of a column."""
    if codec not in _DECODERS:
        raise ValueError(f"unknown structured non-tensor codec: {codec!r}")
    return _DECODERS[codec](parts, num_rows, metadata or {})


# numbers, and arrays of numbers


def encode_numbers(values: Sequence[Any], dtype: Any) -> Encoded:
    data = np.array([0 if value is None else value for value in values], dtype)
    return {"data": data, "nulls": _nulls(values)}, {"dtype": str(data.dtype), "shape": list(data.shape)}


def _encode_exact_numbers(values: Sequence[Any]) -> Encoded:
    present = [value for value in values if value is not None]
    kinds = {np.asarray(value).dtype.kind.replace("u", "i") for value in present}
    if len(kinds) != 1 or not kinds <= set("bifc"):
        raise TypeError("numbers of several types, or too large ones")
    dtype = np.array(present).dtype
    if kinds == {"i"} and (dtype.kind not in "iu" or np.array(present).tolist() != present):
        raise TypeError("integers that no type of 64 bits holds together")
    return encode_numbers(values, dtype)


def _decode_numbers(parts: Mapping[str, Any], num_rows: int, metadata: Mapping[str, Any]) -> list[Any]:
    rows = parts["data"].tolist()
    return [None if is_null else row for row, is_null in zip(rows, parts["nulls"].tolist(), strict=True)]


def _encode_exact_arrays(values: Sequence[Any]) -> Encoded:
    """Lists are refused when they would come back changed, as [1, 2.5] and [1, True] would."""
    parts, metadata = encode_arrays(values)
    dtype = np.dtype(metadata["dtype"])
    if dtype.kind not in "biufc":
        raise TypeError("rows that are no arrays of numbers")
    for value in values:
        if value is None or isinstance(value, np.ndarray):
            continue
        if repr(np.asarray(value, dtype).tolist()) != repr(list(value)):  # 1 and 1.0 are equal but not the same
            raise TypeError("rows that an array does not hold exactly")
    return parts, metadata


# rows of bytes


def _ragged(rows: Sequence[Any]) -> dict[str, Any]:
    parts = [b"" if row is None else row for row in rows]
    buffers = tuple(memoryview(part) for part in parts if len(part))
    ends = np.cumsum([0, *[len(part) for part in parts]], dtype=np.int64)
    return {"data": GatheredPayload(buffers, tuple(parts)), "offsets": ends, "nulls": _nulls(rows)}


def _rows(codec: str, parts: Mapping[str, Any], num_rows: int) -> list[Any]:
    check_rows(codec, parts["offsets"], parts["nulls"], num_rows)
    data, ends = memoryview(parts["data"]), parts["offsets"].tolist()
    pieces = itertools.pairwise(ends)
    nulls = parts["nulls"].tolist()
    return [None if is_null else bytes(data[start:end]) for (start, end), is_null in zip(pieces, nulls, strict=True)]


def _by_row(encode: Callable[[Any], bytes]) -> Callable[[Sequence[Any]], Encoded]:
    return lambda values: (_ragged([None if value is None else encode(value) for value in values]), {})


def _from_row(codec: str, decode: Callable[[bytes], Any]) -> _Decoder:
    return lambda parts, num_rows, metadata: [
        None if row is None else decode(row) for row in _rows(codec, parts, num_rows)
    ]


def encode_msgpack(path: str, values: Sequence[Any]) -> Encoded:
    """encode_leaf() with msgpack. ValueError that names the column when a value cannot be stored."""
    try:
        return encode_leaf("msgpack_ragged", values)
    except TypeError as error:
        raise ValueError(f"unsupported structured non-tensor field {path}: {error}") from error


def decode_msgpack(parts: Mapping[str, Any], num_rows: int) -> list[Any]:
    return decode_leaf("msgpack_ragged", parts, num_rows, None)


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"objects of type {type(value).__name__} cannot be stored")


def _to_json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


# files and images


def _encode_media(values: Sequence[Any]) -> Encoded:
    items = [_file_of(value) for value in values]
    details = [detail for _, detail in items]
    parts = _ragged([None if value is None else data for value, (data, _) in zip(values, items, strict=True)])
    is_plain = all(detail["kind"] in ("bytes", "null") for detail in details)
    return parts, {} if is_plain else {**_media_types(details), "media_encodings": details}


def _decode_media(parts: Mapping[str, Any], num_rows: int, metadata: Mapping[str, Any]) -> list[Any]:
    rows = _rows("media_bytes", parts, num_rows)
    details = metadata.get("media_encodings") or [{}] * num_rows
    return [None if row is None else _open(row, detail) for row, detail in zip(rows, details, strict=True)]


def _encode_media_lists(values: Sequence[Any]) -> Encoded:
    items = [_file_of(item) for value in values for item in value or ()]
    data = _ragged([each for each, _ in items])
    ends = np.cumsum([0, *[len(value or ()) for value in values]], dtype=np.int64)
    parts = {"data": data["data"], "byte_offsets": data["offsets"], "row_offsets": ends, "nulls": _nulls(values)}
    details = [detail for _, detail in items]
    return parts, {**_media_types(details), "media_encodings": details}


def _decode_media_lists(parts: Mapping[str, Any], num_rows: int, metadata: Mapping[str, Any]) -> list[Any]:
    check_rows("media_list_ragged", parts["row_offsets"], parts["nulls"], num_rows)
    data, ends = memoryview(parts["data"]), parts["byte_offsets"].tolist()
    details = metadata.get("media_encodings") or [{}] * (len(ends) - 1)
    files = [
        _open(bytes(data[start:end]), detail)
        for (start, end), detail in zip(itertools.pairwise(ends), details, strict=True)
    ]
    rows = itertools.pairwise(parts["row_offsets"].tolist())
    nulls = parts["nulls"].tolist()
    return [None if is_null else files[start:end] for (start, end), is_null in zip(rows, nulls, strict=True)]


def _file_of(item: Any) -> tuple[bytes, dict[str, Any]]:
    """Return the bytes of an item, and how to open them: images are raw pixels, or PNG where these are not enough."""
    if item is None:
        return b"", {"kind": "null"}
    if not is_image(item):
        return bytes(item), {"kind": "bytes"}
    if item.mode in _PALETTE_MODES:
        file = io.BytesIO()
        item.save(file, format="PNG")
        return file.getvalue(), {"kind": "png"}
    kind = {"kind": "pil_raw", "mode": item.mode, "size": list(item.size), "format": getattr(item, "format", None)}
    return item.tobytes(), kind


def _open(data: bytes, detail: Mapping[str, Any]) -> Any:
    kind = detail.get("kind")
    if kind not in ("pil_raw", "png"):
        return data
    pil = importlib.import_module("PIL.Image")
    if kind == "png":
        return pil.open(io.BytesIO(data))
    image = pil.frombytes(detail["mode"], tuple(detail["size"]), data)
    image.format = detail.get("format")
    return image


def _media_types(details: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    types = {"pil_raw": "image/raw", "png": "image/png"}
    found = sorted({types[detail["kind"]] for detail in details if detail["kind"] in types})
    return {"encode_source": "raw_pixels_from_object", **({"media_types": found} if found else {})}


def _nulls(values: Sequence[Any]) -> np.ndarray[Any, np.dtype[np.bool_]]:
    return np.array([value is None for value in values], np.bool_)


_Decoder = Callable[[Mapping[str, Any], int, Mapping[str, Any]], list[Any]]
_ENCODERS: dict[str, Callable[[Sequence[Any]], Encoded]] = {
    "ndarray": _encode_exact_numbers,
    "typed_ragged": _encode_exact_arrays,
    "ragged_tensor": encode_tensors,
    "bytes_ragged": _by_row(bytes),
    "utf8_ragged": _by_row(lambda value: value.encode()),
    "msgpack_ragged": _by_row(lambda value: msgspec.msgpack.encode(value, enc_hook=_plain)),
    "json_ragged": _by_row(_to_json),
    "media_bytes": _encode_media,
    "media_list_ragged": _encode_media_lists,
}
_DECODERS: dict[str, _Decoder] = {
    "ndarray": _decode_numbers,
    "typed_ragged": decode_arrays,
    "ragged_tensor": decode_tensors,
    "ragged_tensor_dict": decode_tensor_dicts,
    "bytes_ragged": lambda parts, num_rows, metadata: _rows("bytes_ragged", parts, num_rows),
    "utf8_ragged": _from_row("utf8_ragged", bytes.decode),
    "msgpack_ragged": _from_row("msgpack_ragged", msgspec.msgpack.decode),
    "json_ragged": _from_row("json_ragged", json.loads),
    "media_bytes": _decode_media,
    "media_list_ragged": _decode_media_lists,
}
