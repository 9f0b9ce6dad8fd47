"""Small questions to an owner over its tcp port: one ASK frame, one answer (tcp/frames.py, transfer/control.py)."""

from __future__ import annotations

import socket
from typing import TypeVar

import msgspec

from moonpool.base.clock import Deadline
from moonpool.base.errors import MoonpoolError, ProtocolError
from moonpool.base.rpc.protocol import Call, decode_reply
from moonpool.transfer.transports.peer_errors import PeerErrors
from moonpool.transfer.transports.sockets import receive_exactly, send_all
from moonpool.transfer.transports.tcp.frames import (
    MAX_ANSWER_NBYTES,
    RESPONSE_NBYTES,
    FrameStatus,
    check_body,
    pack_ask,
    unpack_error,
    unpack_response,
)
from moonpool.transfer.transports.tcp.lanes import LanePool

R = TypeVar("R")
_REQUEST_ID = 1  # one question at a time, and no answer is ever left on a lane


class TcpControlClient:
    """To the desk behind a pool of lanes, which it shares with the data."""

    def __init__(self, pool: LanePool) -> None:
        self._pool = pool

    def ask(self, call: Call[R], timeout_s: float) -> R:
        frame, deadline = pack_ask(_REQUEST_ID, msgspec.msgpack.encode(call)), Deadline(timeout_s)
        with PeerErrors(self._pool, timeout_s), self._pool.lane(deadline) as sock:
            send_all(sock, [frame], deadline)
            answer = _receive_answer(sock, deadline)
        if isinstance(answer, MoonpoolError):
            raise answer
        reply: R = decode_reply(call, answer)
        return reply


def _receive_answer(sock: socket.socket, deadline: Deadline) -> bytes | MoonpoolError:
    """The body, or the owner's refusal; a refused connection is raised, so that the lane is dropped."""
    head = memoryview(bytearray(RESPONSE_NBYTES))
    receive_exactly(sock, [head], deadline)
    response = unpack_response(head)
    if response.request_id not in (_REQUEST_ID, 0) or response.nbytes > MAX_ANSWER_NBYTES:
        raise ProtocolError(f"the owner answered request {response.request_id} with {response.nbytes} bytes")
    body = memoryview(bytearray(response.nbytes))
    receive_exactly(sock, [body], deadline)
    checked = check_body(bytes(body), response.checksum)
    if response.status is FrameStatus.OK:
        return checked
    error = unpack_error(checked)
    if response.request_id == 0:
        raise error
    return error
