"""A baseline of `moonpool bench store` over tcp: bare Python sockets that move and checksum the same memory, in GB/s.

iperf3 receives into one buffer, which stays in the processor's cache. Objects lie at different places: this loop shows
what that costs before any store is involved.

    python -m moonpool.bench.bare_sockets PORT COUNT     # the other process: serves one connection, then ends
"""

from __future__ import annotations

import socket
import statistics
import subprocess
import sys
from collections.abc import Callable

from moonpool.base.checksum import crc32c
from moonpool.bench.store_objects import MIB, times_s

_GET, _PUT, _DONE = b"g", b"p", b"."
_TIMEOUT_S = 30.0


def bare_gb_s(op: str, count: int, seconds: float) -> float:
    """Let another process send ("get") or receive ("put") `count` MiB again and again; return the mean rate. This
    process checksums each MiB, as a client of the store does.
    """
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(_TIMEOUT_S)
        peer = [sys.executable, "-m", __name__, str(listener.getsockname()[1]), str(count)]
        with subprocess.Popen(peer) as process:
            try:
                connection, _ = listener.accept()
                with connection:
                    connection.settimeout(_TIMEOUT_S)
                    pass_s = statistics.mean(times_s(_pass_of(op, connection, count), seconds))
            finally:
                process.kill()
    return count * MIB / pass_s / 1e9


def _pass_of(op: str, connection: socket.socket, count: int) -> Callable[[], None]:
    pages = _pages(count)

    def get() -> None:
        connection.sendall(_GET)
        for page in pages:
            _receive(connection, page)
            crc32c(page)

    def put() -> None:
        connection.sendall(_PUT)
        for page in pages:
            crc32c(page)
            connection.sendall(page)
        connection.recv(len(_DONE))

    return {"get": get, "put": put}[op]


def _serve(port: int, count: int) -> None:
    pages = _pages(count)
    with socket.create_connection(("127.0.0.1", port)) as connection:
        while asked := connection.recv(1):
            for page in pages:
                if asked == _GET:
                    connection.sendall(page)
                else:
                    _receive(connection, page)
            if asked == _PUT:
                connection.sendall(_DONE)


def _pages(count: int) -> list[memoryview]:
    memory = memoryview(bytearray(b"\x5a" * (count * MIB)))
    return [memory[start : start + MIB] for start in range(0, count * MIB, MIB)]


def _receive(connection: socket.socket, page: memoryview) -> None:
    rest = page
    while rest:
        received = connection.recv_into(rest)
        if not received:
            raise ConnectionError("the other process has ended")
        rest = rest[received:]


if __name__ == "__main__":
    _serve(int(sys.argv[1]), int(sys.argv[2]))
