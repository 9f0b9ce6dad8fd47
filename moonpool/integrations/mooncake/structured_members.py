"""Members of a structured object: arrays, tensors and bytes as buffers of a bundle, read whole or by rows.

A field spec in the bundle's metadata says how to read a member: `ndarray` (dtype, shape), `torch_tensor` (dtype, shape;
the buffer begins with the header of tensor_format.py) or `bytes`. A slice of rows reads only those rows, and a
destination receives them in the caller's memory. Wrong slices and destinations are ValueErrors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from moonpool.base.errors import InvalidInput
from moonpool.integrations.mooncake.bundles import Bundles
from moonpool.integrations.mooncake.column_structure import is_tensor
from moonpool.integrations.mooncake.registered_memory import is_mapped
from moonpool.integrations.mooncake.tensor_format import HEADER_NBYTES, TensorHeader, unpack_header
from moonpool.integrations.mooncake.tensor_memory import describe, in_main_memory, new_tensor, tensor_bytes, tensor_in
from moonpool.transfer.memory.buffers import RawMemory, as_bytes_view

Rows = slice | Sequence[int] | None  # None: all


@dataclass(frozen=True)
class TensorObjectBuffer:
    """Memory that holds, or is to hold, a tensor object: header and elements. `owner` keeps the memory alive."""

    ptr: int
    size: int
    owner: Any = None
    batch_size: int | None = None

    def __len__(self) -> int:
        """Number of rows."""
        if self.batch_size is None:
            raise TypeError("a tensor object buffer needs a batch_size to be a field of a batch")
        return self.batch_size


@dataclass(frozen=True)
class RawDestination:
    """Memory for a member that is read: elements of an array, or a tensor object."""

    ptr: int
    size: int
    owner: Any = None
    pre_registered: bool = False


def tensor_object_buffer(ptr: int, size: int, owner: Any = None, batch_size: int | None = None) -> TensorObjectBuffer:
    """Name a tensor object in memory, to store it or to read one into it."""
    return TensorObjectBuffer(int(ptr), int(size), owner, batch_size)


def raw_destination(ptr: int, size: int, owner: Any = None, *, pre_registered: bool = False) -> RawDestination:
    """Name memory to read a member into."""
    return RawDestination(int(ptr), int(size), owner, pre_registered)


def encode_member(name: str, value: Any) -> tuple[dict[str, Any], list[Any]]:
    """Return the field spec and the buffer, in parts. TypeError when the value cannot be a member."""
    if isinstance(value, TensorObjectBuffer):
        memory = _memory(value)
        try:
            return _tensor_spec(unpack_header(memory)), [memory]
        except InvalidInput as error:
            raise ValueError(f"{name}: {error}") from error
    if is_tensor(value):
        try:
            header = describe(value)
        except InvalidInput as error:
            raise TypeError(f"{name}: {error}") from error
        return _tensor_spec(header), [header.pack(), tensor_bytes(in_main_memory(value))]
    if isinstance(value, np.ndarray):
        if value.dtype.hasobject:
            raise TypeError(f"{name} is an array of Python objects, which is no member; put it as a column of a batch")
        array = np.ascontiguousarray(value).reshape(value.shape)
        return {"encoding": "ndarray", "dtype": array.dtype.str, "shape": list(array.shape)}, [array]
    if isinstance(value, bytes | bytearray | memoryview):
        return {"encoding": "bytes"}, [value]
    raise TypeError(f"{name} is {type(value).__name__}; members are arrays, tensors and bytes")


class MemberReader:
    """Reads members of bundles."""

    def __init__(self, bundles: Bundles) -> None:
        self._bundles = bundles

    def read(
        self, name: str, spec: Mapping[str, Any], payload: Mapping[str, Any], rows: Rows, destination: Any = None
    ) -> Any:
        """Return a member, or some rows of it, in `destination` if there is one."""
        encoding = spec.get("encoding")
        if encoding == "ndarray":
            return self._array(name, spec, payload, rows, destination)
        if encoding == "torch_tensor":
            return self._tensor(name, spec, payload, rows, destination)
        if encoding != "bytes":
            raise ValueError(f"unsupported structured field encoding {encoding!r} of {name}")
        if rows is not None:
            raise ValueError(f"{name} holds bytes and does not support slicing")
        if destination is not None:
            raise ValueError(f"{name} holds bytes and does not support destinations")
        return bytes(self._bundles.read(payload))

    def _array(
        self, name: str, spec: Mapping[str, Any], payload: Mapping[str, Any], rows: Rows, destination: Any
    ) -> Any:
        dtype, shape = np.dtype(spec["dtype"]), tuple(spec["shape"])
        taken, result_shape = _take(name, shape, rows)
        if destination is None:
            array = np.empty(result_shape, dtype)
        elif isinstance(destination, RawDestination):
            nbytes = math.prod(result_shape) * dtype.itemsize
            if nbytes > destination.size:
                raise ValueError(f"{name}: the destination has {destination.size} bytes, {nbytes} are needed")
            array = np.frombuffer(_memory(destination)[:nbytes], dtype).reshape(result_shape)
        else:
            array = _checked_array(name, destination, dtype, result_shape)
        if array.nbytes:
            row_nbytes = math.prod(shape[1:]) * dtype.itemsize
            ranges = _ranges(taken, row_nbytes, 0) if shape else [(0, 0, array.nbytes)]
            self._bundles.read_ranges(payload, ranges, as_bytes_view(array, writable=True))
        return array

    def _tensor(
        self, name: str, spec: Mapping[str, Any], payload: Mapping[str, Any], rows: Rows, destination: Any
    ) -> Any:
        stored = TensorHeader(spec["element_type"], tuple(spec["shape"]), tuple(spec["shape"]))
        taken, result_shape = _take(name, stored.local_shape, rows)
        header = replace(stored, global_shape=result_shape, local_shape=result_shape)
        if destination is None:
            tensor = new_tensor(header)
            memory = as_bytes_view(tensor, writable=True)
        elif isinstance(destination, TensorObjectBuffer | RawDestination):
            if header.nbytes > destination.size:
                raise ValueError(f"{name}: the destination has {destination.size} bytes, {header.nbytes} are needed")
            whole = _memory(destination)[: header.nbytes]
            whole[:HEADER_NBYTES] = header.pack()
            memory = whole[HEADER_NBYTES:]
        else:
            raise ValueError(f"{name} is a tensor and does not support destinations other than raw memory")
        if header.data_nbytes:
            shape = stored.local_shape
            row_nbytes = math.prod(shape[1:]) * stored.item_nbytes
            ranges = _ranges(taken, row_nbytes, HEADER_NBYTES) if shape else [(HEADER_NBYTES, 0, header.data_nbytes)]
            self._bundles.read_ranges(payload, ranges, memory)
        if destination is None:
            return tensor
        return tensor_in(whole) if isinstance(destination, TensorObjectBuffer) else destination


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
    if destination.dtype != dtype or destination.shape != shape:
        raise ValueError(
            f"{name}: destination dtype or shape mismatch, {destination.dtype} {destination.shape} for {dtype} {shape}"
        )
    if not destination.flags.writeable or not destination.flags.c_contiguous:
        raise ValueError(f"{name}: the destination must be writeable and contiguous")
    return destination


def _memory(place: TensorObjectBuffer | RawDestination) -> memoryview:
    """Return memory that the caller names by a pointer. ValueError when this process does not have it."""
    if not is_mapped(place.ptr, place.size, Path("/proc/self/maps").read_text()):
        raise ValueError(f"{place.size} bytes at {place.ptr:#x} are no main memory that this process can write")
    return as_bytes_view(RawMemory(place.ptr, place.size, owner=place.owner), writable=True)


def _tensor_spec(header: TensorHeader) -> dict[str, Any]:
    shape = list(header.local_shape)
    return {
        "encoding": "torch_tensor",
        "dtype": f"torch.{header.type_name}",
        "element_type": header.element_type,
        "shape": shape,
    }
