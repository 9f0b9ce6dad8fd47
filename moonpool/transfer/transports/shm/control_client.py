"""Control calls to an owner on this machine over its Unix socket: one CALL frame, one answer (transfer/control.py)."""

from __future__ import annotations

import socket
from typing import TypeVar

from moonpool.base.clock import Deadline
from moonpool.base.errors import ProtocolError
from moonpool.base.frames import HEADER_NBYTES, FrameKind, decode_header
from moonpool.base.rpc.protocol import Call, decode_error, decode_reply, encode_call
from moonpool.transfer.transports.peer_errors import PeerErrors
from moonpool.transfer.transports.sockets import connect_unix, receive_exactly, send_all
from moonpool.transfer.transports.tcp.frames import MAX_ANSWER_NBYTES

R = TypeVar("R")


class UnixControlClient:
    """To the desk of the process that listens at `path`; a connection for each question."""

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
