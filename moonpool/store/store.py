"""The pool for any Python program: `from moonpool.store import Store`. Blocking and thread-safe; no torch needed.

Keys are text or bytes. Calls on many objects (`..._many`) return results by position, so that one bad object does not
fail the others. A miss is None or False, except for views and sessions, which raise NotFound. A key that cannot be one
raises InvalidInput. Wrong bytes are never returned (client/verified_read.py): the store reports their replica and reads
another one, and raises or returns an error where there is none.

Every call has a deadline. While the master is away, calls raise BreakerOpen at once, or wait for it for `retry_s`
(client/master_client.py). A segment that could not be read is not asked again before it answers a probe
(client/directory.py); objects that are only there are misses meanwhile.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, Unpack, cast

from moonpool.base.clock import Clock, SystemClock
from moonpool.base.errors import InvalidInput, MoonpoolError, NotFound, Refused
from moonpool.base.metrics import GetMetrics, MetricFamily
from moonpool.base.own_folder import OwnFolder
from moonpool.base.rpc.breaker import BreakerLimits
from moonpool.store import messages as m
from moonpool.store.client.cache import CachedReads, ObjectCache
from moonpool.store.client.config import ClientConfig, credentials, find_master
from moonpool.store.client.counters import ClientCounters
from moonpool.store.client.directory import SegmentDirectory
from moonpool.store.client.master_client import MasterClient
from moonpool.store.client.piece_reader import PieceReader
from moonpool.store.client.put_batch import PutBatches
from moonpool.store.client.put_calls import PutCalls
from moonpool.store.client.put_request import Put, PutRequest, PutSettings, is_new, key_value_pairs, put_fields
from moonpool.store.client.put_session import PiecePuts, PieceWriter
from moonpool.store.client.put_tools import PutTools
from moonpool.store.client.read_tools import ReadTools
from moonpool.store.client.reads import ClientReads, report_corrupt
from moonpool.store.client.recovery import none_if_missing, read_ranges
from moonpool.store.client.session_client import SessionClient
from moonpool.store.client.views import ClientViews, ObjectView
from moonpool.store.event_feed import EventFeed
from moonpool.store.keys_text import Key, key_bytes, keys_bytes
from moonpool.store.messages import ListedObject, ObjectInfo, StoreStats
from moonpool.store.pool_tasks import PoolTasks
from moonpool.store.removal_calls import RemovalCalls
from moonpool.store.tensor_calls import TensorCalls
from moonpool.transfer.config import TransferConfig
from moonpool.transfer.engine import TransferEngine
from moonpool.transfer.memory.buffers import Buffer, as_bytes_view
from moonpool.transfer.transports.mapped import MappedRemote

Value = Buffer | Sequence[Buffer]  # several buffers are one value: their bytes follow each other
_SEVERAL = (list, tuple)  # not `list | tuple`, which would be evaluated for each value


class Store(TensorCalls, RemovalCalls):
    """Owns its transfer engine (unless given one), its connections, its pins and its views until close().

    Three groups of calls are attributes: `tasks` (copies, moves and drains of objects), `piece_puts` and `piece_reads`
    (pieces of many objects with one transfer per segment). All calls share one connection to the master, `master`.
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
        clock: Clock | None = None,
    ) -> None:
        """Connects when first used. `master` defaults to MOONPOOL_MASTER, else to the one service on this machine; the
        credential files to MOONPOOL_SECRET_FILE and MOONPOOL_TLS_{CERT,KEY,CA}_FILE.

        `cache_nbytes` of memory cache values that are read repeatedly from other machines. An `engine` stays the
        caller's, and its settings apply. Raise ConfigError when no master is found or a file cannot be used.
        """
        self._address = master or find_master()
        self._config = config or ClientConfig(name=name)
        self._feeds: weakref.WeakSet[EventFeed] = weakref.WeakSet()
        self._cache = ObjectCache(cache_nbytes) if cache_nbytes > 0 else None
        with contextlib.ExitStack() as stack:
            if engine is None:
                files = credentials(
                    secret_file=secret_file,
                    tls_cert_file=tls_cert_file,
                    tls_key_file=tls_key_file,
                    tls_ca_file=tls_ca_file,
                )
                engine = _engine(stack, run_dir, shm, files)
            self._connect(engine, clock or SystemClock())
            self._stack = stack.pop_all()

    def _connect(self, engine: TransferEngine, clock: Clock) -> None:
        """Make the parts that move bytes and ask the master. None of them connects before its first use."""
        config = self._config
        self._counters = counters = ClientCounters()
        self.master = master = MasterClient(
            self._address,
            name=config.name,
            connect_timeout_s=config.connect_timeout_s,
            timeout_s=config.rpc_timeout_s,
            retry_s=config.retry_s,
            limits=BreakerLimits(silence_s=config.silence_s),
        )
        read_timeout_s = min(config.read_timeout_s, config.transfer_timeout_s)
        self.directory = directory = SegmentDirectory(
            engine, lambda: master.call(m.Segments()), open_timeout_s=read_timeout_s
        )
        self._sessions = SessionClient(
            directory, name=config.name, timeout_s=config.connect_timeout_s, uses_gpu=config.uses_gpu
        )
        # Views use another session than puts, because it may be retired (client/views.py).
        self._view_sessions = SessionClient(directory, name=config.name, timeout_s=config.connect_timeout_s)
        put_tools = PutTools(
            engine=engine,
            sessions=self._sessions,
            calls=PutCalls(master, directory, self._sessions, counters, config),
            counters=counters,
            clock=clock,
            timeout_s=config.transfer_timeout_s,
            renew_after_s=config.renew_after_s,
        )
        read_tools = ReadTools(
            directory=directory,
            counters=counters,
            timeout_s=config.transfer_timeout_s,
            read_timeout_s=read_timeout_s,
            report_corrupt=lambda info, place: report_corrupt(master, info, place),
        )
        cache = self._cache
        self._reads = ClientReads(master, read_tools) if cache is None else CachedReads(master, read_tools, cache)
        self.get_remembered, self.read_into = self._reads.read_remembered, self._reads.read  # keys, views of bytes
        self._views = ClientViews(
            master,
            self._reads,
            self._view_sessions,
            max_view_nbytes=config.max_view_nbytes,
            max_verified_views=config.max_verified_views,
        )
        self._puts = PutBatches(put_tools)
        self.put_object = self._puts.put_one  # put_objects() of one, without lists
        self.piece_puts, self.piece_reads = PiecePuts(put_tools), self._reads.pieces
        self.tasks = PoolTasks(master)

    def page_lock_local(self, timeout_s: float = 0.0) -> None:
        """Page-lock the memory of this machine's nodes, for a GPU (TransferEngine.use_gpu()). What takes longer than
        `timeout_s` goes on in the background; nodes that cannot be reached now are locked when they are first used.
        """
        pinning = self.directory.engine.pinning
        assert pinning is not None, "use_gpu() comes first"
        with contextlib.suppress(MoonpoolError):
            self.directory.refresh()
            for info in self.directory.local:
                remote = self.directory.open_segment(info) if info.tier & m.Tier.DRAM else None
                if isinstance(remote, MappedRemote):
                    pinning.add(remote, self._config.transfer_timeout_s)
        pinning.hurry(timeout_s)

    def close(self) -> None:
        """Idempotent. Ends its pins, views and event feeds. Waits for no master that is away: what that one is not told
        ends with the connection, or when its time is over.
        """
        self.master.begin_close()
        for feed in list(self._feeds):
            feed.close()
        self._views.close()
        self._reads.close()
        self.piece_puts.tools.calls.ahead.close()
        self.master.close()
        self.directory.close()
        self._view_sessions.close()
        with contextlib.suppress(MoonpoolError):  # a GPU that is lost copies nothing any more
            self.piece_puts.tools.drain()
        self._sessions.close()  # last: until here, writes to mapped memory may be running
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
        return self.put_objects(
            [Put(key=key_bytes(key), buffers=_buffers(value), **fields) for key, value in key_value_pairs(items)]
        )

    def put_objects(self, puts: Sequence[Put]) -> list[MoonpoolError | None]:
        """As put_many(), for objects with different settings. AlreadyExists means that the old value stays, unless
        options.replace. The buffers are the caller's again when this returns.
        """
        return self._puts.put_many(puts)

    def put_session(self, key: Key, piece_sizes: Sequence[int], **settings: Unpack[PutSettings]) -> PieceWriter:
        """Write a value piece by piece: `with store.put_session(key, sizes) as s: s.write(0, layer)`."""
        request = PutRequest(key=key_bytes(key), piece_nbytes=tuple(piece_sizes), **put_fields(settings))
        return PieceWriter(self.piece_puts, request)

    # getting

    def get(self, key: Key) -> bytes | None:
        """Return the value; None when it is not there or no replica passes the checks (see why()).

        Raise Unavailable when the master or every node with a replica is out of reach, Unauthorized when they require
        another secret or certificate than the engine has: these are no misses.
        """
        (got,) = self._reads.read([key_bytes(key)], [None], None)
        return cast("bytes | None", none_if_missing(got))

    def get_many(self, keys: Iterable[Key], *, identity: bytes | None = None) -> list[bytes | None]:
        """get() of each; values of another `identity` are misses, None accepts any. Raise the first error that is no
        miss.
        """
        names = keys_bytes(keys)
        got = self._reads.read(names, [None] * len(names), identity)
        return cast("list[bytes | None]", [none_if_missing(each) for each in got])

    def get_each(self, keys: Iterable[Key]) -> list[bytes | MoonpoolError]:
        """get() of each. Return by position the value, or the error: NotFound for a miss, else as get_many_into()."""
        names = keys_bytes(keys)
        return cast("list[bytes | MoonpoolError]", self._reads.read(names, [None] * len(names), None))

    def get_into(self, key: Key, into: Value) -> int | None:
        """As get(), into the caller's memory. Return how many bytes. InvalidInput when they do not fit."""
        target = [as_bytes_view(buffer, True) for buffer in _buffers(into)]
        (got,) = self._reads.read([key_bytes(key)], [target], None)
        return cast("int | None", none_if_missing(got))

    def get_many_into(
        self, keys: Iterable[Key], into: Sequence[Value], *, identity: bytes | None = None
    ) -> list[int | MoonpoolError]:
        """Read each value into its buffers, filled one after the other. Return by position its size, or the error:
        NotFound, InvalidInput (it does not fit), IdentityMismatch, Corrupt, Unavailable. Buffers of a key that failed
        may hold anything. Raise InvalidInput for a buffer that cannot be used.
        """
        names = keys_bytes(keys)
        if len(names) != len(into):
            raise InvalidInput(f"{len(names)} keys and buffers for {len(into)}")
        targets = [[as_bytes_view(buffer, True) for buffer in _buffers(value)] for value in into]
        return cast("list[int | MoonpoolError]", self._reads.read(names, targets, identity))

    def get_range(self, key: Key, offset: int, into: Buffer) -> int | None:
        """Read from `offset` as many bytes as the buffer has. None for a miss. InvalidInput beyond the end."""
        return self.get_ranges(key, [(offset, into)])

    def get_ranges(self, key: Key, ranges: Sequence[tuple[int, Buffer]]) -> int | None:
        """get_range() of several parts of one value. Return how many bytes in total. Every piece that a range touches
        is read and verified whole.
        """
        wanted = [(offset, as_bytes_view(buffer, True)) for offset, buffer in ranges]
        return self._reads.read_one(key_bytes(key), lambda session: read_ranges(session, wanted))

    def get_session(self, key: Key, *, identity: bytes | None = None) -> PieceReader:
        """Read a value piece by piece, as it was put: `with store.get_session(key) as s: s.read_into(0, layer)`. Raise
        NotFound for a miss, IdentityMismatch when it has another identity.
        """
        return PieceReader(self._reads, key_bytes(key), identity)

    def view(self, key: Key, *, verify: Literal["once", "always"] = "once") -> ObjectView:
        """Return a read-only view of the value's memory if that is on this machine, else of a copy. Close it. Raise
        NotFound for a miss, and what makes the value unreadable.
        """
        (view,) = self.view_many([key], verify=verify)
        if isinstance(view, MoonpoolError):
            raise view
        return view

    def view_many(
        self, keys: Iterable[Key], *, identity: bytes | None = None, verify: Literal["once", "always"] = "once"
    ) -> list[ObjectView | MoonpoolError]:
        """Return by position a view, or the error as get_many_into(). Close each view.

        Objects on other machines or disks, and views beyond `max_view_nbytes`, are copies. The bytes of an allocation
        are verified when it is viewed first, with `always` each time.
        """
        return self._views.view(keys_bytes(keys), identity, verify == "always")

    # asking

    def lookup(self, keys: Iterable[Key], *, prefix: bool = False, reads: bool = True) -> list[ObjectInfo | None]:
        """Return where the objects are, each leased for info.lease_s. With `prefix`, all after the first miss is None.

        `reads` False: the caller will look up again what it reads, and that look-up counts as the use.
        """
        return self._reads.lookup(keys_bytes(keys), prefix=prefix, reads=reads)

    def exist(self, key: Key) -> bool:
        """Return whether the object exists, and lease it: it stays for the next seconds."""
        return self._reads.exist([key_bytes(key)])[0]

    def exist_many(self, keys: Iterable[Key]) -> list[bool]:
        return self._reads.exist(keys_bytes(keys))

    def size(self, key: Key) -> int | None:
        """Return how many bytes get() would return; None as get()."""
        return self._reads.read_one(key_bytes(key), lambda session: session.nbytes)

    def size_many(self, keys: Iterable[Key]) -> list[int | None]:
        infos = self._reads.find(keys_bytes(keys))
        opened = iter(self.piece_reads.open_many([info for info in infos if info is not None], None))
        sizes: list[int | None] = []
        for info in infos:
            session = None if info is None else next(opened)
            if info is not None and isinstance(session, NotFound | Refused):  # moved or replaced since the look-up
                sizes.append(self.size(info.key))
            elif isinstance(session, MoonpoolError):
                raise session
            else:
                sizes.append(None if session is None else session.nbytes)
        return sizes

    def keys(self, pattern: str | None = None) -> Iterator[bytes]:
        """Yield the keys that match the regular expression (None: all), in no order, page by page."""
        return (each.key for each in self.objects(pattern))

    def objects(self, pattern: str | None = None) -> Iterator[ListedObject]:
        """As keys(), with size (header included), tier, replicas, leases and pins."""
        return self._reads.list_objects(pattern)

    def pin(self, key: Key) -> bool:
        """Pin the object until unpin(), or until this store's connection ends. Return False when it is not there."""
        return self.pin_many([key])[0]

    def pin_many(self, keys: Iterable[Key]) -> list[bool]:
        """pin() of each. Pins are counted per key."""
        return self.master.call_once(m.Pin(keys=keys_bytes(keys)))

    def unpin(self, key: Key) -> None:
        self.unpin_many([key])

    def unpin_many(self, keys: Iterable[Key]) -> None:
        self.master.call_once(m.Unpin(keys=keys_bytes(keys)))

    def why(self, key: Key, *, identity: bytes = b"") -> str:
        """Return a sentence that explains whether and why the key is or is not in the pool, for a reader of that
        identity if one is given.
        """
        return self.master.call(m.Why(key=key_bytes(key), identity=identity))

    def stats(self) -> StoreStats:
        return self.master.call(m.Stats())

    def metrics(self) -> list[MetricFamily]:
        """Return the master's metrics: of the pool and of its journal."""
        return self.master.call(GetMetrics())

    def counters(self) -> dict[str, int]:
        """Return this store's counters: bytes_read, bytes_written, bytes_viewed, hits, misses, corrupt_replicas,
        fewer_replicas, refused_<code>, master_outages, calls_refused; with a cache also cache_...
        """
        cached = {} if self._cache is None else self._cache.counters()
        return {**self._counters.snapshot(), **self.master.counters(), **cached}

    def wait_for_master(self, timeout_s: float) -> bool:
        """Wait for a master that is away. Return False when it is not back in time."""
        return self.master.wait_for_master(timeout_s)

    def events(self, since: int | None = None) -> EventFeed:
        """Return a feed of objects that are stored, removed, moved, or change tiers: iterate over it and close it.
        `since` is the `since` of an earlier feed; without it, or when it is too old, a snapshot comes first.
        """
        feed = EventFeed(self._address, since=since, name=self._config.name, retry_s=self._config.rpc_timeout_s)
        self._feeds.add(feed)
        return feed


def _engine(stack: contextlib.ExitStack, run_dir: str | None, shm: bool, files: dict[str, Any]) -> TransferEngine:
    """Make an engine that serves no segments."""
    folder = run_dir or str(stack.enter_context(OwnFolder("mp.store-")))
    config = TransferConfig(run_dir=folder, shm=shm, tcp_host=None, **files)
    return stack.enter_context(TransferEngine(config))


def _buffers(value: Value) -> Sequence[Buffer]:
    return value if isinstance(value, _SEVERAL) else [value]  # type: ignore[list-item]
