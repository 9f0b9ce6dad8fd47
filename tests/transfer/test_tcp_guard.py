"""Who may talk to a tcp port: real sockets with and without the right secret."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from guarded_port import Port, many_ports, resealed
from waiting import HANG_S, wait_until

from moonpool.base.errors import (
    DeadlineExceeded,
    InvalidInput,
    NotFound,
    Overloaded,
    PeerLost,
    ProtocolError,
    Unauthorized,
)
from moonpool.base.security import Secret
from moonpool.transfer.paths.path_load import is_retriable
from moonpool.transfer.transports.tcp.frames import (
    RESPONSE_NBYTES,
    FrameOp,
    FrameStatus,
    Request,
    pack_refusal,
    pack_request,
    unpack_error,
    unpack_response,
)
from moonpool.transfer.transports.tcp.guard import FRAME_NBYTES, CallerSide, Guard, OwnerSide
from moonpool.transfer.transports.tcp.lanes import LanePool

VALUE = b"correct horse battery staple"
GUARD = Guard(secret=Secret(VALUE))
OTHER = Guard(secret=Secret(b"another secret of some length"))
READ = pack_request(Request(FrameOp.READ, 1, "seg", 1, 0, 1))


@pytest.fixture
def ports() -> Iterator[Callable[..., Port]]:
    with many_ports() as make:
        yield make


def test_both_with_the_secret_move_bytes(ports: Callable[..., Port]) -> None:
    port = ports(GUARD)
    remote = port.remote(Guard(secret=Secret(VALUE)))
    remote.write_from(10, [b"hello"], generation=1, timeout_s=HANG_S)
    back = bytearray(5)
    remote.read_into(10, [back], timeout_s=HANG_S)
    assert back == b"hello"


@pytest.mark.parametrize(
    ("owner", "caller", "says"),
    [
        (GUARD, None, "set secret_file"),
        (GUARD, OTHER, "same content in their secret_file"),
        (None, GUARD, "set it on both sides or on none"),
    ],
)
def test_a_mismatch_is_a_clear_error_at_once(
    ports: Callable[..., Port], owner: Guard | None, caller: Guard | None, says: str
) -> None:
    port = ports(owner)
    remote = port.remote(caller)
    started = time.monotonic()
    for _ in range(3):
        with pytest.raises(Unauthorized, match=says) as caught:
            remote.write_from(0, [b"x" * 5000], generation=1, timeout_s=5 * HANG_S)
        assert not is_retriable(caught.value), "the planner would try for ever"
    assert time.monotonic() - started < HANG_S / 2
    assert bytes(port.segment.memory) == bytes(port.segment.nbytes)


def test_the_uninvited_learn_nothing(ports: Callable[..., Port]) -> None:
    """A segment that exists and one that does not get the same answer."""
    port = ports(GUARD)
    answers = []
    for name in ("seg", "nobody"):
        with port.connect() as sock:
            sock.sendall(pack_request(Request(FrameOp.READ, 7, name, 1, 0, 1)) * 100)
            answers.append(read_all(sock))
    assert answers[0] == answers[1]
    response = unpack_response(answers[0])
    assert (response.status, response.request_id) == (FrameStatus.ERROR, 0)
    assert isinstance(unpack_error(answers[0][RESPONSE_NBYTES:]), Unauthorized)


def test_requests_sent_with_the_proof_do_not_pass_before_it(ports: Callable[..., Port]) -> None:
    port = ports(GUARD)
    caller = CallerSide(OTHER.secret)
    write = pack_request(Request(FrameOp.WRITE, 1, "seg", 1, 0, 4, 1)) + b"evil"
    with port.connect() as sock:
        sock.sendall(caller.hello())
        proof = caller.proof(sock.recv(FRAME_NBYTES, socket.MSG_WAITALL))
        sock.sendall(proof + write * 10)
        assert isinstance(unpack_error(read_all(sock)[RESPONSE_NBYTES:]), Unauthorized)
    assert bytes(port.segment.memory[:4]) == bytes(4)


def test_requests_sent_with_a_right_proof_are_answered(ports: Callable[..., Port]) -> None:
    port = ports(GUARD)
    caller = CallerSide(GUARD.secret)
    with port.connect() as sock:
        sock.sendall(caller.hello())
        sock.sendall(caller.proof(sock.recv(FRAME_NBYTES, socket.MSG_WAITALL)) + READ)
        caller.check_welcome(sock.recv(FRAME_NBYTES, socket.MSG_WAITALL))
        assert unpack_response(sock.recv(RESPONSE_NBYTES, socket.MSG_WAITALL)).status is FrameStatus.OK


def read_all(sock: socket.socket) -> bytes:
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while more := sock.recv(65536):
            data += more
    return data


def test_the_log_names_the_address_once_and_no_secret(
    ports: Callable[..., Port], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    port = ports(GUARD)
    for guard in (None, OTHER, None):
        with pytest.raises(Unauthorized):
            port.remote(guard).probe(HANG_S)
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 1
    assert "127.0.0.1 was not let in" in warnings[0]
    assert "correct horse" not in caplog.text
    assert "another secret" not in caplog.text


def test_the_secret_never_crosses_the_wire(ports: Callable[..., Port]) -> None:
    port = ports(GUARD)
    caller = CallerSide(GUARD.secret)
    with port.connect() as sock:
        heard = b""
        sock.sendall(caller.hello())
        heard += (challenge := sock.recv(FRAME_NBYTES, socket.MSG_WAITALL))
        sock.sendall(proof := caller.proof(challenge))
        heard += sock.recv(FRAME_NBYTES, socket.MSG_WAITALL)
    for part in (heard, caller.hello(), proof):
        assert VALUE[:8] not in part


# Those who do not prove themselves


def test_an_undecided_caller_has_little_time(ports: Callable[..., Port]) -> None:
    port = ports(Guard(secret=GUARD.secret, timeout_s=0.3))
    with port.connect() as silent, port.connect() as slow:
        started = time.monotonic()
        hello, at = CallerSide(GUARD.secret).hello(), 0
        with contextlib.suppress(ConnectionError):
            while at < len(hello):  # one byte now and then
                slow.sendall(hello[at : at + 1])
                at += 1
                if slow_ended(slow, 0.05):
                    break
        assert silent.recv(1) == b""
        assert 0.2 < time.monotonic() - started < HANG_S / 2
        assert at < len(hello)


def slow_ended(sock: socket.socket, timeout_s: float) -> bool:
    sock.settimeout(timeout_s)
    try:
        return sock.recv(1) == b""
    except TimeoutError:
        return False


def test_the_unproven_cannot_fill_the_port(ports: Callable[..., Port]) -> None:
    """They are more than the port has places, all at once and still connected, and a good caller gets in."""
    port = ports(Guard(secret=GUARD.secret, timeout_s=5 * HANG_S, max_unproven=4), max_connections=2)
    with contextlib.ExitStack() as stack:
        crowd = [stack.enter_context(port.connect()) for _ in range(30)]
        remote = port.remote(GUARD)
        remote.probe(HANG_S)
        crowd += [stack.enter_context(port.connect()) for _ in range(30)]
        remote.probe(HANG_S)
        # Those who were put out end in their own time, but long before theirs would be up.
        wait_until(lambda: num_serving(port) <= 6, "those who were put out end")


def num_serving(port: Port) -> int:
    return sum(thread.name == f"tcp-serve-{port.server.port}" for thread in threading.enumerate())


def test_a_full_port_says_so_to_those_who_proved_themselves(ports: Callable[..., Port]) -> None:
    port = ports(GUARD, max_connections=1)
    first = port.pool(GUARD)
    with first.lane(HANG_S):
        with pytest.raises(Overloaded, match="too many connections"):
            port.remote(GUARD).probe(HANG_S)
    first.close()
    wait_until(lambda: can_probe(port), "the place is free again")


def can_probe(port: Port) -> bool:
    try:
        port.remote(GUARD).probe(HANG_S)
    except Overloaded:
        return False
    return True


def test_closing_ends_those_who_are_being_asked(ports: Callable[..., Port]) -> None:
    port = ports(Guard(secret=GUARD.secret, timeout_s=5 * HANG_S))
    with port.connect() as sock:
        sock.sendall(CallerSide(GUARD.secret).hello())
        sock.recv(FRAME_NBYTES, socket.MSG_WAITALL)
        started = time.monotonic()
        port.server.close()
        assert time.monotonic() - started < HANG_S / 2
        assert read_all(sock) == b""


# Owners that are none


@contextlib.contextmanager
def false_owner(serve: Callable[[socket.socket], None]) -> Iterator[LanePool]:
    """Takes one connection and does with it as told; yields a pool of guarded lanes to it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(5)

        def accept() -> None:
            with contextlib.suppress(OSError), listener.accept()[0] as sock:
                sock.settimeout(5)
                serve(sock)

        thread = threading.Thread(target=accept)
        thread.start()
        pool = LanePool("127.0.0.1", listener.getsockname()[1], 1, GUARD)
        try:
            yield pool
        finally:
            pool.close()
            thread.join(HANG_S)


def take_lane(pool: LanePool, timeout_s: float) -> None:
    with pool.lane(timeout_s):
        pass


def test_an_owner_that_does_not_know_the_secret_gets_no_request() -> None:
    def serve(sock: socket.socket) -> None:
        owner = OwnerSide(OTHER.secret)
        sock.sendall(owner.challenge(sock.recv(FRAME_NBYTES, socket.MSG_WAITALL)))
        sock.sendall(resealed(sock.recv(FRAME_NBYTES, socket.MSG_WAITALL), 4))
        assert sock.recv(1) == b""

    with false_owner(serve) as pool, pytest.raises(Unauthorized, match="does not know this side's secret"):
        take_lane(pool, HANG_S)


def test_a_silent_owner_costs_the_deadline_and_no_more() -> None:
    def serve(sock: socket.socket) -> None:
        while sock.recv(1000):
            pass

    with false_owner(serve) as pool:
        started = time.monotonic()
        with pytest.raises(TimeoutError):
            take_lane(pool, 0.3)
        assert time.monotonic() - started < HANG_S / 2


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"HTTP/1.1 400 Bad Request\r\n\r\n" + bytes(100),
        bytes(56),
        b"MPTG\x02\x02\x01\x00" + bytes(40),
        b"MPTX\x01\x01\x00\x00" + bytes(8) + b"\xff" * 8 + bytes(100),
        pack_refusal(0, NotFound("gone")),
    ],
)
def test_nonsense_from_an_owner_is_an_error(answer: bytes) -> None:
    def serve(sock: socket.socket) -> None:
        sock.recv(FRAME_NBYTES, socket.MSG_WAITALL)
        sock.sendall(answer)

    with false_owner(serve) as pool, pytest.raises((ProtocolError, Unauthorized, ConnectionError)):
        take_lane(pool, HANG_S)


def test_closing_a_pool_ends_a_greeting() -> None:
    heard = threading.Event()

    def serve(sock: socket.socket) -> None:
        sock.recv(FRAME_NBYTES, socket.MSG_WAITALL)
        heard.set()
        sock.recv(1)

    errors: list[Exception] = []

    def dial(pool: LanePool) -> None:
        try:
            take_lane(pool, 5 * HANG_S)
        except (OSError, PeerLost) as error:
            errors.append(error)

    with false_owner(serve) as pool:
        thread = threading.Thread(target=dial, args=(pool,))
        thread.start()
        assert heard.wait(HANG_S)
        pool.close()
        thread.join(HANG_S / 2)
        assert not thread.is_alive()
    assert len(errors) == 1


def test_a_host_that_cannot_be_a_name_does_not_use_up_the_pool() -> None:
    pool = LanePool("x" * 70 + ".example", 1, 1)
    for _ in range(3):
        with pytest.raises(InvalidInput, match="not the name of a host"):
            take_lane(pool, 0.5)
    pool.close()


def test_a_failed_greeting_does_not_use_up_the_pool(ports: Callable[..., Port]) -> None:
    remote = ports(GUARD).remote(OTHER)
    for _ in range(5):
        with pytest.raises(Unauthorized):
            remote.probe(HANG_S)
    with pytest.raises(DeadlineExceeded):
        remote.probe(0)
