"""Values in the caller's own memory, by pointer: registered once, then gathered from and scattered to."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from moonpool.base.errors import InvalidInput
from moonpool.integrations.mooncake.base_store import BaseStore
from moonpool.integrations.mooncake.codes import ErrorCode
from moonpool.integrations.mooncake.replicate_config import ReplicateConfig

_LOG = logging.getLogger(__name__)


class BufferMethods(BaseStore):
    def register_buffer(self, buffer_ptr: int, size: int) -> int:
        """Main memory only. It must stay where it is until unregister_buffer() or close()."""
        return self._on_memory(lambda: self._memory.register(buffer_ptr, size))

    def unregister_buffer(self, buffer_ptr: int) -> int:
        return self._on_memory(lambda: self._memory.unregister(buffer_ptr))

    def batch_put_from_multi_buffers(
        self,
        keys: Sequence[str],
        all_buffer_ptrs: Sequence[Sequence[int]],
        all_sizes: Sequence[Sequence[int]],
        config: ReplicateConfig | None = None,
    ) -> list[int]:
        """Each value is its buffers, one behind the other, all in registered memory; each is checksummed by itself."""
        values = self._views("put", keys, all_buffer_ptrs, all_sizes)
        return self._put(keys, values, config or ReplicateConfig())

    def batch_get_into_multi_buffers(
        self,
        keys: Sequence[str],
        all_buffer_ptrs: Sequence[Sequence[int]],
        all_sizes: Sequence[Sequence[int]],
        prefer_alloc_in_same_node: bool = False,
    ) -> list[int]:
        """Bytes read per key. The buffers, in registered memory, are filled one behind the other; together they must
        be as large as the value (-600 otherwise) and may be cut otherwise than when it was put. After an error their
        bytes mean nothing. A replica on this machine is always preferred, asked for or not.
        """
        targets = self._views("get", keys, all_buffer_ptrs, all_sizes)
        results: list[int] = [ErrorCode.INVALID_PARAMS] * len(keys)
        usable = [at for at, target in enumerate(targets) if target]
        outcomes = self._ask(
            "get",
            lambda pool: pool.get_many([self._key(keys[at]) for at in usable], [targets[at] for at in usable]),
            lambda code: code,
        )
        for number, at in enumerate(usable):
            outcome = outcomes if isinstance(outcomes, int) else outcomes[number]
            results[at] = self._code("get", keys[at], outcome)
        return results

    def _views(
        self, what: str, keys: Sequence[str], pointers: Sequence[Sequence[int]], sizes: Sequence[Sequence[int]]
    ) -> list[list[memoryview]]:
        """The memory of each key; none where the lists do not fit each other or the memory is not registered."""
        if not len(keys) == len(pointers) == len(sizes):
            _LOG.warning("%s: %d keys, %d lists of buffers, %d of sizes", what, len(keys), len(pointers), len(sizes))
            return [[] for _ in keys]
        return [self._view(what, *each) for each in zip(keys, pointers, sizes, strict=True)]

    def _view(self, what: str, key: str, pointers: Sequence[int], sizes: Sequence[int]) -> list[memoryview]:
        try:
            if len(pointers) != len(sizes):
                raise InvalidInput(f"{len(pointers)} buffers, {len(sizes)} sizes")
            views = [self._memory.view(*each) for each in zip(pointers, sizes, strict=True)]
        except InvalidInput as error:
            _LOG.warning("%s %s: %s", what, key, error)
            return []
        return [view for view in views if view.nbytes]

    def _on_memory(self, action: Callable[[], None]) -> int:
        if self._session is None:
            return ErrorCode.INVALID_PARAMS
        try:
            action()
        except InvalidInput as error:
            _LOG.warning("register_buffer: %s", error)
            return ErrorCode.INVALID_PARAMS
        return ErrorCode.OK
