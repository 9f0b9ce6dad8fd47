"""What all methods of the store share: the session between setup() and close(), registered memory, keys, and the
rule that errors become numbers.
"""

from __future__ import annotations

import atexit
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from moonpool.base.errors import (
    AlreadyExists,
    BreakerOpen,
    ConfigError,
    InvalidInput,
    MoonpoolError,
    NotFound,
    Unavailable,
)
from moonpool.base.log import RateLimitedLog
from moonpool.integrations.mooncake.codes import ErrorCode, code_of, transfer_code_of
from moonpool.integrations.mooncake.pool import MooncakePool
from moonpool.integrations.mooncake.registered_memory import RegisteredMemory
from moonpool.integrations.mooncake.replicate_config import ReplicateConfig
from moonpool.integrations.mooncake.session import MooncakeSession
from moonpool.integrations.mooncake.setup_config import SetupConfig

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


class BaseStore:
    """Set up, closed, asked whether it is well. Thread-safe."""

    def __init__(self) -> None:
        self._session: MooncakeSession | None = None
        self._memory = RegisteredMemory()
        self._lifecycle = threading.Lock()
        self._rare_log = RateLimitedLog(_LOG)

    def setup(self, local_hostname: str | Mapping[str, Any], *settings: Any, **named: Any) -> int:
        """Either one mapping of settings, or local_hostname, metadata_server, global_segment_size,
        local_buffer_size, protocol, rdma_devices and master_server_addr in this order, more by name (SetupConfig).

        `master_server_addr` is our master's: "host:port" or "unix:/path". A `global_segment_size` above 0 offers that
        much of this process's memory to the pool until close().
        """
        with self._lifecycle:
            try:
                if self._session is not None:
                    raise InvalidInput("this store is set up already; close it first")
                config = _setup_config(local_hostname, settings, named)
                config.say_what_is_ignored()
                self._session = MooncakeSession(config)
            except MoonpoolError as error:
                _LOG.error("setup: %s", error)
                return code_of(error)
            atexit.register(self._leave)  # an engine that just exits still takes its memory out of the pool
            return ErrorCode.OK

    def close(self) -> int:
        """Idempotent. Ends the memory offered and every registration."""
        with self._lifecycle:
            session, self._session = self._session, None
            if session is None:
                return ErrorCode.OK
            atexit.unregister(self._leave)
            self._memory.clear()
            try:
                session.close()
            except MoonpoolError as error:
                _LOG.warning("close: %s", error)
                return code_of(error)
            return ErrorCode.OK

    def health_check(self) -> int:
        """0: well; 1: not set up; 2: the master does not answer."""
        if self._session is None:
            return 1
        return self._ask("health_check", MooncakePool.is_well, lambda _: 2)

    def get_hostname(self) -> str:
        """`host:number`; as a preferred_segment it means the memory that this store offers."""
        session = self._session
        return "" if session is None else session.config.hostname

    def counters(self) -> dict[str, int]:
        """Moonpool's own numbers: bytes_read, bytes_written, hits, misses, corrupt_replicas, refused_<code>."""
        session = self._session
        return {} if session is None else session.client.counters()

    def _leave(self) -> None:
        """The process ends without close(), which would fail half way: the interpreter starts no more threads."""
        session, self._session = self._session, None
        if session is not None:
            try:
                session.leave()
            except MoonpoolError as error:
                _LOG.warning("this process ends without close(), and its memory stays in the pool for now: %s", error)

    # for the methods in the other files

    def _ask(self, what: str, action: Callable[[MooncakePool], R], on_error: Callable[[int], E]) -> R | E:
        """What `action` answers; `on_error` of a code when nobody could be asked."""
        session = self._session
        if session is None:
            return on_error(ErrorCode.INVALID_PARAMS)
        try:
            return action(session.pool)
        except MoonpoolError as error:
            self._complain(what, error)
            return on_error(code_of(error))

    def _put(self, keys: Sequence[str], values: Sequence[list[memoryview]], config: ReplicateConfig) -> list[int]:
        """Empty keys and values are refused. One call for all, results by position."""
        refusal = config.check(len(keys))
        if refusal is not ErrorCode.OK:
            return [refusal] * len(keys)
        results: list[int] = [ErrorCode.INVALID_PARAMS] * len(keys)
        usable = [at for at, value in enumerate(values) if value and keys[at]]
        outcomes = self._ask(
            "put",
            lambda pool: pool.put_many(
                [self._key(keys[at]) for at in usable],
                [values[at] for at in usable],
                config.options(self._segment_of(config.preferred)),
                [self._group(config, at) for at in usable],
            ),
            lambda code: code,
        )
        for number, at in enumerate(usable):
            outcome = outcomes if isinstance(outcomes, int) else outcomes[number]
            kept = outcome is None or isinstance(outcome, AlreadyExists)
            results[at] = ErrorCode.OK if kept else self._code("put", keys[at], outcome)
        return results

    def _code(self, what: str, key: str, outcome: int | MoonpoolError | None) -> int:
        """The number for one key's outcome; says what went wrong unless it is a plain miss."""
        if not isinstance(outcome, MoonpoolError):
            return outcome or ErrorCode.OK
        self._complain(f"{what} {key}", outcome)
        return transfer_code_of(outcome)

    def _complain(self, what: str, error: MoonpoolError) -> None:
        """Into the log, unless it is a plain miss. An outage lasts for thousands of calls: the client has written one
        line about a master that is away and about memory that cannot be read.
        """
        if isinstance(error, BreakerOpen) or (isinstance(error, Unavailable) and what.startswith("get")):
            _LOG.debug("%s: %s", what, error)
        elif isinstance(error, Unavailable):
            self._rare_log.warning("the pool, or a part of it, cannot be reached: %s", error)
        elif not isinstance(error, NotFound):
            _LOG.warning("%s: %s (%d)", what, error, code_of(error))

    def _key(self, key: str) -> bytes:
        session = self._session
        if session is None:
            raise InvalidInput("this store was closed")
        return session.config.namespace + key.encode()

    def _group(self, config: ReplicateConfig, at: int) -> bytes:
        return b"" if config.group_ids is None else self._key(config.group_ids[at])

    def _segment_of(self, preferred: str | None) -> str | None:
        """What upstream calls a segment is a client's hostname; ours have names of their own."""
        session = self._session
        if session is not None and preferred == session.config.hostname:
            return session.segment_name
        return preferred


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
    if values.pop("engine", None) is not None:
        raise ConfigError("a transfer engine of Mooncake's cannot be used here", param="engine")
    return SetupConfig.from_mapping(values)
