"""Answers what one tcp connection asks, on that connection's own thread.

Nothing is touched before name, incarnation, bounds and generation are checked. Data moves straight between the socket
and the segment's memory, or through a buffer where the segment has no memory to show. A connection that breaks the
protocol, or stalls inside a request, is closed.
"""

from __future__ import annotations

import socket

from moonpool.base.clock import Deadline
from moonpool.base.errors import MoonpoolError, ProtocolError
from moonpool.transfer.desk import Desk
from moonpool.transfer.segment import Fence, Segment
from moonpool.transfer.transports.base import check_bounds
from moonpool.transfer.transports.file.bounce import BouncePool
from moonpool.transfer.transports.sockets import receive_exactly, receive_present, wait_readable
from moonpool.transfer.transports.tcp.frames import (
    REQUEST_NBYTES,
    Op,
    Request,
    pack_refusal,
    pack_response,
    unpack_request,
)
from moonpool.transfer.transports.tcp.staging import parts_of, staged
from moonpool.transfer.transports.tcp.streams import INBOX_NBYTES, PART_NBYTES, Inbox, Outbox

_DISCARD_NBYTES = 64 * 1024


class TcpConnection:
    """Answers the requests of one connection, in order, until the other side leaves."""

    def __init__(self, sock: socket.socket, desk: Desk, staging: BouncePool, stall_timeout_s: float) -> None:
        self._sock = sock
        self._desk = desk
        self._staging = staging
        self._stall_timeout_s = stall_timeout_s
        self._left = 0  # bytes of the WRITE under way that are still on the wire
        self._inbox = Inbox(sock, INBOX_NBYTES)
        self._outbox = Outbox(sock, stall_timeout_s)
        self._answers = {Op.READ: self._read, Op.WRITE: self._write, Op.ASK: self._ask}

    def serve(self) -> None:
        while True:
            try:
                request = self._next()
            except ProtocolError as error:
                self._outbox.add(pack_refusal(0, error))
                self._outbox.flush()
                return
            self._answers[request.op](request)
            self._inbox.expect(request.nbytes if request.op is Op.WRITE else 0)

    def _next(self) -> Request:
        """Answers wait while more requests are here, and go before this side waits."""
        inbox = self._inbox
        if inbox.nbytes < REQUEST_NBYTES and not inbox.receive_present():
            self._outbox.flush()
            inbox.receive(1, None)
        if inbox.nbytes < REQUEST_NBYTES:
            self._outbox.flush()
            inbox.receive(REQUEST_NBYTES, self._stall_deadline())
        head = unpack_request(inbox.take(REQUEST_NBYTES))
        if inbox.nbytes < head.name_nbytes:
            self._outbox.flush()
            inbox.receive(head.name_nbytes, self._stall_deadline())
        return head.with_name(inbox.take(head.name_nbytes))

    def _ask(self, request: Request) -> None:
        body = memoryview(bytearray(request.nbytes))
        self._receive(body)
        try:
            answer = self._desk.answer_body(bytes(body))
        except MoonpoolError as error:
            self._outbox.add(pack_refusal(request.request_id, error))
            return
        self._outbox.add(pack_response(request.request_id, len(answer)) + answer)

    def _read(self, request: Request) -> None:
        try:
            segment = self._target(request)
            if not segment.in_memory:
                self._read_staged(segment, request)
                return
            memory = segment.borrow().memory[request.offset : request.offset + request.nbytes]
        except MoonpoolError as error:
            self._outbox.add(pack_refusal(request.request_id, error))
            return
        self._outbox.add(pack_response(request.request_id, request.nbytes), memory)

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
                self._outbox.flush()  # the part is filled anew next

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
        segment = self._desk.segments.find(request.name, request.incarnation)
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
