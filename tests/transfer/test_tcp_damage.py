"""A bit that flips on the wire: whichever bit of a request it is, nothing is written, and nothing is stamped."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
from guarded_port import NBYTES, Port, many_ports
from waiting import HANG_S

from moonpool.base.errors import DamagedFrame
from moonpool.base.frames import DamageCount
from moonpool.transfer.control import Introduce
from moonpool.transfer.transports.tcp import connection
from moonpool.transfer.transports.tcp.frames import (
    RESPONSE_NBYTES,
    FrameOp,
    Request,
    pack_answer,
    pack_request,
    unpack_error,
    unpack_response,
)
from moonpool.transfer.transports.tcp.transport import TcpControlClient

DATA = b"\xff" * 3000
WRITE = pack_request(Request(FrameOp.WRITE, 1, "seg", 1, 8192, len(DATA), 9))


@pytest.fixture
def port() -> Iterator[Port]:
    with many_ports() as make:
        yield make(None, max_connections=256)


def said_to(port: Port, request: bytes) -> bytes:
    """What the owner answers before it closes the connection."""
    with port.connect() as sock:
        sock.sendall(request)
        sock.shutdown(socket.SHUT_WR)
        heard = b""
        try:
            while part := sock.recv(4096):
                heard += part
        except ConnectionResetError:
            pass  # it did not read all that was sent
        return heard


def test_no_flipped_bit_of_a_write_writes_or_stamps_anything(port: Port) -> None:
    assert port.segment.fence is not None
    before = DamageCount.total
    for bit in range(8 * len(WRITE)):
        flipped = bytearray(WRITE + DATA)
        flipped[bit // 8] ^= 1 << bit % 8
        said_to(port, bytes(flipped))
    assert not any(port.segment.memory)
    assert port.segment.fence.spans_above(0) == []
    assert DamageCount.total - before == 8 * (len(WRITE) - 5), "all but those of magic and version, which are refused"
    assert port.server.ended["damaged_frame"] + port.server.ended["closed"] >= 8 * (len(WRITE) - 5)
    port.remote(None).write_from(8192, [DATA], generation=9, timeout_s=HANG_S)
    assert port.segment.memory[8192 : 8192 + len(DATA)] == DATA
    assert port.segment.memory.nbytes == NBYTES


def test_the_caller_is_told_that_its_request_was_damaged(port: Port) -> None:
    flipped = bytearray(WRITE)
    flipped[40] ^= 0x10  # the generation
    heard = said_to(port, bytes(flipped))
    response = unpack_response(heard)
    assert response.request_id == 0
    assert isinstance(unpack_error(heard[RESPONSE_NBYTES:]), DamagedFrame)


@pytest.mark.parametrize("at", [8, 16, 24, 28, 32, 40], ids=["id", "size", "checksum", "seal", "answer", "text"])
def test_a_damaged_answer_is_a_lost_connection(port: Port, at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the next request is asked on another one."""
    packed, num_left = pack_answer, 1

    def damaged(request_id: int, body: bytes) -> bytes:
        nonlocal num_left
        answer = bytearray(packed(request_id, body))
        answer[at] ^= num_left
        num_left = 0
        return bytes(answer)

    monkeypatch.setattr(connection, "pack_answer", damaged)
    line = TcpControlClient(port.pool(None))
    with pytest.raises(DamagedFrame):
        line.ask(Introduce(), 5)
    assert line.ask(Introduce(), 5).host
