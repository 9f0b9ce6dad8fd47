"""The pool, for a program: put, get and everything between, blocking and thread-safe.

Every call has a deadline. While the master is away calls raise BreakerOpen at once (retry.py), or wait for it for as
long as `retry_s` says. Memory that could not be read is not asked again before it can be (directory.py): what lies
only there does not exist for this client. Pins made by pin() are held by the connection and end with it. Bytes that
fail a check are never returned: their replica is reported, another one is read, and where there is none the answer
says so.
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
from moonpool.store.client.get_batch import Got
from moonpool.store.client.master_client import MasterClient
from moonpool.store.client.put_batch import OPAQUE_PIECE_NBYTES, PutBatches
from moonpool.store.client.put_calls import PutCalls
from moonpool.store.client.put_request import DEFAULT_OPTIONS, Put, PutRequest, bundle
from moonpool.store.client.put_session import PutSession, PutTools, write_headers, write_pieces
from moonpool.store.client.read_session import ReadSession, ReadTools, finish_reads, open_reads, read_pieces
from moonpool.store.client.reads import ClientReads, report_corrupt
from moonpool.store.client.recovery import read_ranges
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
    """Borrows the transfer engine. Close it to end its connections, its pins and its views."""

    def __init__(
        self,
        master_address: str,
        engine: TransferEngine,
        config: ClientConfig | None = None,
        clock: Clock | None = None,
    ) -> None:
        config = config or ClientConfig()
        self.line = line = MasterClient(
            master_address,
            name=config.name,
            connect_timeout_s=config.connect_timeout_s,
            timeout_s=config.rpc_timeout_s,
            retry_s=config.retry_s,
        )
        self._counters = ClientCounters()
        self.directory = directory = SegmentDirectory(engine, lambda: line.ask(m.Segments()))
        self._holder = SessionClient(directory, name=config.name, timeout_s=config.connect_timeout_s)
        self._calls = PutCalls(line, directory, self._holder, self._counters)
        self._put_tools = PutTools(
            holder=self._holder,
            counters=self._counters,
            clock=clock or SystemClock(),
            timeout_s=config.transfer_timeout_s,
            renew_after_s=config.renew_after_s,
            renew=self.renew_puts,
        )
        self._crew = TransferThreads()
        self._puts = PutBatches(self._crew, self._calls, self._put_tools)
        self._read_tools = ReadTools(
            directory=directory,
            counters=self._counters,
            timeout_s=config.transfer_timeout_s,
            report_corrupt=lambda info, place: report_corrupt(line, info, place),
        )
        # Views have sessions of their own, for these may change (views.py).
        self._view_holder = SessionClient(directory, name=config.name, timeout_s=config.connect_timeout_s)
        self._reads = ClientReads(
            line,
            self._crew,
            self._view_holder,
            self._read_tools,
            max_view_nbytes=config.max_view_nbytes,
            max_verified_views=config.max_verified_views,
        )

    def close(self) -> None:
        """Idempotent."""
        self._reads.close()
        self.line.close()
        self.directory.close()
        self._crew.close()
        self._view_holder.close()
        self._holder.close()  # last: until here something may be written in place

    def __enter__(self) -> StoreClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def counters(self) -> dict[str, int]:
        """bytes_read, bytes_written, bytes_viewed, hits, misses, corrupt_replicas, fewer_replicas, refused_<code>,
        master_outages, calls_refused.
        """
        return {**self._counters.snapshot(), **self.line.counters()}

    def wait_for_master(self, timeout_s: float) -> bool:
        """Wait for a master that is away; False when it was not back in time."""
        return self.line.wait_for_master(timeout_s)

    # asking the master

    def lookup(self, keys: Sequence[bytes], prefix: bool = False, reads: bool = True) -> list[ObjectInfo | None]:
        """Where the objects are, each leased for info.lease_s. With `prefix` all behind the first gap is None.

        `reads` False: another look-up will follow for what is read, which counts its use.
        """
        return self._reads.lookup(list(keys), prefix=prefix, reads=reads)

    def exist(self, keys: Sequence[bytes]) -> list[bool]:
        """As lookup, leases included, without the places; counts neither hit nor miss. What lies only on segments that
        this client could not read does not exist for it, until they can be read again.
        """
        return self.line.ask(m.Exist(keys=list(keys), without=self.directory.unreadable.listed))

    def remove(self, keys: Sequence[bytes], force: bool = False) -> list[bool]:
        """True where no object is under the key now. Leased and pinned ones stay unless `force`."""
        return self.line.ask(m.Remove(keys=list(keys), force=force, errand=_errand()))

    def remove_matching(self, pattern: str | None = None, force: bool = False) -> tuple[int, int]:
        """Removes what the regular expression finds (None: everything); how many went and how many stayed."""
        num_removed, num_kept = 0, 0
        cursor: int | None = 0
        while cursor is not None:
            call = m.RemoveMatching(pattern=pattern, force=force, cursor=cursor, errand=_errand())
            step = self.line.ask(call)
            num_removed, num_kept, cursor = num_removed + step.num_removed, num_kept + step.num_kept, step.cursor
        return num_removed, num_kept

    def list_objects(self, pattern: str | None = None) -> Iterator[ListedObject]:
        """What is stored under keys that the regular expression finds (None: all), in no order; asks as it goes."""
        cursor: int | None = 0
        while cursor is not None:
            page = self.line.ask(m.ListObjects(pattern=pattern, cursor=cursor))
            yield from page.objects
            cursor = page.cursor

    def pin(self, keys: Sequence[bytes]) -> list[bool]:
        """Keeps the objects until unpin or until this client's connection ends; pins count."""
        return self.line.ask_once(m.Pin(keys=list(keys)))

    def unpin(self, keys: Sequence[bytes]) -> None:
        self.line.ask_once(m.Unpin(keys=list(keys)))

    def why(self, key: bytes, identity: bytes = b"") -> str:
        """What became of a key, in a sentence."""
        return self.line.ask(m.Why(key=key, identity=identity))

    def stats(self) -> StoreStats:
        return self.line.ask(m.Stats())

    def list_tasks(self, finished: bool = False) -> list[TaskInfo]:
        """Copies, moves and drains that are running; with `finished` also those that ended lately."""
        return self.line.ask(m.ListTasks(finished=finished))

    # putting

    def put(
        self, key: bytes, data: Buffer, *, num_replicas: int = 1, pinned: bool = False, replace: bool = False
    ) -> bool:
        """Stores opaque bytes. False when the key was taken, in which case the old value stays. True also when it got
        fewer replicas than asked for; put_many() says so.
        """
        options = DEFAULT_OPTIONS
        if num_replicas != 1 or pinned or replace:
            options = PutOptions(num_replicas=num_replicas, hard_pin=pinned, replace=replace)
        return is_new(self.put_many([Put(key, [data], options=options)])[0])

    def put_many(self, puts: Sequence[Put]) -> list[MoonpoolError | None]:
        """Stores the objects; per position None or why not: AlreadyExists (the old value stays unless
        options.replace), NoSpace, InvalidInput, Unavailable. FewerReplicas says that it is stored, on fewer replicas
        than asked for. The buffers are the caller's again when this returns.
        """
        return self._puts.put_many(puts)

    def begin_puts(self, requests: Sequence[PutRequest]) -> list[PutSession | MoonpoolError]:
        """Space for each request, in few calls; or why not: AlreadyExists, NoSpace, InvalidInput."""
        begun: list[PutSession | MoonpoolError | None] = [None] * len(requests)
        sizes = [request.nbytes for request in requests]
        for positions in bundle(requests, sizes, range(len(requests))):
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
        """The master discards them later; False where it has already. Writing pieces does it when it is due."""
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
        """Writes the headers and makes the objects visible, in one call. Those that fail are aborted; FewerReplicas is
        no failure, as in put_many().

        Raises only when the master cannot be asked; whether the objects are visible is not known then.
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
            results[index] = refused.get(at) or self._counters.note_replicas(
                session.num_replicas, session.request.options.num_replicas
            )
        return results

    def abort_puts(self, sessions: Sequence[PutSession]) -> None:
        """Gives the space back. Best effort: what the master does not hear of it discards by itself in time."""
        for settled in (True, False):
            some = [each for each in sessions if each.settled is settled]
            self._calls.give_back([each.key for each in some], [each.generation for each in some], settled)

    # getting

    def get(self, key: bytes) -> bytes | None:
        """The object's bytes; None when it is not there or no replica passes the checks (why() knows more).

        Raises Unavailable when the master or every node that holds it is out of reach, Unauthorized when they ask for
        another secret or certificate than the engine has (TransferConfig.secret_file): that is no miss.
        """
        return self.get_many([key])[0]

    def get_many(self, keys: Sequence[bytes], identity: bytes | None = None) -> list[bytes | None]:
        """get() of each; raises the first error that is no miss."""
        return [cast(bytes | None, _or_none(got)) for got in self._reads.read(keys, [None] * len(keys), identity)]

    def get_into(self, key: bytes, into: Buffer) -> int | None:
        """As get, into the caller's memory; how many bytes. InvalidInput when they do not fit."""
        return cast(int | None, _or_none(self._reads.read([key], [[as_bytes_view(into, True)]], None)[0]))

    def get_many_into(
        self, keys: Sequence[bytes], buffers: Sequence[Sequence[Buffer]], identity: bytes | None = None
    ) -> list[int | MoonpoolError]:
        """Each object into its buffers, filled one after the other, however they are cut; how many bytes it has.

        Errors by position: NotFound for a miss, InvalidInput when it does not fit, IdentityMismatch, Corrupt,
        Unavailable. Buffers of a key that failed may hold anything. InvalidInput is raised for a buffer of no use.
        """
        if len(keys) != len(buffers):
            raise InvalidInput(f"{len(keys)} keys and buffers for {len(buffers)}")
        targets = [[as_bytes_view(buffer, True) for buffer in some] for some in buffers]
        return cast("list[int | MoonpoolError]", self._reads.read(keys, targets, identity))

    def get_ranges(self, key: bytes, ranges: Sequence[tuple[int, Buffer]], identity: bytes | None = None) -> int | None:
        """Bytes of the object from each offset on, as many as fit that buffer; how many in all, or None as get().

        Every piece that a range touches is read and verified whole. InvalidInput beyond the object's end.
        """
        wanted = [(offset, as_bytes_view(buffer, True)) for offset, buffer in ranges]
        return _attempted(lambda: self._reads.read_one(key, identity, lambda session: read_ranges(session, wanted)))

    def size(self, key: bytes) -> int | None:
        """How many bytes get() would give, or None as get(); read from the object's header."""
        return _attempted(lambda: self._reads.read_one(key, None, lambda session: session.nbytes))

    def view(
        self,
        keys: Sequence[bytes],
        *,
        identity: bytes | None = None,
        verify: Literal["once", "always"] = "once",
    ) -> list[ObjectView | MoonpoolError]:
        """The objects where they lie, or by position why not, as get_many_into. Close each view.

        What lies on other machines or disks, and what goes beyond `max_view_nbytes`, is copied. The bytes of an
        allocation are verified when they are first seen, with `always` each time.
        """
        return self._reads.view(list(keys), identity, verify == "always")

    def open_read(self, info: ObjectInfo, identity: bytes | None) -> ReadSession:
        """Checks the header, replica by replica. `identity` None reads an object of any.

        Raises IdentityMismatch, StaleGeneration, Corrupt, NotFound, Unauthorized or Unavailable if no replica will do.
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
    """Whether a put has stored the object; False when the key was taken. Raises other outcomes."""
    if outcome is None or isinstance(outcome, FewerReplicas):
        return True
    if isinstance(outcome, AlreadyExists):
        return False
    raise outcome


def _attempted(action: Callable[[], int]) -> int | None:
    """None for a miss."""
    try:
        return action()
    except (Refused, NotFound):
        return None


def _or_none(got: Got) -> int | bytes | None:
    """None for a miss; other errors are raised."""
    if isinstance(got, Refused | NotFound):
        return None
    if isinstance(got, MoonpoolError):
        raise got
    return got


def _errand() -> int:
    """A number no other call has. Not from a counter: two clients would have the same."""
    return 1 + secrets.randbelow((1 << 63) - 1)
