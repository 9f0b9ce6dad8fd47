"""`mooncake.http_metadata_server`: the key-value store over HTTP in which engines find each other by name.

GET, PUT and DELETE of /metadata?key=K; GET /health. 400 for an empty key, 404 for an unknown one. The address of an
engine (a key that contains `rpc_meta`) is not replaced, 400: two engines of one name must not silently take turns.

Everybody who reaches the port can change the entries, so it listens on the loopback interface unless told otherwise
(upstream: on all).
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import threading
from collections.abc import Sequence
from enum import Enum
from http import HTTPStatus

from moonpool.base.errors import MoonpoolError
from moonpool.integrations.mooncake.http_service import JSON, HttpRequest, HttpResponse, HttpService

DEFAULT_HOST, DEFAULT_PORT = "127.0.0.1", 8080
_LOG = logging.getLogger(__name__)
_JOIN_S = 5.0
_MAX_KEYS = 1_000_000
_MAX_NBYTES = 1 << 30  # of all values


class KVPoll(Enum):
    """The state of the server, in upstream's words; only the first and the last occur."""

    Failed = 0
    Bootstrapping = 1
    WaitingForInput = 2
    Transferring = 3
    Success = 4


class MetadataStore:
    """The entries and the requests for them. Used on one event loop."""

    def __init__(self) -> None:
        self.entries: dict[str, bytes] = {}
        self._nbytes = 0

    async def answer(self, request: HttpRequest) -> HttpResponse:
        key = request.query.get("key", "").strip()
        if not key:
            return _reply(HTTPStatus.BAD_REQUEST, b"a key is required: /metadata?key=KEY")
        match request.method:
            case "GET":
                value = self.entries.get(key)
                return _reply(HTTPStatus.NOT_FOUND, b"no such key") if value is None else _reply(HTTPStatus.OK, value)
            case "PUT":
                return self._put(key, await request.read())
            case "DELETE":
                return self._delete(key)
        return _reply(HTTPStatus.METHOD_NOT_ALLOWED, b"use GET, PUT or DELETE")

    def _put(self, key: str, value: bytes) -> HttpResponse:
        before = self.entries.get(key)
        if before is not None and "rpc_meta" in key:
            return _reply(HTTPStatus.BAD_REQUEST, b"this engine is known already; DELETE its entry first")
        grown = self._nbytes + len(value) - len(before or b"")
        if grown > _MAX_NBYTES or (before is None and len(self.entries) >= _MAX_KEYS):
            return _reply(HTTPStatus.INSUFFICIENT_STORAGE, b"the metadata store is full")
        self.entries[key], self._nbytes = value, grown
        return _reply(HTTPStatus.OK, b"stored")

    def _delete(self, key: str) -> HttpResponse:
        value = self.entries.pop(key, None)
        if value is None:
            return _reply(HTTPStatus.NOT_FOUND, b"no such key")
        self._nbytes -= len(value)
        return _reply(HTTPStatus.OK, b"deleted")

    def service(self) -> HttpService:
        """Return an HTTP server of this store, which does not listen yet."""
        return HttpService({("*", "/metadata"): self.answer, ("GET", "/health"): _health})


class KVBootstrapServer:
    """The server on a thread of its own. Upstream's names: `store`, run(), close(), poll()."""

    def __init__(self, port: int, host: str = DEFAULT_HOST) -> None:
        self.port = port  # with 0, the port that was chosen, after run()
        self.host = host
        self._metadata = MetadataStore()
        self.store = self._metadata.entries
        self.thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._started = threading.Event()
        self._error: MoonpoolError | None = None

    def run(self) -> threading.Thread:
        """Start the server and return its thread. Raise ConfigError when the address cannot be used."""
        self.thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name="metadata", daemon=True)
        self.thread.start()
        self._started.wait()
        if self._error is not None:
            raise self._error
        return self.thread

    def close(self) -> None:
        """Idempotent."""
        loop, stop, self._stop = self._loop, self._stop, None
        if loop is not None and stop is not None:
            loop.call_soon_threadsafe(stop.set)
        if self.thread is not None:
            self.thread.join(_JOIN_S)

    def poll(self) -> KVPoll:
        return KVPoll.Success if self.thread is not None and self.thread.is_alive() else KVPoll.Failed

    async def _handle_metadata(self, request: HttpRequest) -> HttpResponse:
        return await self._metadata.answer(request)

    async def _serve(self) -> None:
        service = self._metadata.service()
        try:
            self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
            stop = self._stop
            self.port = await service.listen(self.host, self.port)
            self._started.set()
            _LOG.info("the metadata server listens on %s:%d", self.host, self.port)
            await stop.wait()
        except MoonpoolError as error:
            self._error = error
        finally:
            self._started.set()
            await service.close()


async def _health(request: HttpRequest) -> HttpResponse:
    return _reply(HTTPStatus.OK, b'"OK"')


def _reply(status: HTTPStatus, body: bytes) -> HttpResponse:
    return HttpResponse(status, body, JSON)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the server until SIGINT or SIGTERM. Return the exit code."""
    parser = argparse.ArgumentParser(
        prog="mooncake_http_metadata_server",
        description="HTTP metadata server of Mooncake's API: engines find each other here by name.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--port", type=int, default=DEFAULT_PORT, help="port to listen on")
    parser.add_argument("--host", default=DEFAULT_HOST, help="address to listen on; 0.0.0.0 for all")
    levels = ["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"]
    parser.add_argument("--log-level", choices=levels, default="INFO", help="least severe messages to log")
    options = parser.parse_args(argv)
    logging.basicConfig(level=options.log_level, format="%(asctime)s %(levelname)s %(message)s")
    server = KVBootstrapServer(options.port, options.host)
    # Blocked before the thread starts, so that no thread takes them and sigwait() gets them.
    ending = {signal.SIGINT, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, ending)
    try:
        server.run()
    except MoonpoolError as error:
        _LOG.error("%s", error)
        return 1
    signal.sigwait(ending)
    server.close()
    return 0
