"""Members of a structured object: arrays, tensors and bytes as buffers of a bundle, read whole or by rows.

A field spec in the bundle's metadata says how to read a member: `ndarray` (dtype, shape), `torch_tensor` (a tensor
object, or a nested tensor) or `bytes`. A selection of rows reads only those rows, and a destination receives them in
the caller's memory. Wrong selections and destinations are ValueErrors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from moonpool.base.errors import InvalidInput
from moonpool.integrations.mooncake.bundle_payloads import (
    GatheredPayload,
    RawDestination,
    TensorObjectBuffer,
    TensorPayload,
    memory_at,
)
from moonpool.integrations.mooncake.column_structure import is_tensor
from moonpool.integrations.mooncake.nested_tensors import decode_nested, encode_nested, load_saved, take_rows
from moonpool.integrations.mooncake.payload_reads import PayloadReader
from moonpool.integrations.mooncake.tensor_format import HEADER_NBYTES, TensorHeader, unpack_header
from moonpool.integrations.mooncake.tensor_memory import describe, deserialize_tensor, new_tensor, tensor_in
from moonpool.transfer.memory.buffers import as_bytes_view

Rows = slice | Sequence[int] | None  # None: all


def encode_member(name: str, value: Any) -> tuple[dict[str, Any], Any]:
    """Return the field spec and the buffer. TypeError when the value cannot be a member."""
    if isinstance(value, TensorObjectBuffer):
        return {"encoding": "torch_tensor"}, value
    if isinstance(value, TensorPayload):
        value = value.tensor
    if is_tensor(value):
        return _encode_tensor(name, value)
    if isinstance(value, GatheredPayload) and value.dtype is not None and value.shape is not None:
        return {"encoding": "ndarray", "dtype": value.dtype, "shape": list(value.shape)}, value
    if isinstance(value, np.ndarray):
        if value.dtype.hasobject:
            raise TypeError(f"{name} is an array of Python objects, which is no member; put it as a column of a batch")
        return {"encoding": "ndarray", "dtype": value.dtype.str, "shape": list(value.shape)}, value
    if isinstance(value, bytes | bytearray | memoryview | GatheredPayload):
        return {"encoding": "bytes"}, value
    raise TypeError(f"{name} is {type(value).__name__}; members are arrays, tensors and bytes")


def _encode_tensor(name: str, tensor: Any) -> tuple[dict[str, Any], Any]:
    if tensor.is_nested:
        return encode_nested(tensor)
    try:
        header = describe(tensor)
    except InvalidInput as error:
        raise TypeError(f"{name}: {error}") from error
    spec = {"dtype": str(tensor.dtype), "shape": list(tensor.shape), "element_size": header.item_nbytes}
    return {"encoding": "torch_tensor", **spec}, TensorPayload(tensor)


class MemberReader:
    """Reads members of bundles."""

    def __init__(self, reader: PayloadReader) -> None:
        self._reader = reader

    def read(
        self, name: str, spec: Mapping[str, Any], payload: Mapping[str, Any], rows: Rows, destination: Any = None
    ) -> Any:
        """Return a member, or some rows of it, in `destination` if there is one."""
        encoding = spec.get("encoding", "bytes")
        if encoding == "ndarray":
            return self._array(name, spec, payload, rows, destination)
        if encoding == "torch_tensor":
            return self._tensor(name, spec, payload, rows, destination)
        if encoding != "bytes":
            raise ValueError(f"unsupported structured field encoding {encoding!r} of {name}")
        if rows is not None:
            raise ValueError(f"{name} holds bytes and does not support slicing")
        _refuse_destination(name, "bytes", destination)
        in_pool = self._reader.read_array(payload, np.dtype(np.uint8), (payload["bytes"],), 0)
        return bytes(self._reader.read(payload)) if in_pool is None else in_pool

    def _array(
        self, name: str, spec: Mapping[str, Any], payload: Mapping[str, Any], rows: Rows, destination: Any
    ) -> Any:
        if not isinstance(spec.get("dtype"), str) or not isinstance(spec.get("shape"), list):
            raise ValueError(f"{name}: the spec of an array has dtype and shape")
        dtype, shape = np.dtype(spec["dtype"]), tuple(spec["shape"])
        taken, result_shape = _take(name, shape, rows)
        row_nbytes = math.prod(shape[1:]) * dtype.itemsize
        ranges = _ranges(taken, row_nbytes, 0)
        if destination is None and len(ranges) == 1:
            in_pool = self._reader.read_array(payload, dtype, result_shape, ranges[0][0])
            if in_pool is not None:
                return in_pool
        if destination is None:
            array = np.empty(result_shape, dtype)
        elif isinstance(destination, RawDestination):
            nbytes = math.prod(result_shape) * dtype.itemsize
            room = _room(name, destination, nbytes)
            array = np.frombuffer(room, dtype).reshape(result_shape) if nbytes else np.empty(result_shape, dtype)
        else:
            array = _checked_array(name, destination, dtype, result_shape)
        if array.nbytes:
            self._read_into(payload, ranges, array.reshape(-1).view(np.uint8).data, destination)
        return array

    def _tensor(
        self, name: str, spec: Mapping[str, Any], payload: Mapping[str, Any], rows: Rows, destination: Any
    ) -> Any:
        if spec.get("nested"):
            _refuse_destination(name, "a nested tensor", destination)
            nested = decode_nested(spec, memoryview(self._reader.read(payload)))
            return nested if rows is None else take_rows(nested, _take(name, (len(nested),), rows)[0])
        if payload.get("format") == "torch_save":
            _refuse_destination(name, "a tensor that torch saved", destination)
            saved = load_saved(memoryview(self._reader.read(payload)))
            return saved if rows is None else saved[list(_take(name, tuple(saved.shape), rows)[0])]
        if rows is not None:
            return self._tensor_rows(name, payload, rows, destination)
        if destination is None:
            if payload.get("kind") == "tensor":
                return self._reader.read_tensor(payload)
            return deserialize_tensor(bytes(self._reader.read(payload)))
        memory = _room(name, destination, payload["bytes"], is_tensor_object=True)
        self._read_into(payload, [(0, 0, memory.nbytes)], memory, destination)
        return tensor_in(memory) if "dtype" in spec else destination

    def _tensor_rows(self, name: str, payload: Mapping[str, Any], rows: Rows, destination: Any) -> Any:
        """Return rows of a tensor object. What its header says counts, not what the spec says."""
        stored = self._header(name, payload)
        taken, shape = _take(name, stored.local_shape, rows)
        header = replace(stored, global_shape=shape, local_shape=shape, data_offset=HEADER_NBYTES)
        if destination is None:
            tensor = new_tensor(header)
            target = as_bytes_view(tensor, writable=True)
        else:
            whole = _room(name, destination, header.nbytes, is_tensor_object=True)
            whole[:HEADER_NBYTES] = header.pack()
            target = whole[HEADER_NBYTES:]
        if header.data_nbytes:
            row_nbytes = math.prod(shape[1:]) * stored.item_nbytes
            self._read_into(payload, _ranges(taken, row_nbytes, stored.data_offset), target, destination)
        return tensor if destination is None else destination

    def _header(self, name: str, payload: Mapping[str, Any]) -> TensorHeader:
        header = bytearray(min(HEADER_NBYTES, payload["bytes"]))
        self._reader.read_ranges(payload, [(0, 0, len(header))], memoryview(header))
        try:
            return unpack_header(memoryview(header), payload["bytes"])
        except InvalidInput as error:
            raise ValueError(f"{name}: {error}") from error

    def _read_into(
        self,
        payload: Mapping[str, Any],
        ranges: Sequence[tuple[int, int, int]],
        target: memoryview,
        destination: Any,
    ) -> None:
        is_registered = isinstance(destination, RawDestination) and destination.pre_registered
        is_part = isinstance(destination, TensorObjectBuffer)
        self._reader.read_ranges(payload, ranges, target, is_registered=is_registered, is_part=is_part)


def _take(name: str, shape: tuple[int, ...], rows: Rows) -> tuple[Sequence[int], tuple[int, ...]]:
    """Return the indices of the rows to read, and the shape of the result."""
    num_rows = shape[0] if shape else 1
    if rows is None:
        return range(num_rows), shape
    if not shape:
        raise ValueError(f"{name} has no rows")
    taken: Sequence[int] = range(num_rows)[rows] if isinstance(rows, slice) else list(rows)
    if any(not 0 <= row < num_rows for row in taken):
        raise IndexError(f"{name} has {num_rows} rows")
    return taken, (len(taken), *shape[1:])


def _ranges(rows: Sequence[int], row_nbytes: int, offset: int) -> list[tuple[int, int, int]]:
    """Return where the rows lie in the buffer and go in the target; neighbours are one range."""
    found: list[tuple[int, int, int]] = []
    if isinstance(rows, range) and rows.step == 1:
        return [(offset + rows.start * row_nbytes, 0, len(rows) * row_nbytes)]
    for at, row in enumerate(rows):
        start = offset + row * row_nbytes
        if found and found[-1][0] + found[-1][2] == start:
            found[-1] = (found[-1][0], found[-1][1], found[-1][2] + row_nbytes)
        else:
            found.append((start, at * row_nbytes, row_nbytes))
    return found


def _checked_array(name: str, destination: Any, dtype: np.dtype[Any], shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    if not isinstance(destination, np.ndarray):
        raise ValueError(f"{name}: the destination is {type(destination).__name__}, no array")
    if destination.dtype != dtype:
        raise ValueError(f"{name}: destination dtype mismatch, {destination.dtype} for {dtype}")
    if destination.shape != shape:
        raise ValueError(f"{name}: destination shape mismatch, {destination.shape} for {shape}")
    if not destination.flags.writeable or not destination.flags.c_contiguous:
        raise ValueError(f"{name}: the destination must be writeable and contiguous")
    return destination


def _refuse_destination(name: str, what: str, destination: Any) -> None:
    if destination is not None:
        raise ValueError(f"{name} is {what} and does not support destinations")


def _room(name: str, destination: Any, nbytes: int, *, is_tensor_object: bool = False) -> memoryview:
    """Return the first bytes of memory that the caller names. ValueError when it has fewer, or none is named."""
    kinds = (RawDestination, TensorObjectBuffer) if is_tensor_object else (RawDestination,)
    if not isinstance(destination, kinds):
        raise ValueError(f"{name} is a tensor and does not support destinations other than raw memory")
    if nbytes > destination.size:
        raise ValueError(f"{name}: the destination has {destination.size} bytes, {nbytes} are needed")
    return memory_at(destination)[:nbytes]
