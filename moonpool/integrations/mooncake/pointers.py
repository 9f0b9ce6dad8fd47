"""`PointerCalls`: values in the caller's registered memory, by address; main memory, or a GPU's.

Lists that differ in length, and memory that is not registered, are -600 by key; the other keys of a batch are not
affected.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

from moonpool.base.errors import MoonpoolError
from moonpool.integrations.mooncake.base_store import StoreBase
from moonpool.integrations.mooncake.codes import ErrorCode, code_of, transfer_code_of
from moonpool.integrations.mooncake.device_memory import MemoryStage
from moonpool.integrations.mooncake.types import ReplicateConfig
from moonpool.store.client import Put
from moonpool.store.keys_text import keys_bytes

_OK = ErrorCode.OK  # looking an attribute up takes longer than using it


class PointerCalls(StoreBase):
    # one buffer per value

    def put_from(self, key: str, buffer_ptr: int, size: int, config: ReplicateConfig | None = None) -> int:
        """Put `size` bytes at the address. Return 0 also when the key is taken, and when there are no bytes: nothing is
        stored then.
        """
        session, view = self._session, self._memory.find(buffer_ptr, size)
        if config is not None or session is None or view is None or not key:
            return self._put_one(key, [buffer_ptr], [size], config, replace=False)
        # The common case: nothing is made for lists and settings.
        put = Put(key=session.namespace + key.encode(), buffers=(view,), options=session.plain_options)
        try:
            outcome = session.client.put_object(put)
        except MoonpoolError as error:
            self._log_error("put", error)
            return code_of(error)
        return _OK if outcome is None else self._put_code(key, outcome)

    def put_from_with_metadata(
        self,
        key: str,
        buffer_ptr: int,
        metadata_buffer_ptr: int,
        size: int,
        metadata_size: int,
        config: ReplicateConfig | None = None,
    ) -> int:
        """Put one value: the metadata, then the `size` bytes at `buffer_ptr`. Without such bytes nothing is stored."""
        if size == 0:
            return self._put_one(key, [buffer_ptr], [0], config, replace=False)
        return self._put_one(key, [metadata_buffer_ptr, buffer_ptr], [metadata_size, size], config, replace=False)

    def upsert_from(self, key: str, buffer_ptr: int, size: int, config: ReplicateConfig | None = None) -> int:
        """put_from(), replacing an older value."""
        return self._put_one(key, [buffer_ptr], [size], config, replace=True)

    def get_into(self, key: str, buffer_ptr: int, size: int) -> int:
        """Read the value to the address. Return how many bytes; -600 when the value is larger than `size`."""
        session, view = self._session, self._memory.find(buffer_ptr, size)
        if session is not None and view is not None:
            got = session.client.get_remembered(session.namespace + key.encode(), view)
            if got is not None:
                return got
        if not self._gpu_memory.is_empty:
            return self.batch_get_into([key], [buffer_ptr], [size])[0]
        target = self._view("get", key, (buffer_ptr,), (size,)) if view is None else [view]
        if not target:
            return ErrorCode.INVALID_PARAMS
        return self._read_into([key], [target])[0]

    def batch_put_from(
        self,
        keys: Sequence[str],
        buffer_ptrs: Sequence[int],
        sizes: Sequence[int],
        config: ReplicateConfig | None = None,
    ) -> list[int]:
        """put_from() of each; empty values are -600 here."""
        return self._put_each(keys, buffer_ptrs, sizes, config, replace=False)

    def batch_upsert_from(
        self,
        keys: Sequence[str],
        buffer_ptrs: Sequence[int],
        sizes: Sequence[int],
        config: ReplicateConfig | None = None,
    ) -> list[int]:
        """upsert_from() of each; empty values are -600 here."""
        return self._put_each(keys, buffer_ptrs, sizes, config, replace=True)

    def batch_get_into(self, keys: Sequence[str], buffer_ptrs: Sequence[int], sizes: Sequence[int]) -> list[int]:
        """get_into() of each."""
        stage = self._stage()
        return self._get_into(keys, self._views_of_one("get", keys, buffer_ptrs, sizes, stage), stage)

    # several buffers per value

    def batch_put_from_multi_buffers(
        self,
        keys: Sequence[str],
        all_buffer_ptrs: Sequence[Sequence[int]],
        all_sizes: Sequence[Sequence[int]],
        config: ReplicateConfig | None = None,
    ) -> list[int]:
        """Put values that are gathered from registered buffers, in their order; each buffer has its own checksum."""
        stage = self._stage()
        values = self._views("put", keys, all_buffer_ptrs, all_sizes, stage)
        return self._put_staged(keys, values, config or ReplicateConfig(), stage, replace=False)

    def batch_get_into_multi_buffers(
        self,
        keys: Sequence[str],
        all_buffer_ptrs: Sequence[Sequence[int]],
        all_sizes: Sequence[Sequence[int]],
        prefer_alloc_in_same_node: bool = False,
    ) -> list[int]:
        """Read values into registered buffers, which are filled in their order. Return the bytes read per key.

        The buffers of a key must together be as large as its value (-600 otherwise); their sizes may differ from those
        it was put from. After an error the bytes in the buffers mean nothing. A replica on this machine is always
        preferred, whatever `prefer_alloc_in_same_node` says.
        """
        stage = self._stage()
        return self._get_into(keys, self._views("get", keys, all_buffer_ptrs, all_sizes, stage), stage)

    def _get_into(
        self, keys: Sequence[str], targets: Sequence[list[memoryview]], stage: MemoryStage | None
    ) -> list[int]:
        """Read values into their memory; those without memory are -600."""
        if all(targets):
            results = self._read_into(keys, targets)
        else:
            results = [ErrorCode.INVALID_PARAMS] * len(keys)
            usable = [at for at, target in enumerate(targets) if target]
            codes = self._read_into([keys[at] for at in usable], [targets[at] for at in usable])
            for at, found in zip(usable, codes, strict=True):
                results[at] = found
        code = self._copy("get", stage, lambda used: used.write_back(results))
        return results if code == ErrorCode.OK else [code if result >= 0 else result for result in results]

    def _read_into(self, keys: Sequence[str], targets: Sequence[list[memoryview]]) -> list[int]:
        """Read values into their memory. Return for each the number of bytes, or its error's."""
        outcomes = self._ask(
            "get", lambda client: client.read_into(keys_bytes(self._keys(keys)), targets, None), lambda code: code
        )
        if isinstance(outcomes, int):
            return [outcomes] * len(keys)
        return [
            self._code("get", key, each) if isinstance(each, MoonpoolError) else each
            for key, each in zip(keys, cast("list[int | MoonpoolError]", outcomes), strict=True)
        ]

    def _put_one(
        self,
        key: str,
        pointers: Sequence[int],
        sizes: Sequence[int],
        config: ReplicateConfig | None,
        *,
        replace: bool,
    ) -> int:
        config = config or ReplicateConfig()
        if self._session is None or config.prefer_alloc_in_same_node:
            return ErrorCode.INVALID_PARAMS
        if not any(sizes):
            return ErrorCode.OK
        stage = self._stage()
        values = [self._view("put", key, pointers, sizes, stage)]
        return self._put_staged([key], values, config, stage, replace=replace)[0]

    def _put_each(
        self,
        keys: Sequence[str],
        pointers: Sequence[int],
        sizes: Sequence[int],
        config: ReplicateConfig | None,
        *,
        replace: bool,
    ) -> list[int]:
        config = config or ReplicateConfig()
        if config.prefer_alloc_in_same_node:
            return [ErrorCode.INVALID_PARAMS] * len(keys)
        stage = self._stage()
        values = self._views_of_one("put", keys, pointers, sizes, stage)
        return self._put_staged(keys, values, config, stage, replace=replace)

    def _put_staged(
        self,
        keys: Sequence[str],
        values: Sequence[list[memoryview]],
        config: ReplicateConfig,
        stage: MemoryStage | None,
        *,
        replace: bool,
    ) -> list[int]:
        code = self._copy("put", stage, MemoryStage.fill)
        return self._put(keys, values, config, replace=replace) if code == ErrorCode.OK else [code] * len(keys)

    def _copy(self, what: str, stage: MemoryStage | None, copy: Callable[[MemoryStage], None]) -> int:
        """Copy between a GPU's memory and the stage. Return 0, or the error when the GPU could not."""
        if stage is None:
            return ErrorCode.OK
        try:
            copy(stage)
        except MoonpoolError as error:
            self._log_error(what, error)
            return transfer_code_of(error)
        return ErrorCode.OK
