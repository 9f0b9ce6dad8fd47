"""Answers the requests of one tcp connection, on that connection's own thread.

Nothing is read or written before the request's checksums, name, incarnation, bounds and generation are checked. Data
moves straight between the socket and the segment's memory; a file or a GPU's memory is served through a few staging
buffers, which all connections of a server share. A connection that breaks the protocol, carries a damaged request or
stalls inside a request is closed.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, runtime_checkable

from moonpool.base.clock import Deadline
from moonpool.base.errors import (
    DamagedFrame,
    Internal,
    InvalidInput,
    MoonpoolError,
    Overloaded,
    ProtocolError,
    StaleGeneration,
)
from moonpool.transfer.control import ControlHandler
from moonpool.transfer.disk.alignment import BouncePool
from moonpool.transfer.memory.buffers import Buffer
from moonpool.transfer.memory.fence import Fence
from moonpool.transfer.memory.segment import Borrowed, Segment
from moonpool.transfer.transports.base import check_bounds
from moonpool.transfer.transports.sockets import receive_exactly, receive_present, wait_readable
from moonpool.transfer.transports.tcp.frame_columns import LEAST_RUN_NBYTES, read_run
from moonpool.transfer.transports.tcp.frames import (
    REQUEST_NBYTES,
    START_NBYTES,
    FrameOp,
    ReadVerdict,
    Request,
    RequestReader,
    check_body,
    check_start,
    pack_answer,
    pack_refusal,
    pack_response,
    pack_verdict,
    unpack_request,
)
from moonpool.transfer.transports.tcp.read_runs import GATHER_NBYTES, answer_together, cut_run
from moonpool.transfer.transports.tcp.streams import DIRECT_NBYTES, INBOX_NBYTES, PART_NBYTES, Inbox, ResponseQueue

_PART_NBYTES = 1024 * 1024
_MAX_PARTS = 16
_ALIGNMENT = 4096


@runtime_checkable
class StagedSegment(Protocol):
    """A segment that has no memory to show and copies to and from its owner's instead."""

    def read_into(self, offset: int, buffers: Sequence[Buffer], *, timeout_s: float) -> None: ...

    def write_from(self, offset: int, buffers: Sequence[Buffer], *, generation: int, timeout_s: float) -> None: ...


def staging_buffers() -> BouncePool:
    """Bounded whatever the number of connections; a request waits for one within its stall timeout."""
    return BouncePool(_PART_NBYTES, _MAX_PARTS, _ALIGNMENT)


def staged(segment: Segment) -> StagedSegment:
    if not isinstance(segment, StagedSegment):
        raise Internal(f"segment {segment.name!r} offers neither memory nor copies")
    return segment


def parts_of(buffer: memoryview, nbytes: int) -> Iterator[tuple[int, memoryview]]:
    """(start, room for the bytes from there on) until all `nbytes` had theirs; one empty part where there are none."""
    for start in range(0, max(nbytes, 1), buffer.nbytes):
        yield start, buffer[: min(buffer.nbytes, nbytes - start)]


_DISCARD_NBYTES = 64 * 1024


class TcpConnection:
    """Answers the requests of one connection, in order, until the other side leaves."""

    def __init__(
        self,
        sock: socket.socket,
        control: ControlHandler,
        staging: BouncePool,
        stall_timeout_s: float,
        idle_timeout_s: float,
    ) -> None:
        self._sock = sock
        self._control = control
        self._staging = staging
        self._stall_timeout_s = stall_timeout_s
        self._idle_timeout_s = idle_timeout_s
        self._idle_since_s: float | None = None  # since when the next request is waited for
        self._left = 0  # bytes of the WRITE under way that are still on the wire
        self._inbox = Inbox(sock, INBOX_NBYTES)
        self._outbox = ResponseQueue(sock, stall_timeout_s)
        self._reader = RequestReader()
        self._is_alone = False  # no other bytes had been received with the last request
        self._answers = {FrameOp.READ: self._read, FrameOp.WRITE: self._write, FrameOp.ASK: self._ask}

    def serve(self, first_request_s: float | None = None, on_first: Callable[[], None] = lambda: None) -> str:
        """Answer requests until the connection ends; return why it did, unless OSError says so.

        The first request has `first_request_s` to come (default: as long as any other) and is answered only if
        `on_first` raises nothing.
        """
        wait_s, on_next = self._idle_timeout_s if first_request_s is None else first_request_s, on_first
        while True:
            try:
                request = self._next(wait_s)
                if request is None:
                    return "silent"
                on_next()
                wait_s, on_next = self._idle_timeout_s, _nothing
                self._answers[request.op](request)
            except (ProtocolError, DamagedFrame, Overloaded) as error:
                self._outbox.add(pack_refusal(0, error))
                self._outbox.flush()
                return error.code
            nbytes = request.nbytes if request.op is FrameOp.WRITE else 0
            self._inbox.expect(nbytes)
            self._is_alone = self._is_alone and not self._inbox.nbytes and nbytes < DIRECT_NBYTES
            if request.op is FrameOp.READ and self._inbox.nbytes >= LEAST_RUN_NBYTES:
                self._read_alike(request)

    def idle_s(self) -> float:
        """For how long the next request has been waited for."""
        since_s = self._idle_since_s
        return 0.0 if since_s is None else time.monotonic() - since_s

    def _next(self, wait_s: float) -> Request | None:
        """Answers wait while more requests are here, and go before this side waits. None when nothing came in time."""
        inbox = self._inbox
        if self._is_alone or (inbox.nbytes < REQUEST_NBYTES and not inbox.receive_present()):
            self._outbox.flush()
            if not self._wait(wait_s):
                return None
            self._is_alone = True
        else:
            self._is_alone = False
        found = self._reader.read(inbox.all())
        if found is not None:
            inbox.take(found[1])
            return found[0]
        if inbox.nbytes < REQUEST_NBYTES:
            self._outbox.flush()
            deadline = self._stall_deadline()
            inbox.receive(START_NBYTES, deadline)
            check_start(inbox.peek(START_NBYTES))  # the head of another version may be shorter
            inbox.receive(REQUEST_NBYTES, deadline)
        head = unpack_request(inbox.take(REQUEST_NBYTES))
        if inbox.nbytes < head.name_nbytes:
            self._outbox.flush()
            inbox.receive(head.name_nbytes, self._stall_deadline())
        request = head.with_name(inbox.take(head.name_nbytes))
        self._reader.remember(request)
        return request

    def _wait(self, wait_s: float) -> bool:
        """Whether a request has begun within that time."""
        self._idle_since_s = time.monotonic()
        try:
            self._inbox.receive(1, Deadline(wait_s))
        except TimeoutError:
            return self._inbox.nbytes > 0
        finally:
            self._idle_since_s = None
        return True

    def _ask(self, request: Request) -> None:
        body = memoryview(bytearray(request.nbytes))
        self._receive(body)
        call = check_body(bytes(body), request.checksum)
        try:
            answer = self._control.answer_body(call)
        except MoonpoolError as error:
            self._outbox.add(pack_refusal(request.request_id, error))
            return
        self._outbox.add(pack_answer(request.request_id, answer))

    def _read(self, request: Request) -> None:
        try:
            segment = self._target(request)
            fence = self._expect(segment, request)
            if not segment.in_memory:
                self._read_staged(segment, request)
            else:
                self._read_memory(segment.borrow().memory, request, fence)
        except MoonpoolError as error:
            self._outbox.add(pack_refusal(request.request_id, error))
            return
        if fence is not None and (not segment.in_memory or request.nbytes >= GATHER_NBYTES):
            self._outbox.flush()  # the bytes have been taken when it returns
            self._outbox.add(pack_verdict(request.request_id, _verdict(fence, request)))

    def _read_alike(self, request: Request) -> None:
        """Answer the READs about the same segment that came together with this one. Each head is looked at once."""
        run = read_run(self._inbox.all(), request)
        if run is None or not run.request_ids:
            return
        self._inbox.take(len(run.request_ids) * (REQUEST_NBYTES + len(request.name.encode())))
        borrowed = self._borrowed(request)
        for part, together in cut_run(run, borrowed):
            if borrowed is not None and together:
                self._outbox.add(answer_together(part, borrowed))
                continue
            for number, *place in zip(part.request_ids, *[column.tolist() for column in part[1:]], strict=True):
                self._read(Request(request.op, number, request.name, request.incarnation, *place))

    def _borrowed(self, request: Request) -> Borrowed | None:
        """Return the memory that the request is about; None when there is none to show, which _read() tells."""
        try:
            segment = self._control.segments.find(request.name, request.incarnation)
            return segment.borrow() if segment.in_memory else None
        except MoonpoolError:
            return None

    def _expect(self, segment: Segment, request: Request) -> Fence | None:
        """The fence to ask again when the bytes have been taken; None when the READ expects no generation.

        StaleGeneration when the space has another one now, InvalidInput when it has none.
        """
        if not request.generation:
            return None
        fence = segment.borrow().fence if segment.in_memory else segment.fence
        if fence is None:
            raise InvalidInput(f"segment {segment.name!r} has no generations to check; read without one")
        fence.check(request.offset, request.nbytes, request.generation)
        return fence

    def _read_memory(self, memory: memoryview, request: Request, fence: Fence | None) -> None:
        data = memory[request.offset : request.offset + request.nbytes]
        head = pack_response(request.request_id, request.nbytes)
        if fence is None or request.nbytes >= GATHER_NBYTES:
            self._outbox.add(head, data)
            return
        # A little is taken now, so that the verdict is known before anything is sent: then many go out together.
        taken = bytes(data)
        self._outbox.add(b"".join((head, taken, pack_verdict(request.request_id, _verdict(fence, request)))))

    def _read_staged(self, segment: Segment, request: Request) -> None:
        source = staged(segment)
        with self._staging.borrow(self._stall_deadline()) as buffer:
            for start, part in parts_of(buffer, request.nbytes):
                try:
                    source.read_into(request.offset + start, [part], timeout_s=self._stall_timeout_s)
                except MoonpoolError as error:
                    if start:  # the answer has begun, and its rest will not come
                        raise ConnectionAbortedError(f"segment {segment.name!r} failed: {error}") from error
                    raise
                head = pack_response(request.request_id, request.nbytes) if start == 0 else b""
                self._outbox.add(head, part)
                self._outbox.flush()  # the part is filled again next

    def _write(self, request: Request) -> None:
        """Every byte announced is taken off the wire, kept or not."""
        if self._outbox.has_data:
            self._outbox.flush()
        self._left = request.nbytes
        try:
            segment = self._target(request)
            if segment.in_memory:
                self._write_memory(segment, request)
            else:
                self._write_staged(segment, request)
        except MoonpoolError as error:
            self._discard(self._left)
            self._outbox.add(pack_refusal(request.request_id, error))
            return
        self._outbox.add(pack_response(request.request_id, 0))

    def _write_memory(self, segment: Segment, request: Request) -> None:
        memory, fence = segment.borrow()
        memory = memory[request.offset : request.offset + request.nbytes]
        if fence is not None:
            fence.admit(request.offset, request.nbytes, request.generation)
        if self._inbox.nbytes >= self._left:  # a small one that came together with others
            memory[:] = self._inbox.take(self._left)
            self._left = 0
        else:
            self._receive_data(memory, request, fence)
        if fence is not None:
            fence.confirm(request.offset, request.nbytes, request.generation)

    def _receive_data(self, memory: memoryview, request: Request, fence: Fence | None) -> None:
        """Part by part. The deadline is a part's, not a byte's: who sends byte by byte stalls too."""
        deadline, renew_at = self._stall_deadline(), self._left - PART_NBYTES
        while self._left:
            if self._left <= renew_at:
                deadline, renew_at = self._stall_deadline(), self._left - PART_NBYTES
            self._left -= self._receive_some(memory[-self._left :], request, fence, deadline)

    def _write_staged(self, segment: Segment, request: Request) -> None:
        target = staged(segment)
        with self._staging.borrow(self._stall_deadline()) as buffer:
            for start, part in parts_of(buffer, request.nbytes):
                self._receive(part)
                self._left -= part.nbytes
                target.write_from(
                    request.offset + start, [part], generation=request.generation, timeout_s=self._stall_timeout_s
                )

    def _receive(self, view: memoryview) -> None:
        if self._inbox.nbytes < view.nbytes:
            self._outbox.flush()
        if view.nbytes:
            self._inbox.fill([view], 0, self._stall_deadline())

    def _receive_some(self, rest: memoryview, request: Request, fence: Fence | None, deadline: Deadline) -> int:
        """Takes some of the data into its place and says how much."""
        here = min(self._inbox.nbytes, rest.nbytes)
        if here:
            rest[:here] = self._inbox.take(here)
            return here
        if fence is None:
            part = rest[:PART_NBYTES]
            receive_exactly(self._sock, [part], deadline)
            return part.nbytes
        # A writer may be slow and be overtaken while its bytes are on the wire. Only bytes that are here already
        # are let in, and the fence is asked right before: the new owner of the space is not overwritten later.
        wait_readable(self._sock, deadline)
        fence.confirm(request.offset, request.nbytes, request.generation)
        return receive_present(self._sock, rest)

    def _target(self, request: Request) -> Segment:
        segment = self._control.segments.find(request.name, request.incarnation)
        check_bounds(request.offset, request.nbytes, segment.nbytes)
        return segment

    def _discard(self, nbytes: int) -> None:
        nbytes -= self._inbox.take(min(nbytes, self._inbox.nbytes)).nbytes
        scratch = memoryview(bytearray(min(nbytes, _DISCARD_NBYTES)))
        while nbytes > 0:
            part = scratch[: min(nbytes, _DISCARD_NBYTES)]
            receive_exactly(self._sock, [part], self._stall_deadline())
            nbytes -= part.nbytes

    def _stall_deadline(self) -> Deadline:
        return Deadline(self._stall_timeout_s)


def _nothing() -> None:
    pass


def _verdict(fence: Fence, request: Request) -> ReadVerdict:
    """Whether the space still carries the generation that a READ expects."""
    try:
        fence.check(request.offset, request.nbytes, request.generation)
    except StaleGeneration:
        return ReadVerdict.STALE
    return ReadVerdict.SAME
