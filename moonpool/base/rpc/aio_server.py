"""The asyncio server: decodes calls, runs handlers, answers each one exactly once.

A handler is a plain function (answered at once, the fast way), a coroutine function, or for a StreamCall an async
generator. It gets the call and the Peer. When a peer goes away, or promised pings and is silent for too long
(rpc/silence.py), its running handlers are cancelled and its `on_close` callbacks run.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import os
import socket
import stat
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, cast

from moonpool.base.address import Address, parse_address
from moonpool.base.errors import Cancelled, ConfigError, MoonpoolError, Overloaded, ProtocolError
from moonpool.base.frames import HEADER_NBYTES, Frame, FrameDecoder, FrameKind, encode_frame, whole_frame
from moonpool.base.rpc.protocol import (
    Call,
    CallDecoder,
    Hello,
    as_moonpool_error,
    decode_hello,
    encode_error,
    encode_value,
)
from moonpool.base.rpc.silence import DEFAULT_PATIENCE, AttendedTimer, Patience, Watch
from moonpool.base.unix_socket import bind_private, is_own_user

_LOG = logging.getLogger(__name__)
_MAX_CALLS_PER_PEER = 4096
_HELLO_TIMEOUT_S = 10.0
_KEEPALIVE_IDLE_S, _KEEPALIVE_INTERVAL_S, _KEEPALIVE_PROBES = 15, 5, 3
_PONG = encode_frame(FrameKind.PONG, 0)

Handler = Callable[[Any, "Peer"], Any]


class RpcServer:
    """Serves one set of calls at any number of addresses. Close it to end all connections."""

    def __init__(
        self,
        service: str,
        handlers: Mapping[type[Call[Any]], Handler],
        *,
        name: str = "",
        incarnation: int = 0,
        patience: Patience = DEFAULT_PATIENCE,
    ) -> None:
        self.hello = Hello(service, name, incarnation)
        self.decoder = CallDecoder(handlers)
        self.handlers = dict(handlers)
        self.patience = patience
        self._servers: list[asyncio.Server] = []
        self._paths: list[str] = []
        self.peers: set[Peer] = set()

    async def listen(self, address: str) -> str:
        """Starts to serve there; returns the address with the real port. ConfigError when it is taken."""
        loop, at = asyncio.get_running_loop(), parse_address(address)
        try:
            if at.scheme == "unix":
                await _free_socket_path(at.path)
                server = await loop.create_unix_server(lambda: Peer(self), sock=bind_private(at.path))
                self._paths.append(at.path)
            else:
                server = await loop.create_server(lambda: Peer(self), at.host, at.port)
                at = Address("tcp", host=at.host, port=server.sockets[0].getsockname()[1])
        except OSError as error:
            raise ConfigError(f"cannot listen at {address}: {error.strerror or error}") from error
        self._servers.append(server)
        return str(at)

    async def close(self) -> None:
        """Idempotent. Stops listening, ends every connection, waits for the handlers to end."""
        for server in self._servers:
            server.close()
        peers = list(self.peers)
        tasks = [task for peer in peers for task in peer.tasks()]
        for peer in peers:
            peer.abort()
        await asyncio.gather(*tasks, *(peer.ended.wait() for peer in peers), return_exceptions=True)
        for path in self._paths:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
        self._servers.clear()
        self._paths.clear()


async def _free_socket_path(path: str) -> None:
    """Removes what a predecessor that was killed left behind; ConfigError when somebody answers there."""
    try:
        _, writer = await asyncio.open_unix_connection(path)
    except OSError:
        with contextlib.suppress(FileNotFoundError):
            if stat.S_ISSOCK(os.stat(path).st_mode):
                os.unlink(path)
        return
    writer.close()
    raise ConfigError(f"cannot listen at unix:{path}: another process serves there")


def _is_other_user(transport: asyncio.Transport) -> bool:
    sock = transport.get_extra_info("socket")
    return sock is not None and sock.family == socket.AF_UNIX and not is_own_user(sock)


def _keep_alive(transport: asyncio.Transport) -> None:
    """Lets the kernel find out when the machine of a peer that does not ping is gone; what it held must not stay."""
    sock = transport.get_extra_info("socket")
    if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_IDLE_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _KEEPALIVE_INTERVAL_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _KEEPALIVE_PROBES)


class Peer(asyncio.Protocol):
    """One connection, seen from the server. `hello` is who they said they are."""

    def __init__(self, server: RpcServer) -> None:
        self._server = server
        self._frames = FrameDecoder()
        self._running: dict[int, asyncio.Task[None]] = {}
        self._on_close: list[Callable[[], None]] = []
        self._writable = asyncio.Event()
        self._writable.set()
        self._transport: asyncio.Transport | None = None
        self._greeting: AttendedTimer | None = None
        self._watch = Watch(server.patience, lost=self._on_silence)
        self._watched = False  # it has promised to be heard
        self.hello: Hello | None = None
        self.closed = False
        self.ended = asyncio.Event()

    def on_close(self, callback: Callable[[], None]) -> None:
        """Runs `callback` once when the connection ends, at once if it has ended."""
        if self.closed:
            callback()
        else:
            self._on_close.append(callback)

    def off_close(self, callback: Callable[[], None]) -> None:
        """Forgets a callback given to on_close; unknown ones are ignored."""
        with contextlib.suppress(ValueError):
            self._on_close.remove(callback)

    def tasks(self) -> list[asyncio.Task[None]]:
        return list(self._running.values())

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast(asyncio.Transport, transport)  # uvloop does not derive its own from it
        self._transport = transport
        self._greeting = AttendedTimer(_HELLO_TIMEOUT_S, self.abort)
        self._server.peers.add(self)
        if _is_other_user(transport):
            _LOG.warning("%s: a process of another user was turned away", self._server.hello.service)
            self.abort()
            return
        _keep_alive(transport)

    def data_received(self, data: bytes) -> None:
        if self._watched:
            self._watch.heard()
        elif self.hello is not None and self._frames.is_empty:  # one call of a client that waits for its answer, mostly
            call_id = whole_frame(FrameKind.CALL, data, len(data))
            if call_id is not None and call_id not in self._running:
                self._on_call(call_id, data[HEADER_NBYTES:])
                return
        try:
            for frame in self._frames.feed(data):
                self._on_frame(frame)
        except MoonpoolError as error:
            self._send(encode_error(0, error))
            assert self._transport is not None
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        self._writable.set()
        self._server.peers.discard(self)
        self._watch.stop()
        if self._greeting is not None:
            self._greeting.cancel()
        for task in self.tasks():
            task.cancel()
        callbacks, self._on_close = self._on_close, []
        for callback in callbacks:
            try:
                callback()
            except Exception:  # noqa: BLE001 - one owner's bug must not keep the others from cleaning up
                _LOG.exception("bug in an on_close callback of %s", self._server.hello.service)
        self.ended.set()

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    # frames

    def _on_frame(self, frame: Frame) -> None:
        if self.hello is None:
            self._greet(decode_hello(frame))
        elif frame.kind is FrameKind.CALL:
            if frame.call_id in self._running:
                raise ProtocolError(f"call {frame.call_id} is still running")
            self._on_call(frame.call_id, frame.body)
        elif frame.kind is FrameKind.PING:
            self._send(_PONG)
        elif frame.kind is FrameKind.CANCEL:
            task = self._running.get(frame.call_id)
            if task is not None:
                task.cancel()
        else:
            raise ProtocolError(f"a {frame.kind.name} frame is not for a server")

    def _greet(self, hello: Hello) -> None:
        if hello.service != self._server.hello.service:
            raise ProtocolError(f"this is {self._server.hello.service!r}, not {hello.service!r}")
        self.hello = hello
        assert self._greeting is not None
        self._greeting.cancel()
        self._send(encode_value(FrameKind.HELLO, 0, self._server.hello))
        if hello.pings:
            self._watched = True
            self._watch.start()

    def _on_silence(self) -> None:
        assert self.hello is not None
        who, limit_s = self.hello.name or "a peer", self._watch.patience.silence_limit_s
        _LOG.warning("%s: %s has been silent for %g s and is cut off", self._server.hello.service, who, limit_s)
        self.abort()

    def _on_call(self, call_id: int, body: bytes) -> None:
        server = self._server
        try:
            call = server.decoder.decode(body)
            if len(self._running) >= _MAX_CALLS_PER_PEER:
                raise Overloaded(f"over {_MAX_CALLS_PER_PEER} calls of one peer are running")
            answer = server.handlers[type(call)](call, self)
            if not call.streams and not hasattr(answer, "__await__"):  # isawaitable() would take longer than the rest
                self._send(encode_value(FrameKind.REPLY, call_id, answer))
                return
        except Exception as error:  # noqa: BLE001 - every call gets an answer, a bug's included
            self._fail(call_id, error)
            return
        if call.streams:
            self._spawn(call_id, self._stream(call_id, answer))
        else:
            task = self._spawn(call_id, self._reply(call_id, answer))
            if inspect.iscoroutine(answer):
                task.add_done_callback(lambda _: answer.close())  # a call cancelled before it began

    def _spawn(self, call_id: int, coroutine: Any) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(coroutine)
        self._running[call_id] = task
        task.add_done_callback(lambda _: self._running.pop(call_id, None))
        return task

    async def _reply(self, call_id: int, answer: Any) -> None:
        try:
            value = await answer
            self._send(encode_value(FrameKind.REPLY, call_id, value))
        except asyncio.CancelledError:
            self._fail(call_id, Cancelled("the call was cancelled"))
            raise
        except Exception as error:  # noqa: BLE001 - as above
            self._fail(call_id, error)

    async def _stream(self, call_id: int, items: AsyncIterator[Any]) -> None:
        async with contextlib.aclosing(items) as source:  # type: ignore[type-var]
            try:
                async for item in source:
                    self._send(encode_value(FrameKind.ITEM, call_id, item))
                    await self._writable.wait()
                self._send(encode_frame(FrameKind.END, call_id))
            except asyncio.CancelledError:
                self._fail(call_id, Cancelled("the stream was cancelled"))
                raise
            except Exception as error:  # noqa: BLE001 - as above
                self._fail(call_id, error)

    def _fail(self, call_id: int, error: Exception) -> None:
        if not isinstance(error, MoonpoolError):
            _LOG.error("bug in a handler of %s", self._server.hello.service, exc_info=error)
        self._send(encode_error(call_id, as_moonpool_error(error)))

    def _send(self, data: bytes) -> None:
        if self._transport is not None and not self.closed:
            self._transport.write(data)
