"""The tcp transport inside TLS: what works, what is refused and how clearly, and the socket functions over records."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from guarded_port import NBYTES, Port, many_ports
from tls_authority import Authority
from waiting import HANG_S

from moonpool.base.clock import Deadline
from moonpool.base.errors import ConfigError, PeerLost, StaleGeneration, Unauthorized
from moonpool.base.security import Secret, TlsConfig
from moonpool.transfer.transports.sockets import (
    abandon,
    hang_up,
    is_quiet,
    receive_ahead,
    receive_exactly,
    receive_present,
    receive_some,
    send_all,
    wait_readable,
)
from moonpool.transfer.transports.tcp import tls as tcp_tls
from moonpool.transfer.transports.tcp.frames import RESPONSE_NBYTES, FrameOp, Request, pack_request, unpack_error
from moonpool.transfer.transports.tcp.guard import Guard
from moonpool.transfer.transports.tcp.lanes import LanePool

SECRET = Secret(b"correct horse battery staple")


class Certificates:
    """One set for all tests: making them takes a while."""

    def __init__(self, folder: Path) -> None:
        authority, stranger = Authority(folder), Authority(folder, "stranger")
        self.good = authority.issue("good")
        self.other_good = authority.issue("other")
        self.expired = authority.issue("expired", days=-1)
        self.elsewhere = authority.issue("elsewhere", names="DNS:elsewhere.test")
        self.server_only = authority.issue("server-only", purposes="serverAuth")
        self.foreign = stranger.issue("foreign", trust=authority)
        self.foreigners_friend = authority.issue("friend", trust=stranger)


@pytest.fixture(scope="module")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("tls"))


def guard(tls: TlsConfig, secret: Secret | None = None) -> Guard:
    return Guard(secret=secret, tls=tls.load())


@pytest.fixture
def ports() -> Iterator[Callable[..., Port]]:
    with many_ports() as make:
        yield make


@pytest.mark.parametrize("secret", [None, SECRET])
def test_bytes_move_both_ways(certs: Certificates, ports: Callable[..., Port], secret: Secret | None) -> None:
    port = ports(guard(certs.good, secret))
    remote = port.remote(guard(certs.other_good, secret))
    data = np.random.default_rng(1).integers(0, 256, NBYTES, dtype=np.uint8)
    remote.write_from(0, [data[:100], data[100:40_000], data[40_000:]], generation=2, timeout_s=HANG_S)
    assert bytes(port.segment.memory) == data.tobytes()
    back = np.zeros_like(data)
    remote.read_many([(at, back[at : at + 1000]) for at in range(0, NBYTES, 1000)], timeout_s=HANG_S)
    assert (back == data).all()
    with pytest.raises(StaleGeneration):
        remote.write_from(0, [data], generation=1, timeout_s=HANG_S)
    remote.probe(HANG_S)


def test_nothing_readable_is_on_the_wire(certs: Certificates, ports: Callable[..., Port]) -> None:
    port = ports(guard(certs.good))
    heard: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as relay:
        thread = threading.Thread(target=pass_on, args=(relay, port, heard))
        thread.start()
        remote = port.remote(guard(certs.good), via=relay.getsockname()[1])
        remote.write_from(0, [b"a very readable text" * 50], generation=1, timeout_s=HANG_S)
        port.close()
        thread.join(HANG_S)
    assert sum(map(len, heard)) > 1000
    assert b"readable" not in b"".join(heard)


def pass_on(listener: socket.socket, port: Port, heard: list[bytes]) -> None:
    """Between one caller and the owner, listening in on the caller."""
    caller, _ = listener.accept()
    with caller, port.connect() as owner:
        back = threading.Thread(target=pump, args=(owner, caller, []))
        back.start()
        pump(caller, owner, heard)
        back.join(HANG_S)


def pump(source: socket.socket, target: socket.socket, heard: list[bytes]) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            heard.append(data)
            target.sendall(data)
    hang_up(source)
    hang_up(target)


@pytest.mark.parametrize(
    ("owner", "caller", "says"),
    [
        ("good", "foreign", "does not accept this side's certificate: unknown ca"),
        ("good", "expired", "does not accept this side's certificate: certificate expired"),
        ("good", "server_only", "does not accept this side's certificate"),
        ("foreign", "good", "its certificate is not accepted here: .*(unable to get|self-signed)"),
        ("expired", "good", "its certificate is not accepted here: certificate has expired"),
        ("elsewhere", "good", "its certificate is not accepted here: IP address mismatch"),
    ],
)
def test_a_wrong_certificate_is_a_clear_error(
    certs: Certificates, ports: Callable[..., Port], owner: str, caller: str, says: str
) -> None:
    port = ports(guard(getattr(certs, owner)))
    remote = port.remote(guard(getattr(certs, caller)))
    started = time.monotonic()
    for _ in range(3):
        with pytest.raises(Unauthorized, match=says):
            remote.write_from(0, [b"x"], generation=1, timeout_s=5 * HANG_S)
    assert time.monotonic() - started < HANG_S / 2
    assert bytes(port.segment.memory[:1]) == b"\0"


def test_the_name_may_be_left_unchecked_and_the_authority_not(certs: Certificates, ports: Callable[..., Port]) -> None:
    port = ports(guard(certs.elsewhere))
    trusting = TlsConfig(certs.good.cert_file, certs.good.key_file, certs.good.ca_file, check_host=False)
    port.remote(guard(trusting)).probe(HANG_S)
    stranger = ports(guard(certs.foreign))
    with pytest.raises(Unauthorized):
        stranger.remote(guard(trusting)).probe(HANG_S)


def test_a_name_is_checked_by_name_too(certs: Certificates, ports: Callable[..., Port]) -> None:
    port = ports(guard(certs.good))
    port.remote(guard(certs.good), host="localhost").probe(HANG_S)
    elsewhere = ports(guard(certs.elsewhere))
    with pytest.raises(Unauthorized, match="Hostname mismatch"):
        elsewhere.remote(guard(certs.good), host="localhost").probe(HANG_S)


def test_the_secret_counts_inside_tls_too(certs: Certificates, ports: Callable[..., Port]) -> None:
    port = ports(guard(certs.good, SECRET))
    with pytest.raises(Unauthorized, match="same content"):
        port.remote(guard(certs.good, Secret(b"some other secret, as long"))).probe(HANG_S)
    with pytest.raises(Unauthorized, match="asks for a secret"):
        port.remote(guard(certs.good)).probe(HANG_S)
    with pytest.raises(Unauthorized, match="no secret, only TLS"):
        ports(guard(certs.good)).remote(guard(certs.good, SECRET)).probe(HANG_S)


@pytest.mark.parametrize("caller", [None, Guard(secret=SECRET)])
def test_a_plain_caller_of_a_tls_port_is_told(
    certs: Certificates, ports: Callable[..., Port], caller: Guard | None
) -> None:
    port = ports(guard(certs.good))
    started = time.monotonic()
    with pytest.raises(Unauthorized, match="speaks TLS only; set tls_cert_file"):
        port.remote(caller).write_from(0, [b"x" * 3000], generation=1, timeout_s=5 * HANG_S)
    assert time.monotonic() - started < HANG_S / 2


@pytest.mark.parametrize("owner", [None, Guard(secret=SECRET)])
def test_a_tls_caller_of_a_plain_port_is_told(
    certs: Certificates, ports: Callable[..., Port], owner: Guard | None
) -> None:
    port = ports(owner)
    started = time.monotonic()
    with pytest.raises(Unauthorized, match="does not speak TLS"):
        port.remote(guard(certs.good)).probe(5 * HANG_S)
    assert time.monotonic() - started < HANG_S / 2


def test_older_tls_is_not_spoken(certs: Certificates, ports: Callable[..., Port]) -> None:
    port = ports(guard(certs.good))
    command = ["openssl", "s_client", "-tls1_2", "-connect", f"127.0.0.1:{port.server.port}"]
    done = subprocess.run(command, input="", capture_output=True, text=True, timeout=HANG_S, check=False)
    assert done.returncode != 0


@pytest.mark.parametrize("opening", [b"", b"\x16", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(20)])
def test_a_caller_that_stops_in_the_handshake_is_let_go(
    certs: Certificates, ports: Callable[..., Port], opening: bytes
) -> None:
    port = ports(Guard(tls=certs.good.load(), timeout_s=0.3))
    with port.connect() as sock:
        sock.sendall(opening)
        started = time.monotonic()
        with contextlib.suppress(ConnectionResetError):
            assert sock.recv(1) == b""
        assert time.monotonic() - started < HANG_S / 2


def test_a_silent_owner_costs_the_deadline(certs: Certificates) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        pool = LanePool("127.0.0.1", listener.getsockname()[1], 1, guard(certs.good))
        started = time.monotonic()
        with pytest.raises(TimeoutError), pool.lane(0.3):
            pass
        assert time.monotonic() - started < HANG_S / 2
        pool.close()


def test_unfit_files_are_refused_at_once(certs: Certificates, tmp_path: Path) -> None:
    good, junk = certs.good, tmp_path / "junk"
    junk.write_text("no PEM")
    junk.chmod(0o600)
    for bad in (
        TlsConfig(str(tmp_path / "missing"), good.key_file, good.ca_file),
        TlsConfig(good.cert_file, str(tmp_path / "missing"), good.ca_file),
        TlsConfig(good.cert_file, good.key_file, str(tmp_path / "missing")),
        TlsConfig(str(junk), good.key_file, good.ca_file),
        TlsConfig(good.cert_file, str(junk), good.ca_file),
        TlsConfig(good.cert_file, good.key_file, str(junk)),
        TlsConfig(good.cert_file, certs.other_good.key_file, good.ca_file),
    ):
        with pytest.raises(ConfigError):
            bad.load()


def test_a_key_that_all_may_read_is_refused(certs: Certificates, tmp_path: Path) -> None:
    key = tmp_path / "open.key"
    key.write_bytes(Path(certs.good.key_file).read_bytes())
    key.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        TlsConfig(certs.good.cert_file, str(key), certs.good.ca_file).load()


def test_an_encrypted_key_is_refused_and_nobody_is_asked_for_its_password(certs: Certificates, tmp_path: Path) -> None:
    key = str(tmp_path / "locked.key")
    command = ["openssl", "ec", "-in", certs.good.key_file, "-aes128", "-passout", "pass:sesame", "-out", key]
    subprocess.run(command, capture_output=True, timeout=HANG_S, check=True)
    os.chmod(key, 0o600)
    with pytest.raises(ConfigError, match="passphrase"):
        TlsConfig(certs.good.cert_file, key, certs.good.ca_file).load()


# The socket functions


@pytest.fixture
def pair(certs: Certificates) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Two ends of one TLS connection."""
    left, right = socket.socketpair()
    tls = certs.elsewhere.load()
    tls.client.check_hostname = False
    server = tcp_tls.wrap_server(right, tls)
    thread = threading.Thread(target=tcp_tls.handshake, args=(server, Deadline(HANG_S)))
    thread.start()
    client = tcp_tls.wrap_client(left, tls, "elsewhere.test")
    tcp_tls.handshake(client, Deadline(HANG_S))
    thread.join(HANG_S)
    with client, server:
        yield client, server


Pair = tuple[socket.socket, socket.socket]


def test_bytes_that_openssl_holds_count_as_readable(pair: Pair) -> None:
    """A part of a record that was taken leaves the rest where poll() does not see it."""
    left, right = pair
    send_all(left, [b"0123456789"], Deadline(HANG_S))
    first = memoryview(bytearray(4))
    receive_exactly(right, [first], Deadline(HANG_S))
    wait_readable(right, Deadline(0.5))
    assert not is_quiet(right)
    rest = memoryview(bytearray(100))
    assert receive_present(right, rest) == 6
    assert bytes(first) + bytes(rest[:6]) == b"0123456789"
    assert is_quiet(right)
    with pytest.raises(TimeoutError):
        wait_readable(right, Deadline(0.05))


@pytest.mark.parametrize(
    "wrap",
    [lambda sock, tls: tcp_tls.wrap_client(sock, tls, "127.0.0.1"), tcp_tls.wrap_server],
    ids=["client", "server"],
)
def test_a_connection_that_was_reset_before_tls_began_is_closed(certs: Certificates, wrap: Callable[..., Any]) -> None:
    """wrap_socket() raises then, after it has taken the descriptor over."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        left = socket.create_connection(listener.getsockname())
        right, _ = listener.accept()
    right.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    right.close()
    fd = left.fileno()
    identity = certs.good.load()
    with pytest.raises(ConnectionResetError):
        wrap(left, identity)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_nothing_here_is_not_the_end(pair: Pair) -> None:
    left, right = pair
    view = memoryview(bytearray(10))
    assert receive_present(right, view) == 0
    assert receive_ahead(right, view) == 0
    left.close()
    wait_readable(right, Deadline(HANG_S))
    assert receive_ahead(right, view) == 0
    with pytest.raises(ConnectionError):
        receive_present(right, view)
    with pytest.raises(ConnectionError):
        receive_some(right, view, Deadline(HANG_S))


def test_deadlines_hold_on_both_directions(pair: Pair) -> None:
    left, right = pair
    view = memoryview(bytearray(10))
    for deadline_s in (0.0, 0.1):
        started = time.monotonic()
        with pytest.raises(TimeoutError):
            receive_some(right, view, Deadline(deadline_s))
        with pytest.raises(TimeoutError):
            receive_exactly(right, [view], Deadline(deadline_s))
        assert time.monotonic() - started < HANG_S / 2
    with pytest.raises(TimeoutError):
        send_all(left, [bytes(64 << 20)], Deadline(0.2))  # nobody reads


def test_large_and_small_pieces_arrive_in_order(pair: Pair) -> None:
    left, right = pair
    rng = np.random.default_rng(3)
    pieces = [rng.bytes(size) for size in (1, 0, 48, 16_383, 16_384, 16_385, 5, 1_000_000, 3, 70_000, *[17] * 3000)]
    sender = threading.Thread(target=send_all, args=(left, pieces, Deadline(HANG_S)))
    sender.start()
    views = [memoryview(bytearray(len(piece))) for piece in pieces]
    receive_exactly(right, views, Deadline(HANG_S))
    sender.join(HANG_S)
    assert [bytes(view) for view in views] == pieces


def test_hanging_up_wakes_whoever_waits(pair: Pair) -> None:
    left, _ = pair
    ends: list[str] = []

    def wait() -> None:
        try:
            receive_some(left, memoryview(bytearray(1)), None)
        except OSError as error:
            ends.append(type(error).__name__)

    thread = threading.Thread(target=wait)
    thread.start()
    hang_up(left)
    thread.join(HANG_S)
    assert not thread.is_alive()
    assert ends
    # Nothing leaves in the clear afterwards.
    with pytest.raises(OSError):
        send_all(left, [b"plain?"], Deadline(1))
    abandon(left)


def test_a_closed_owner_is_lost_at_once(certs: Certificates, ports: Callable[..., Port]) -> None:
    port = ports(guard(certs.good, SECRET))
    remote = port.remote(guard(certs.good, SECRET))
    remote.probe(HANG_S)
    port.server.close()
    started = time.monotonic()
    with pytest.raises(PeerLost):
        remote.read_into(0, [bytearray(1)], timeout_s=5 * HANG_S)
    assert time.monotonic() - started < HANG_S / 2


def test_a_broken_record_ends_the_connection_and_no_more(certs: Certificates, ports: Callable[..., Port]) -> None:
    """Flipped bits on the way: the owner drops the connection, and serves others."""
    port = ports(guard(certs.good))
    identity = certs.good.load()
    sock = tcp_tls.wrap_client(port.connect(), identity, "127.0.0.1")
    with sock:
        tcp_tls.handshake(sock, Deadline(HANG_S))
        socket.socket.send(sock, b"\x17\x03\x03\x00\x40" + bytes(64))
        with contextlib.suppress(OSError):
            while receive_some(sock, memoryview(bytearray(100)), Deadline(HANG_S)):
                pass
    port.remote(guard(certs.good)).write_from(0, [b"x"], generation=1, timeout_s=HANG_S)
    assert bytes(port.segment.memory[:1]) == b"x"


def test_a_plain_request_inside_tls_is_refused(certs: Certificates, ports: Callable[..., Port]) -> None:
    port = ports(guard(certs.good, SECRET))
    sock = tcp_tls.wrap_client(port.connect(), certs.good.load(), "127.0.0.1")
    with sock:
        tcp_tls.handshake(sock, Deadline(HANG_S))
        send_all(sock, [pack_request(Request(FrameOp.READ, 1, "seg", 1, 0, 1))], Deadline(HANG_S))
        head = memoryview(bytearray(RESPONSE_NBYTES))
        receive_exactly(sock, [head], Deadline(HANG_S))
        text = memoryview(bytearray(int.from_bytes(head[16:24], "little")))
        receive_exactly(sock, [text], Deadline(HANG_S))
        assert isinstance(unpack_error(text), Unauthorized)
