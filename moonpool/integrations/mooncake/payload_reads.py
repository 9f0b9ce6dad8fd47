"""Buffers of bundles read from a store: whole or in ranges, into the caller's memory or into memory of a pool.

The store is any object with get. With register_buffer and batch_get_into, get_into or get_into_ranges it writes into
the memory itself; otherwise values are fetched and copied. Values that are missing or of another size are
RuntimeErrors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from moonpool.integrations.mooncake.payload_writes import REGISTRATION, BundleStore, check_codes, has, lend, registered
from moonpool.transfer.memory.buffers import RawMemory, address_of, as_bytes_view

Ranges = Sequence[tuple[int, int, int]]  # each: start in the buffer, start in the target, size


class PoolOwner:
    """The lease of pool memory that arrays lie in. It is released once: by release(), or when no array is left."""

    def __init__(self, lease: Any) -> None:
        self._lease = lease

    def release(self) -> None:
        lease, self._lease = self._lease, None
        if lease is not None:
            lease.release()

    def __del__(self) -> None:
        self.release()


class PoolArray(np.ndarray[Any, Any]):
    """An array in pool memory. Its slices have its owner; all views of it, of any type, keep the lease."""

    _mooncake_pool_owner: PoolOwner | None

    def __array_finalize__(self, source: Any) -> None:
        self._mooncake_pool_owner = getattr(source, "_mooncake_pool_owner", None)


class PayloadReader:
    """Reads buffers that a manifest describes."""

    def __init__(self, store: BundleStore, buffer_pool: Any = None) -> None:
        self._store: Any = store
        self._pool = buffer_pool

    def read(self, spec: Mapping[str, Any]) -> bytearray:
        """Return a whole buffer."""
        value = bytearray(spec["bytes"])
        if not value:
            return value
        target = memoryview(value)
        parts = list(_overlaps(spec["chunks"], 0, 0, len(value)))
        if not has(self._store, "batch_get_into", *REGISTRATION):
            self._copy(parts, target)
            return value
        keys, sizes = [part.chunk["key"] for part in parts], [part.nbytes for part in parts]
        with registered(self._store, [target]) as pointers:
            found = self._store.batch_get_into(keys, [pointers[0] + part.at for part in parts], sizes)
        check_codes("batch_get_into", keys, found, sizes)
        return value

    def read_array(self, spec: Mapping[str, Any], dtype: np.dtype[Any], shape: tuple[int, ...], start: int) -> Any:
        """Return an array in memory of the pool whose bytes begin at `start`; None when there is no pool, no room in
        it, or no call that reads into it.
        """
        nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        if self._pool is None or not nbytes or not has(self._store, "get_into_ranges"):
            return None
        lease = lend(self._pool, nbytes)
        if lease is None:
            return None
        owner = PoolOwner(lease)
        memory = as_bytes_view(RawMemory(lease.ptr, nbytes, owner=owner), writable=True)
        self._gather(list(_overlaps(spec["chunks"], start, 0, nbytes)), lease.ptr)
        array = np.frombuffer(memory, dtype).reshape(shape).view(PoolArray)
        array._mooncake_pool_owner = owner
        return array

    def read_ranges(
        self,
        spec: Mapping[str, Any],
        ranges: Ranges,
        target: memoryview,
        *,
        is_registered: bool = False,
        is_part: bool = False,
    ) -> None:
        """Read parts of a buffer to `target`. `is_registered`: the store knows the memory. `is_part`: it may know
        memory around it, for which only get_into_ranges() is sure to work.
        """
        parts = [part for start, at, nbytes in ranges for part in _overlaps(spec["chunks"], start, at, nbytes)]
        if not parts:
            return
        is_one_object = len(parts) == 1 and (parts[0].offset, parts[0].nbytes) == (0, parts[0].chunk["bytes"])
        is_plain = is_one_object and not is_registered and not is_part and has(self._store, "get_into")
        call = "get_into" if is_plain else "get_into_ranges"
        if not has(self._store, call) or not (is_registered or has(self._store, *REGISTRATION)):
            self._copy(parts, target)
            return
        if is_registered:
            self._gather(parts, address_of(target))
            return
        with registered(self._store, [target]) as pointers:
            if call == "get_into_ranges":
                self._gather(parts, pointers[0])
                return
            key, nbytes = parts[0].chunk["key"], parts[0].nbytes
            found = self._store.get_into(key, pointers[0] + parts[0].at, nbytes)
        check_codes("get_into", [key], [found], [nbytes])

    def read_tensor(self, spec: Mapping[str, Any]) -> Any:
        """Return a tensor that the store's own put_tensor stored."""
        if not has(self._store, "get_tensor"):
            raise RuntimeError("the store does not support get_tensor, by which this member is read")
        tensor = self._store.get_tensor(spec["key"])
        if tensor is None:
            raise RuntimeError(f"get_tensor of {spec['key']} found no tensor")
        return tensor

    def _gather(self, parts: Sequence[_Part], address: int) -> None:
        """Let the store write the parts to memory that is registered."""
        keys, sizes = [part.chunk["key"] for part in parts], [part.nbytes for part in parts]
        targets, sources = [[part.at] for part in parts], [[part.offset] for part in parts]
        answer = self._store.get_into_ranges([address], [keys], [targets], [sources], [[[size] for size in sizes]])
        if len(answer) != 1 or any(len(each) != 1 for each in answer[0]):
            raise RuntimeError(f"get_into_ranges gave results of another shape for {len(keys)} ranges")
        check_codes("get_into_ranges", keys, [each[0] for each in answer[0]], sizes)

    def _copy(self, parts: Sequence[_Part], target: memoryview) -> None:
        """Read chunks as bytes and copy what is wanted of them."""
        values: dict[str, bytes] = {}
        for part in parts:
            key, nbytes = part.chunk["key"], part.chunk["bytes"]
            if key not in values:
                values[key] = self._store.get(key)
                if len(values[key]) != nbytes:
                    raise RuntimeError(f"get of {key} failed: {len(values[key])} bytes instead of {nbytes}")
            target[part.at : part.at + part.nbytes] = values[key][part.offset : part.offset + part.nbytes]


class _Part(NamedTuple):
    """Bytes of one chunk that are wanted, and where in the target they go."""

    chunk: Mapping[str, Any]
    at: int
    offset: int
    nbytes: int


def _overlaps(chunks: Sequence[Mapping[str, Any]], start: int, target_at: int, nbytes: int) -> Iterator[_Part]:
    """Yield the chunks that hold a range."""
    at = 0
    for chunk in chunks:
        low, high = max(start, at), min(start + nbytes, at + chunk["bytes"])
        if low < high:
            yield _Part(chunk, target_at + low - start, low - at, high - low)
        at += chunk["bytes"]
