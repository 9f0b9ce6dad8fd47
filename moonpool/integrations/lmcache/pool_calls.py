"""What the plug-in asks of the pool: look up, load, store, delete. Nothing raised by the pool leaves this module.

A chunk that cannot be read for any reason is a miss, and one that cannot be stored is not stored. Each failure is
counted by its kind, and logged at most once a minute per kind.

Loads use a Store with a short timeout: LMCache lets a request wait for its load, so a node that has stopped must cost
less than computing. Stores run in the background, and large batches take longer, so they use a Store of their own.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import NamedTuple

from moonpool.base.errors import AlreadyExists, FewerReplicas, Internal, InvalidInput, MoonpoolError, NotFound
from moonpool.base.log import RateLimitedLog
from moonpool.base.own_folder import OwnFolder
from moonpool.integrations.lmcache.settings import LmcacheSettings
from moonpool.store import Store
from moonpool.store.client import ClientConfig
from moonpool.store.client.config import credentials
from moonpool.transfer.config import TransferConfig
from moonpool.transfer.engine import TransferEngine

_LOG = logging.getLogger(__name__)
_CONNECT_TIMEOUT_S = 0.2  # LMCache waits for look-ups


class PoolResult(NamedTuple):
    """Per key whether it was found, loaded, stored or removed; and the first failure that is no plain miss."""

    done: list[bool]
    error: MoonpoolError | None = None


class PoolCalls:
    """Thread-safe. Connects when first used; a pool that is away when LMCache starts may come later."""

    def __init__(self, settings: LmcacheSettings) -> None:
        """Raise ConfigError when no master is named or found, or a credential file cannot be used."""
        self._settings = settings
        self._rare_log = RateLimitedLog(_LOG)
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter(
            looked_up=0, found=0, loaded=0, loaded_nbytes=0, stored=0, stored_nbytes=0, removed=0, corrupt=0
        )
        with ExitStack() as stack:
            folder = str(stack.enter_context(OwnFolder("mp.lmcache-")))
            files = credentials(
                secret_file=settings.secret_file,
                tls_cert_file=settings.tls_cert_file,
                tls_key_file=settings.tls_key_file,
                tls_ca_file=settings.tls_ca_file,
            )
            wires = TransferConfig(run_dir=folder, shm=settings.shm, tcp_host=None, num_threads=1, **files)
            engine = stack.enter_context(TransferEngine(wires))
            self._reads = stack.enter_context(self._store(engine, "lmcache-loads", settings.silence_s))
            self._writes = stack.enter_context(self._store(engine, "lmcache-stores", settings.store_timeout_s))
            self._stack = stack.pop_all()

    def look_up(self, keys: Sequence[str]) -> PoolResult:
        """Return which keys are in the pool. They are leased: they stay for the next seconds."""
        result = self._guarded("look_up", len(keys), lambda: self._look_up(keys))
        self._add(looked_up=len(keys), found=sum(result.done))
        return result

    def load(self, keys: Sequence[str], views: Sequence[memoryview]) -> PoolResult:
        """Fill each view with its chunk. A view whose chunk was not loaded may hold anything. The views are the
        caller's again when this returns.
        """
        result = self._guarded("load", len(keys), lambda: self._load(keys, views))
        nbytes = sum(view.nbytes for view, is_loaded in zip(views, result.done, strict=False) if is_loaded)
        self._add(loaded=sum(result.done), loaded_nbytes=nbytes)
        return result

    def store(self, keys: Sequence[str], views: Sequence[memoryview]) -> PoolResult:
        """Store each chunk under its key. A key that is taken counts as stored: LMCache's keys name the content. The
        views are the caller's again when this returns.
        """
        result = self._guarded("store", len(keys), lambda: self._put(keys, views))
        nbytes = sum(view.nbytes for view, is_stored in zip(views, result.done, strict=False) if is_stored)
        self._add(stored=sum(result.done), stored_nbytes=nbytes)
        return result

    def remove(self, keys: Sequence[str]) -> PoolResult:
        """Remove the chunks. One that is leased to a reader stays, and is reported as not removed."""
        result = self._guarded("delete", len(keys), lambda: PoolResult(self._reads.remove_many(self._keys(keys))))
        self._add(removed=sum(result.done))
        return result

    def refuse(self, call: str, num_keys: int, error: MoonpoolError) -> PoolResult:
        """Return the result of a call that was not made, and count it as failed."""
        self._note(call, num_keys, error)
        return PoolResult([False] * num_keys, error)

    def counters(self) -> dict[str, int]:
        """Return looked_up, found, loaded, loaded_nbytes, stored, stored_nbytes, removed; corrupt (replicas whose
        checksum was wrong, never used); failed_<call>_<code> in keys; master_outages; and unreadable_segments, the
        number of nodes' segments that cannot be read now.
        """
        with self._lock:
            counts = dict(self._counts)
        reads = self._reads.counters()
        counts["corrupt"] = reads["corrupt_replicas"]
        counts["master_outages"] = reads["master_outages"]
        counts["unreadable_segments"] = len(self._reads.directory.unreadable.listed)
        return counts

    def close(self) -> None:
        """Idempotent. No call may be running."""
        self._stack.close()

    def _store(self, engine: TransferEngine, name: str, transfer_timeout_s: float) -> Store:
        config = ClientConfig(
            name=name, connect_timeout_s=_CONNECT_TIMEOUT_S, retry_s=0.0, transfer_timeout_s=transfer_timeout_s
        )
        return Store(self._settings.master or None, engine=engine, config=config)

    def _keys(self, keys: Sequence[str]) -> list[bytes]:
        return self._settings.pool_keys(keys)

    def _look_up(self, keys: Sequence[str]) -> PoolResult:
        return PoolResult(self._reads.exist_many(self._keys(keys)))

    def _load(self, keys: Sequence[str], views: Sequence[memoryview]) -> PoolResult:
        got = self._reads.get_many_into(self._keys(keys), views)
        errors = [_load_error(each, view.nbytes) for each, view in zip(got, views, strict=True)]
        failed = self._noted("load", [each for each in errors if not isinstance(each, NotFound)])
        return PoolResult([each is None for each in errors], failed)

    def _put(self, keys: Sequence[str], views: Sequence[memoryview]) -> PoolResult:
        items = zip(self._keys(keys), views, strict=True)
        put = self._writes.put_many(items, num_replicas=self._settings.num_replicas)
        errors = [None if isinstance(each, AlreadyExists | FewerReplicas) else each for each in put]
        return PoolResult([each is None for each in errors], self._noted("store", errors))

    def _noted(self, call: str, errors: Sequence[MoonpoolError | None]) -> MoonpoolError | None:
        """Count each error by its kind. Return the first."""
        failures: dict[str, list[MoonpoolError]] = {}
        for each in errors:
            if each is not None:
                failures.setdefault(each.code, []).append(each)
        for alike in failures.values():
            self._note(call, len(alike), alike[0])
        return next((alike[0] for alike in failures.values()), None)

    def _guarded(self, call: str, num_keys: int, act: Callable[[], PoolResult]) -> PoolResult:
        try:
            return act()
        except MoonpoolError as error:
            return self.refuse(call, num_keys, error)
        except Exception as error:  # noqa: BLE001 - a bug costs a miss, not the engine's request
            _LOG.exception("a bug in a %s of LMCache's chunks", call)
            return self.refuse(call, num_keys, Internal(f"{type(error).__name__}: {error}"))

    def _note(self, call: str, num_keys: int, error: MoonpoolError) -> None:
        self._add(**{f"failed_{call}_{error.code}": num_keys})
        text = "%s of %d chunks failed; LMCache goes on without them: %s"
        self._rare_log.warning(text, call, num_keys, error, key=f"{call}/{error.code}")

    def _add(self, **amounts: int) -> None:
        with self._lock:
            self._counts.update(amounts)


def _load_error(got: int | MoonpoolError, nbytes: int) -> MoonpoolError | None:
    """Return why the chunk must not be used; None when all of its bytes are there. NotFound is a plain miss."""
    if isinstance(got, MoonpoolError):
        return got
    if got != nbytes:  # of another data type or chunk size under the same key
        return InvalidInput(f"the stored chunk has {got:,} bytes, and LMCache expects {nbytes:,}")
    return None
