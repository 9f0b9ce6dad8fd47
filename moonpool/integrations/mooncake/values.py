"""`ValueCalls`: values as bytes and in the caller's registered memory, whether keys exist, sizes and removal."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from moonpool.base.errors import InvalidInput, NotFound
from moonpool.integrations.mooncake.base_store import StoreBase
from moonpool.integrations.mooncake.codes import ErrorCode
from moonpool.integrations.mooncake.types import ReplicateConfig
from moonpool.store import Store
from moonpool.transfer.memory.buffers import as_bytes_view

if TYPE_CHECKING:
    from typing_extensions import Buffer

_LOG = logging.getLogger(__name__)


class ValueCalls(StoreBase):
    """One key or a batch of keys per call; results of a batch are by position."""

    # whole values

    def put(self, key: str, value: Buffer, config: ReplicateConfig | None = None) -> int:
        """Copy `value` to the pool; its memory need not be registered. Return 0 also when the key is taken: the old
        value stays.
        """
        config = config or ReplicateConfig()
        if config.prefer_alloc_in_same_node:
            return ErrorCode.INVALID_PARAMS
        try:
            view = as_bytes_view(value, writable=False)
        except InvalidInput as error:
            _LOG.warning("put: %s", error)
            return ErrorCode.INVALID_PARAMS
        return self._put([key], [[view] if view.nbytes else []], config)[0]

    def get(self, key: str) -> bytes:
        """Return the value, or b"" when there is none or it cannot be read."""
        return self._ask("get", lambda client: client.get(self._key(key)) or b"", lambda _: b"")

    def is_exist(self, key: str) -> int:
        """Return 1 (the object is leased then), 0 or an error."""
        return self.batch_is_exist([key])[0]

    def batch_is_exist(self, keys: Sequence[str]) -> list[int]:
        """Return 1 or 0 by position; objects that exist are leased. All results are the same error when the master
        could not be asked.
        """

        def exist(client: Store) -> list[int]:
            return [int(found) for found in client.exist_many([self._key(key) for key in keys])]

        return self._ask("exist", exist, lambda code: [code] * len(keys))

    def get_size(self, key: str) -> int:
        """Return the value's size in bytes, without its header, or an error."""

        def size(client: Store) -> int:
            nbytes = client.size(self._key(key))
            if nbytes is None:
                raise NotFound("no such object")
            return nbytes

        return self._ask("get_size", size, lambda code: code)

    def remove(self, key: str, force: bool = False) -> int:
        """Remove an object. Return -706 while it is leased or pinned, unless `force`."""

        def remove(client: Store) -> int:
            if not client.why(self._key(key)).startswith("this object is stored"):  # exist() would lease it
                raise NotFound("no such object")
            return ErrorCode.OK if client.remove(self._key(key), force=force) else ErrorCode.OBJECT_HAS_LEASE

        return self._ask("remove", remove, lambda code: code)

    def remove_all(self, force: bool = False) -> int:
        """Remove all objects of this tenant; leased and pinned ones stay unless `force`. Return how many were removed,
        or an error. Objects of others stay.
        """
        return self._ask(
            "remove_all",
            lambda client: client.remove_matching(f"^{re.escape(self._key('').decode())}", force=force)[0],
            lambda code: code,
        )

    # values in the caller's own memory, by pointer

    def batch_put_from_multi_buffers(
        self,
        keys: Sequence[str],
        all_buffer_ptrs: Sequence[Sequence[int]],
        all_sizes: Sequence[Sequence[int]],
        config: ReplicateConfig | None = None,
    ) -> list[int]:
        """Put values that are gathered from registered buffers, in their order; each buffer has its own checksum."""
        values = self._views("put", keys, all_buffer_ptrs, all_sizes)
        return self._put(keys, values, config or ReplicateConfig())

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
        targets = self._views("get", keys, all_buffer_ptrs, all_sizes)
        results: list[int] = [ErrorCode.INVALID_PARAMS] * len(keys)
        usable = [at for at, target in enumerate(targets) if target]
        outcomes = self._ask(
            "get",
            lambda client: client.get_many_into([self._key(keys[at]) for at in usable], [targets[at] for at in usable]),
            lambda code: code,
        )
        for number, at in enumerate(usable):
            outcome = outcomes if isinstance(outcomes, int) else outcomes[number]
            results[at] = self._code("get", keys[at], outcome)
        return results
