"""Whole values under a key: put, get, exist, size, remove."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from moonpool.base.errors import InvalidInput
from moonpool.integrations.mooncake.base_store import BaseStore
from moonpool.integrations.mooncake.codes import ErrorCode
from moonpool.integrations.mooncake.pool import MooncakePool
from moonpool.integrations.mooncake.replicate_config import ReplicateConfig
from moonpool.transfer.memory.buffers import as_bytes_view

if TYPE_CHECKING:
    from typing_extensions import Buffer

_LOG = logging.getLogger(__name__)


class ValueMethods(BaseStore):
    def put(self, key: str, value: Buffer, config: ReplicateConfig | None = None) -> int:
        """Copies `value` to the pool; it need not be registered. 0 also when the key is taken: the old value stays."""
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
        """b"" when it is not there or cannot be had."""
        return self._ask("get", lambda pool: pool.get(self._key(key)) or b"", lambda _: b"")

    def is_exist(self, key: str) -> int:
        """1, leased then, or 0, or an error."""
        return self.batch_is_exist([key])[0]

    def batch_is_exist(self, keys: Sequence[str]) -> list[int]:
        """1 or 0 by position; those that are there are leased. The same error for all when nobody could be asked."""

        def exist(pool: MooncakePool) -> list[int]:
            return [int(found) for found in pool.exist([self._key(key) for key in keys])]

        return self._ask("exist", exist, lambda code: [code] * len(keys))

    def get_size(self, key: str) -> int:
        """Bytes of the value, or an error."""
        return self._ask("get_size", lambda pool: pool.nbytes(self._key(key)), lambda code: code)

    def remove(self, key: str, force: bool = False) -> int:
        """-706 while it is leased or pinned, unless `force`."""

        def remove(pool: MooncakePool) -> int:
            return ErrorCode.OK if pool.remove(self._key(key), force) else ErrorCode.OBJECT_HAS_LEASE

        return self._ask("remove", remove, lambda code: code)

    def remove_all(self, force: bool = False) -> int:
        """How many objects of this tenant went, or an error. What others keep in the pool stays."""

        def remove(pool: MooncakePool) -> int:
            session = self._session
            return 0 if session is None else pool.remove_all(session.config.namespace, force)

        return self._ask("remove_all", remove, lambda code: code)
