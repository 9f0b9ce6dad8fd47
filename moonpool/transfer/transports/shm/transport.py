"""Between processes of one machine: the owner passes its memfd, the other process maps it.

A read is a copy or a view; the owner does nothing for it. Only segments made by Segment.allocate() have a memfd to
pass. Control calls (transfer/control.py) go over the owner's Unix socket: one CALL frame, one answer.
"""

from __future__ import annotations

import os
import select
import socket
import threading
import uuid
from typing import TypeVar

from moonpool.base.address import parse_address
from moonpool.base.clock import Deadline
from moonpool.base.descriptor import SegmentDescriptor
from moonpool.base.errors import DeadlineExceeded, PeerLost, ProtocolError
from moonpool.base.frames import HEADER_NBYTES, FrameKind, decode_header
from moonpool.base.rpc.protocol import Call, decode_error, decode_reply, encode_call
from moonpool.transfer.control import ControlHandler, Notify, check_message
from moonpool.transfer.memory.location import host_id
from moonpool.transfer.memory.segment import LAYOUT_VERSION, Borrowed, Segment
from moonpool.transfer.transports.base import Transport, check_bounds, rest_of
from moonpool.transfer.transports.mapped import MappedRemote
from moonpool.transfer.transports.shm.server import (
    PREFIX,
    SUFFIX,
    AskSegment,
    ShmServer,
    check_layout,
    sweep_sockets,
)
from moonpool.transfer.transports.sockets import PeerErrors, connect_unix, receive_exactly, receive_with_fds, send_all
from moonpool.transfer.transports.tcp.frames import MAX_ANSWER_NBYTES

R = TypeVar("R")


class UnixControlClient:
    """Calls the control handler of the process that listens at `path`; one connection per call."""

    def __init__(self, path: str) -> None:
        self._path = path

    def ask(self, call: Call[R], timeout_s: float) -> R:
        deadline = Deadline(timeout_s)
        with PeerErrors(f"the owner at {self._path}", timeout_s), connect_unix(self._path, deadline) as sock:
            send_all(sock, [encode_call(call, 1)], deadline)
            header = memoryview(bytearray(HEADER_NBYTES))
            receive_exactly(sock, [header], deadline)
            return receive_reply(sock, call, bytes(header), deadline)


def receive_reply(sock: socket.socket, call: Call[R], header: bytes, deadline: Deadline) -> R:
    """The answer whose header is here already; raises the owner's error."""
    head = decode_header(header)
    if head.nbytes > MAX_ANSWER_NBYTES:
        raise ProtocolError(f"an answer of {head.nbytes} bytes is over the limit")
    body = memoryview(bytearray(head.nbytes))
    receive_exactly(sock, [body], deadline)
    frame = head.with_body(bytes(body))
    if frame.kind is FrameKind.ERROR:
        raise decode_error(frame.body)
    reply: R = decode_reply(call, frame.body)
    return reply


MAX_CONNECTIONS = 1024


class ShmTransport(Transport):
    """Its socket lies in `run_dir`, under a name that no other owner uses."""

    scheme = "shm"

    def __init__(
        self, run_dir: str, *, control: ControlHandler | None = None, max_connections: int = MAX_CONNECTIONS
    ) -> None:
        os.makedirs(run_dir, mode=0o700, exist_ok=True)
        sweep_sockets(run_dir)
        name = f"{PREFIX}{os.getpid()}-{uuid.uuid4().hex[:8]}{SUFFIX}"
        path = os.path.join(os.path.abspath(run_dir), name)
        self._path = parse_address(f"unix:{path}").path  # refuses a path too long for the kernel
        self.control = control or ControlHandler()
        self._server = ShmServer(self.control, self._path, max_connections=max_connections)

    @property
    def control_endpoint(self) -> str:
        """Return where processes of this machine reach the control handler."""
        return f"unix:{self._path}"

    def can_serve(self, segment: Segment) -> bool:
        return segment.in_memory and segment.fd is not None

    def serve(self, segment: Segment) -> str:
        self.control.serve(segment)
        return f"{self.scheme}:{self._path}"

    def unserve(self, name: str) -> None:
        self.control.withdraw(name)
        self._server.hang_up_segment(name)

    def usable(self, descriptor: SegmentDescriptor, endpoint: str) -> bool:
        return descriptor.host == host_id() and os.path.exists(rest_of(endpoint, self.scheme))

    def open(self, descriptor: SegmentDescriptor, endpoint: str, *, timeout_s: float) -> ShmRemote:
        return ShmRemote(rest_of(endpoint, self.scheme), descriptor, timeout_s)

    def close(self) -> None:
        self._server.close()
        self.control.close()


class _Attachment:
    """One mapping and the connection that says whether its owner lives."""

    def __init__(self, sock: socket.socket, segment: Segment) -> None:
        self.borrowed = segment.borrow()
        self._sock = sock
        self._segment = segment
        self._said = select.epoll(1)  # unlike poll objects, several threads may ask it at once
        self._said.register(sock, select.EPOLLIN)

    def owner_lives(self) -> bool:
        """The owner says nothing on this connection; it only ends it."""
        try:
            return not self._said.poll(0, 1)
        except (ValueError, OSError):  # closed by another thread
            return False

    def close(self) -> None:
        self._said.close()
        self._sock.close()
        self._segment.close()


class ShmRemote(MappedRemote):
    transport = ShmTransport.scheme

    def __init__(self, path: str, descriptor: SegmentDescriptor, timeout_s: float) -> None:
        self.nbytes = descriptor.nbytes
        self._path = path
        self._descriptor = descriptor
        self._lock = threading.Lock()
        self._closed = False
        self._attachment: _Attachment | None = None
        self._borrow(timeout_s)

    def notify(self, message: bytes, *, timeout_s: float) -> None:
        check_message(message)
        if self._closed:
            raise PeerLost(f"this handle of segment {self._descriptor.name!r} is closed")
        UnixControlClient(self._path).ask(
            Notify(self._descriptor.name, self._descriptor.incarnation, message), timeout_s
        )

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._detach()

    def _borrow(self, timeout_s: float) -> Borrowed:
        # Without the lock: at worst the owner, or this handle, was closed a moment ago, and the mapping outlives both.
        attachment = self._attachment
        if attachment is not None and attachment.owner_lives():
            return attachment.borrowed
        del attachment  # else an error raised below keeps this frame, and with it the mapping of an owner that is gone
        return self._borrow_anew(Deadline(timeout_s))

    def _borrow_anew(self, deadline: Deadline) -> Borrowed:
        # One thread attaches, the others wait for it, each within its own deadline.
        if not self._lock.acquire(blocking=False) and not self._lock.acquire(timeout=deadline.remaining_s()):
            raise DeadlineExceeded(f"the owner at {self._path} did not answer in time")
        try:
            if self._closed:
                raise PeerLost(f"this handle of segment {self._descriptor.name!r} is closed")
            if self._attachment is not None and not self._attachment.owner_lives():
                self._detach()
            if self._attachment is None:
                self._attachment = self._attach(deadline)
            return self._attachment.borrowed
        finally:
            self._lock.release()

    def _detach(self) -> None:
        attachment, self._attachment = self._attachment, None
        if attachment is not None:
            attachment.close()

    def _attach(self, deadline: Deadline) -> _Attachment:
        with PeerErrors(f"the owner at {self._path}"):
            sock = connect_unix(self._path, deadline)
            try:
                return _Attachment(sock, self._fetch(sock, deadline))
            except BaseException:
                sock.close()
                raise

    def _fetch(self, sock: socket.socket, deadline: Deadline) -> Segment:
        """Asks for the memory and maps it."""
        ask = AskSegment(self._descriptor.name, self._descriptor.incarnation, LAYOUT_VERSION)
        send_all(sock, [encode_call(ask, 1)], deadline)
        header, fds = receive_with_fds(sock, HEADER_NBYTES, deadline)
        try:
            memory = receive_reply(sock, ask, header, deadline)
            if len(fds) != 1:
                raise ProtocolError("the owner's answer carries no memory")
            check_layout(memory.layout)
            check_bounds(0, self.nbytes, memory.nbytes)
            return Segment.from_fd(
                ask.name, fds[0], memory.nbytes, granule_nbytes=memory.granule_nbytes, incarnation=ask.incarnation
            )
        except BaseException:
            for fd in fds:
                os.close(fd)
            raise
