"""What callers may name as the bytes of a buffer besides plain memory, and how such bytes are cut into chunks. Pure.

`GatheredPayload` is one buffer that lies in several places, `TensorPayload` a tensor that is stored as a tensor object
(tensor_format.py), `TensorObjectBuffer` memory that holds such an object already, and `RawDestination` memory to read a
member into.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from moonpool.base.errors import InvalidInput
from moonpool.integrations.mooncake.registered_memory import is_mapped
from moonpool.transfer.memory.buffers import RawMemory, as_bytes_view


@dataclass(frozen=True)
class GatheredPayload:
    """One buffer whose bytes lie in several places. With `dtype` and `shape` it is an array, else bytes. `owners` keeps
    the memory alive.
    """

    buffers: tuple[memoryview, ...]
    owners: tuple[Any, ...] = ()
    dtype: str | None = None
    shape: tuple[int, ...] | None = None

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.buffers)

    @classmethod
    def from_flat_arrays(cls, arrays: Sequence[np.ndarray[Any, Any]], dtype: Any, total_elems: int) -> GatheredPayload:
        """Return contiguous arrays of one dimension and type, one after the other, as one array."""
        buffers = tuple(as_bytes_view(array, writable=False) for array in arrays if array.nbytes)
        return cls(buffers, tuple(arrays), np.dtype(dtype).str, (total_elems,))


@dataclass(frozen=True)
class TensorPayload:
    """A tensor that is stored as a tensor object."""

    tensor: Any


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


def memory_at(place: TensorObjectBuffer | RawDestination) -> memoryview:
    """Return memory that the caller names by a pointer. ValueError when this process does not have it."""
    if not is_mapped(place.ptr, place.size, Path("/proc/self/maps").read_text()):
        raise ValueError(f"{place.size} bytes at {place.ptr:#x} are no main memory that this process can write")
    return as_bytes_view(RawMemory(place.ptr, place.size, owner=place.owner), writable=True)


def views_of(value: Any, name: str) -> list[memoryview]:
    """Return the memory of a buffer, in its parts. TypeError when it has none."""
    try:
        if isinstance(value, GatheredPayload):
            return [as_bytes_view(part, writable=False) for part in value.buffers]
        if isinstance(value, np.ndarray):  # dates have no buffer protocol, their bytes have
            value = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
        return [as_bytes_view(value, writable=False)]
    except (InvalidInput, TypeError) as error:
        raise TypeError(f"{name} is no buffer: {error}") from error


class StoredChunk(NamedTuple):
    """One object of a store: its key, and its bytes in parts."""

    key: str
    parts: list[memoryview]

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)


def cut(key: str, views: Sequence[memoryview], chunk_nbytes: int) -> list[StoredChunk]:
    """Return a buffer in chunks of at most `chunk_nbytes`."""
    num_chunks = math.ceil(sum(view.nbytes for view in views) / chunk_nbytes)
    keys = [key] if num_chunks == 1 else [f"{key}/chunk/{number}" for number in range(num_chunks)]
    return [StoredChunk(name, parts) for name, parts in zip(keys, _groups(views, chunk_nbytes), strict=True)]


def describe_chunks(key: str, chunks: Sequence[StoredChunk]) -> dict[str, Any]:
    """Return what a manifest says about a buffer."""
    return {
        "key": key,
        "bytes": sum(chunk.nbytes for chunk in chunks),
        "chunks": [{"key": chunk.key, "bytes": chunk.nbytes} for chunk in chunks],
    }


def _groups(views: Sequence[memoryview], chunk_nbytes: int) -> Iterator[list[memoryview]]:
    group: list[memoryview] = []
    room = chunk_nbytes
    for view in views:
        while view.nbytes:
            part, view = view[:room], view[room:]
            group.append(part)
            room -= part.nbytes
            if not room:
                yield group
                group, room = [], chunk_nbytes
    if group:
        yield group
