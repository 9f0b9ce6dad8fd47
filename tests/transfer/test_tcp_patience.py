"""Peers that are slow on purpose: each costs the owner its stall timeout, and what waits for them is bounded."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import pytest
from guarded_port import NBYTES, Port
from waiting import HANG_S, wait_until

from moonpool.transfer.transports.tcp.frames import FrameOp, Request, pack_request, pack_response
from moonpool.transfer.transports.tcp.streams import ResponseQueue

STALL_S = 0.4
READ = pack_request(Request(FrameOp.READ, 1, "seg", 1, 0, NBYTES))
WRITE = pack_request(Request(FrameOp.WRITE, 1, "seg", 1, 0, NBYTES, 1))
REFUSED = pack_request(Request(FrameOp.WRITE, 1, "nobody", 1, 0, NBYTES, 1))


@pytest.fixture
def port() -> Iterator[Port]:
    made = Port(None, stall_timeout_s=STALL_S)
    yield made
    made.close()


def num_serving(port: Port) -> int:
    return sum(thread.name == f"tcp-serve-{port.server.port}" for thread in threading.enumerate())


def is_hung_up(sock: socket.socket, data: bytes, pause_s: float) -> bool:
    """Sends byte by byte. Whether the owner hangs up before all are sent."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.settimeout(pause_s)
    for byte in data:
        try:
            sock.sendall(bytes([byte]))
            if sock.recv(1) == b"":
                return True
        except TimeoutError:
            pass
        except ConnectionError:
            return True
    return False


@pytest.mark.parametrize(
    ("first", "rest", "pause_s"),
    [
        (b"", READ[:47], 0.02),
        (READ[:56], b"se", 1.0),
        (WRITE, bytes(1000), 0.02),
        (REFUSED, bytes(1000), 0.02),
    ],
    ids=["head", "name", "fenced data", "refused data"],
)
def test_a_trickle_is_a_stall(port: Port, first: bytes, rest: bytes, pause_s: float) -> None:
    with port.connect() as sock:
        sock.sendall(first)
        assert is_hung_up(sock, rest, pause_s)
        wait_until(lambda: num_serving(port) == 0, "the owner serves it no more")


def test_a_peer_that_never_reads_its_answers_is_let_go(port: Port) -> None:
    with port.connect() as sock:
        sock.settimeout(0.1)
        with contextlib.suppress(TimeoutError, ConnectionError):
            for _ in range(2000):
                sock.sendall(READ)
        wait_until(lambda: num_serving(port) == 0, "the owner serves it no more")


def test_slow_peers_do_not_slow_others_down() -> None:
    port = Port(None, stall_timeout_s=5 * HANG_S)
    with contextlib.closing(port), contextlib.ExitStack() as stack:
        for _ in range(8):
            stack.enter_context(port.connect()).sendall(WRITE + b"begin")
        remote = port.remote(None)
        started = time.monotonic()
        for _ in range(20):
            remote.read_into(0, [bytearray(100)], timeout_s=HANG_S)
        assert time.monotonic() - started < HANG_S / 2


def test_an_idle_peer_is_no_stalled_one(port: Port) -> None:
    with port.connect() as sock:
        for _ in range(2):
            sock.sendall(pack_request(Request(FrameOp.READ, 1, "seg", 1, 0, 1)))
            assert len(sock.recv(33, socket.MSG_WAITALL)) == 33
            time.sleep(STALL_S * 1.5)  # the silence is what is tested


def test_answers_that_wait_are_bounded_in_bytes() -> None:
    """Answers of the control are no segment's memory, and count all the same."""
    left, right = socket.socketpair()
    taken = threading.Thread(target=read_all, args=(right,))
    taken.start()
    with left, right:
        outbox = ResponseQueue(left, 5.0)
        most = 0
        for number in range(40):
            outbox.add(pack_response(number, 1 << 20) + bytes(1 << 20))
            most = max(most, sum(len(part) for part in outbox._parts))
        outbox.flush()
        left.shutdown(socket.SHUT_WR)
        taken.join(HANG_S)
    assert most < 8 << 20


def read_all(sock: socket.socket) -> None:
    while sock.recv(1 << 20):
        pass
