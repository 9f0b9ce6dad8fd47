"""uvicorn's HTTP protocol with limits: on headers, on the time of every phase, and on the number of connections.

A client that exceeds a limit gets an error in OpenAI's format if one can still be sent (431, 408, 400, 503), and its
connection is closed. When `max_connections` is reached, a new connection replaces the one that has been idle longest;
if all are in use, new ones may only request /health and /metrics. The limits are ConnectionLimits.
"""

from __future__ import annotations

import asyncio
import contextlib
import http
from collections.abc import Iterator
from typing import Any, NoReturn

import httptools
from starlette.types import Receive, Scope, Send
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from moonpool.base.errors import Cancelled, InvalidInput, Unavailable
from moonpool.frontend.connection import ConnectionLimits, ConnectionWatch, Phase
from moonpool.frontend.http_errors import reply_json

WATCH_CLIENT = "moonpool.watch_client"  # in a scope's extensions: GuardedProtocol.watch_client
ALWAYS_SERVED = (b"/health", b"/metrics")
_FULL = "all connections of the front end are in use; try again later"
_TOO_SLOW = {
    Phase.HEAD: "the request's headers took too long to arrive",
    Phase.BODY: "the request's body took too long to arrive",
}


class GuardedProtocol(HttpToolsProtocol):
    """One connection. `sweep` must be called about once a second."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        limits: ConnectionLimits,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._limits = limits
        self.watch = ConnectionWatch(limits, self.loop.time())
        self._is_surplus = False  # above max_connections
        self._is_refused = False  # an answer that closes the connection was sent; what still arrives is discarded
        self._unfinished_head_nbytes = 0
        self._is_gone = False
        self._watching: set[asyncio.Future[NoReturn]] = set()  # of requests that are being answered

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        num_connections = len(self.connections)
        if num_connections > self._limits.max_connections and not self._evict_idle():
            self._is_surplus = True
            if num_connections > self._limits.max_connections + self._limits.reserve:
                transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._tell_gone()

    @contextlib.contextmanager
    def watch_client(self) -> Iterator[asyncio.Future[NoReturn]]:
        """Yield a future that fails with Cancelled when the client is gone. (ASGI's own way takes a task.)"""
        self.flow.resume_reading()  # a request behind this one has paused it, and an end would not be noticed
        gone: asyncio.Future[NoReturn] = self.loop.create_future()
        self._watching.add(gone)
        if self._is_gone:
            self._tell_gone()
        try:
            yield gone
        finally:
            self._watching.discard(gone)

    def _tell_gone(self) -> None:
        self._is_gone = True
        for gone in self._watching:
            if not gone.done():
                gone.set_exception(Cancelled("the client went away"))
                gone.exception()  # a request that has just ended does not look at it
        self._watching.clear()

    def _evict_idle(self) -> bool:
        """Close the connection that would time out first of those without a whole request. False if there is none."""
        others = [one for one in self.connections if isinstance(one, GuardedProtocol) and one is not self]
        waiting = [one for one in others if one.watch.phase in (Phase.IDLE, Phase.HEAD)]
        if not waiting:
            return False
        min(waiting, key=lambda one: one.watch.due_s).transport.abort()
        return True

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        if self._is_refused:
            self._count_body(len(data))
            return
        was_head = self.watch.phase is Phase.HEAD
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            pass  # no other protocol is offered, so the request is answered as it stands
        except httptools.HttpParserError:
            if self.watch.is_head_too_large:
                self._refuse_head()
            else:
                self._refuse(400, "the request is not valid HTTP")
            return
        if was_head and self.watch.phase is Phase.HEAD:
            self._unfinished_head_nbytes += len(data)  # a header that never ends is not reported by the parser
            if self._unfinished_head_nbytes > self._limits.max_head_nbytes:
                self._refuse_head()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["extensions"] = {WATCH_CLIENT: self.watch_client}  # type: ignore[dict-item]
        self._unfinished_head_nbytes = 0
        if self.cycle is None or self.cycle.response_complete:
            self.watch.head_began(self.loop.time())

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self.watch.header(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        self.watch.header(len(name) + len(value) + len(b": \r\n"))
        if self.watch.is_head_too_large:
            raise InvalidInput("too large a head")  # ends the parsing
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        is_full = self._is_surplus and self.url.partition(b"?")[0] not in ALWAYS_SERVED
        self.app = _answer_full if is_full else self.config.loaded_app
        super().on_headers_complete()
        if not self.pipeline:
            self.watch.head_ended(self.loop.time())

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        self._count_body(len(body))

    def _count_body(self, nbytes: int) -> None:
        self.watch.body(nbytes)
        if self.watch.overdue(self.loop.time()) is Phase.DRAINING:  # until the next sweep it could send gigabytes
            self.transport.abort()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        if not self.pipeline:
            self.watch.body_ended(self.loop.time())

    def on_response_complete(self) -> None:
        waiting = self.pipeline[-1][0] if self.pipeline else None
        super().on_response_complete()
        now_s = self.loop.time()
        if self.transport.is_closing():
            self.watch.closing(now_s)
            return
        self.watch.answered(now_s)
        if waiting is not None:  # a request that was sent before the last one was answered
            self.watch.head_began(now_s)
            self.watch.head_ended(now_s)
            if not waiting.more_body:
                self.watch.body_ended(now_s)

    def pause_writing(self) -> None:
        super().pause_writing()
        self.watch.write_paused(self.loop.time())

    def resume_writing(self) -> None:
        super().resume_writing()
        self.watch.write_resumed()

    def sweep(self, now_s: float) -> None:
        """Close the connection if its time is over."""
        if self.transport.is_closing() and self.watch.phase is not Phase.DRAINING:
            self.watch.closing(now_s)
        phase = self.watch.overdue(now_s)
        if phase in _TOO_SLOW and not self._is_refused:
            self._refuse(408, _TOO_SLOW[phase])
        elif phase is Phase.IDLE:
            self.transport.close()
            self.watch.closing(now_s)
        elif phase is not None:
            self.transport.abort()

    def _refuse_head(self) -> None:
        limits = self._limits
        message = f"the request has more than {limits.max_headers} headers or {limits.max_head_nbytes} bytes of them"
        self._refuse(431, message)

    def _refuse(self, status: int, message: str) -> None:
        """Send an error and close. The client can still send, so that it gets to read the answer."""
        self._is_refused = True
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete:
            if cycle.response_started:
                self.transport.abort()
                return
            cycle.disconnected = True
            cycle.message_event.set()
            self._tell_gone()
        body = reply_json(status, message)
        self.flow.resume_reading()
        self.transport.write(
            f"HTTP/1.1 {status} {http.HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode()
            + body
        )
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.watch.closing(self.loop.time())


async def _answer_full(scope: Scope, receive: Receive, send: Send) -> None:
    body = reply_json(Unavailable.http_status, _FULL, Unavailable.code)
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"connection", b"close"),
        (b"retry-after", b"1"),
    ]
    await send({"type": "http.response.start", "status": Unavailable.http_status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})
