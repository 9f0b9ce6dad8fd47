"""The HTTP server and Mooncake's metadata store: upstream's answers, and requests that are none."""

from __future__ import annotations

import http.client
import socket
from collections.abc import Iterator

import pytest
from waiting import HANG_S

from moonpool.base.errors import AlreadyExists, ConfigError, InvalidInput, NotFound, PeerLost
from moonpool.integrations.mooncake.http_metadata import KVBootstrapServer, KVPoll
from moonpool.integrations.mooncake.http_service import MAX_BODY_NBYTES, MAX_HEAD_NBYTES
from moonpool.integrations.mooncake.metadata_client import EngineEntry, HttpNames, engine_names


@pytest.fixture
def server() -> Iterator[KVBootstrapServer]:
    made = KVBootstrapServer(0)
    made.run()
    assert made.poll() is KVPoll.Success
    yield made
    made.close()
    assert made.poll() is KVPoll.Failed


def ask(connection: http.client.HTTPConnection, method: str, url: str, body: bytes | None = None) -> tuple[int, bytes]:
    connection.request(method, url, body)
    answer = connection.getresponse()
    return answer.status, answer.read()


def test_entries_over_one_connection(server: KVBootstrapServer) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=HANG_S)
    url = "/metadata?key=mooncake%2Fram%2Fx"
    assert ask(connection, "GET", url)[0] == 404
    assert ask(connection, "PUT", url, b"1")[0] == 200
    assert ask(connection, "PUT", url, b"2")[0] == 200
    assert ask(connection, "GET", url) == (200, b"2")
    assert ask(connection, "DELETE", url)[0] == 200
    assert ask(connection, "DELETE", url)[0] == 404
    assert ask(connection, "PUT", "/metadata?key=rpc_meta/x", b"1")[0] == 200
    assert ask(connection, "PUT", "/metadata?key=rpc_meta/x", b"2")[0] == 400
    assert ask(connection, "GET", "/metadata?key=%20rpc_meta/x%20") == (200, b"1")
    assert ask(connection, "PUT", "/metadata?key=%20", b"2")[0] == 400
    assert ask(connection, "GET", "/metadata")[0] == 400
    assert ask(connection, "POST", url)[0] == 405
    assert ask(connection, "GET", "/health")[0] == 200
    assert ask(connection, "POST", "/health")[0] == 405
    assert ask(connection, "GET", "/other")[0] == 404
    connection.close()


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"nonsense\r\n\r\n", 400),
        (b"GET /metadata?key=x SMTP/1\r\n\r\n", 400),
        (b"GET http://[::1 HTTP/1.1\r\n\r\n", 400),
        (b"PUT /metadata?key=x HTTP/1.1\r\nContent-Length: -1\r\n\r\n", 400),
        (b"PUT /metadata?key=x HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % (MAX_BODY_NBYTES + 1), 413),
        (b"PUT /metadata?key=x HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n", 411),
        (b"GET /metadata?key=x HTTP/1.1\r\nX: " + b"x" * MAX_HEAD_NBYTES, 431),
    ],
)
def test_requests_that_are_refused(server: KVBootstrapServer, request_bytes: bytes, status: int) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=HANG_S) as sock:
        sock.sendall(request_bytes)
        answer = sock.recv(4096)
    assert int(answer.split()[1]) == status


def test_half_a_request_harms_nobody(server: KVBootstrapServer) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=HANG_S) as sock:
        sock.sendall(b"PUT /metadata?key=x HTTP/1.1\r\nContent-Length: 5\r\n\r\nab")
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=HANG_S)
    assert ask(connection, "GET", "/metadata?key=x")[0] == 404
    connection.close()


def test_a_port_that_is_taken(server: KVBootstrapServer) -> None:
    with pytest.raises(ConfigError, match="cannot listen"):
        KVBootstrapServer(server.port).run()


def test_names_of_engines(server: KVBootstrapServer) -> None:
    names = HttpNames(f"http://127.0.0.1:{server.port}/metadata")
    with pytest.raises(NotFound):
        names.resolve("a")
    names.publish("a", EngineEntry("127.0.0.1", 5), lambda _: True)
    assert names.resolve("a") == "127.0.0.1:5"
    with pytest.raises(AlreadyExists):
        names.publish("a", EngineEntry("127.0.0.1", 6), lambda _: True)
    names.publish("a", EngineEntry("::1", 6), lambda _: False)  # the one at port 5 is gone
    assert names.resolve("a") == "[::1]:6"
    server.store["mooncake/rpc_meta/b"] = b"{}"
    with pytest.raises(InvalidInput):
        names.resolve("b")
    names.withdraw("a")
    with pytest.raises(NotFound):
        names.resolve("a")


def test_metadata_servers_that_cannot_be_used() -> None:
    with pytest.raises(ConfigError, match="P2PHANDSHAKE"):
        engine_names("127.0.0.1:2379", "etcd")
    with pytest.raises(ConfigError):
        engine_names("http:///metadata", "etcd")
    with pytest.raises(PeerLost):
        engine_names("http://127.0.0.1:1/metadata", "etcd").resolve("a")
    assert engine_names("P2PHANDSHAKE", "").resolve("h:5") == "h:5"
