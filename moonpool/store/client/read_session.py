"""Sessions that read objects piece by piece, each with the checks of verified_read.py.

A session checks the header when it opens, each piece when it is read, and the header again in finish(). A replica that
fails a check is reported to the master, and the session goes on with the next one. Wrong bytes are never returned; the
caller's buffer may hold them after an error.

PieceReads serves many sessions with one transfer per remote segment. Where a shared transfer fails, or an item fails
its check, the sessions concerned go on one by one, so that an error concerns its own item only.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple, TypeAlias

from moonpool.base.errors import (
    Corrupt,
    InvalidInput,
    MoonpoolError,
    NotFound,
    StaleGeneration,
    Unauthorized,
    Unavailable,
)
from moonpool.base.object_header import ALIGN_NBYTES, HeaderFields, announced_nbytes
from moonpool.store.client.cuts import Part
from moonpool.store.client.read_tools import ReadTools
from moonpool.store.client.verified_read import PREFIX_NBYTES, check_header, check_piece, is_unchanged
from moonpool.store.messages import ObjectInfo, Placement
from moonpool.transfer import TransferOp, TransferRequest
from moonpool.transfer.memory.buffers import Buffer, as_bytes_view
from moonpool.transfer.transports.base import RemoteSegment

Failures: TypeAlias = dict[tuple[str, int], MoonpoolError]  # by segment and incarnation: why it cannot be read
_CANNOT_READ = (Unavailable, Unauthorized)  # an error of the whole segment, not of one object in it


class ReadSession:
    """An object open for reading, by one thread. `fields` describes its pieces.

    Segments in `failures` are not tried again; those that cannot be reached are added. `fetched` is the start of the
    object at one of its replicas, if the caller has read it already.
    """

    def __init__(
        self,
        info: ObjectInfo,
        identity: bytes | None,
        tools: ReadTools,
        failures: Failures | None = None,
        fetched: tuple[Placement, bytearray] | None = None,
    ) -> None:
        self.info = info
        self._fetched = fetched
        self._identity = identity
        self._tools = tools
        self._failures = {} if failures is None else failures
        self._untried = tools.directory.best_first(info.replicas)
        self._remote: RemoteSegment
        self._placement: Placement
        self._prefix: bytes
        self._fields: HeaderFields | None = None
        self._open_next(NotFound(f"{info.key.hex()[:16]} has no replica"))
        self._offsets = list(accumulate(self.fields.sizes, initial=self.fields.nbytes))

    @property
    def fields(self) -> HeaderFields:
        """The verified header of the object."""
        assert self._fields is not None, "an open session has a header"
        return self._fields

    @property
    def checksums(self) -> tuple[int, ...] | None:
        """The crc32c of each piece, as the verified header states them; None when the object was put without."""
        return self.fields.checksums if self.fields.checksum_kind else None

    def place(self) -> tuple[RemoteSegment, int]:
        """Return the segment of the replica that is read now, and where in it the first piece lies: for callers that
        copy the pieces, compare their checksums and call finish() themselves.
        """
        return self._remote, self._placement.offset + self._offsets[0]

    @property
    def is_on_disk(self) -> bool:
        """Whether the replica that is read is on SSD; False when its segment is gone."""
        return self._tools.directory.is_disk(self._placement)

    @property
    def node(self) -> str:
        """The node of the replica that is read; "" when its segment is gone."""
        return self._tools.directory.node_of(self._placement)

    @property
    def is_remote(self) -> bool:
        """Whether the replica that is read is on another machine."""
        return self._tools.directory.is_remote(self._placement)

    @property
    def nbytes(self) -> int:
        """Size of the pieces together."""
        return self._offsets[-1] - self._offsets[0]

    def read_piece(self, index: int, into: Buffer) -> None:
        """Copy piece `index` and check the copy. Try every replica, and raise the last failure.

        StaleGeneration: the object is gone and its space was reused. Corrupt: no replica has the right bytes.
        """
        view = as_bytes_view(into, writable=True)
        self.read_parts(index, [(view.nbytes, view)])

    def read_parts(self, index: int, parts: Sequence[Part]) -> None:
        """read_piece() into several places. Parts without memory are read and checked as well."""
        self._check_size(index, sum(part_nbytes for part_nbytes, _ in parts))
        views = [memoryview(bytearray(part_nbytes)) if view is None else view for part_nbytes, view in parts]
        self._read(index, views, None)

    def _check_size(self, index: int, nbytes: int) -> None:
        piece_nbytes = self.fields.sizes[index]
        if nbytes != piece_nbytes:
            raise InvalidInput(f"piece {index} has {piece_nbytes} bytes, the buffer {nbytes}")

    def _read(self, index: int, views: Sequence[memoryview], failure: MoonpoolError | None) -> None:
        """Read the piece from one replica after the other. `failure`: the current replica has failed already."""
        while True:
            try:
                if failure is not None:
                    raise failure
                at = self._placement.offset + self._offsets[index]
                self._remote.read_into(at, views, timeout_s=self._tools.time_for(self.fields.sizes[index]))
                check_piece(self.fields, index, views)
            except (Unavailable, NotFound, Unauthorized, Corrupt) as error:
                self._drop_replica(error)
                self._open_next(error)
                failure = None
            else:
                self._tools.counters.add("bytes_read", self.fields.sizes[index])
                return

    def finish(self) -> None:
        """Raise StaleGeneration when the space was given to another object meanwhile: use nothing of what was read."""
        self._check_unchanged(self._read_start(PREFIX_NBYTES))

    def _check_unchanged(self, prefix: bytearray) -> None:
        if not is_unchanged(self._prefix, prefix):
            raise StaleGeneration(f"the space of {self.info.key.hex()[:16]} was reused while it was read")

    def _open_next(self, failure: MoonpoolError) -> None:
        """Open the next replica that passes the checks. Raise the last failure when there is none."""
        while self._untried:
            self._placement = self._untried.pop(0)
            known = self._failures.get((self._placement.segment, self._placement.incarnation))
            if known is not None:
                failure = known
                continue
            try:
                self._remote = self._tools.directory.open(self._placement)
                self._read_header()
            except (Unavailable, NotFound, Unauthorized, Corrupt, StaleGeneration) as error:
                self._drop_replica(error)
                failure = error
            else:
                return
        raise failure

    def _drop_replica(self, error: MoonpoolError) -> None:
        """Report wrong bytes. Raise StaleGeneration when the master has no such replica any more: the read was late."""
        if isinstance(error, Unavailable | NotFound | Unauthorized):
            self._failures[self._placement.segment, self._placement.incarnation] = error
            self._tools.directory.unreadable.add(self._placement, error)
            return
        if not self._tools.report_corrupt(self.info, self._placement):
            raise StaleGeneration(f"{self.info.key.hex()[:16]} was removed or replaced while it was read") from error
        self._tools.counters.add("corrupt_replicas")

    def _read_header(self) -> None:
        if self._fetched is not None and self._fetched[0] is self._placement:
            raw = self._fetched[1]
        else:
            raw = self._read_start(_first_nbytes(self.info))
        nbytes = announced_nbytes(raw)
        if len(raw) < nbytes <= self.info.nbytes:
            raw = self._read_start(nbytes)
        fields = check_header(raw, 0, self.info, self._placement, self._identity)
        before = self._fields
        if before is not None and (fields.sizes, fields.checksums) != (before.sizes, before.checksums):
            raise Corrupt(f"the replicas of {self.info.key.hex()[:16]} differ")
        self._fields, self._prefix = fields, bytes(raw[:PREFIX_NBYTES])

    def _read_start(self, nbytes: int) -> bytearray:
        raw = bytearray(nbytes)
        self._remote.read_into(self._placement.offset, [raw], timeout_s=self._tools.time_for(nbytes))
        return raw


class _Piece(NamedTuple):
    """One item of PieceReads.read(): piece `number` of the session, which lies at `offset` of the segment."""

    session: ReadSession
    number: int
    place: Placement  # the session's replica when the transfer began
    offset: int
    view: memoryview

    def check(self) -> MoonpoolError | None:
        try:
            check_piece(self.session.fields, self.number, [self.view])
        except Corrupt as error:
            return error
        return None

    def read_again(self, failure: MoonpoolError) -> None:
        """Read the piece alone. `failure` is why its replica cannot be used."""
        has_moved = self.session._placement is not self.place  # an earlier piece made the session change its replica
        self.session._read(self.number, [self.view], None if has_moved else failure)


class PendingPieces:
    """Pieces on their way. Their buffers are the transfer engine's until finish() or cancel() has returned.

    The pieces of `num_ahead` other reads share the link, so these have as many times longer. With `room_timeout_s` 0
    nothing is moved on the caller's thread, however small it is.
    """

    def __init__(
        self,
        reads: Sequence[tuple[ReadSession, int, Buffer]],
        tools: ReadTools,
        num_ahead: int = 0,
        room_timeout_s: float | None = None,
    ) -> None:
        self._tools = tools
        self._errors: list[MoonpoolError | None] = [None] * len(reads)
        self._pieces: list[tuple[int, _Piece]] = []
        requests: list[TransferRequest] = []
        for position, (session, index, buffer) in enumerate(reads):
            try:
                view = as_bytes_view(buffer, writable=True)
                session._check_size(index, view.nbytes)
            except MoonpoolError as error:
                self._errors[position] = error
                continue
            place = session._placement
            piece = _Piece(session, index, place, place.offset + session._offsets[index], view)
            if view.nbytes:
                self._pieces.append((position, piece))
                requests.append(TransferRequest(TransferOp.READ, session._remote, piece.offset, [view]))
        self._batch = tools.directory.engine.submit(
            requests, timeout_s=tools.timeout_s * (1 + num_ahead), room_timeout_s=room_timeout_s
        )

    def finish(self) -> list[MoonpoolError | None]:
        """Check each piece when it arrives. Read those that failed again, one by one. Return the error of each."""
        failed: list[tuple[int, _Piece, MoonpoolError]] = []
        nbytes = 0
        for number in self._batch.as_completed():
            position, piece = self._pieces[number]
            failure = self._batch.error(number) or piece.check()
            if failure is None:
                nbytes += piece.view.nbytes
            else:
                failed.append((position, piece, failure))
        self._tools.counters.add("bytes_read", nbytes)
        for position, piece, failure in failed:
            try:
                piece.read_again(failure)
            except MoonpoolError as error:
                self._errors[position] = error
        return self._errors

    def cancel(self) -> None:
        """Give the pieces up. Return when no buffer is in use any more; what they hold is undefined."""
        self._batch.cancel()
        self._batch.done_within(None)


class PieceReads:
    """Reads of many objects, piece by piece. Thread-safe."""

    def __init__(self, tools: ReadTools) -> None:
        self._tools = tools

    def open(self, info: ObjectInfo, identity: bytes | None) -> ReadSession:
        """Open an object for reading. `identity` None accepts any.

        Raise IdentityMismatch, StaleGeneration, Corrupt, NotFound, Unauthorized or Unavailable if no replica can be
        used.
        """
        try:
            return ReadSession(info, identity, self._tools)
        except MoonpoolError as error:
            self._tools.counters.add_refusal(error)
            raise

    def open_many(self, infos: Sequence[ObjectInfo], identity: bytes | None) -> list[ReadSession | MoonpoolError]:
        """open() of each, with one transfer of headers per segment. Return the session, or what open() raises."""
        fetched, failures = _fetch_headers(infos, self._tools)
        opened: list[ReadSession | MoonpoolError] = []
        for position, info in enumerate(infos):
            try:
                opened.append(ReadSession(info, identity, self._tools, dict(failures), fetched.get(position)))
            except MoonpoolError as error:
                self._tools.counters.add_refusal(error)
                opened.append(error)
        return opened

    def read(self, reads: Sequence[tuple[ReadSession, int, Buffer]]) -> list[MoonpoolError | None]:
        """Read piece `int` of each session into its buffer, as one batch of the transfer engine.

        Each piece is verified, and read from another replica where it fails, as in ReadSession.read_piece(). Return of
        each None, or what read_piece() raises. The buffers are the caller's again when this returns; one whose read
        failed may hold anything.
        """
        return PendingPieces(reads, self._tools).finish()

    def start(self, reads: Sequence[tuple[ReadSession, int, Buffer]], num_ahead: int) -> PendingPieces:
        """Start read(); finish() of the result waits, and returns what read() would. `num_ahead` is the number of
        earlier ones that are still under way. Raise Overloaded when the transfer engine's queue is full.
        """
        return PendingPieces(reads, self._tools, num_ahead, room_timeout_s=0.0)

    def count(self, *, nbytes: int = 0, damaged: int = 0) -> None:
        """Count bytes that the caller has copied and verified itself (ReadSession.place()), and pieces that were wrong
        where they arrived.
        """
        self._tools.counters.add("bytes_read", nbytes)
        self._tools.counters.add("damaged_copies", damaged)

    def finish(self, sessions: Sequence[ReadSession]) -> list[MoonpoolError | None]:
        """ReadSession.finish() of each, with one transfer per segment. Return the error of each: what a session with
        an error has read must not be used.
        """
        errors: list[MoonpoolError | None] = [None] * len(sessions)
        by_remote: dict[RemoteSegment, list[int]] = {}
        for position, session in enumerate(sessions):
            by_remote.setdefault(session._remote, []).append(position)
        for remote, positions in by_remote.items():
            wanted = [(sessions[position]._placement.offset, bytearray(PREFIX_NBYTES)) for position in positions]
            try:
                are_read = _read_together(remote, wanted, self._tools)
            except _CANNOT_READ as error:
                for position in positions:
                    errors[position] = error
                continue
            for position, (_, prefix) in zip(positions, wanted, strict=True):
                try:
                    if are_read:
                        sessions[position]._check_unchanged(prefix)
                    else:
                        sessions[position].finish()
                except MoonpoolError as error:
                    errors[position] = error
        return errors


def _read_together(remote: RemoteSegment, wanted: Sequence[tuple[int, bytearray]], tools: ReadTools) -> bool:
    """Fill the buffers with one transfer. Return False when one of the items is at fault, so that each has to be read
    alone. Raise Unavailable or Unauthorized when the segment cannot be read.
    """
    try:
        remote.read_many(wanted, timeout_s=tools.time_for(sum([len(raw) for _, raw in wanted])))
    except _CANNOT_READ:
        raise
    except MoonpoolError:
        return False
    return True


def _fetch_headers(
    infos: Sequence[ObjectInfo], tools: ReadTools
) -> tuple[dict[int, tuple[Placement, bytearray]], Failures]:
    """Return the start of each object that could be read, by position, and the segments that cannot be read."""
    directory = tools.directory
    by_segment: dict[tuple[str, int], list[tuple[int, Placement, bytearray]]] = {}
    for position, info in enumerate(infos):
        replicas = info.replicas
        if replicas:
            place = replicas[0] if len(replicas) == 1 else directory.best_first(replicas)[0]
            wanted = by_segment.setdefault((place.segment, place.incarnation), [])
            wanted.append((position, place, bytearray(_first_nbytes(info))))
    fetched: dict[int, tuple[Placement, bytearray]] = {}
    failures: Failures = {}
    for key, wanted in by_segment.items():
        first = wanted[0][1]
        try:
            if _read_together(directory.open(first), [(place.offset, raw) for _, place, raw in wanted], tools):
                fetched.update((position, (place, raw)) for position, place, raw in wanted)
        except (NotFound, *_CANNOT_READ) as error:
            failures[key] = error
            directory.unreadable.add(first, error)
    return fetched, failures


def _first_nbytes(info: ObjectInfo) -> int:
    """Return how much of an object to read first: the whole header, unless it has very many pieces."""
    return min(ALIGN_NBYTES, info.nbytes)
