"""Objects written piece by piece, in any order and from any thread, then the header, to every replica.

A replica that cannot be written is left out; the put fails only when no replica is left. Readers see nothing before
PiecePuts.finish() has told the master. Writing a piece renews a session that has lasted long. PiecePuts serves many
sessions with one transfer per segment; PieceWriter is one session as a context manager.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from moonpool.base.checksum import crc32c
from moonpool.base.errors import (
    FewerReplicas,
    InvalidInput,
    MoonpoolError,
    StaleGeneration,
    Unauthorized,
    Unavailable,
)
from moonpool.base.object_header import header_nbytes, pack_header
from moonpool.store.client.put_request import PutRequest, bundle_puts
from moonpool.store.client.put_tools import REPLICA_ERRORS, PutTools
from moonpool.store.client.transfer_window import bundles
from moonpool.store.client.whole_puts import PendingPuts
from moonpool.store.messages import Placement
from moonpool.transfer.memory.buffers import Buffer, DeviceSpan, as_bytes_view


class PutSession:
    """Space that the master granted. End it with PiecePuts.finish() or abort()."""

    def __init__(
        self, request: PutRequest, generation: int, replicas: Sequence[Placement], session: int, pieces: PiecePuts
    ) -> None:
        self.request = request
        self.generation = generation
        self.settled = True  # no write of this session can still arrive at an owner
        self._session = session
        self._pieces = pieces
        self._replicas = list(replicas)
        self._failed: list[str] = []
        self._failure: MoonpoolError | None = None
        self._checksums: list[int | None] = [None] * len(request.piece_nbytes)
        first = header_nbytes(len(request.key), len(request.piece_nbytes))
        self._offsets = list(accumulate(request.piece_nbytes, initial=first))
        self._renewed_s = pieces.tools.clock.now_s()

    @property
    def key(self) -> bytes:
        return self.request.key

    @property
    def failed(self) -> tuple[str, ...]:
        """Segments whose replicas could not be written."""
        return tuple(self._failed)

    @property
    def num_replicas(self) -> int:
        """Replicas that have all that was written so far."""
        return len(self._replicas)

    def write_piece(self, index: int, buffer: Buffer, checksum: int | None = None) -> None:
        """Copy piece `index` to the replicas. `checksum` is its crc32c if the caller knows it.

        The buffer is the caller's again when this returns. Raises when no replica could be written, StaleGeneration
        when the put was discarded meanwhile.
        """
        (error,) = self._pieces.write([(self, index, buffer, checksum)])
        if error is not None:
            raise error

    @property
    def replicas(self) -> tuple[Placement, ...]:
        """Where the object is written, without replicas that failed."""
        return tuple(self._replicas)

    def checksums(self, pieces: range) -> tuple[int, ...] | None:
        """Return the crc32c of these pieces; None if one was not written."""
        found = tuple(each for each in self._checksums[pieces.start : pieces.stop] if each is not None)
        return found if len(found) == len(pieces) else None

    def add_written(self, pieces: range, checksums: Sequence[int], failed: Sequence[str]) -> None:
        """Another process has written these pieces, but not to the segments in `failed` (shared_puts.py)."""
        if len(checksums) != len(pieces):
            raise InvalidInput(f"{len(checksums)} checksums for {len(pieces)} pieces")
        self._checksums[pieces.start : pieces.stop] = checksums
        for placement in [each for each in self._replicas if each.segment in failed]:
            self._replicas.remove(placement)
            self._failed.append(placement.segment)

    def _piece(self, index: int, buffer: Buffer, checksum: int | None) -> _Write:
        """Record the piece's checksum and return its write. InvalidInput when the buffer has another size."""
        view = as_bytes_view(buffer, writable=False)
        if view.nbytes != self.request.piece_nbytes[index]:
            raise InvalidInput(f"piece {index} has {self.request.piece_nbytes[index]} bytes, not {view.nbytes}")
        self._checksums[index] = crc32c(view) if checksum is None else checksum
        return _Write(self, self._offsets[index], view)

    def _whole(self, memory: DeviceSpan, checksums: Sequence[int]) -> int:
        """Record the checksums of all pieces; return where in the object they begin. InvalidInput for other sizes."""
        sizes = self.request.piece_nbytes
        if memory.nbytes != sum(sizes) or len(checksums) != len(sizes):
            raise InvalidInput(f"the pieces of {self.key.hex()[:16]} have {sum(sizes)} bytes, not {memory.nbytes}")
        self._checksums = list(checksums)
        return self._offsets[0]

    def _header(self) -> _Write:
        """Return the write of the header. InvalidInput when a piece was not written."""
        checksums = [checksum for checksum in self._checksums if checksum is not None]
        if len(checksums) < len(self._checksums):
            missing = self._checksums.index(None)
            raise InvalidInput(f"piece {missing} of {self.key.hex()[:16]} was not written")
        request = self.request
        header = pack_header(
            request.key,
            self.generation,
            request.piece_nbytes,
            checksums,
            kind=request.kind,
            identity=request.identity,
            valid_tokens=request.valid_tokens,
        )
        return _Write(self, 0, memoryview(header))

    def _drop_replica(self, placement: Placement, error: MoonpoolError) -> None:
        # After a lost connection or a deadline the bytes may still arrive at the owner.
        self.settled = self.settled and not isinstance(error, Unavailable)
        self._failure = error
        if isinstance(error, Unauthorized):
            self._pieces.tools.counters.add_refusal(error)
        if placement in self._replicas:  # else another thread has removed it
            self._replicas.remove(placement)
            self._failed.append(placement.segment)


class _Write(NamedTuple):
    """Bytes for offset `at` of the session's object, in each of its replicas."""

    session: PutSession
    at: int
    view: memoryview


class _ReplicaWrite(NamedTuple):
    """A _Write to one replica. `position` is that of the write."""

    position: int
    session: PutSession
    place: Placement
    item: tuple[int, list[memoryview], int]  # offset, bytes and generation, as RemoteSegment.write_each() takes them


class PiecePuts:
    """Puts of many objects, piece by piece. Thread-safe."""

    def __init__(self, tools: PutTools) -> None:
        self.tools = tools

    def begin(self, requests: Sequence[PutRequest]) -> list[PutSession | MoonpoolError]:
        """Get space for each request, in few calls. Return by position the session, or the error: AlreadyExists,
        NoSpace, InvalidInput.
        """
        begun: list[PutSession | MoonpoolError | None] = [None] * len(requests)
        sizes = [request.nbytes for request in requests]
        for positions in bundle_puts(requests, sizes, range(len(requests))):
            granted = self.tools.calls.start([requests[p] for p in positions], [sizes[p] for p in positions])
            for index, position in enumerate(positions):
                begun[position] = granted.errors[index] or PutSession(
                    requests[position], granted.generations[index], granted.replicas[index], granted.session, self
                )
        return [each for each in begun if each is not None]

    def renew(self, sessions: Sequence[PutSession]) -> list[bool]:
        """Tell the master that the puts go on, so that it does not discard them. Return False where it has discarded
        the put. Writing pieces renews by itself when it is due.
        """
        return self.tools.calls.renew([each.key for each in sessions], [each.generation for each in sessions])

    def write(self, writes: Sequence[tuple[PutSession, int, Buffer, int | None]]) -> list[MoonpoolError | None]:
        """Write piece `int` of each session from its buffer, with one transfer per segment. The last number is the
        piece's crc32c if the caller knows it, else None.

        A replica that cannot be written is left out. Return of each None, or what PutSession.write_piece() raises: a
        write fails only when its session has no replica left, or was discarded. The buffers are the caller's again
        when this returns.
        """
        errors: list[MoonpoolError | None] = [None] * len(writes)
        ready: list[_Write] = []
        positions: list[int] = []
        late = self._renew_due([session for session, _, _, _ in writes])
        for position, (session, index, buffer, checksum) in enumerate(writes):
            try:
                if session in late:
                    raise late[session]
                ready.append(session._piece(index, buffer, checksum))
                positions.append(position)
            except MoonpoolError as error:
                errors[position] = error
        nbytes = 0
        for position, write, outcome in zip(positions, ready, _write(ready, self.tools), strict=True):
            errors[position] = outcome
            nbytes += write.view.nbytes if outcome is None else 0
        self.tools.counters.add("bytes_written", nbytes)
        return errors

    def start_whole(self, writes: Sequence[tuple[PutSession, DeviceSpan, Sequence[int]]]) -> PendingPuts:
        """Start writing all pieces of each session from one span of GPU memory; the numbers are their crc32c. The
        memory is in use until wait() of the result has returned, which returns what write() would.
        """
        late = self._renew_due([session for session, _, _ in writes])
        return PendingPuts(writes, [late.get(session) for session, _, _ in writes], self.tools)

    def finish(self, sessions: Sequence[PutSession]) -> list[MoonpoolError | None]:
        """Write the headers and make the objects visible, with one call. Return the error of each. Puts that fail are
        aborted; FewerReplicas is no failure, as in Store.put_many().

        Raise only when the master cannot be asked; it is not known then whether the objects are visible.
        """
        results = self._write_headers(sessions)
        self.abort([each for each, error in zip(sessions, results, strict=True) if error is not None])
        written = [index for index, error in enumerate(results) if error is None]
        refused = self.tools.calls.finish(
            [sessions[index].key for index in written],
            [sessions[index].generation for index in written],
            {at: sessions[index].failed for at, index in enumerate(written) if sessions[index].failed},
        )
        for at, index in enumerate(written):
            session = sessions[index]
            results[index] = refused.get(at) or self.tools.counters.check_replicas(
                session.num_replicas, session.request.options.num_replicas
            )
        return results

    def abort(self, sessions: Sequence[PutSession]) -> None:
        """Give the space back."""
        for settled in (True, False):
            some = [each for each in sessions if each.settled is settled]
            self.tools.calls.give_back([each.key for each in some], [each.generation for each in some], settled)

    def _write_headers(self, sessions: Sequence[PutSession]) -> list[MoonpoolError | None]:
        """Return the error of each: InvalidInput when a piece was not written, else why no replica could be written."""
        errors: list[MoonpoolError | None] = [None] * len(sessions)
        ready: list[_Write] = []
        positions: list[int] = []
        for position, session in enumerate(sessions):
            try:
                ready.append(session._header())
                positions.append(position)
            except MoonpoolError as error:
                errors[position] = error
        for position, outcome in zip(positions, _write(ready, self.tools), strict=True):
            errors[position] = outcome
        return errors

    def _renew_due(self, sessions: Sequence[PutSession]) -> dict[PutSession, MoonpoolError]:
        """Renew sessions that are due, long before the master would discard them. Return those that the master has
        discarded, or could not be asked about, with the error.
        """
        now_s = self.tools.clock.now_s()
        due = [each for each in dict.fromkeys(sessions) if now_s - each._renewed_s >= self.tools.renew_after_s]
        if not due:
            return {}
        for session in due:
            session._renewed_s = now_s  # first: one thread asks, the others go on
        try:
            renewed = self.renew(due)
        except MoonpoolError as error:
            return dict.fromkeys(due, error)
        return {
            session: StaleGeneration(f"the put of {session.key.hex()[:16]} took too long and was discarded")
            for session, is_renewed in zip(due, renewed, strict=True)
            if not is_renewed
        }


class PieceWriter:
    """Writes one object. Leaving the `with` block makes it visible; an error in the block gives the space back."""

    def __init__(self, pieces: PiecePuts, request: PutRequest) -> None:
        """Raise AlreadyExists, NoSpace or InvalidInput when there is no space for it."""
        self._pieces = pieces
        (begun,) = pieces.begin([request])
        if isinstance(begun, MoonpoolError):
            raise begun
        self._session: PutSession = begun

    def write(self, index: int, buffer: Buffer) -> None:
        """Copy piece `index`, in any order, from any thread. The buffer is the caller's again when this returns."""
        self._session.write_piece(index, buffer)

    def finish(self) -> None:
        """Make the object visible. Raise InvalidInput when a piece is missing, StaleGeneration when it took too long;
        nothing is stored then. Fewer replicas than asked for are no error; they are counted (`fewer_replicas`).
        """
        (error,) = self._pieces.finish([self._session])
        if error is not None and not isinstance(error, FewerReplicas):
            raise error

    def abort(self) -> None:
        self._pieces.abort([self._session])

    def __enter__(self) -> PieceWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.finish()
        else:
            self.abort()


def _write(writes: Sequence[_Write], tools: PutTools) -> list[MoonpoolError | None]:
    """Write to every replica that is left. A replica that cannot be written is left out; the error of a write is why
    its session has no replica left.
    """
    errors: list[MoonpoolError | None] = [None] * len(writes)
    by_segment: dict[tuple[str, int, int], list[_ReplicaWrite]] = {}
    for position, (session, at, view) in enumerate(writes):
        for place in list(session._replicas):
            each = _ReplicaWrite(position, session, place, (place.offset + at, [view], place.generation))
            by_segment.setdefault((place.segment, place.incarnation, session._session), []).append(each)
    for (_, _, number), some in by_segment.items():
        for each, error in _write_segment(some, number, tools):
            if isinstance(error, REPLICA_ERRORS):
                each.session._drop_replica(each.place, error)
            elif error is not None:
                errors[each.position] = error
    for position, write in enumerate(writes):
        if not write.session._replicas:
            errors[position] = write.session._failure
    return errors


def _write_segment(
    writes: Sequence[_ReplicaWrite], number: int, tools: PutTools
) -> Iterator[tuple[_ReplicaWrite, MoonpoolError | None]]:
    """Write to one segment, for puts begun with session `number`. Yield the error of each."""
    lost: MoonpoolError | None = None
    try:
        remote = tools.sessions.open_for_writing(writes[0].place, number)
    except MoonpoolError as error:
        lost = error
    for bundle in bundles(writes, lambda each: each.item[1][0].nbytes):
        outcomes: list[MoonpoolError | None] = [lost] * len(bundle)
        if lost is None:
            try:
                outcomes = remote.write_each([each.item for each in bundle], timeout_s=tools.timeout_s)
            except MoonpoolError as error:
                outcomes = [error] * len(bundle)
                lost = error if isinstance(error, Unavailable) else None  # the owner is not asked again
        yield from zip(bundle, outcomes, strict=True)
