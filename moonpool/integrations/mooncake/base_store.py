"""`StoreBase`: what all groups of Mooncake's calls share, from setup() to close().

It owns the connection to the pool and the caller's registered memory, and turns our errors into upstream's numbers.
"""

from __future__ import annotations

import atexit
import logging
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import repeat
from typing import Any, TypeVar

from moonpool.base.errors import (
    AlreadyExists,
    BreakerOpen,
    ConfigError,
    InvalidInput,
    MoonpoolError,
    NoSpace,
    NotFound,
    Unavailable,
)
from moonpool.base.log import RateLimitedLog
from moonpool.integrations.mooncake.codes import ErrorCode, code_of, transfer_code_of
from moonpool.integrations.mooncake.device_memory import MemoryStage, RegisteredDeviceMemory
from moonpool.integrations.mooncake.engine_types import InnerTransferEngine
from moonpool.integrations.mooncake.registered_memory import RegisteredMemory
from moonpool.integrations.mooncake.session import MooncakeSession
from moonpool.integrations.mooncake.setup_config import SetupConfig
from moonpool.integrations.mooncake.types import ReplicateConfig
from moonpool.store import Store
from moonpool.store.client import Put

_LOG = logging.getLogger(__name__)
_BY_POSITION = (
    "metadata_server",
    "global_segment_size",
    "local_buffer_size",
    "protocol",
    "rdma_devices",
    "master_server_addr",
    "engine",
)
R = TypeVar("R")
E = TypeVar("E")


class StoreBase:
    """A client of the pool from setup() to close()."""

    def __init__(self) -> None:
        self._session: MooncakeSession | None = None
        self._memory = RegisteredMemory()
        self._gpu_memory = RegisteredDeviceMemory()
        self._lifecycle = threading.Lock()
        self._rare_log = RateLimitedLog(_LOG)
        self._forgotten: weakref.finalize[..., StoreBase] | None = None

    # from setup() to close()

    def setup(self, local_hostname: str | Mapping[str, Any], *settings: Any, **named: Any) -> int:
        """Connect to the pool. Takes either one mapping of settings, or local_hostname, metadata_server,
        global_segment_size, local_buffer_size, protocol, rdma_devices and master_server_addr in this order, and further
        settings by name (SetupConfig).

        `master_server_addr` is the address of Moonpool's master: "host:port" or "unix:/path". A `global_segment_size`
        above 0 offers that much of this process's memory to the pool until close().
        """
        with self._lifecycle:
            try:
                if self._session is not None:
                    raise InvalidInput("this store is set up already; close it first")
                config = _setup_config(local_hostname, settings, named)
                config.log_ignored_settings()
                self._session = MooncakeSession(config)
            except MoonpoolError as error:
                _LOG.error("setup: %s", error)
                return code_of(error)
            # At exit without close(), the session takes its memory out of the pool. When the last reference to the
            # store is gone, the session is closed.
            atexit.register(self._session.leave_quietly)
            self._forgotten = weakref.finalize(self, self._session.close_soon)
            self._forgotten.atexit = False
            return ErrorCode.OK

    def close(self) -> int:
        """Take the offered memory back and forget all registered memory. Idempotent."""
        with self._lifecycle:
            session, self._session = self._session, None
            if session is None:
                return ErrorCode.OK
            atexit.unregister(session.leave_quietly)
            if self._forgotten is not None:
                self._forgotten.detach()
            self._memory.clear()
            self._gpu_memory.clear()
            try:
                session.close()
            except MoonpoolError as error:
                _LOG.warning("close: %s", error)
                return code_of(error)
            return ErrorCode.OK

    def health_check(self) -> int:
        """Return 0 when the master answers, 1 before setup(), 2 when the master does not answer."""
        if self._session is None:
            return 1
        return self._ask("health_check", lambda client: len(client.exist_many([])), lambda _: 2)

    def get_hostname(self) -> str:
        """Return `host:number`. As a preferred_segment it means the memory that this store offers."""
        session = self._session
        return "" if session is None else session.hostname

    def local_buffer_nbytes(self) -> int:
        """Return the local_buffer_size of setup() in bytes, the default size of a BufferPool; -600 before setup()."""
        session = self._session
        return ErrorCode.INVALID_PARAMS if session is None else session.config.local_buffer_nbytes

    def counters(self) -> dict[str, int]:
        """Return Moonpool's own numbers: bytes_read, bytes_written, hits, misses, corrupt_replicas, refused_<code>."""
        session = self._session
        return {} if session is None else session.client.counters()

    # the caller's own memory

    def register_buffer(self, buffer_ptr: int, size: int) -> int:
        """Register main memory of this process, or a GPU's. It must stay until unregister_buffer() or close()."""

        def register() -> None:
            if not self._gpu_memory.register(buffer_ptr, size):
                self._memory.register(buffer_ptr, size)

        return self._on_memory(register)

    def unregister_buffer(self, buffer_ptr: int) -> int:
        def unregister() -> None:
            if not self._gpu_memory.unregister(buffer_ptr):
                self._memory.unregister(buffer_ptr)

        return self._on_memory(unregister)

    def _ask(self, what: str, action: Callable[[Store], R], on_error: Callable[[int], E]) -> R | E:
        """Return the result of `action`, or of `on_error` with the error code when `action` raises."""
        session = self._session
        if session is None:
            return on_error(ErrorCode.INVALID_PARAMS)
        try:
            return action(session.client)
        except MoonpoolError as error:
            self._log_error(what, error)
            return on_error(code_of(error))

    def _put(
        self,
        keys: Sequence[str],
        values: Sequence[list[memoryview]],
        config: ReplicateConfig,
        *,
        replace: bool = False,
    ) -> list[int]:
        """Put all values with one call; with `replace`, over older ones. Return the results by position; empty keys and
        values are refused.
        """
        refusal = config.check(len(keys))
        if refusal is not ErrorCode.OK:
            return [refusal] * len(keys)
        results: list[int] = [ErrorCode.INVALID_PARAMS] * len(keys)
        usable = [at for at, value in enumerate(values) if value and keys[at]]

        def put(client: Store) -> list[MoonpoolError | None]:
            options = config.options(self._segments_of(config.preferred), replace)
            names = self._keys([keys[at] for at in usable])
            groups = repeat(b"") if config.group_ids is None else [self._group(config, at) for at in usable]
            return client.put_objects(
                [
                    Put(key=name, buffers=values[at], options=options, group=group)
                    for name, at, group in zip(names, usable, groups, strict=False)
                ]
            )

        outcomes = self._ask("put", put, lambda code: code)
        for number, at in enumerate(usable):
            outcome = outcomes if isinstance(outcomes, int) else outcomes[number]
            results[at] = ErrorCode.OK if outcome is None else self._put_code(keys[at], outcome)
        return results

    def _put_code(self, key: str, outcome: int | MoonpoolError) -> int:
        """Return the number for one put's error; a taken key is none."""
        return ErrorCode.OK if isinstance(outcome, AlreadyExists) else self._code("put", key, outcome)

    def _code(self, what: str, key: str, outcome: int | MoonpoolError | None) -> int:
        """Return the number for one key's outcome. Log errors other than a miss."""
        if not isinstance(outcome, MoonpoolError):
            return outcome or ErrorCode.OK
        self._log_error(f"{what} {key}", outcome)
        if what == "put" and isinstance(outcome, NotFound):
            return ErrorCode.TRANSFER_FAIL  # what was not found is the memory, which went away after it was allotted
        return transfer_code_of(outcome)

    def _log_error(self, what: str, error: MoonpoolError) -> None:
        """Log the error, unless it is a miss. An outage or a full pool lasts for thousands of calls; the client itself
        logs one line about a master that is away and about memory that cannot be read.
        """
        if isinstance(error, BreakerOpen) or (isinstance(error, Unavailable) and what.startswith("get")):
            _LOG.debug("%s: %s", what, error)
        elif isinstance(error, Unavailable):
            self._rare_log.warning("the pool, or a part of it, cannot be reached: %s", error)
        elif isinstance(error, NoSpace):
            self._rare_log.warning("the pool is full: %s", error)
        elif not isinstance(error, NotFound):
            _LOG.warning("%s: %s (%d)", what, error, code_of(error))

    def _keys(self, keys: Iterable[str]) -> list[bytes]:
        """_key() of each."""
        session = self._session
        if session is None:
            raise InvalidInput("this store was closed")
        namespace = session.namespace
        return [namespace + key.encode() for key in keys]

    def _key(self, key: str) -> bytes:
        session = self._session
        if session is None:
            raise InvalidInput("this store was closed")
        return session.namespace + key.encode()

    def _group(self, config: ReplicateConfig, at: int) -> bytes:
        return b"" if config.group_ids is None else self._key(config.group_ids[at])

    def _segments_of(self, preferred: Sequence[str]) -> tuple[str, ...]:
        """Return the pool's names of preferred segments, by default of the memory that this store offers. Upstream
        names a segment by its client's hostname.
        """
        session = self._session
        if session is None:
            return ()
        own = () if session.segment_name is None else (session.segment_name,)
        found: list[str] = []
        for name in preferred:
            found += own if own and name == session.hostname else session.names.resolve(name)
        return tuple(found) if preferred else own

    def _stage(self) -> MemoryStage | None:
        """Return what stands for the GPU memory in one call; None when no GPU memory is registered."""
        return None if self._gpu_memory.is_empty else MemoryStage(self._memory, self._gpu_memory)

    def _views(
        self,
        what: str,
        keys: Sequence[str],
        pointers: Sequence[Sequence[int]],
        sizes: Sequence[Sequence[int]],
        stage: MemoryStage | None = None,
    ) -> list[list[memoryview]]:
        """Return the memory of each key; [] where the lists differ in length or the memory is not registered."""
        if not len(keys) == len(pointers) == len(sizes):
            _LOG.warning("%s: %d keys, %d lists of buffers, %d of sizes", what, len(keys), len(pointers), len(sizes))
            return [[] for _ in keys]
        return [self._view(what, *each, stage) for each in zip(keys, pointers, sizes, strict=True)]

    def _views_of_one(
        self,
        what: str,
        keys: Sequence[str],
        pointers: Sequence[int],
        sizes: Sequence[int],
        stage: MemoryStage | None = None,
    ) -> list[list[memoryview]]:
        """_views() of keys with one buffer each, without a list for each."""
        if stage is None and len(keys) == len(pointers) == len(sizes):
            try:
                return [[view] if view.nbytes else [] for view in self._memory.views(pointers, sizes)]
            except InvalidInput:  # the others are not affected: look at each of them
                pass
        return self._views(what, keys, [[each] for each in pointers], [[each] for each in sizes], stage)

    def _view(
        self,
        what: str,
        key: str,
        pointers: Sequence[int],
        sizes: Sequence[int],
        stage: MemoryStage | None = None,
    ) -> list[memoryview]:
        if len(pointers) != len(sizes):
            _LOG.warning("%s %s: %d buffers, %d sizes", what, key, len(pointers), len(sizes))
            pointers = sizes = ()  # not left out: a stage counts the keys
        try:
            views = (stage or self._memory).views(pointers, sizes)
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


def _setup_config(
    local_hostname: str | Mapping[str, Any], settings: Sequence[Any], named: Mapping[str, Any]
) -> SetupConfig:
    if isinstance(local_hostname, Mapping):
        if settings or named:
            raise ConfigError("setup takes one mapping or the settings one by one, not both")
        return SetupConfig.from_mapping(local_hostname)
    if len(settings) > len(_BY_POSITION):
        raise ConfigError(f"setup takes {len(_BY_POSITION) + 1} settings by position")
    values = {"local_hostname": local_hostname, **dict(zip(_BY_POSITION, settings, strict=False)), **named}
    if not isinstance(values.pop("engine", None), InnerTransferEngine | None):
        raise ConfigError("the engine is none of mooncake.engine's get_engine()", param="engine")
    return SetupConfig.from_mapping(values)
