"""Chunks of buffers written to a store: from a pool of registered memory, from the caller's memory, or as plain puts.

The store is any object with put. What else it has is used: with a buffer pool `batch_put_from` reads the pool's memory,
`put_batch` writes many chunks at once, and `put_tensor` or `pub_tensor` stores tensors. Codes of the store that are not
0 are RuntimeErrors. Nothing is undone here: who writes removes what was written.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

from moonpool.integrations.mooncake.buffer_pool import BufferPool
from moonpool.integrations.mooncake.bundle_payloads import (
    StoredChunk,
    TensorObjectBuffer,
    TensorPayload,
    describe_chunks,
    memory_at,
)
from moonpool.integrations.mooncake.codes import ErrorCode
from moonpool.integrations.mooncake.tensor_format import HEADER_NBYTES
from moonpool.integrations.mooncake.tensor_memory import tensor_parts, torch_module
from moonpool.integrations.mooncake.write_groups import options
from moonpool.transfer.memory.buffers import address_of, as_bytes_view, copy_bytes

DEFAULT_CHUNK_NBYTES = 64 * 1024 * 1024
PARALLEL_MIN_NBYTES = DEFAULT_CHUNK_NBYTES
PARALLEL_MIN_CHUNKS = 8


class BundleStore(Protocol):
    """What a store must have."""

    def put(self, key: str, value: Any, config: Any = None) -> int: ...
    def get(self, key: str) -> bytes: ...
    def remove(self, key: str, force: bool = False) -> int: ...


@dataclass(frozen=True)
class BundleTransferPolicy:
    """How chunks are written. `zero_copy` raises where bytes would have to be copied before the store reads them."""

    max_inflight_put: int = 1
    put_mode: Literal["auto", "batch", "parallel"] = "auto"
    copy_mode: Literal["auto", "zero_copy", "copy"] = "auto"

    def check(self) -> None:
        if self.max_inflight_put < 1:
            raise ValueError(f"max_inflight_put must be positive, not {self.max_inflight_put}")
        if self.put_mode not in ("auto", "batch", "parallel"):
            raise ValueError(f"there is no put_mode {self.put_mode!r}")
        if self.copy_mode not in ("auto", "zero_copy", "copy"):
            raise ValueError(f"there is no copy_mode {self.copy_mode!r}")

    def copying(self) -> BundleTransferPolicy:
        """Return the policy for small bytes that are made for the put, such as metadata."""
        return replace(self, copy_mode="copy")


class PayloadWriter:
    """Writes chunks and tensors to `store`, through registered memory of `buffer_pool` where there is one."""

    def __init__(self, store: BundleStore, buffer_pool: Any = None) -> None:
        self._store: Any = store
        self._pool = buffer_pool

    def put_chunks(self, chunks: Sequence[StoredChunk], policy: BundleTransferPolicy, config: Any = None) -> None:
        if not chunks:
            return
        if policy.copy_mode == "zero_copy":
            self._put_from_source(chunks, config)
        elif policy.copy_mode == "auto" and self._pool is not None and has(self._store, "batch_put_from"):
            self._in_turns(chunks, policy, lambda chunk: self._put_through_pool(chunk, config))
        elif policy.copy_mode == "auto" and has(self._store, "put_batch"):
            values = [_joined(chunk.parts) for chunk in chunks]
            keys = [chunk.key for chunk in chunks]
            check_status("put_batch", keys[0], self._store.put_batch(keys, values, **options(config, len(keys))))
        else:
            self._in_turns(chunks, policy, lambda chunk: self._put_plain(chunk, config))

    def put_tensor(
        self, key: str, payload: TensorPayload | TensorObjectBuffer, policy: BundleTransferPolicy, config: Any = None
    ) -> dict[str, Any]:
        """Store a tensor as one object. Return what the manifest says about it."""
        if isinstance(payload, TensorObjectBuffer):
            return self._put_object_buffer(key, payload, policy, config)
        if policy.copy_mode == "zero_copy":
            raise ValueError("zero-copy tensors lie in a BufferPool tensor-object buffer; see tensor_object_buffer()")
        call = "put_tensor" if config is None else "pub_tensor"
        if policy.copy_mode == "auto" and has(self._store, call):
            check_status(call, key, getattr(self._store, call)(key, payload.tensor, **options(config, 1)))
            return _direct_spec(key, payload.tensor)
        if payload.tensor.dim() == 0:  # readers of upstream's give a header without dimensions the shape 1
            chunk = StoredChunk(key, [memoryview(_saved(payload.tensor))])
            extra: dict[str, Any] = {"format": "torch_save"}
        else:
            header, elements = tensor_parts(payload.tensor)
            chunk = StoredChunk(key, [memoryview(header.pack()), elements])
            extra = {"metadata_bytes": HEADER_NBYTES}
        self.put_chunks([chunk], policy, config)
        return {**describe_chunks(key, [chunk]), **extra}

    def _put_object_buffer(
        self, key: str, payload: TensorObjectBuffer, policy: BundleTransferPolicy, config: Any
    ) -> dict[str, Any]:
        memory = memory_at(payload)
        spec = describe_chunks(key, [StoredChunk(key, [memory])])
        call = "put_tensor_from" if config is None and has(self._store, "put_tensor_from") else "put_from"
        if has(self._store, call):
            with registered(self._store, [memory]) as pointers:
                code = getattr(self._store, call)(key, pointers[0], memory.nbytes, **options(config, 1))
            check_status(call, key, code)
            return spec
        if policy.copy_mode == "zero_copy":
            raise RuntimeError("the store cannot do a zero-copy put: it has no put_from")
        self.put_chunks([StoredChunk(key, [memory])], policy, config)
        return spec

    def _put_plain(self, chunk: StoredChunk, config: Any) -> None:
        check_status("put", chunk.key, self._store.put(chunk.key, _joined(chunk.parts), **options(config, 1)))

    def _put_through_pool(self, chunk: StoredChunk, config: Any) -> None:
        lease = lend(self._pool, chunk.nbytes)
        if lease is None:
            self._put_plain(chunk, config)
            return
        try:
            at = 0
            with as_bytes_view(lease.buffer, writable=True) as target:  # a lease with a view cannot be released
                for part in chunk.parts:
                    copy_bytes(target[at : at + part.nbytes], part)
                    at += part.nbytes
            codes = self._store.batch_put_from([chunk.key], [lease.ptr], [at], **options(config, 1))
            check_codes("batch_put_from", [chunk.key], codes, [0])
        finally:
            lease.release()

    def _put_from_source(self, chunks: Sequence[StoredChunk], config: Any) -> None:
        """Let the store read the caller's memory."""
        if any(len(chunk.parts) > 1 for chunk in chunks):
            raise RuntimeError("a zero-copy put needs the bytes of a chunk in one place")
        if not has(self._store, "batch_put_from", *REGISTRATION):
            raise RuntimeError("the store cannot do a zero-copy put: it has no registered memory or no batch_put_from")
        keys, sizes = [chunk.key for chunk in chunks], [chunk.nbytes for chunk in chunks]
        with registered(self._store, [chunk.parts[0] for chunk in chunks]) as pointers:
            codes = self._store.batch_put_from(keys, pointers, sizes, **options(config, len(keys)))
        check_codes("batch_put_from", keys, codes, [0] * len(keys))

    def _in_turns(
        self, chunks: Sequence[StoredChunk], policy: BundleTransferPolicy, put: Callable[[StoredChunk], None]
    ) -> None:
        mode = self._resolve_buffer_group_put_mode([chunk.parts for chunk in chunks], policy)
        if mode == "batch" or policy.max_inflight_put == 1:
            for chunk in chunks:
                put(chunk)
            return
        with ThreadPoolExecutor(min(policy.max_inflight_put, len(chunks))) as threads:
            list(threads.map(put, chunks))

    @staticmethod
    def _resolve_buffer_group_put_mode(groups: Sequence[Sequence[Any]], policy: BundleTransferPolicy) -> str:
        """Return "parallel" where several threads write: when told so, or when many bytes are in many chunks."""
        if policy.put_mode != "auto":
            return policy.put_mode
        is_much = sum(len(part) for group in groups for part in group) >= PARALLEL_MIN_NBYTES
        is_worth_it = policy.max_inflight_put > 1 and len(groups) >= PARALLEL_MIN_CHUNKS and is_much
        return "parallel" if is_worth_it else "batch"


def lend(pool: Any, nbytes: int) -> Any:
    """Return a lease; None when the pool has nothing left. It is not waited for: what the caller read lies in the pool
    too, and only the caller can give it back.
    """
    try:
        return pool.acquire(nbytes, block=False) if isinstance(pool, BufferPool) else pool.acquire(nbytes)
    except RuntimeError:
        return None


REGISTRATION = ("register_buffer", "unregister_buffer")


@contextmanager
def registered(store: Any, views: Sequence[memoryview]) -> Iterator[list[int]]:
    """Register memory for the block and yield its addresses. Memory that the store refuses may be registered already:
    the call that uses it will tell.
    """
    pointers = [address_of(view) for view in views]
    own: list[int] = []
    try:
        if has(store, *REGISTRATION):
            for pointer, view in zip(pointers, views, strict=True):
                if pointer not in own and store.register_buffer(pointer, view.nbytes) == ErrorCode.OK:
                    own.append(pointer)
        yield pointers
    finally:
        for pointer in own:
            store.unregister_buffer(pointer)


def has(store: Any, *calls: str) -> bool:
    return all(callable(getattr(store, name, None)) for name in calls)


def check_status(what: str, key: str, code: Any) -> None:
    if code not in (None, 0):
        raise RuntimeError(f"{what} of {key} failed: {code}")


def check_codes(what: str, keys: Sequence[str], codes: Sequence[int], expected: Sequence[int]) -> None:
    if len(codes) != len(keys):
        raise RuntimeError(f"{what} gave {len(codes)} results for {len(keys)} keys")
    for key, code, good in zip(keys, codes, expected, strict=True):
        if code != good:
            raise RuntimeError(f"{what} of {key} failed: {code} instead of {good}")


def _direct_spec(key: str, tensor: Any) -> dict[str, Any]:
    nbytes = HEADER_NBYTES + tensor.numel() * tensor.element_size()
    return {
        "key": key,
        "kind": "tensor",
        "bytes": nbytes,
        "dtype": str(tensor.dtype),
        "shape": list(tensor.shape),
        "chunks": [{"key": key, "bytes": nbytes}],
        "metadata_bytes": HEADER_NBYTES,
    }


def _joined(parts: Sequence[memoryview]) -> memoryview | bytes:
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _saved(tensor: Any) -> bytes:
    file = io.BytesIO()
    torch_module().save(tensor.detach().cpu(), file)
    return file.getvalue()
