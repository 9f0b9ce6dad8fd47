"""The tcp transport against peers that misbehave: real sockets, hand-made bytes."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from waiting import HANG_S, wait_until

from moonpool.base.descriptor import SegmentDescriptor
from moonpool.base.errors import (
    ConfigError,
    DeadlineExceeded,
    InvalidInput,
    Overloaded,
    PeerLost,
    ProtocolError,
    Unavailable,
)
from moonpool.transfer.memory.segment import Segment
from moonpool.transfer.transports.tcp import lanes
from moonpool.transfer.transports.tcp.frames import (
    RESPONSE_NBYTES,
    FrameOp,
    FrameStatus,
    Request,
    pack_request,
    pack_response,
    unpack_error,
    unpack_response,
)
from moonpool.transfer.transports.tcp.transport import TcpTransport

NBYTES = 1 << 20


class Owner:
    """A fenced segment served by tcp, with connections of one's own to it."""

    def __init__(self, **settings: float) -> None:
        self.segment = Segment.allocate("seg", NBYTES, granule_nbytes=4096, incarnation=1)
        self.transport = TcpTransport("127.0.0.1", **settings)  # type: ignore[arg-type]
        self.endpoint = self.transport.serve(self.segment)
        self.port = int(self.endpoint.rpartition(":")[2])
        self.descriptor = describe(self.endpoint)

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=HANG_S)

    def close(self) -> None:
        self.transport.close()
        self.segment.close()


def describe(endpoint: str) -> SegmentDescriptor:
    return SegmentDescriptor(name="seg", nbytes=NBYTES, incarnation=1, host="h", endpoints=(endpoint,))


@pytest.fixture
def owner() -> Iterator[Owner]:
    made = Owner()
    yield made
    made.close()


def answer(sock: socket.socket) -> tuple[FrameStatus, int, bytes]:
    response = unpack_response(sock.recv(RESPONSE_NBYTES, socket.MSG_WAITALL))
    return response.status, response.request_id, sock.recv(response.nbytes, socket.MSG_WAITALL)


def test_pipelined_requests_are_answered_in_order(owner: Owner) -> None:
    owner.segment.memory[:6] = b"abcdef"
    with owner.connect() as sock:
        sock.sendall(b"".join(pack_request(Request(FrameOp.READ, n + 1, "seg", 1, n, 1)) for n in range(6)))
        answers = [answer(sock) for _ in range(6)]
    assert answers == [(FrameStatus.OK, n + 1, b"abcdef"[n : n + 1]) for n in range(6)]


def test_a_refused_write_leaves_the_connection_in_step(owner: Owner) -> None:
    with owner.connect() as sock:
        sock.sendall(pack_request(Request(FrameOp.WRITE, 1, "seg", 1, NBYTES - 10, 200_000, 1)) + bytes(200_000))
        sock.sendall(pack_request(Request(FrameOp.WRITE, 2, "other", 1, 0, 5, 1)) + b"12345")
        sock.sendall(pack_request(Request(FrameOp.WRITE, 3, "seg", 1, 0, 5, 1)) + b"12345")
        answers = [answer(sock) for _ in range(3)]
    assert [(status, id_) for status, id_, _ in answers] == [
        (FrameStatus.ERROR, 1),
        (FrameStatus.ERROR, 2),
        (FrameStatus.OK, 3),
    ]
    assert [unpack_error(answers[n][2]).code for n in (0, 1)] == ["invalid_input", "not_found"]
    assert bytes(owner.segment.memory[:5]) == b"12345"


def test_reads_see_the_writes_before_them_and_not_those_after(owner: Owner) -> None:
    with owner.connect() as sock:
        frames = b""
        for n in range(50):
            frames += pack_request(Request(FrameOp.WRITE, 2 * n + 1, "seg", 1, 0, 1, 1)) + bytes([n])
            frames += pack_request(Request(FrameOp.READ, 2 * n + 2, "seg", 1, 0, 1))
        sock.sendall(frames)
        answers = [answer(sock) for _ in range(100)]
    assert [data for _, _, data in answers[1::2]] == [bytes([n]) for n in range(50)]


def test_a_frame_may_come_byte_by_byte(owner: Owner) -> None:
    frame = pack_request(Request(FrameOp.WRITE, 1, "seg", 1, 0, 5, 1)) + b"12345"
    with owner.connect() as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in frame * 3:
            sock.sendall(bytes([byte]))
        assert [answer(sock)[0] for _ in range(3)] == [FrameStatus.OK] * 3
    assert bytes(owner.segment.memory[:5]) == b"12345"


@pytest.mark.parametrize("bad", [0, 63, 64, 199])
def test_an_item_that_only_the_owner_refuses_leaves_the_lane_in_step(owner: Owner, bad: int) -> None:
    client = TcpTransport(None, lanes=1)
    remote = client.open(owner.descriptor, owner.endpoint, timeout_s=HANG_S)
    remote.nbytes = 2 * NBYTES  # as if the segment had been larger once
    owner.segment.memory[:200] = bytes(range(200))
    items = [(NBYTES if n == bad else n, bytearray(1)) for n in range(200)]
    with pytest.raises(InvalidInput, match="outside"):
        remote.read_many(items, timeout_s=HANG_S)
    assert [bytes(data) for _, data in items] == [bytes([0 if n == bad else n]) for n in range(200)]
    with pytest.raises(InvalidInput, match="outside"):
        remote.write_many(
            [(NBYTES if n == bad else n, b"w" * 3000) for n in range(200)], generation=1, timeout_s=HANG_S
        )
    back = bytearray(100)
    remote.read_into(1000, [back], timeout_s=HANG_S)
    assert back == b"w" * 100
    client.close()


def test_many_to_a_silent_owner_cost_the_deadline_and_no_more() -> None:
    silent = Silent()
    client = TcpTransport(None)
    try:
        remote = client.open(describe(silent.endpoint), silent.endpoint, timeout_s=HANG_S)
        started = time.monotonic()
        with pytest.raises(DeadlineExceeded, match=r"0\.2 s"):
            remote.read_many([(n, bytearray(10)) for n in range(500)], timeout_s=0.2)
        with pytest.raises(DeadlineExceeded, match=r"0\.2 s"):
            remote.write_many([(0, bytes(NBYTES))] * 64, generation=1, timeout_s=0.2)
        assert 0.39 < time.monotonic() - started < HANG_S / 2
    finally:
        client.close()
        silent.close()


def test_a_slow_writer_that_was_overtaken_cannot_overwrite(owner: Owner) -> None:
    fence = owner.segment.fence
    assert fence is not None
    with owner.connect() as slow, owner.connect() as fast:
        slow.sendall(pack_request(Request(FrameOp.WRITE, 1, "seg", 1, 0, 8192, 5)) + b"s" * 4096)
        wait_until(lambda: owner.segment.memory[4095] == ord("s"), "the first half is written")
        fast.sendall(pack_request(Request(FrameOp.WRITE, 1, "seg", 1, 0, 8192, 6)) + b"f" * 8192)
        assert answer(fast)[0] is FrameStatus.OK
        slow.sendall(b"s" * 4096)
        status, _, text = answer(slow)
    assert status is FrameStatus.ERROR
    assert unpack_error(text).code == "stale_generation"
    assert bytes(owner.segment.memory[:8192]) == b"f" * 8192


def test_a_broken_frame_gets_an_answer_and_the_door(owner: Owner) -> None:
    with owner.connect() as sock:
        sock.sendall(b"GET / HTTP/1.1\r\nHost: wrong-protocol\r\n\r\nmore than 56 bytes, which a head has")
        status, id_, text = answer(sock)
        assert (status, id_) == (FrameStatus.ERROR, 0)
        assert isinstance(unpack_error(text), ProtocolError)
        with contextlib.suppress(ConnectionResetError):
            assert sock.recv(1) == b""


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(min_size=1, max_size=120), st.booleans(), st.booleans())
def test_random_bytes_never_hurt_the_owner(owner: Owner, data: bytes, with_magic: bool, with_name: bool) -> None:
    before = bytes(owner.segment.memory)
    with owner.connect() as sock:
        sock.sendall((b"MPTX\x01\x01" if with_magic else b"") + (b"\x03\x00" if with_name else b"") + data)
        sock.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionResetError):
            while sock.recv(65536):
                pass
    assert bytes(owner.segment.memory) == before
    good = owner.transport.open(owner.descriptor, owner.endpoint, timeout_s=HANG_S)
    good.read_into(0, [bytearray(10)], timeout_s=HANG_S)


def test_a_stalled_request_is_cut_off() -> None:
    owner = Owner(stall_timeout_s=0.1)
    try:
        with owner.connect() as idle, owner.connect() as stalled:
            stalled.sendall(pack_request(Request(FrameOp.WRITE, 1, "seg", 1, 0, 100, 1)) + b"only a part")
            assert stalled.recv(1) == b""
            # An idle connection is not a stalled one.
            idle.sendall(pack_request(Request(FrameOp.READ, 1, "seg", 1, 0, 1)))
            assert answer(idle)[0] is FrameStatus.OK
    finally:
        owner.close()


def test_too_many_connections_are_refused_and_places_come_free() -> None:
    owner = Owner(max_connections=1)
    client = TcpTransport(None)
    try:
        with owner.connect() as first:
            first.sendall(pack_request(Request(FrameOp.READ, 1, "seg", 1, 0, 1)))
            answer(first)
            with pytest.raises((Overloaded, PeerLost)):
                client.open(owner.descriptor, owner.endpoint, timeout_s=HANG_S)
        wait_until(lambda: can_open(client, owner), "a place comes free")
    finally:
        client.close()
        owner.close()


def can_open(client: TcpTransport, owner: Owner) -> bool:
    try:
        client.open(owner.descriptor, owner.endpoint, timeout_s=HANG_S)
    except (Overloaded, Unavailable):
        return False
    return True


class Silent:
    """Listens, reads, answers the first `answers` requests as empty successes, then nothing."""

    def __init__(self, answers: int = 1) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"tcp:127.0.0.1:{self._listener.getsockname()[1]}"
        self.accepted: list[socket.socket] = []
        self.heard = threading.Semaphore(0)
        self._answers = answers
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = self._listener.accept()
                self.accepted.append(sock)
                thread = threading.Thread(target=self._serve, args=(sock,))
                self._threads.append(thread)
                thread.start()

    def _serve(self, sock: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := sock.recv(65536):
                if self._answers:
                    self._answers -= 1
                    sock.sendall(pack_response(int.from_bytes(data[8:16], "little"), 0))
                self.heard.release()

    def hang_up(self) -> None:
        for sock in [*self.accepted, self._listener]:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.hang_up()
        for thread in self._threads:
            thread.join(HANG_S)
        for sock in [*self.accepted, self._listener]:
            sock.close()


@pytest.fixture
def silent() -> Iterator[Silent]:
    made = Silent()
    yield made
    made.close()


def test_a_silent_owner_costs_the_deadline_and_no_more(silent: Silent) -> None:
    client = TcpTransport(None)
    remote = client.open(describe(silent.endpoint), silent.endpoint, timeout_s=HANG_S)
    for _ in range(2):
        started = time.monotonic()
        with pytest.raises(DeadlineExceeded, match=r"0\.2 s"):
            remote.read_into(0, [bytearray(100)], timeout_s=0.2)
        assert 0.19 < time.monotonic() - started < HANG_S / 2
    with pytest.raises(DeadlineExceeded):
        remote.write_from(0, [np.zeros(NBYTES, np.uint8)], generation=1, timeout_s=0.1)
    client.close()


def test_waiting_for_a_lane_counts_too(silent: Silent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "BUSY_TIMEOUT_S", 0.3)
    client = TcpTransport(None, lanes=1)
    remote = client.open(describe(silent.endpoint), silent.endpoint, timeout_s=HANG_S)
    failures: list[Exception] = []

    def read(timeout_s: float) -> None:
        try:
            remote.read_into(0, [bytearray(1)], timeout_s=timeout_s)
        except Unavailable as error:
            failures.append(error)

    silent.heard.acquire(timeout=HANG_S)
    holder = threading.Thread(target=read, args=(5 * HANG_S,))
    holder.start()
    assert silent.heard.acquire(timeout=HANG_S)
    read(0.1)
    assert [type(error) for error in failures] == [DeadlineExceeded]
    client.close()  # wakes the one that holds the lane
    holder.join(HANG_S)
    assert [type(error) for error in failures] == [DeadlineExceeded, PeerLost]


def test_waiting_callers_learn_at_once_that_the_owner_hung_up(silent: Silent) -> None:
    client = TcpTransport(None)
    remote = client.open(describe(silent.endpoint), silent.endpoint, timeout_s=HANG_S)
    silent.heard.acquire(timeout=HANG_S)
    lost = threading.Event()

    def read() -> None:
        with pytest.raises(PeerLost):
            remote.read_into(0, [bytearray(1)], timeout_s=5 * HANG_S)
        lost.set()

    waiter = threading.Thread(target=read)
    waiter.start()
    assert silent.heard.acquire(timeout=HANG_S)
    silent.hang_up()
    assert lost.wait(HANG_S / 2)
    waiter.join(HANG_S)
    client.close()


def test_a_dropped_lane_is_replaced(owner: Owner) -> None:
    client = TcpTransport(None, lanes=1)
    remote = client.open(owner.descriptor, owner.endpoint, timeout_s=HANG_S)
    with pytest.raises(DeadlineExceeded):
        remote.read_into(0, [bytearray(1)], timeout_s=0)
    owner.segment.memory[:2] = b"ok"
    buffer = bytearray(2)
    remote.read_into(0, [buffer], timeout_s=HANG_S)
    assert buffer == b"ok"
    client.close()


def test_listening_everywhere_needs_a_name_for_others() -> None:
    with pytest.raises(ConfigError, match="tcp_advertise_host"):
        TcpTransport("0.0.0.0")
    transport = TcpTransport("0.0.0.0", advertise_host="example.test")
    with Segment.over("s", bytearray(1), incarnation=1) as segment:
        assert transport.serve(segment).startswith("tcp:example.test:")
        transport.close()
