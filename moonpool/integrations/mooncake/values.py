"""`ValueCalls`: values as bytes, whether keys exist, sizes and removal."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from moonpool.base.errors import InvalidInput, MoonpoolError, NotFound
from moonpool.integrations.mooncake.base_store import StoreBase
from moonpool.integrations.mooncake.codes import ErrorCode, code_of
from moonpool.integrations.mooncake.types import BufferHandle, ReplicateConfig
from moonpool.store import Store
from moonpool.store.messages import Lookup
from moonpool.transfer.memory.buffers import as_bytes_view

if TYPE_CHECKING:
    from typing_extensions import Buffer

_LOG = logging.getLogger(__name__)


class ValueCalls(StoreBase):
    """One key or a batch of keys per call; results of a batch are by position. The memory of the values need not be
    registered.
    """

    # writing

    def put(self, key: str, value: Buffer, config: ReplicateConfig | None = None) -> int:
        """Copy `value` to the pool; its memory need not be registered. Return 0 also when the key is taken: the old
        value stays.
        """
        return self._put_copies([key], [[value]], config, replace=False)[0]

    def put_parts(self, key: str, *parts: Buffer, config: ReplicateConfig | None = None) -> int:
        """put() of several buffers as one value. Return 0 and store nothing when they are all empty. Raise RuntimeError
        for a part that is not a row of bytes.
        """
        return self._put_parts(key, parts, config, replace=False)

    def put_batch(self, keys: Sequence[str], values: Sequence[Buffer], config: ReplicateConfig | None = None) -> int:
        """put() of each. Return 0, or the first error; the other values are stored all the same."""
        return self._put_batch(keys, values, config, replace=False)

    def upsert(self, key: str, value: Buffer, config: ReplicateConfig | None = None) -> int:
        """Put the value, and replace an older one. Readers find the older one until the new one is complete."""
        return self._put_copies([key], [[value]], config, replace=True)[0]

    def upsert_parts(self, key: str, *parts: Buffer, config: ReplicateConfig | None = None) -> int:
        """upsert() of several buffers as one value; otherwise as put_parts()."""
        return self._put_parts(key, parts, config, replace=True)

    def upsert_batch(self, keys: Sequence[str], values: Sequence[Buffer], config: ReplicateConfig | None = None) -> int:
        """upsert() of each. Return 0, or the first error; the other values are stored all the same."""
        return self._put_batch(keys, values, config, replace=True)

    # reading

    def get(self, key: str) -> bytes:
        """Return the value, or b"" when there is none or it cannot be read."""
        return self._ask("get", lambda client: client.get(self._key(key)) or b"", lambda _: b"")

    def get_batch(self, keys: Sequence[str]) -> list[bytes]:
        """get() of each."""
        return [value or b"" for value in self._get_each(keys)]

    def get_buffer(self, key: str) -> BufferHandle | None:
        """Return a copy of the value with an address, or None when there is none or it cannot be read."""
        return self.batch_get_buffer([key])[0]

    def batch_get_buffer(self, keys: Sequence[str]) -> list[BufferHandle | None]:
        """get_buffer() of each."""
        return [None if value is None else BufferHandle(value) for value in self._get_each(keys)]

    # asking

    def is_exist(self, key: str) -> int:
        """Return 1 (the object is leased then), 0 or an error."""
        session = self._session
        if session is None:
            return ErrorCode.INVALID_PARAMS
        try:
            return int(session.client.exist(session.namespace + key.encode()))
        except MoonpoolError as error:
            self._log_error("exist", error)
            return code_of(error)

    def batch_is_exist(self, keys: Sequence[str]) -> list[int]:
        """Return 1 or 0 by position; objects that exist are leased. All results are the same error when the master
        could not be asked.
        """

        def exist(client: Store) -> list[int]:
            return [int(found) for found in client.exist_many(self._keys(keys))]

        return self._ask("exist", exist, lambda code: [code] * len(keys))

    def get_size(self, key: str) -> int:
        """Return the value's size in bytes, without its header, or an error."""

        def size(client: Store) -> int:
            nbytes = client.size(self._key(key))
            if nbytes is None:
                raise NotFound("no such object")
            return nbytes

        return self._ask("get_size", size, lambda code: code)

    # removing

    def remove(self, key: str, force: bool = False) -> int:
        """Remove an object. Return -704 when there is none, -706 while it is leased or pinned, unless `force`."""
        return self.batch_remove([key], force)[0]

    def batch_remove(self, keys: Sequence[str], force: bool = False) -> list[int]:
        """remove() of each."""

        def remove(client: Store) -> list[int]:
            names = [self._key(key) for key in keys]
            found = client.master.call(Lookup(keys=names, lease=False))  # exist() would lease them
            return [
                (ErrorCode.OK if info is not None else ErrorCode.OBJECT_NOT_FOUND)
                if is_gone
                else ErrorCode.OBJECT_HAS_LEASE
                for info, is_gone in zip(found, client.remove_many(names, force=force), strict=True)
            ]

        return self._ask("remove", remove, lambda code: [code] * len(keys)) if keys else []

    def remove_by_regex(self, regex_pattern: str, force: bool = False) -> int:
        """Remove the objects of this tenant in whose keys the regular expression is found; leased and pinned ones stay
        unless `force`. Return how many were removed, or an error.

        The expression is RE2's, so that it is searched for in linear time: look-around and backreferences are -600.
        """
        return self._remove_matching("remove_by_regex", regex_pattern, force)

    def remove_all(self, force: bool = False) -> int:
        """Remove all objects of this tenant; leased and pinned ones stay unless `force`. Return how many were removed,
        or an error. Objects of others stay.
        """
        return self._remove_matching("remove_all", None, force)

    def _remove_matching(self, what: str, pattern: str | None, force: bool) -> int:
        return self._ask(
            what,
            lambda client: client.remove_matching(pattern, prefix=self._key(""), force=force)[0],
            lambda code: code,
        )

    def _put_parts(self, key: str, parts: Sequence[Buffer], config: ReplicateConfig | None, *, replace: bool) -> int:
        views = [_row_of_bytes(part) for part in parts]
        if self._session is not None and not any(view.nbytes for view in views):
            return ErrorCode.OK
        return self._put_copies([key], [views], config, replace=replace)[0]

    def _put_batch(
        self, keys: Sequence[str], values: Sequence[Buffer], config: ReplicateConfig | None, *, replace: bool
    ) -> int:
        if self._session is None or len(keys) != len(values):
            return ErrorCode.INVALID_PARAMS
        results = self._put_copies(keys, [[value] for value in values], config, replace=replace)
        return next((code for code in results if code != ErrorCode.OK), ErrorCode.OK)

    def _put_copies(
        self, keys: Sequence[str], values: Sequence[Sequence[Buffer]], config: ReplicateConfig | None, *, replace: bool
    ) -> list[int]:
        """Put values from memory of any kind; upstream refuses `prefer_alloc_in_same_node` for these."""
        config = config or ReplicateConfig()
        if config.prefer_alloc_in_same_node:
            return [ErrorCode.INVALID_PARAMS] * len(keys)
        return self._put(keys, [_readable(value) for value in values], config, replace=replace)

    def _get_each(self, keys: Sequence[str]) -> list[bytes | None]:
        """Return the values by position; None where there is none or it cannot be read."""
        found = self._ask("get", lambda client: client.get_each(self._keys(keys)), lambda _: [NotFound()] * len(keys))
        return [self._value(key, outcome) for key, outcome in zip(keys, found, strict=True)]

    def _value(self, key: str, outcome: bytes | MoonpoolError) -> bytes | None:
        if not isinstance(outcome, MoonpoolError):
            return outcome
        self._log_error(f"get {key}", outcome)
        return None


def _readable(buffers: Sequence[Buffer]) -> list[memoryview]:
    """Return the bytes of the buffers without empty ones; [] when one of them is no buffer."""
    try:
        views = [as_bytes_view(buffer, writable=False) for buffer in buffers]
    except InvalidInput as error:
        _LOG.warning("put: %s", error)
        return []
    return [view for view in views if view.nbytes]


def _row_of_bytes(part: Buffer) -> memoryview:
    view = memoryview(part)
    if view.ndim != 1 or view.itemsize != 1:
        raise RuntimeError("parts must be 1-D bytes-like")
    return view
