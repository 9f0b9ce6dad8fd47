"""The blocking driver against a real server: answers, errors, deadlines, lost peers, nonsense."""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from rpc_service import Big, Echo, Fail, ServedService, Slow, Unknown, Unsendable
from waiting import HANG_S

from moonpool.base.errors import (
    Cancelled,
    DamagedFrame,
    DeadlineExceeded,
    Internal,
    MoonpoolError,
    NotFound,
    Overloaded,
    PeerLost,
    ProtocolError,
)
from moonpool.base.frames import MAX_BODY_NBYTES, VERSION, FrameKind, encode_frame
from moonpool.base.rpc import BlockingClient, Call, Hello
from moonpool.base.rpc.protocol import encode_value


@pytest.fixture
def client(served: ServedService) -> Iterator[BlockingClient]:
    client = BlockingClient(served.address, "testing", name="client-1")
    yield client
    client.close()


def test_calls_and_hello(client: BlockingClient) -> None:
    assert client.connect() == Hello("testing", "server-1", 77)
    assert client.call(Echo(b"abc")) == b"abc"
    assert client.call(Echo(os.urandom(1000) * 3000)) is not None  # several reads long


def test_threads_share_one_client(client: BlockingClient) -> None:
    with ThreadPoolExecutor(8) as pool:
        sent = [str(number).encode() for number in range(200)]
        assert list(pool.map(lambda data: client.call(Echo(data)), sent)) == sent


def test_work_is_done_while_the_answer_is_on_its_way(served: ServedService, client: BlockingClient) -> None:
    client.connect()
    done: list[int] = []

    def some() -> bool:
        done.append(len(done))
        if len(done) == 3:
            served.soon(served.service.gate.set)
        return len(done) < 1_000_000  # it ends as soon as the answer is there

    client.call(Echo(b"warm"))  # from then on with the kernel's limit of this call
    assert client.call(Slow(), meanwhile=some) == "at last"
    assert 3 <= len(done) < 1_000_000
    assert client.call(Echo(b"2")) == b"2"


def test_work_that_fails_meanwhile_leaves_no_answer_behind(client: BlockingClient) -> None:
    client.connect()
    client.call(Echo(b"warm"))

    def fail() -> bool:
        raise MemoryError

    with pytest.raises(MemoryError):
        client.call(Echo(b"1"), meanwhile=fail)
    assert client.call(Echo(b"2")) == b"2"


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (Fail("missing"), NotFound),
        (Fail("busy"), Overloaded),
        (Fail("bug"), Internal),
        (Fail("cancelled"), Cancelled),
        (Unsendable(), Internal),
        (Unknown(), ProtocolError),
        (Big(MAX_BODY_NBYTES), ProtocolError),
    ],
)
def test_errors_come_back_and_the_connection_stays(
    served: ServedService,
    client: BlockingClient,
    call: Call[object],
    error: type[MoonpoolError],
    caplog: pytest.LogCaptureFixture,
) -> None:
    client.call(Echo(b"1"))
    with pytest.raises(error):
        client.call(call)
    assert client.call(Echo(b"2")) == b"2"
    assert not served.service.peer_closed.is_set()


def test_a_call_over_the_limit_is_not_sent(served: ServedService, client: BlockingClient) -> None:
    client.call(Echo(b"1"))
    with pytest.raises(ProtocolError, match="over the limit"):
        client.call(Echo(bytes(MAX_BODY_NBYTES)))
    assert client.call(Echo(b"2")) == b"2"
    assert not served.service.peer_closed.is_set()


def test_a_deadline_ends_the_wait_and_the_handler(served: ServedService, client: BlockingClient) -> None:
    start = time.monotonic()
    with pytest.raises(DeadlineExceeded):
        client.call(Slow(), timeout_s=1.0)  # enough for the handler to have begun
    assert time.monotonic() - start < HANG_S / 2
    served.do(served.service.ended.wait())
    assert client.call(Echo(b"next")) == b"next"  # connected anew


def test_a_connection_can_outlive_a_deadline(served: ServedService) -> None:
    client = BlockingClient(served.address, "testing", keeps_connection=True)
    try:
        client.call(Echo(b"first"))
        for _ in range(2):
            with pytest.raises(DeadlineExceeded):
                client.call(Slow(), timeout_s=0.1)
        served.soon(served.service.gate.set)
        assert client.call(Echo(b"next")) == b"next", "the late answers are skipped"
        assert client.call(Slow(), timeout_s=HANG_S) == "at last"
        assert not served.service.peer_closed.is_set()
    finally:
        client.close()


def test_waiting_for_the_turn_counts_too(served: ServedService, client: BlockingClient) -> None:
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(client.call, Slow())
        served.do(served.service.started.wait())
        with pytest.raises(DeadlineExceeded, match="busy with other calls"):
            client.call(Echo(b"x"), timeout_s=0.05)
        served.soon(served.service.gate.set)
        assert slow.result(HANG_S) == "at last"


def test_close_wakes_a_waiting_thread(served: ServedService, client: BlockingClient) -> None:
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(client.call, Slow())
        served.do(served.service.started.wait())
        client.close()
        with pytest.raises(PeerLost):
            slow.result(HANG_S)
    with pytest.raises(PeerLost, match="closed"):
        client.call(Echo(b"x"))


def test_a_lost_server_and_its_successor(listen_at: str) -> None:
    served = ServedService(listen_at)
    client = BlockingClient(served.address, "testing")
    client.call(Echo(b"1"))
    served.close()
    with pytest.raises(PeerLost):
        client.call(Echo(b"2"))
    with pytest.raises(PeerLost):
        client.connect()
    successor = ServedService(served.address)
    assert client.call(Echo(b"3")) == b"3"
    client.close()
    successor.close()


def test_wrong_service(served: ServedService) -> None:
    other = BlockingClient(served.address, "store")
    for _ in range(2):  # the failed greeting leaves nothing half open
        with pytest.raises(ProtocolError, match="this is 'testing', not 'store'"):
            other.connect()
    other.close()


@contextmanager
def impostor(tmp_path: Path, talk: Callable[[socket.socket], None]) -> Iterator[str]:
    """A server that says what `talk` says to its one connection."""
    path = f"{tmp_path}/impostor.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(path)
        listener.listen(1)

        def serve() -> None:
            peer, _ = listener.accept()
            with peer:
                talk(peer)
                with suppress(OSError):  # the client may hang up first
                    peer.shutdown(socket.SHUT_WR)
                    while peer.recv(65536):
                        pass

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"unix:{path}"
        thread.join(HANG_S)


HELLO = encode_value(FrameKind.HELLO, 0, Hello("testing"))


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        HELLO + encode_frame(FrameKind.REPLY, 99, b"\xc4\x00"),
        HELLO + encode_frame(FrameKind.REPLY, 1, b"\xc1"),
        HELLO + encode_frame(FrameKind.REPLY, 1, b"\x05"),
        HELLO + struct.pack("<2sBBIIIQI", b"MP", VERSION, 2, 0, 2**32 - 1, 0, 1, 0),
        encode_frame(FrameKind.REPLY, 0, b""),
    ],
    ids=["http", "other call", "not msgpack", "other type", "too large", "no hello"],
)
def test_nonsense_from_the_server(tmp_path: Path, answer: bytes) -> None:
    with impostor(tmp_path, lambda peer: peer.sendall(answer)) as address:
        client = BlockingClient(address, "testing")
        with pytest.raises(ProtocolError):
            client.call(Echo(b"x"), timeout_s=HANG_S)
        client.close()


@pytest.mark.parametrize("at", [0, 2, 3, 4, 8, 12, 16, 24])
def test_a_damaged_answer_is_a_lost_connection(tmp_path: Path, at: int) -> None:
    """So it is asked again by whoever asks again when a connection breaks."""
    answer = bytearray(encode_value(FrameKind.REPLY, 1, b"the answer"))
    answer[at] ^= 0x10
    with impostor(tmp_path, lambda peer: peer.sendall(HELLO + answer)) as address:
        client = BlockingClient(address, "testing")
        with pytest.raises(DamagedFrame):
            client.call(Echo(b"x"), timeout_s=HANG_S)
        client.close()


def test_a_stray_sign_of_life_is_no_answer(tmp_path: Path) -> None:
    answer = HELLO + 2 * encode_frame(FrameKind.PONG, 0) + encode_value(FrameKind.REPLY, 1, b"the answer")
    with impostor(tmp_path, lambda peer: peer.sendall(answer)) as address:
        client = BlockingClient(address, "testing")
        assert client.call(Echo(b"x"), timeout_s=HANG_S) == b"the answer"
        client.close()


def test_a_server_that_stops_in_the_middle_of_a_frame(tmp_path: Path) -> None:
    with impostor(tmp_path, lambda peer: peer.sendall(HELLO + b"MP\1")) as address:
        client = BlockingClient(address, "testing")
        with pytest.raises(PeerLost):
            client.call(Echo(b"x"), timeout_s=HANG_S)
        client.close()


def test_a_server_that_drips(tmp_path: Path) -> None:
    """One byte now and then must not stretch the deadline."""
    stop = threading.Event()

    def drip(peer: socket.socket) -> None:
        peer.sendall(HELLO)
        for byte in encode_frame(FrameKind.REPLY, 1, bytes(100_000)):
            if stop.wait(0.03):
                return
            try:
                peer.sendall(bytes([byte]))
            except OSError:
                return

    with impostor(tmp_path, drip) as address:
        client = BlockingClient(address, "testing")
        start = time.monotonic()
        with pytest.raises(DeadlineExceeded):
            client.call(Echo(b"x"), timeout_s=0.2)
        assert time.monotonic() - start < HANG_S / 2
        stop.set()
        client.close()


def socket_of(client: BlockingClient) -> socket.socket | None:
    return client._socket


def test_a_connection_outlives_a_server_that_reads_nothing(tmp_path: Path) -> None:
    """Until the kernel takes no more requests: one of which nothing was sent leaves the stream as it was."""
    stop = threading.Event()

    def freeze(peer: socket.socket) -> None:
        peer.sendall(HELLO)
        stop.wait(HANG_S)

    with impostor(tmp_path, freeze) as address:
        client = BlockingClient(address, "testing", keeps_connection=True)
        client.connect()
        sock = socket_of(client)
        assert sock is not None
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)  # the least there is: a few requests
        for _ in range(30):
            with pytest.raises(DeadlineExceeded):
                client.call(Echo(b"x"), timeout_s=0.02)
        with pytest.raises(BlockingIOError):
            sock.send(b"x", socket.MSG_DONTWAIT)
        assert socket_of(client) is sock
        stop.set()
        client.close()
