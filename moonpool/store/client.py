"""The pool, for a program: put, get and everything between, blocking and thread-safe.

Every call has a deadline. When the master is gone a call raises PeerLost at once and the next one connects anew;
pins are held by the connection and end with it. Bytes that fail a check are never returned: `get` answers None and
counts, a session raises.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from moonpool.base.errors import (
    AlreadyExists,
    InvalidInput,
    MoonpoolError,
    NotFound,
    PeerLost,
    Refused,
    StaleGeneration,
    from_wire,
)
from moonpool.base.rpc import BlockingClient, Call
from moonpool.store import messages as m
from moonpool.store.counters import ClientCounters
from moonpool.store.directory import SegmentDirectory
from moonpool.store.messages import ObjectInfo, Placement, StoreStats
from moonpool.store.put_session import PutRequest, PutSession
from moonpool.store.read_session import ReadSession
from moonpool.transfer.buffers import as_bytes_view
from moonpool.transfer.engine import TransferEngine

if TYPE_CHECKING:
    from typing_extensions import Buffer

R = TypeVar("R")
OPAQUE_PIECE_NBYTES = 4 * 1024 * 1024


@dataclass(frozen=True, kw_only=True)
class ClientConfig:
    name: str = ""  # how the master's log calls this client
    connect_timeout_s: float = 2.0
    rpc_timeout_s: float = 10.0
    transfer_timeout_s: float = 10.0  # per piece and replica


class StoreClient:
    """Borrows the transfer engine. Close it to end its connection and its pins."""

    def __init__(self, master_address: str, engine: TransferEngine, config: ClientConfig | None = None) -> None:
        self._config = config or ClientConfig()
        self._rpc = BlockingClient(
            master_address, m.SERVICE, name=self._config.name, connect_timeout_s=self._config.connect_timeout_s
        )
        self._counters = ClientCounters()
        self._directory = SegmentDirectory(engine, lambda: self._ask(m.Segments()))

    def close(self) -> None:
        """Idempotent."""
        self._rpc.close()

    def __enter__(self) -> StoreClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def counters(self) -> dict[str, int]:
        """bytes_read, bytes_written, hits, misses, corrupt_replicas, refused_<code>."""
        return self._counters.snapshot()

    # asking the master

    def lookup(self, keys: Sequence[bytes], prefix: bool = False) -> list[ObjectInfo | None]:
        """Where the objects are, each leased for info.lease_s. With `prefix` all behind the first gap is None."""
        found = self._ask(m.Lookup(keys=list(keys), prefix=prefix))
        num_found = len(found) - found.count(None)
        self._counters.add("hits", num_found)
        self._counters.add("misses", len(found) - num_found)
        return found

    def exist(self, keys: Sequence[bytes]) -> list[bool]:
        """As lookup, leases included, without the places; counts neither hit nor miss."""
        return self._ask(m.Exist(keys=list(keys)))

    def remove(self, keys: Sequence[bytes], force: bool = False) -> list[bool]:
        """True where no object is under the key now. Leased and pinned ones stay unless `force`."""
        return self._ask(m.Remove(keys=list(keys), force=force))

    def pin(self, keys: Sequence[bytes]) -> list[bool]:
        """Keeps the objects until unpin or until this client's connection ends; pins count."""
        return self._call(m.Pin(keys=list(keys)))

    def unpin(self, keys: Sequence[bytes]) -> None:
        self._call(m.Unpin(keys=list(keys)))

    def why(self, key: bytes) -> str:
        """What became of a key, in a sentence."""
        return self._ask(m.Why(key=key))

    def stats(self) -> StoreStats:
        return self._ask(m.Stats())

    # putting

    def begin_puts(self, requests: Sequence[PutRequest]) -> list[PutSession | MoonpoolError]:
        """Space for each request, in one call; or why not: AlreadyExists, NoSpace, InvalidInput."""
        local = self._directory.local_segment()
        items = [
            m.PutItem(
                key=each.key,
                nbytes=each.nbytes,
                num_replicas=each.num_replicas,
                preferred_segment=each.preferred_segment or local,
                pinned=each.pinned,
            )
            for each in requests
        ]
        # Said twice it is refused at worst: a first one that did arrive holds its keys until it is discarded.
        outcomes = self._ask(m.PutStart(items=items))
        return [self._session(request, outcome) for request, outcome in zip(requests, outcomes, strict=True)]

    def finish_puts(self, sessions: Sequence[PutSession]) -> list[MoonpoolError | None]:
        """Writes the headers and makes the objects visible, in one call. Those that fail are aborted.

        Raises only when the master cannot be asked; whether the objects are visible is not known then.
        """
        results: list[MoonpoolError | None] = [_attempt(session.write_header) for session in sessions]
        self.abort_puts([each for each, error in zip(sessions, results, strict=True) if error is not None])
        written = [index for index, error in enumerate(results) if error is None]
        if written:
            refusals = self._ask(m.PutEnd(items=[sessions[index].written() for index in written]))
            for index, refusal in zip(written, refusals, strict=True):
                results[index] = None if refusal is None else self._refused(refusal)
        return results

    def abort_puts(self, sessions: Sequence[PutSession]) -> None:
        """Gives the space back. Best effort: what the master does not hear of it discards by itself in time."""
        for settled in (True, False):
            items = [each.written() for each in sessions if each.settled is settled]
            if items:
                _attempt(lambda: self._call(m.PutRevoke(items=items, settled=settled)))  # noqa: B023 - runs here

    def put(self, key: bytes, data: Buffer, *, num_replicas: int = 1, pinned: bool = False) -> bool:
        """Stores opaque bytes. False when the key was taken, in which case the old value stays."""
        view = as_bytes_view(data, writable=False)
        sizes = tuple(len(view[at : at + OPAQUE_PIECE_NBYTES]) for at in range(0, len(view), OPAQUE_PIECE_NBYTES))
        session = self.begin_puts([PutRequest(key, sizes, num_replicas=num_replicas, pinned=pinned)])[0]
        if isinstance(session, AlreadyExists):
            return False
        if isinstance(session, MoonpoolError):
            raise session
        try:
            for index in range(len(sizes)):
                start = index * OPAQUE_PIECE_NBYTES
                session.write_piece(index, view[start : start + OPAQUE_PIECE_NBYTES])
        except BaseException:
            self.abort_puts([session])
            raise
        error = self.finish_puts([session])[0]
        if error is not None:
            raise error
        return True

    # getting

    def open_read(self, info: ObjectInfo, identity: bytes | None) -> ReadSession:
        """Checks the header, replica by replica. `identity` None reads an object of any.

        Raises IdentityMismatch, StaleGeneration, Corrupt, NotFound, Unauthorized or Unavailable if no replica will do.
        """
        try:
            return ReadSession(
                info,
                identity,
                self._directory,
                self._report_corrupt,
                self._counters,
                self._config.transfer_timeout_s,
            )
        except MoonpoolError as error:
            self._counters.add_refusal(error)
            raise

    def get(self, key: bytes) -> bytes | None:
        """The object's bytes; None when it is not there or no replica passes the checks (why() knows more).

        Raises Unavailable when the master or every node that holds it is out of reach, Unauthorized when they ask for
        another secret or certificate than the engine has (TransferConfig.secret_file): that is no miss.
        """
        found = self._get(key, lambda nbytes: np.empty(nbytes, dtype=np.uint8).data)
        return None if found is None else found.tobytes()

    def get_into(self, key: bytes, into: Buffer) -> int | None:
        """As get, into the caller's memory; how many bytes. InvalidInput when they do not fit."""
        target = as_bytes_view(into, writable=True)

        def take(nbytes: int) -> memoryview:
            if nbytes > target.nbytes:
                raise InvalidInput(f"the object has {nbytes} bytes, the buffer {target.nbytes}")
            return target[:nbytes]

        found = self._get(key, take)
        return None if found is None else found.nbytes

    def _get(self, key: bytes, take: Callable[[int], memoryview]) -> memoryview | None:
        for _ in range(2):  # an object replaced while it was read is looked up once more
            info = self.lookup([key])[0]
            if info is None:
                return None
            try:
                return _read_all(self.open_read(info, identity=None), take)
            except StaleGeneration as error:
                self._counters.add_refusal(error)
            except (Refused, NotFound) as error:
                self._counters.add_refusal(error)
                return None
        return None

    # the wire

    def _session(self, request: PutRequest, outcome: m.PutOutcome) -> PutSession | MoonpoolError:
        if outcome.grant is not None:
            timeout_s = self._config.transfer_timeout_s
            return PutSession(request, outcome.grant, self._directory, self._counters, timeout_s)
        assert outcome.refusal is not None, "an outcome is a grant or a refusal"
        return self._refused(outcome.refusal)

    def _refused(self, refusal: m.Refusal) -> MoonpoolError:
        error = from_wire(refusal.code, refusal.message)
        self._counters.add_refusal(error)
        return error

    def _report_corrupt(self, info: ObjectInfo, placement: Placement) -> bool:
        call = m.ReportCorrupt(key=info.key, generation=info.generation, segment=placement.segment)
        return self._call(call)

    def _call(self, call: Call[R]) -> R:
        return self._rpc.call(call, timeout_s=self._config.rpc_timeout_s)

    def _ask(self, call: Call[R]) -> R:
        """For calls that may be said twice: a connection that broke since the last call is not the caller's concern."""
        try:
            return self._call(call)
        except PeerLost:
            return self._call(call)


def _read_all(session: ReadSession, take: Callable[[int], memoryview]) -> memoryview:
    target, at = take(session.nbytes), 0
    for index, piece in enumerate(session.header.pieces):
        session.read_piece(index, target[at : at + piece.nbytes])
        at += piece.nbytes
    session.finish()
    return target


def _attempt(action: Callable[[], object]) -> MoonpoolError | None:
    try:
        action()
    except MoonpoolError as error:
        return error
    return None
