"""The baseline of the store benchmarks: redis-server on loopback, with the fastest settings of its Python client.

Nothing is written to disk. The client runs with both parsers and with small and large reads; the fastest counts.
"""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from moonpool.base.errors import Unavailable
from moonpool.bench.iperf import free_port
from moonpool.bench.store_objects import MIB, times_s

_START_TIMEOUT_S = 10.0
_READ_NBYTES = (64 * 1024, MIB)


def missing() -> str | None:
    """Return what is not installed; None if redis can be measured."""
    if shutil.which("redis-server") is None:
        return "redis-server is not installed (apt-get install redis-server)"
    if importlib.util.find_spec("redis") is None:
        return "the Python package redis is not installed (pip install redis hiredis)"
    return None


@contextlib.contextmanager
def redis_server(folder: str) -> Iterator[int]:
    """Start a server; yield its port."""
    port = free_port()
    command = ["redis-server", "--bind", "127.0.0.1", "--port", str(port), "--save", "", "--appendonly", "no"]
    command += ["--dir", folder, "--loglevel", "warning"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        try:
            _wait_for(port, process)
            yield port
        finally:
            process.kill()


class RedisWork:
    """The work of a client process on redis. Imports the redis package on first use."""

    def work(self) -> dict[str, Callable[..., Any]]:
        return {"redis_get": self.get, "redis_put": self.put}

    def get(self, port: int, count: int, batch: bool, seconds: float) -> float:
        """GB/s."""
        keys = [f"get-{number}" for number in range(count)]
        values = _values(count)
        for client in _clients(port):
            client.mset(dict(zip(keys, values, strict=True)))
            break

        def measure(client: Any) -> float:
            def one_by_one() -> None:
                for key in keys:
                    client.get(key)

            return _gb_s(count, times_s((lambda: client.mget(keys)) if batch else one_by_one, seconds))

        return max(measure(client) for client in _clients(port))

    def put(self, port: int, count: int, batch: bool, seconds: float) -> float:
        """GB/s, over the same keys each time."""
        values = dict(zip((f"put-{number}" for number in range(count)), _values(count), strict=True))

        def measure(client: Any) -> float:
            def one_by_one() -> None:
                for key, value in values.items():
                    client.set(key, value)

            return _gb_s(count, times_s((lambda: client.mset(values)) if batch else one_by_one, seconds))

        return max(measure(client) for client in _clients(port))


def _clients(port: int) -> Iterator[Any]:
    import redis
    from redis import _parsers, connection

    for parser in {connection.DefaultParser, _parsers._RESP2Parser}:  # hiredis if it is installed, and redis' own
        for nbytes in _READ_NBYTES:
            pool = redis.ConnectionPool(
                host="127.0.0.1", port=port, protocol=2, parser_class=parser, socket_read_size=nbytes
            )
            with contextlib.closing(pool), redis.Redis(connection_pool=pool) as client:
                yield client


def _values(count: int) -> list[bytes]:
    noise = np.random.default_rng(0)
    return [noise.bytes(MIB) for _ in range(count)]


def _gb_s(count: int, taken_s: list[float]) -> float:
    return count * MIB / 1e9 / (sum(taken_s) / len(taken_s))


def _wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    ends_s = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < ends_s and process.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
            return
        time.sleep(0.02)
    raise Unavailable("redis-server did not start")
