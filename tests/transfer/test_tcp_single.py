"""A single request on a lane: one send, one receive, refusals and all; and timers that are set when they must be."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest
from waiting import HANG_S

from moonpool.base.clock import Deadline
from moonpool.base.errors import NotFound, ProtocolError, StaleGeneration, Unauthorized
from moonpool.transfer.transports.sockets import TimedSocket, receive_exactly, send_all
from moonpool.transfer.transports.tcp.frames import (
    FrameOp,
    ReadVerdict,
    Request,
    RequestPacker,
    RequestReader,
    pack_refusal,
    pack_request,
    pack_response,
    pack_verdict,
)
from moonpool.transfer.transports.tcp.single import read_one, write_one

PACKER = RequestPacker("seg", 7)


@pytest.fixture
def ends() -> Iterator[tuple[TimedSocket, socket.socket]]:
    one, other = socket.socketpair()
    with TimedSocket.over(one) as lane, other:
        yield lane, other


def deadline() -> Deadline:
    return Deadline(HANG_S)


@pytest.mark.parametrize("chunk_nbytes", [1, 31, 33, 50, 1000])
@pytest.mark.parametrize("generation", [0, 9])
def test_an_answer_in_any_pieces_fills_the_views(
    ends: tuple[TimedSocket, socket.socket], chunk_nbytes: int, generation: int
) -> None:
    lane, owner = ends
    data = bytes(range(100))
    said = pack_response(1, 100) + data + (pack_verdict(1, ReadVerdict.SAME) if generation else b"")

    def answer() -> None:
        for at in range(0, len(said), chunk_nbytes):
            owner.sendall(said[at : at + chunk_nbytes])

    thread = threading.Thread(target=answer)
    thread.start()
    memory = memoryview(bytearray(100))
    assert read_one(lane, PACKER, 3, 100, [memory[:60], memory[60:]], generation, deadline()) is None
    thread.join()
    assert memory == data
    request = Request(FrameOp.READ, 1, "seg", 7, 3, 100, generation)
    assert owner.recv(1000) == pack_request(request)


@pytest.mark.parametrize("nbytes", [1, 20, 4000])
def test_a_refusal_is_returned_whether_it_is_longer_or_shorter_than_the_data(
    ends: tuple[TimedSocket, socket.socket], nbytes: int
) -> None:
    lane, owner = ends
    owner.sendall(pack_refusal(1, NotFound("no segment 'seg' is served here")))
    refusal = read_one(lane, PACKER, 0, nbytes, [memoryview(bytearray(nbytes))], 0, deadline())
    assert isinstance(refusal, NotFound)
    assert str(refusal) == "no segment 'seg' is served here"


def test_space_that_was_given_away_meanwhile_is_stale(ends: tuple[TimedSocket, socket.socket]) -> None:
    lane, owner = ends
    owner.sendall(pack_response(1, 8) + bytes(8) + pack_verdict(1, ReadVerdict.STALE))
    assert isinstance(read_one(lane, PACKER, 0, 8, [memoryview(bytearray(8))], 5, deadline()), StaleGeneration)


def test_a_write_is_sent_whole_and_its_refusal_returned(ends: tuple[TimedSocket, socket.socket]) -> None:
    lane, owner = ends
    owner.sendall(pack_response(1, 0) + pack_refusal(1, StaleGeneration("too late")))
    views = [memoryview(b"ab"), memoryview(b"cdef")]
    assert write_one(lane, PACKER, 64, 6, views, 4, deadline()) is None
    assert owner.recv(1000) == pack_request(Request(FrameOp.WRITE, 1, "seg", 7, 64, 6, 4)) + b"abcdef"
    assert isinstance(write_one(lane, PACKER, 64, 6, views, 4, deadline()), StaleGeneration)


def test_a_refused_connection_and_a_wrong_answer_are_raised(ends: tuple[TimedSocket, socket.socket]) -> None:
    lane, owner = ends
    owner.sendall(pack_refusal(0, Unauthorized("not you")))
    with pytest.raises(Unauthorized, match="not you"):
        read_one(lane, PACKER, 0, 8, [memoryview(bytearray(8))], 0, deadline())
    owner.sendall(pack_response(2, 8) + bytes(8))
    with pytest.raises(ProtocolError, match="request 2"):
        read_one(lane, PACKER, 0, 8, [memoryview(bytearray(8))], 0, deadline())


def test_an_owner_that_leaves_or_is_silent_is_noticed(ends: tuple[TimedSocket, socket.socket]) -> None:
    lane, owner = ends
    with pytest.raises(TimeoutError):
        read_one(lane, PACKER, 0, 8, [memoryview(bytearray(8))], 0, Deadline(0.05))
    owner.close()
    with pytest.raises(OSError, match=r"closed|Broken pipe|reset"):
        read_one(lane, PACKER, 0, 8, [memoryview(bytearray(8))], 0, deadline())


def test_a_timer_stands_as_long_as_it_ends_in_time() -> None:
    one, other = socket.socketpair()
    with TimedSocket.over(one) as lane, other:
        buffer = memoryview(bytearray(4))
        for timeout_s, expected in ((8.0, 7.2), (8.0, 7.2), (7.5, 7.2), (5.0, 4.5), (100.0, 90.0), (0.5, 0.45)):
            other.sendall(b"data")
            receive_exactly(lane, [buffer], Deadline(timeout_s))
            assert lane.timers[socket.SO_RCVTIMEO] == pytest.approx(expected, rel=0.01)
        send_all(lane, [b"x"], None)
        assert lane.timers[socket.SO_SNDTIMEO] == 0.0
        with pytest.raises(TimeoutError):
            receive_exactly(lane, [buffer], Deadline(0.03))


def test_a_reader_takes_only_requests_that_are_whole_and_right() -> None:
    reader = RequestReader()
    first = Request(FrameOp.READ, 1, "seg", 7, 0, 100, 5)
    frame = pack_request(first)
    assert reader.read(memoryview(frame)) is None, "its name is not known yet"
    reader.remember(first._replace(checksum=int.from_bytes(frame[48:52], "little")))
    found = reader.read(memoryview(frame + b"more"))
    assert found is not None
    assert found[0][:7] == first[:7]
    assert found[1] == len(frame)
    assert reader.read(memoryview(frame[:-1])) is None
    assert reader.read(memoryview(pack_request(Request(FrameOp.READ, 1, "sag", 7, 0, 100, 5)))) is None
    for at in range(len(frame)):
        damaged = bytearray(frame)
        damaged[at] ^= 1
        assert reader.read(memoryview(damaged)) is None
