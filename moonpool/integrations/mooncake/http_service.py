"""A small HTTP/1.1 server on asyncio for a few fixed paths: metadata of engines, and the admin calls of a master.

A request has at most MAX_HEAD_NBYTES of headers and MAX_BODY_NBYTES of body, stated by Content-Length. A connection
that is silent for IDLE_S is closed. What a handler raises is answered with 500 and logged.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from urllib.parse import parse_qsl, urlsplit

import msgspec

from moonpool.base.errors import ConfigError

_LOG = logging.getLogger(__name__)
MAX_HEAD_NBYTES = 32 * 1024
MAX_BODY_NBYTES = 8 * 1024 * 1024
MAX_CONNECTIONS = 256
IDLE_S = 60.0
JSON, TEXT = "application/json", "text/plain"


class HttpRequest(msgspec.Struct, frozen=True):
    method: str
    path: str
    query: Mapping[str, str]
    body: bytes = b""
    keep_alive: bool = True

    async def read(self) -> bytes:
        """Return the body."""
        return self.body


class HttpResponse(msgspec.Struct, frozen=True):
    status: int
    body: bytes = b""
    content_type: str = TEXT


HttpHandler = Callable[[HttpRequest], Awaitable[HttpResponse]]


class HttpService:
    """`routes` maps (method, path) to a handler; the method "*" takes all methods of a path."""

    def __init__(self, routes: Mapping[tuple[str, str], HttpHandler]) -> None:
        self._routes = dict(routes)
        self._paths = {path for _, path in self._routes}
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def listen(self, host: str, port: int) -> int:
        """Start to serve and return the port. ConfigError when the address cannot be used."""
        try:
            self._server = await asyncio.start_server(self._serve, host, port, limit=MAX_HEAD_NBYTES)
        except OSError as error:
            raise ConfigError(f"HTTP cannot listen on {host}:{port}: {error.strerror or error}") from error
        listening: int = self._server.sockets[0].getsockname()[1]
        return listening

    async def close(self) -> None:
        """Stop serving and close all connections. Idempotent."""
        if self._server is not None:
            self._server.close()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def answer(self, request: HttpRequest) -> HttpResponse:
        """Return the response of the handler of this path; 404 and 405 where there is none."""
        handler = self._routes.get((request.method, request.path)) or self._routes.get(("*", request.path))
        if handler is None:
            known = request.path in self._paths
            return failure(HTTPStatus.METHOD_NOT_ALLOWED if known else HTTPStatus.NOT_FOUND)
        try:
            return await handler(request)
        except Exception:  # noqa: BLE001 - one bad request must not end the server
            _LOG.exception("%s %s failed", request.method, request.path)
            return failure(HTTPStatus.INTERNAL_SERVER_ERROR)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            if len(self._connections) > MAX_CONNECTIONS:
                writer.write(_encode(failure(HTTPStatus.SERVICE_UNAVAILABLE), keep_alive=False))
            else:
                await self._serve_requests(reader, writer)
        except (OSError, EOFError, TimeoutError, asyncio.CancelledError):
            pass  # the caller left, was silent, or the server closes
        finally:
            self._connections.discard(task)
            writer.close()
            with contextlib.suppress(OSError, asyncio.CancelledError):
                await writer.wait_closed()

    async def _serve_requests(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        keep_alive = True
        while keep_alive:
            async with asyncio.timeout(IDLE_S):
                request = await _receive(reader)
            keep_alive = isinstance(request, HttpRequest) and request.keep_alive
            response = await self.answer(request) if isinstance(request, HttpRequest) else request
            writer.write(_encode(response, keep_alive))
            async with asyncio.timeout(IDLE_S):
                await writer.drain()


def failure(status: HTTPStatus, reason: str | None = None) -> HttpResponse:
    return HttpResponse(status, (reason or status.phrase).encode())


async def _receive(reader: asyncio.StreamReader) -> HttpRequest | HttpResponse:
    """Return the next request, or the response to one that cannot be read. EOFError at the end of the connection."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.LimitOverrunError:
        return failure(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
    lines = head.decode("latin-1").split("\r\n")
    words = lines[0].split(" ")
    if len(words) != 3 or not words[2].startswith("HTTP/1."):
        return failure(HTTPStatus.BAD_REQUEST)
    pairs = (line.partition(":") for line in lines[1:] if line)
    headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
    if "transfer-encoding" in headers:
        return failure(HTTPStatus.LENGTH_REQUIRED)
    length = headers.get("content-length", "0")
    if not (length.isascii() and length.isdigit()):
        return failure(HTTPStatus.BAD_REQUEST)
    if int(length) > MAX_BODY_NBYTES:
        return failure(HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
    body = await reader.readexactly(int(length))
    try:
        url = urlsplit(words[1])
    except ValueError:
        return failure(HTTPStatus.BAD_REQUEST)
    connection = headers.get("connection", "keep-alive" if words[2] == "HTTP/1.1" else "close")
    query = dict(parse_qsl(url.query, keep_blank_values=True))
    return HttpRequest(words[0], url.path, query, body, connection.lower() != "close")


def _encode(response: HttpResponse, keep_alive: bool) -> bytes:
    status = HTTPStatus(response.status)
    head = (
        f"HTTP/1.1 {status.value} {status.phrase}\r\n"
        f"Content-Type: {response.content_type}\r\n"
        f"Content-Length: {len(response.body)}\r\n"
        f"Connection: {'keep-alive' if keep_alive else 'close'}\r\n\r\n"
    )
    return head.encode("latin-1") + response.body
