"""The client of the pool: put, get, views and sessions, with keys of bytes. Blocking and thread-safe.

Every call has a deadline. While the master is away, calls raise BreakerOpen at once, or wait for it for `retry_s`
(master_client.py). A segment that could not be read is not asked again before it answers a probe (directory.py);
objects that are only there are misses meanwhile. Pins made by pin() belong to the connection and end with it. Bytes
that fail a check are never returned (verified_read.py): the client reports their replica and reads another one, and
raises or returns an error where there is none.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, cast

from moonpool.base.clock import Clock, SystemClock
from moonpool.base.errors import (
    AlreadyExists,
    FewerReplicas,
    InvalidInput,
    MoonpoolError,
    NotFound,
    Refused,
)
from moonpool.store import messages as m
from moonpool.store.client.counters import ClientCounters
from moonpool.store.client.directory import SegmentDirectory
from moonpool.store.client.master_client import MasterClient
from moonpool.store.client.put_batch import OPAQUE_PIECE_NBYTES, PutBatches
from moonpool.store.client.put_calls import PutCalls
from moonpool.store.client.put_request import DEFAULT_OPTIONS, Put, PutRequest, bundle_puts
from moonpool.store.client.put_session import PutSession, PutTools, write_headers, write_pieces
from moonpool.store.client.read_session import ReadSession, ReadTools, finish_reads, open_reads, read_pieces
from moonpool.store.client.reads import ClientReads, Got, read_ranges, report_corrupt
from moonpool.store.client.session_client import SessionClient
from moonpool.store.client.transfer_window import TransferThreads
from moonpool.store.client.views import ObjectView
from moonpool.store.messages import ListedObject, ObjectInfo, PutOptions, StoreStats, TaskInfo
from moonpool.transfer.engine import TransferEngine
from moonpool.transfer.memory.buffers import Buffer, as_bytes_view

__all__ = ["OPAQUE_PIECE_NBYTES", "ClientConfig", "ObjectView", "Put", "PutOptions", "PutRequest", "StoreClient"]


@dataclass(frozen=True, kw_only=True)
class ClientConfig:
    name: str = ""  # of this client in the master's log
    connect_timeout_s: float = 2.0  # to reach the master
    rpc_timeout_s: float = 10.0  # of one call to the master
    retry_s: float = 0.0  # how long calls retry while the master cannot be reached; 0: they fail at once
    transfer_timeout_s: float = 10.0  # of one transfer, per replica
    renew_after_s: float = 10.0  # seconds between renewals of unfinished puts; a third of the master's put_discard_s
    max_view_nbytes: int = 1 << 30  # mapped by views at the same time; above it views are copies
    max_verified_views: int = 65_536  # objects whose checksum is remembered as verified


class StoreClient:
    """Uses the caller's transfer engine. close() ends its connections, its pins and its views."""

    def __init__(
        self,
        master_address: str,
        engine: TransferEngine,
        config: ClientConfig | None = None,
        clock: Clock | None = None,
    ) -> None:
        config = config or ClientConfig()
        self.master = master = MasterClient(
            master_address,
            name=config.name,
            connect_timeout_s=config.connect_timeout_s,
            timeout_s=config.rpc_timeout_s,
            retry_s=config.retry_s,
        )
        self._counters = ClientCounters()
        self.directory = directory = SegmentDirectory(engine, lambda: master.call(m.Segments()))
        self._sessions = SessionClient(directory, name=config.name, timeout_s=config.connect_timeout_s)
        self._calls = PutCalls(master, directory, self._sessions, self._counters)
        self._put_tools = PutTools(
            sessions=self._sessions,
            counters=self._counters,
            clock=clock or SystemClock(),
            timeout_s=config.transfer_timeout_s,
            renew_after_s=config.renew_after_s,
            renew=self.renew_puts,
        )
        self._threads = TransferThreads()
        self._puts = PutBatches(self._threads, self._calls, self._put_tools)
        self._read_tools = ReadTools(
            directory=directory,
            counters=self._counters,
            timeout_s=config.transfer_timeout_s,
            report_corrupt=lambda info, place: report_corrupt(master, info, place),
        )
        # Views use another session than puts, because it may be retired (views.py).
        self._view_sessions = SessionClient(directory, name=config.name, timeout_s=config.connect_timeout_s)
        self._reads = ClientReads(
            master,
            self._threads,
            self._view_sessions,
            self._read_tools,
            max_view_nbytes=config.max_view_nbytes,
            max_verified_views=config.max_verified_views,
        )

    def close(self) -> None:
        """Idempotent."""
        self._reads.close()
        self.master.close()
        self.directory.close()
        self._threads.close()
        self._view_sessions.close()
        self._sessions.close()  # last: until here, writes to mapped memory may be running

    def __enter__(self) -> StoreClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def counters(self) -> dict[str, int]:
        """bytes_read, bytes_written, bytes_viewed, hits, misses, corrupt_replicas, fewer_replicas, refused_<code>,
        master_outages, calls_refused.
        """
        return {**self._counters.snapshot(), **self.master.counters()}

    def wait_for_master(self, timeout_s: float) -> bool:
        """Wait for a master that is away. Return False when it is not back in time."""
        return self.master.wait_for_master(timeout_s)

    # asking the master

    def lookup(self, keys: Sequence[bytes], prefix: bool = False, reads: bool = True) -> list[ObjectInfo | None]:
        """Return where the objects are, each leased for info.lease_s. With `prefix`, all after the first miss is None.

        `reads` False: the caller will look up again what it reads, and that look-up counts as the use.
        """
        return self._reads.lookup(list(keys), prefix=prefix, reads=reads)

    def exist(self, keys: Sequence[bytes]) -> list[bool]:
        """Return which objects exist, and lease them. Counts neither hits nor misses. Objects that are only on segments
        that this client could not read are misses, until the segments can be read again.
        """
        return self.master.call(m.Exist(keys=list(keys), without=self.directory.unreadable.listed))

    def remove(self, keys: Sequence[bytes], force: bool = False) -> list[bool]:
        """Remove objects. Return True where no object is under the key now. Leased and pinned ones stay unless
        `force`.
        """
        return self.master.call(m.Remove(keys=list(keys), force=force, errand=_idempotency_key()))

    def remove_matching(self, pattern: str | None = None, force: bool = False) -> tuple[int, int]:
        """Remove the objects whose key matches the regular expression (None: all). Return how many were removed and how
        many stayed.
        """
        num_removed, num_kept = 0, 0
        cursor: int | None = 0
        while cursor is not None:
            call = m.RemoveMatching(pattern=pattern, force=force, cursor=cursor, errand=_idempotency_key())
            step = self.master.call(call)
            num_removed, num_kept, cursor = num_removed + step.num_removed, num_kept + step.num_kept, step.cursor
        return num_removed, num_kept

    def list_objects(self, pattern: str | None = None) -> Iterator[ListedObject]:
        """Yield the objects whose key matches the regular expression (None: all), in no order, page by page."""
        cursor: int | None = 0
        while cursor is not None:
            page = self.master.call(m.ListObjects(pattern=pattern, cursor=cursor))
            yield from page.objects
            cursor = page.cursor

    def pin(self, keys: Sequence[bytes]) -> list[bool]:
        """Pin the objects until unpin(), or until this client's connection ends. Pins are counted per key. Return False
        where there is no object.
        """
        return self.master.call_once(m.Pin(keys=list(keys)))

    def unpin(self, keys: Sequence[bytes]) -> None:
        self.master.call_once(m.Unpin(keys=list(keys)))

    def why(self, key: bytes, identity: bytes = b"") -> str:
        """Return a sentence that explains whether and why the key is or is not in the pool."""
        return self.master.call(m.Why(key=key, identity=identity))

    def stats(self) -> StoreStats:
        return self.master.call(m.Stats())

    def list_tasks(self, finished: bool = False) -> list[TaskInfo]:
        """Return the running copies, moves and drains; with `finished` also those that ended recently."""
        return self.master.call(m.ListTasks(finished=finished))

    # putting

    def put(
        self, key: bytes, data: Buffer, *, num_replicas: int = 1, pinned: bool = False, replace: bool = False
    ) -> bool:
        """Store opaque bytes. Return False when the key is taken; the old value stays then. True also when the object
        has fewer replicas than asked for; put_many() tells.
        """
        options = DEFAULT_OPTIONS
        if num_replicas != 1 or pinned or replace:
            options = PutOptions(num_replicas=num_replicas, hard_pin=pinned, replace=replace)
        return is_new(self.put_many([Put(key, [data], options=options)])[0])

    def put_many(self, puts: Sequence[Put]) -> list[MoonpoolError | None]:
        """Store the objects. Return by position None or the error: AlreadyExists (the old value stays unless
        options.replace), NoSpace, InvalidInput, Unavailable. FewerReplicas means stored, but on fewer replicas than
        asked for. The buffers are the caller's again when this returns.
        """
        return self._puts.put_many(puts)

    def begin_puts(self, requests: Sequence[PutRequest]) -> list[PutSession | MoonpoolError]:
        """Get space for each request, in few calls. Return by position the session, or the error: AlreadyExists,
        NoSpace, InvalidInput.
        """
        begun: list[PutSession | MoonpoolError | None] = [None] * len(requests)
        sizes = [request.nbytes for request in requests]
        for positions in bundle_puts(requests, sizes, range(len(requests))):
            granted = self._calls.start([requests[p] for p in positions], [sizes[p] for p in positions])
            for index, position in enumerate(positions):
                begun[position] = granted.errors[index] or PutSession(
                    requests[position],
                    granted.generations[index],
                    granted.replicas[index],
                    granted.session,
                    self._put_tools,
                )
        return [each for each in begun if each is not None]

    def renew_puts(self, sessions: Sequence[PutSession]) -> list[bool]:
        """Tell the master that the puts go on, so that it does not discard them. Return False where it has discarded
        the put. Writing pieces renews by itself when it is due.
        """
        return self._calls.renew([each.key for each in sessions], [each.generation for each in sessions])

    def write_pieces(self, writes: Sequence[tuple[PutSession, int, Buffer, int | None]]) -> list[MoonpoolError | None]:
        """Write piece `int` of each session from its buffer, with one transfer per segment. The last number is the
        piece's crc32c if the caller knows it, else None.

        A replica that cannot be written is left out. Return of each None, or what PutSession.write_piece() raises: a
        write fails only when its session has no replica left, or was discarded. The buffers are the caller's again
        when this returns.
        """
        return write_pieces(writes, self._put_tools)

    def finish_puts(self, sessions: Sequence[PutSession]) -> list[MoonpoolError | None]:
        """Write the headers and make the objects visible, with one call. Puts that fail are aborted; FewerReplicas is
        no failure, as in put_many().

        Raise only when the master cannot be asked; it is not known then whether the objects are visible.
        """
        results = write_headers(sessions, self._put_tools)
        self.abort_puts([each for each, error in zip(sessions, results, strict=True) if error is not None])
        written = [index for index, error in enumerate(results) if error is None]
        refused = self._calls.finish(
            [sessions[index].key for index in written],
            [sessions[index].generation for index in written],
            {at: sessions[index].failed for at, index in enumerate(written) if sessions[index].failed},
        )
        for at, index in enumerate(written):
            session = sessions[index]
            results[index] = refused.get(at) or self._counters.check_replicas(
                session.num_replicas, session.request.options.num_replicas
            )
        return results

    def abort_puts(self, sessions: Sequence[PutSession]) -> None:
        """Give the space back. Best effort: the master discards unfinished puts by itself after a while."""
        for settled in (True, False):
            some = [each for each in sessions if each.settled is settled]
            self._calls.give_back([each.key for each in some], [each.generation for each in some], settled)

    # getting

    def get(self, key: bytes) -> bytes | None:
        """Return the object's bytes; None when it is not there or no replica passes the checks (see why()).

        Raise Unavailable when the master or every node with a replica is out of reach, Unauthorized when they require
        another secret or certificate than the engine has (TransferConfig.secret_file): these are no misses.
        """
        return self.get_many([key])[0]

    def get_many(self, keys: Sequence[bytes], identity: bytes | None = None) -> list[bytes | None]:
        """get() of each. Raise the first error that is no miss."""
        return [cast(bytes | None, _or_none(got)) for got in self._reads.read(keys, [None] * len(keys), identity)]

    def get_into(self, key: bytes, into: Buffer) -> int | None:
        """As get(), into the caller's memory. Return how many bytes. Raise InvalidInput when they do not fit."""
        return cast(int | None, _or_none(self._reads.read([key], [[as_bytes_view(into, True)]], None)[0]))

    def get_many_into(
        self, keys: Sequence[bytes], buffers: Sequence[Sequence[Buffer]], identity: bytes | None = None
    ) -> list[int | MoonpoolError]:
        """Read each object into its buffers, filled one after the other. Return its size or the error.

        Errors by position: NotFound for a miss, InvalidInput when it does not fit, IdentityMismatch, Corrupt,
        Unavailable. Buffers of a key that failed may hold anything. Raise InvalidInput for a buffer that cannot be
        used.
        """
        if len(keys) != len(buffers):
            raise InvalidInput(f"{len(keys)} keys and buffers for {len(buffers)}")
        targets = [[as_bytes_view(buffer, True) for buffer in some] for some in buffers]
        return cast("list[int | MoonpoolError]", self._reads.read(keys, targets, identity))

    def get_ranges(self, key: bytes, ranges: Sequence[tuple[int, Buffer]], identity: bytes | None = None) -> int | None:
        """Read from each offset as many bytes as its buffer has. Return how many in total, or None as get().

        Every piece that a range touches is read and verified whole. Raise InvalidInput beyond the object's end.
        """
        wanted = [(offset, as_bytes_view(buffer, True)) for offset, buffer in ranges]
        return _attempted(lambda: self._reads.read_one(key, identity, lambda session: read_ranges(session, wanted)))

    def size(self, key: bytes) -> int | None:
        """Return how many bytes get() would return, from the object's header; None as get()."""
        return _attempted(lambda: self._reads.read_one(key, None, lambda session: session.nbytes))

    def view(
        self,
        keys: Sequence[bytes],
        *,
        identity: bytes | None = None,
        verify: Literal["once", "always"] = "once",
    ) -> list[ObjectView | MoonpoolError]:
        """Return by position a view of the object's memory, or the error as get_many_into(). Close each view.

        Objects on other machines or disks, and views beyond `max_view_nbytes`, are copies. The bytes of an allocation
        are verified when it is viewed first, with `always` each time.
        """
        return self._reads.view(list(keys), identity, verify == "always")

    def open_read(self, info: ObjectInfo, identity: bytes | None) -> ReadSession:
        """Open an object for reading piece by piece. `identity` None accepts any.

        Raise IdentityMismatch, StaleGeneration, Corrupt, NotFound, Unauthorized or Unavailable if no replica can be
        used.
        """
        try:
            return ReadSession(info, identity, self._read_tools)
        except MoonpoolError as error:
            self._counters.add_refusal(error)
            raise

    def open_reads(self, infos: Sequence[ObjectInfo], identity: bytes | None) -> list[ReadSession | MoonpoolError]:
        """open_read() of each, with one transfer of headers per segment; the session, or what open_read() raises."""
        return open_reads(infos, identity, self._read_tools)

    def read_pieces(self, reads: Sequence[tuple[ReadSession, int, Buffer]]) -> list[MoonpoolError | None]:
        """Read piece `int` of each session into its buffer, with one stream of transfers per segment.

        Each piece is verified, and read from another replica where it fails, as in ReadSession.read_piece(). Return of
        each None, or what read_piece() raises. The buffers are the caller's again when this returns.
        """
        return read_pieces(reads, self._read_tools)

    def finish_reads(self, sessions: Sequence[ReadSession]) -> list[MoonpoolError | None]:
        """ReadSession.finish() of each, with one transfer per segment. What a session with an error has read must not
        be used.
        """
        return finish_reads(sessions, self._read_tools)


def is_new(outcome: MoonpoolError | None) -> bool:
    """Return whether the put stored the object; False when the key was taken. Raise other errors."""
    if outcome is None or isinstance(outcome, FewerReplicas):
        return True
    if isinstance(outcome, AlreadyExists):
        return False
    raise outcome


def _attempted(action: Callable[[], int]) -> int | None:
    """Return what the action returns; None for a miss."""
    try:
        return action()
    except (Refused, NotFound):
        return None


def _or_none(got: Got) -> int | bytes | None:
    """Return None for a miss. Raise other errors."""
    if isinstance(got, Refused | NotFound):
        return None
    if isinstance(got, MoonpoolError):
        raise got
    return got


def _idempotency_key() -> int:
    """Return a number that no other call has. It is random: counters of two clients would give the same."""
    return 1 + secrets.randbelow((1 << 63) - 1)
