"""The pool for any Python program: `from moonpool.store import Store`. Blocking and thread-safe; no torch needed.

Keys are text or bytes. Calls on many objects (`..._many`) return results by position, so that one bad key does not fail
the others. A miss is None or False, except for views and sessions, which raise NotFound. A key that cannot be one
raises InvalidInput. Wrong bytes are never returned (client/verified_read.py).
"""

from __future__ import annotations

import contextlib
import re
import tempfile
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Unpack

from numpy.typing import NDArray

from moonpool.base.errors import InvalidInput, MoonpoolError, NotFound, Refused
from moonpool.base.metrics import GetMetrics, MetricFamily
from moonpool.store import messages as m
from moonpool.store import safetensors_files
from moonpool.store.client import ClientConfig, Put, PutRequest, StoreClient
from moonpool.store.client.cache import CachedReads, ObjectCache
from moonpool.store.client.put_request import PutSettings, put_fields
from moonpool.store.client.store_client import is_new
from moonpool.store.client.views import ObjectView
from moonpool.store.event_feed import EventFeed
from moonpool.store.finding import credentials, find_master
from moonpool.store.keys_text import Key, key_bytes, keys_bytes
from moonpool.store.messages import ListedObject, ObjectInfo, StoreStats
from moonpool.store.piece_sessions import PieceReader, PieceWriter
from moonpool.store.pool_tasks import PoolTasks
from moonpool.store.tensors import Library, TensorCalls
from moonpool.transfer.config import TransferConfig
from moonpool.transfer.engine import TransferEngine
from moonpool.transfer.memory.buffers import Buffer

Value = Buffer | Sequence[Buffer]  # several buffers are one value: their bytes follow each other


class Store:
    """Owns its transfer engine (unless given one), its connections, its pins and its views until close().

    `client` is its StoreClient, with sessions and calls that are not here; both share one connection to the master.
    """

    def __init__(
        self,
        master: str | None = None,
        *,
        name: str = "store",
        cache_nbytes: int = 0,
        secret_file: str | None = None,
        tls_cert_file: str | None = None,
        tls_key_file: str | None = None,
        tls_ca_file: str | None = None,
        run_dir: str | None = None,
        shm: bool = True,
        config: ClientConfig | None = None,
        engine: TransferEngine | None = None,
    ) -> None:
        """Connects when first used. `master` defaults to MOONPOOL_MASTER, else to the one service on this machine; the
        credential files to MOONPOOL_SECRET_FILE and MOONPOOL_TLS_{CERT,KEY,CA}_FILE.

        `cache_nbytes` of memory cache values that are read repeatedly from other machines. An `engine` stays the
        caller's, and its settings apply. Raise ConfigError when no master is found or a file cannot be used.
        """
        address = master or find_master()
        config = config or ClientConfig(name=name)
        with contextlib.ExitStack() as stack:
            if engine is None:
                files = credentials(
                    secret_file=secret_file,
                    tls_cert_file=tls_cert_file,
                    tls_key_file=tls_key_file,
                    tls_ca_file=tls_ca_file,
                )
                engine = _engine(stack, run_dir, shm, files)
            self._address, self._config = address, config
            self.client = stack.enter_context(StoreClient(address, engine, config))
            self._master = self.client.master
            self._feeds: weakref.WeakSet[EventFeed] = weakref.WeakSet()
            self._cache = ObjectCache(cache_nbytes) if cache_nbytes > 0 else None
            self._reads: StoreClient | CachedReads = self.client
            if self._cache is not None:
                self._reads = CachedReads(self.client, self._cache, self._lookup, self.client.directory)
            self.tasks = PoolTasks(self._master)
            self._tensors = TensorCalls(self.client, self._reads.get_many_into, self._lookup)
            self._stack = stack.pop_all()

    def close(self) -> None:
        """Idempotent. Ends its pins, views and event feeds."""
        for feed in list(self._feeds):
            feed.close()
        self._stack.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # putting

    def put(self, key: Key, value: Value, **settings: Unpack[PutSettings]) -> bool:
        """Store the value. Return False when the key is taken: the old value stays (see `replace`, upsert()). Objects
        with fewer replicas than asked for are counted (`fewer_replicas`); put_many() tells which. Raise NoSpace,
        InvalidInput, Unavailable. The buffers are the caller's again when this returns.
        """
        return is_new(self.put_many([(key, value)], **settings)[0])

    def upsert(self, key: Key, value: Value, **settings: Unpack[PutSettings]) -> None:
        """Store the value, replacing an older one. Readers find the older one until the new one is complete."""
        settings["replace"] = True
        self.put(key, value, **settings)

    def put_many(
        self, items: Mapping[Any, Value] | Iterable[tuple[Key, Value]], **settings: Unpack[PutSettings]
    ) -> list[MoonpoolError | None]:
        """Store the values. Return by position None or the error: AlreadyExists, NoSpace, InvalidInput, Unavailable.
        FewerReplicas means stored, but on fewer replicas than asked for.
        """
        fields = put_fields(settings)
        return self.client.put_many(
            [Put(key=key_bytes(key), buffers=_buffers(value), **fields) for key, value in _pairs(items)]
        )

    def put_session(self, key: Key, piece_sizes: Sequence[int], **settings: Unpack[PutSettings]) -> PieceWriter:
        """Write a value piece by piece: `with store.put_session(key, sizes) as s: s.write(0, layer)`."""
        request = PutRequest(key=key_bytes(key), piece_nbytes=tuple(piece_sizes), **put_fields(settings))
        return PieceWriter(self.client, request)

    # getting

    def get(self, key: Key) -> bytes | None:
        """Return the value; None when it is not there or no replica passes the checks (see why()). Raise Unavailable
        when no node that has it can be reached: that is no miss.
        """
        return self._reads.get_many([key_bytes(key)])[0]

    def get_many(self, keys: Iterable[Key]) -> list[bytes | None]:
        """get() of each. Raise the first error that is no miss."""
        return self._reads.get_many(keys_bytes(keys))

    def get_into(self, key: Key, into: Value) -> int | None:
        """As get(), into the caller's memory. Return how many bytes. InvalidInput when they do not fit."""
        (got,) = self.get_many_into([key], [into])
        if isinstance(got, NotFound | Refused):
            return None
        if isinstance(got, MoonpoolError):
            raise got
        return got

    def get_many_into(self, keys: Iterable[Key], into: Sequence[Value]) -> list[int | MoonpoolError]:
        """Read each value into its buffers. Return by position its size, or the error: NotFound, InvalidInput (it does
        not fit), Corrupt, Unavailable. Buffers of a key that failed may hold anything.
        """
        return self._reads.get_many_into(keys_bytes(keys), [_buffers(value) for value in into])

    def get_range(self, key: Key, offset: int, into: Buffer) -> int | None:
        """Read from `offset` as many bytes as the buffer has. None for a miss. InvalidInput beyond the end."""
        return self.get_ranges(key, [(offset, into)])

    def get_ranges(self, key: Key, ranges: Sequence[tuple[int, Buffer]]) -> int | None:
        """get_range() of several parts of one value. Return how many bytes in total."""
        return self.client.get_ranges(key_bytes(key), ranges)

    def get_session(self, key: Key, *, identity: bytes | None = None) -> PieceReader:
        """Read a value piece by piece, as it was put: `with store.get_session(key) as s: s.read_into(0, layer)`. Raise
        NotFound for a miss, IdentityMismatch when it has another identity.
        """
        return PieceReader(self.client, key_bytes(key), identity)

    def view(self, key: Key, *, verify: Literal["once", "always"] = "once") -> ObjectView:
        """Return a read-only view of the value's memory if that is on this machine, else of a copy. Close it. Raise
        NotFound for a miss, and what makes the value unreadable.
        """
        (view,) = self.view_many([key], verify=verify)
        if isinstance(view, MoonpoolError):
            raise view
        return view

    def view_many(
        self, keys: Iterable[Key], *, verify: Literal["once", "always"] = "once"
    ) -> list[ObjectView | MoonpoolError]:
        return self.client.view(keys_bytes(keys), verify=verify)

    # asking and removing

    def exist(self, key: Key) -> bool:
        """Return whether the object exists, and lease it: it stays for the next seconds."""
        return self.exist_many([key])[0]

    def exist_many(self, keys: Iterable[Key]) -> list[bool]:
        return self.client.exist(keys_bytes(keys))

    def size(self, key: Key) -> int | None:
        """Return how many bytes get() would return; None as get()."""
        return self.client.size(key_bytes(key))

    def size_many(self, keys: Iterable[Key]) -> list[int | None]:
        return [None if info is None else self._size(info) for info in self._lookup(keys_bytes(keys))]

    def remove(self, key: Key, *, force: bool = False) -> bool:
        """Remove the object. Return True when no object is under the key now. Leased and pinned objects stay unless
        `force`.
        """
        return self.remove_many([key], force=force)[0]

    def remove_many(self, keys: Iterable[Key], *, force: bool = False) -> list[bool]:
        return self.client.remove(keys_bytes(keys), force)

    def remove_matching(self, pattern: str, *, force: bool = False) -> tuple[int, int]:
        """Remove the objects whose key's bytes match the regular expression. Return how many were removed and how many
        stayed.
        """
        return self.client.remove_matching(pattern, force)

    def remove_all(self, *, force: bool = False) -> tuple[int, int]:
        return self.client.remove_matching(None, force)

    def keys(self, pattern: str | None = None) -> Iterator[bytes]:
        """Yield the keys that match the regular expression (None: all), in no order, page by page."""
        return (each.key for each in self.objects(pattern))

    def objects(self, pattern: str | None = None) -> Iterator[ListedObject]:
        """As keys(), with size (header included), tier, replicas, leases and pins."""
        return self.client.list_objects(pattern)

    def pin(self, key: Key) -> bool:
        """Pin the object until unpin(), or until this store's connection ends. Return False when it is not there."""
        return self.pin_many([key])[0]

    def pin_many(self, keys: Iterable[Key]) -> list[bool]:
        return self.client.pin(keys_bytes(keys))

    def unpin(self, key: Key) -> None:
        self.unpin_many([key])

    def unpin_many(self, keys: Iterable[Key]) -> None:
        self.client.unpin(keys_bytes(keys))

    def why(self, key: Key, *, identity: bytes = b"") -> str:
        """Return a sentence that explains whether and why the key is or is not in the pool, for a reader of that
        identity if one is given.
        """
        return self.client.why(key_bytes(key), identity)

    def stats(self) -> StoreStats:
        return self.client.stats()

    def metrics(self) -> list[MetricFamily]:
        """Return the master's metrics: of the pool and of its journal."""
        return self._master.call(GetMetrics())

    def counters(self) -> dict[str, int]:
        """Return this store's counters: bytes_read, bytes_written, hits, misses, ...; with a cache also cache_..."""
        return {**self.client.counters(), **(self._cache.counters() if self._cache is not None else {})}

    def events(self, since: int | None = None) -> EventFeed:
        """Return a feed of objects that are stored, removed, moved, or change tiers: iterate over it and close it.
        `since` is the `since` of an earlier feed; without it, or when it is too old, a snapshot comes first.
        """
        feed = EventFeed(self._address, since=since, name=self._config.name, retry_s=self._config.rpc_timeout_s)
        self._feeds.add(feed)
        return feed

    # tensors

    def put_tensor(self, key: Key, array: Any, **settings: Unpack[PutSettings]) -> bool:
        """Store an array of numpy, torch or any library with a buffer interface, with type and shape; as put()."""
        return is_new(self.put_tensors([(key, array)], **settings)[0])

    def put_tensors(
        self, items: Mapping[Any, Any] | Iterable[tuple[Key, Any]], **settings: Unpack[PutSettings]
    ) -> list[MoonpoolError | None]:
        """As put_many(), with InvalidInput for what is no array or has elements that cannot be stored."""
        pairs = _pairs(items)
        return self._tensors.put_many([key_bytes(key) for key, _ in pairs], [array for _, array in pairs], settings)

    def get_tensor(self, key: Key, *, like: Library = "numpy") -> Any | None:
        """Return a new numpy array or torch tensor; None for a miss. InvalidInput when the object is no tensor, or the
        library has no such element type.
        """
        return self.get_tensors([key], like=like)[0]

    def get_tensors(self, keys: Iterable[Key], *, like: Library = "numpy") -> list[Any | None]:
        return self._tensors.get_many(keys_bytes(keys), like)

    def get_tensor_into(self, key: Key, array: Any) -> bool:
        """Read into an array of that type and shape (else InvalidInput, and the array may hold anything). Return False
        for a miss.
        """
        return self.get_tensors_into([key], [array])[0]

    def get_tensors_into(self, keys: Iterable[Key], arrays: Sequence[Any]) -> list[bool]:
        return self._tensors.get_many_into(keys_bytes(keys), arrays)

    def view_tensor(self, key: Key) -> NDArray[Any]:
        """Return a read-only numpy array over the value's memory on this machine, else over a copy. The memory stays
        pinned while the array, or any made from it, is used. NotFound for a miss.
        """
        return self._tensors.view(key_bytes(key))

    def load_safetensors(
        self,
        path: str | Path,
        *,
        prefix: str = "",
        progress: safetensors_files.Progress | None = None,
        **settings: Unpack[PutSettings],
    ) -> list[str]:
        """Put every tensor of the file under prefix + its name. Return the keys. AlreadyExists unless `replace`."""
        return safetensors_files.load(Path(path), self.client, prefix, settings, progress)

    def save_safetensors(
        self,
        path: str | Path,
        keys: Iterable[str] | None = None,
        *,
        prefix: str = "",
        metadata: Mapping[str, str] | None = None,
        progress: safetensors_files.Progress | None = None,
    ) -> list[str]:
        """Write the tensors under `keys`, or all whose key begins with `prefix`, to a file. Their names are the keys
        without the prefix. Return the keys. NotFound when there is none.
        """
        chosen = list(keys) if keys is not None else self._tensor_keys(prefix)
        if not chosen:
            raise NotFound(f"no object's key begins with {prefix!r}")
        names = {key.removeprefix(prefix): key_bytes(key) for key in chosen}
        if len(names) < len(chosen):
            raise InvalidInput("two of the keys have the same name in the file")
        safetensors_files.save(Path(path), self._tensors, names, metadata, progress)
        return chosen

    def _tensor_keys(self, prefix: str) -> list[str]:
        try:
            return sorted(key.decode() for key in self.keys(rf"\A{re.escape(prefix)}"))
        except UnicodeDecodeError as error:
            raise InvalidInput(f"a key that begins with {prefix!r} is no text, so no name in a file") from error

    def _size(self, info: ObjectInfo) -> int | None:
        try:
            return self.client.open_read(info, None).nbytes
        except (NotFound, Refused):  # moved or replaced since the look-up
            return self.client.size(info.key)

    def _lookup(self, keys: list[bytes]) -> list[ObjectInfo | None]:
        """Look objects up, leased, without counting reads."""
        return self._master.call(m.Lookup(keys=keys))


def _engine(
    stack: contextlib.ExitStack, run_dir: str | None, shm: bool, files: dict[str, str | None]
) -> TransferEngine:
    """Make an engine that serves no segments."""
    folder = run_dir or stack.enter_context(tempfile.TemporaryDirectory(prefix="mp-store-"))
    config = TransferConfig(run_dir=folder, shm=shm, tcp_host=None, num_threads=1, **files)  # type: ignore[arg-type]
    return stack.enter_context(TransferEngine(config))


def _pairs(items: Mapping[Any, Any] | Iterable[tuple[Key, Any]]) -> list[tuple[Key, Any]]:
    return list(items.items() if isinstance(items, Mapping) else items)


def _buffers(value: Value) -> Sequence[Buffer]:
    return value if isinstance(value, list | tuple) else [value]  # type: ignore[list-item]
