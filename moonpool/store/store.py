"""The pool for any Python program: `from moonpool.store import Store`. Blocking and thread-safe; no torch needed.

Keys are text or bytes. Calls on one object answer plainly; those on many (`..._many`) answer by position, so one bad
key never fails its neighbours. A miss is None or False, never an error, except where there would be nothing to hand
out (views, sessions): there it is NotFound. What can be no key raises InvalidInput. Wrong bytes are never returned.
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
from moonpool.store.client import ClientConfig, Put, PutRequest, StoreClient
from moonpool.store.client.cache import ObjectCache
from moonpool.store.client.cached_reads import CachedReads
from moonpool.store.client.store_client import is_new
from moonpool.store.client.views import ObjectView
from moonpool.store.event_feed import EventFeed
from moonpool.store.finding import credentials, find_master
from moonpool.store.keys_text import Key, key_bytes, keys_bytes
from moonpool.store.messages import ListedObject, ObjectInfo, StoreStats
from moonpool.store.piece_sessions import PieceReader, PieceWriter
from moonpool.store.pool_tasks import PoolTasks
from moonpool.store.put_settings import PutSettings, as_wish
from moonpool.store.tensors import safetensors_files
from moonpool.store.tensors.arrays import Library
from moonpool.store.tensors.tensor_calls import TensorCalls
from moonpool.transfer.config import TransferConfig
from moonpool.transfer.engine import TransferEngine
from moonpool.transfer.memory.buffers import Buffer

Value = Buffer | Sequence[Buffer]  # several buffers are one value, one after the other


class Store:
    """Owns its transfer engine (unless given one), its connections, its pins and its views until close().

    `client` is what it stands on, for what is not here.
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
        """Connects when first used. Without `master`: MOONPOOL_MASTER, else the one service on this machine. Without
        the files that let it in: MOONPOOL_SECRET_FILE and MOONPOOL_TLS_{CERT,KEY,CA}_FILE.

        `cache_nbytes` of memory keep values that are read repeatedly from other machines. An `engine` is borrowed, with
        its own settings. ConfigError when there is no master to be found or a file is unfit.
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
            self._line = self.client.line
            self._feeds: weakref.WeakSet[EventFeed] = weakref.WeakSet()
            self._cache = ObjectCache(cache_nbytes) if cache_nbytes > 0 else None
            self._reads: StoreClient | CachedReads = self.client
            if self._cache is not None:
                self._reads = CachedReads(self.client, self._cache, self._lookup, self.client.directory)
            self.tasks = PoolTasks(self._line)
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
        """Stores it. False when the key was taken: the old value stays (see `replace`, upsert()). Fewer replicas than
        asked for are counted (`fewer_replicas`), and put_many() tells of which. Raises NoSpace, InvalidInput,
        Unavailable. The buffers are the caller's again when this returns.
        """
        return is_new(self.put_many([(key, value)], **settings)[0])

    def upsert(self, key: Key, value: Value, **settings: Unpack[PutSettings]) -> None:
        """Stores it in place of what was there; readers find the old value until the new one is whole."""
        settings["replace"] = True
        self.put(key, value, **settings)

    def put_many(
        self, items: Mapping[Any, Value] | Iterable[tuple[Key, Value]], **settings: Unpack[PutSettings]
    ) -> list[MoonpoolError | None]:
        """Per item None, or why not: AlreadyExists, NoSpace, InvalidInput, Unavailable. FewerReplicas says that it is
        stored, on fewer replicas than asked for.
        """
        wish = as_wish(settings)
        return self.client.put_many(
            [Put(key=key_bytes(key), buffers=_buffers(value), **wish) for key, value in _pairs(items)]
        )

    def put_session(self, key: Key, piece_sizes: Sequence[int], **settings: Unpack[PutSettings]) -> PieceWriter:
        """For a value that is written piece by piece: `with store.put_session(key, sizes) as s: s.write(0, layer)`."""
        request = PutRequest(key=key_bytes(key), piece_nbytes=tuple(piece_sizes), **as_wish(settings))
        return PieceWriter(self.client, request)

    # getting

    def get(self, key: Key) -> bytes | None:
        """The value; None when it is not there or no replica passes the checks (why() knows more). Raises Unavailable
        when nobody who has it can be reached: that is no miss.
        """
        return self._reads.get_many([key_bytes(key)])[0]

    def get_many(self, keys: Iterable[Key]) -> list[bytes | None]:
        """get() of each; raises the first error that is no miss."""
        return self._reads.get_many(keys_bytes(keys))

    def get_into(self, key: Key, into: Value) -> int | None:
        """get() into the caller's memory; how many bytes. InvalidInput when they do not fit."""
        (got,) = self.get_many_into([key], [into])
        if isinstance(got, NotFound | Refused):
            return None
        if isinstance(got, MoonpoolError):
            raise got
        return got

    def get_many_into(self, keys: Iterable[Key], into: Sequence[Value]) -> list[int | MoonpoolError]:
        """Each into its buffers, however they are cut; how many bytes, or why not: NotFound, InvalidInput (it does not
        fit), Corrupt, Unavailable. Buffers of a key that failed may hold anything.
        """
        return self._reads.get_many_into(keys_bytes(keys), [_buffers(value) for value in into])

    def get_range(self, key: Key, offset: int, into: Buffer) -> int | None:
        """Bytes from `offset` on, as many as fit the buffer; None for a miss. InvalidInput beyond the end."""
        return self.get_ranges(key, [(offset, into)])

    def get_ranges(self, key: Key, ranges: Sequence[tuple[int, Buffer]]) -> int | None:
        """get_range() of several parts of one value; how many bytes in all."""
        return self.client.get_ranges(key_bytes(key), ranges)

    def get_session(self, key: Key, *, identity: bytes | None = None) -> PieceReader:
        """Piece by piece, as it was put: `with store.get_session(key) as s: s.read_into(0, layer)`. NotFound for a
        miss, IdentityMismatch when it is not of that identity.
        """
        return PieceReader(self.client, key_bytes(key), identity)

    def view(self, key: Key, *, verify: Literal["once", "always"] = "once") -> ObjectView:
        """The value where it lies, read-only, when that is on this machine; else a copy. NotFound for a miss; raises
        what makes it unreadable. Close it.
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
        """Leases it too: it stays for the next seconds."""
        return self.exist_many([key])[0]

    def exist_many(self, keys: Iterable[Key]) -> list[bool]:
        return self.client.exist(keys_bytes(keys))

    def size(self, key: Key) -> int | None:
        """How many bytes get() would give; None as get()."""
        return self.client.size(key_bytes(key))

    def size_many(self, keys: Iterable[Key]) -> list[int | None]:
        return [None if info is None else self._size(info) for info in self._lookup(keys_bytes(keys))]

    def remove(self, key: Key, *, force: bool = False) -> bool:
        """True when nothing is under the key now. Leased and pinned objects stay unless `force`."""
        return self.remove_many([key], force=force)[0]

    def remove_many(self, keys: Iterable[Key], *, force: bool = False) -> list[bool]:
        return self.client.remove(keys_bytes(keys), force)

    def remove_matching(self, pattern: str, *, force: bool = False) -> tuple[int, int]:
        """Removes what the regular expression finds in the key's bytes; how many went and how many had to stay."""
        return self.client.remove_matching(pattern, force)

    def remove_all(self, *, force: bool = False) -> tuple[int, int]:
        return self.client.remove_matching(None, force)

    def keys(self, pattern: str | None = None) -> Iterator[bytes]:
        """Keys in which the regular expression finds something (None: all), in no order; asks as it goes."""
        return (each.key for each in self.objects(pattern))

    def objects(self, pattern: str | None = None) -> Iterator[ListedObject]:
        """As keys(), with size (header included), tier, replicas, leases and pins."""
        return self.client.list_objects(pattern)

    def pin(self, key: Key) -> bool:
        """Keeps it until unpin(), or until this store's connection ends. False when it is not there."""
        return self.pin_many([key])[0]

    def pin_many(self, keys: Iterable[Key]) -> list[bool]:
        return self.client.pin(keys_bytes(keys))

    def unpin(self, key: Key) -> None:
        self.unpin_many([key])

    def unpin_many(self, keys: Iterable[Key]) -> None:
        self.client.unpin(keys_bytes(keys))

    def why(self, key: Key, *, identity: bytes = b"") -> str:
        """What became of a key, in a sentence; with an identity, for a reader of that one."""
        return self.client.why(key_bytes(key), identity)

    def stats(self) -> StoreStats:
        return self.client.stats()

    def metrics(self) -> list[MetricFamily]:
        """The master's figures: the pool's, and its journal's health."""
        return self._line.ask(GetMetrics())

    def counters(self) -> dict[str, int]:
        """What this store did: bytes_read, bytes_written, hits, misses, ...; with a cache its cache_... too."""
        return {**self.client.counters(), **(self._cache.counters() if self._cache is not None else {})}

    def events(self, since: int | None = None) -> EventFeed:
        """What is stored, removed, moved, or changes its tiers, as it happens: iterate over it and close it. `since`
        is the `since` of an earlier feed; without it, or when it is too long ago, a snapshot comes first.
        """
        feed = EventFeed(self._address, since=since, name=self._config.name, retry_s=self._config.rpc_timeout_s)
        self._feeds.add(feed)
        return feed

    # tensors

    def put_tensor(self, key: Key, array: Any, **settings: Unpack[PutSettings]) -> bool:
        """Stores an array of numpy, torch or whatever offers its memory, with element type and shape; as put()."""
        return is_new(self.put_tensors([(key, array)], **settings)[0])

    def put_tensors(
        self, items: Mapping[Any, Any] | Iterable[tuple[Key, Any]], **settings: Unpack[PutSettings]
    ) -> list[MoonpoolError | None]:
        """As put_many(); InvalidInput for what is no array or has elements that cannot be stored."""
        pairs = _pairs(items)
        return self._tensors.put_many([key_bytes(key) for key, _ in pairs], [array for _, array in pairs], settings)

    def get_tensor(self, key: Key, *, like: Library = "numpy") -> Any | None:
        """A numpy array or torch tensor of its own; None for a miss. InvalidInput when it holds no tensor, or one that
        the library has no type for.
        """
        return self.get_tensors([key], like=like)[0]

    def get_tensors(self, keys: Iterable[Key], *, like: Library = "numpy") -> list[Any | None]:
        return self._tensors.get_many(keys_bytes(keys), like)

    def get_tensor_into(self, key: Key, array: Any) -> bool:
        """Into an array of that type and shape (else InvalidInput, and the array may hold anything); False: a miss."""
        return self.get_tensors_into([key], [array])[0]

    def get_tensors_into(self, keys: Iterable[Key], arrays: Sequence[Any]) -> list[bool]:
        return self._tensors.get_many_into(keys_bytes(keys), arrays)

    def view_tensor(self, key: Key) -> NDArray[Any]:
        """A read-only numpy array over the value where it lies on this machine, else over a copy. It stays there for
        as long as the array, or any made from it, is used. NotFound for a miss.
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
        """Puts every tensor of the file under prefix + its name; the keys. AlreadyExists unless `replace`."""
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
        """Writes tensors to a file: those under `keys`, or all whose key begins with `prefix`; which is left out of
        their names. The keys. NotFound when there is none.
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
        except (NotFound, Refused):  # moved or replaced since
            return self.client.size(info.key)

    def _lookup(self, keys: list[bytes]) -> list[ObjectInfo | None]:
        """Leased, and not counted among this client's reads."""
        return self._line.ask(m.Lookup(keys=keys))


def _engine(
    stack: contextlib.ExitStack, run_dir: str | None, shm: bool, files: dict[str, str | None]
) -> TransferEngine:
    """It only reaches out; it serves nothing."""
    folder = run_dir or stack.enter_context(tempfile.TemporaryDirectory(prefix="mp-store-"))
    config = TransferConfig(run_dir=folder, shm=shm, tcp_host=None, num_threads=1, **files)  # type: ignore[arg-type]
    return stack.enter_context(TransferEngine(config))


def _pairs(items: Mapping[Any, Any] | Iterable[tuple[Key, Any]]) -> list[tuple[Key, Any]]:
    return list(items.items() if isinstance(items, Mapping) else items)


def _buffers(value: Value) -> Sequence[Buffer]:
    return value if isinstance(value, list | tuple) else [value]  # type: ignore[list-item]
