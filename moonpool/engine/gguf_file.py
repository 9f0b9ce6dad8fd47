"""Reads a GGUF file: its metadata, its tensor list and, one tensor at a time, its weights as float32.

This module reads the header, because the gguf package takes seconds for a vocabulary and this takes a tenth of a
second; the gguf package decodes all quantization formats. A truncated or foreign file raises ModelError.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from moonpool.base.errors import ModelError

_MAGIC = b"GGUF"
_DEFAULT_ALIGNMENT = 32
_STRING, _ARRAY = 8, 9
_U64 = struct.Struct("<Q")
_SCALARS = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "|b1", 10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One entry of the tensor list. `shape` is in row-major order, the reverse of the file's order."""

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int


@dataclass(frozen=True, slots=True)
class GgufFile:
    """An open file. The mapping lives as long as this object; tensors are read through it."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]
    _data: mmap.mmap = field(repr=False)

    @classmethod
    def open(cls, path: Path) -> GgufFile:
        try:
            with open(path, "rb") as file:
                data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise ModelError(f"{path} cannot be read: {error}") from error
        try:
            metadata, tensors = _read_header(data)
        except (struct.error, ValueError, IndexError, OverflowError) as error:
            raise ModelError(f"{path} is truncated or not a GGUF file: {error}") from error
        return cls(path, metadata, tensors, data)

    def require_whole(self) -> None:
        """Raise ModelError unless every tensor is inside the file."""
        for tensor in self.tensors.values():
            missing = tensor.offset + _tensor_nbytes(tensor) - len(self._data)
            if missing > 0:
                raise ModelError(f"{self.path} is truncated: tensor {tensor.name} ends {missing} bytes behind its end")

    def read(self, name: str) -> np.ndarray:
        """Return the tensor as float32, for any format in the file."""
        from gguf import (  # here: the import takes a quarter of a second, which the front end does not need
            GGMLQuantizationType,
            quants,
        )

        tensor = self.tensors.get(name)
        if tensor is None:
            raise ModelError(f"{self.path} lacks the tensor {name}")
        nbytes = _tensor_nbytes(tensor)
        if tensor.offset + nbytes > len(self._data):
            raise ModelError(f"{self.path} is truncated: tensor {name} is cut off")
        raw = np.frombuffer(self._data, dtype=np.uint8, count=nbytes, offset=tensor.offset)
        kind = GGMLQuantizationType(tensor.kind)
        try:
            values = quants.dequantize(_as_stored(raw, kind, tensor.shape), kind)
        except NotImplementedError as error:
            raise ModelError(f"{self.path}: tensors of type {kind.name} are not supported") from error
        return np.require(values, np.float32, ["W"]).reshape(tensor.shape)


def _as_stored(raw: np.ndarray, kind: Any, shape: tuple[int, ...]) -> np.ndarray:
    """Return the bytes as dequantize expects them: floats by their type, other formats as rows of bytes."""
    if kind.name in ("F32", "F16"):
        return raw.view("<f4" if kind.name == "F32" else "<f2").reshape(shape)
    return raw.reshape(*shape[:-1], -1)


def _tensor_nbytes(tensor: GgufTensor) -> int:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        block, block_nbytes = GGML_QUANT_SIZES[GGMLQuantizationType(tensor.kind)]
    except (KeyError, ValueError) as error:
        raise ModelError(f"tensor {tensor.name} has an unknown type {tensor.kind}") from error
    return int(math.prod(tensor.shape) // block * block_nbytes)


class _Cursor:
    """Reads little-endian values one after another; raises struct.error or ValueError at the end of the data."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.at = data, 0

    def u32(self) -> int:
        self.at += 4
        return int.from_bytes(self._span(4), "little")

    def u64(self) -> int:
        self.at += 8
        return int.from_bytes(self._span(8), "little")

    def text(self) -> str:
        size = self.u64()
        self.at += size
        return self._span(size).decode("utf-8", errors="replace")

    def texts(self, count: int) -> list[str]:
        """Do text() `count` times, in a fifth of the time: vocabularies have a hundred thousand."""
        data, at, size_at, found = self.data, self.at, _U64.unpack_from, []
        for _ in range(count):
            begin = at + 8
            (size,) = size_at(data, at)
            at = begin + size
            found.append(data[begin:at])
        self.at = at
        self._span(0)
        return [each.decode("utf-8", errors="replace") for each in found]

    def numbers(self, dtype: str, count: int) -> list[Any]:
        size = np.dtype(dtype).itemsize * count
        self.at += size
        return list(np.frombuffer(self._span(size), dtype=dtype).tolist())

    def _span(self, size: int) -> bytes:
        if self.at > len(self.data):
            raise ValueError("the header ends too early")
        return self.data[self.at - size : self.at]


def _read_header(data: mmap.mmap) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
    if data[:4] != _MAGIC:
        raise ValueError("it does not start with GGUF")
    cursor = _Cursor(data)
    cursor.at = 4
    version = cursor.u32()
    if version not in (2, 3):
        raise ValueError(f"GGUF version {version} is not supported")
    num_tensors, num_values = cursor.u64(), cursor.u64()
    metadata = {cursor.text(): _read_value(cursor, cursor.u32()) for _ in range(num_values)}
    listed = [_read_tensor(cursor) for _ in range(num_tensors)]
    alignment = int(metadata.get("general.alignment", _DEFAULT_ALIGNMENT))
    start = -(-cursor.at // alignment) * alignment
    return metadata, {t.name: GgufTensor(t.name, t.shape, t.kind, start + t.offset) for t in listed}


def _read_value(cursor: _Cursor, kind: int) -> Any:
    if kind == _STRING:
        return cursor.text()
    if kind == _ARRAY:
        return _read_array(cursor, cursor.u32(), cursor.u64())
    return cursor.numbers(_scalar_dtype(kind), 1)[0]


def _read_array(cursor: _Cursor, kind: int, count: int) -> list[Any]:
    if kind == _STRING:
        return cursor.texts(count)
    if kind == _ARRAY:
        return [_read_value(cursor, _ARRAY) for _ in range(count)]
    return cursor.numbers(_scalar_dtype(kind), count)


def _scalar_dtype(kind: int) -> str:
    if kind not in _SCALARS:
        raise ValueError(f"unknown value type {kind}")
    return _SCALARS[kind]


def _read_tensor(cursor: _Cursor) -> GgufTensor:
    name, num_dims = cursor.text(), cursor.u32()
    dims = [cursor.u64() for _ in range(num_dims)]
    kind, offset = cursor.u32(), cursor.u64()
    return GgufTensor(name, tuple(reversed(dims)), kind, offset)
