"""The asyncio server: decodes calls, runs handlers, answers each call exactly once.

A handler is a plain function (answered at once, the fastest way), a coroutine function, or for a StreamCall an async
generator. It gets the call and the RpcPeer. When a peer disconnects, or promised pings and is silent for too long
(rpc/silence.py), its running handlers are cancelled and its `on_close` callbacks run.

No connection can block the others (rpc/intake.py): the server handles the calls of one connection in short turns, and
none while earlier answers are unread; before its hello a connection may send only a small frame.

A call is not begun when its caller no longer waits: it is answered with TooLate, and counted. The time that the caller
waits, which the call states, is counted from the moment at which its bytes had arrived for certain, so a call whose
caller still waits is not refused. The clock is the one that callers wait by, which goes on while this process is
stopped. Bytes that arrived while the event loop handled something else, or while the process was stopped, count from
the moment at which the loop looks at its sockets again: for how long they have been there is unknown, and their calls
are carried out. A service whose answers give something away must be told which of them were not taken.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import os
import socket
import stat
import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, cast

from moonpool.base.address import (
    Address,
    add_own_socket,
    bind_private,
    is_own_user,
    parse_address,
    peer_pid,
    remove_own_socket,
)
from moonpool.base.errors import Cancelled, ConfigError, MoonpoolError, Overloaded, ProtocolError, TooLate
from moonpool.base.frames import (
    MAX_BODY_NBYTES,
    Frame,
    FrameDecoder,
    FrameKind,
    encode_frame,
    whole_frame,
)
from moonpool.base.rpc.intake import (
    MAX_BACKLOG_NBYTES,
    MAX_HELLO_NBYTES,
    TURN_FRAMES,
    TURN_S,
    ArrivalTimes,
    LargeFrames,
)
from moonpool.base.rpc.protocol import (
    Call,
    CallDecoder,
    Hello,
    as_moonpool_error,
    decode_hello,
    encode_error,
    encode_reply,
    encode_value,
)
from moonpool.base.rpc.silence import DEFAULT_SILENCE_LIMITS, AttendedTimer, SilenceLimits, SilenceWatch

_LOG = logging.getLogger(__name__)
_BACKLOG = 1024  # connections that wait to be accepted while a handler runs
_MAX_CALLS_PER_PEER = 4096
_HELLO_TIMEOUT_S = 10.0
_UNREAD_NBYTES = 256 * 1024  # of answers; with more, calls wait until the peer has read all but a quarter
_KEEPALIVE_IDLE_S, _KEEPALIVE_INTERVAL_S, _KEEPALIVE_PROBES = 15, 5, 3
_TURN_S, _MAX_READS = 1e-3, 32  # after so long, or so many reads, a turn of the event loop is noted
_PONG = encode_frame(FrameKind.PONG, 0)
_CALL = FrameKind.CALL  # looking an attribute up takes longer than using it

Handler = Callable[[Any, "RpcPeer"], Any]


class LateCalls:
    """How many calls this process has not begun because their callers no longer waited, on all its servers."""

    total = 0


class RpcServer:
    """Serves one set of calls at any number of addresses. Close it to end all connections."""

    def __init__(
        self,
        service: str,
        handlers: Mapping[type[Call[Any]], Handler],
        *,
        name: str = "",
        incarnation: int = 0,
        silence_limits: SilenceLimits = DEFAULT_SILENCE_LIMITS,
    ) -> None:
        self.hello = Hello(service, name, incarnation)
        self.decoder = CallDecoder(handlers)
        self.handlers = dict(handlers)
        self.silence_limits = silence_limits
        self._servers: list[asyncio.Server] = []
        self._paths: list[str] = []
        self.peers: set[RpcPeer] = set()
        self.large_frames = LargeFrames()
        self.closed = False
        # A turn of the event loop is noted about once in a millisecond: noting each, or reading the clock for each
        # call, takes 5 to 20 % of what a call takes. So reads are counted, as many as came in the last millisecond.
        self.reads_left = 0  # until begin_turn() is due
        self.turn_s: float | None = None  # when it was called in the present turn
        self.turn = 0  # number of the latest turn that was noted
        self._noted_s = 0.0  # when that was
        self._reads_per_turn = 1

    async def listen(self, address: str) -> str:
        """Start to serve at the address. Return it with the real port. ConfigError when the address is taken."""
        loop, at = asyncio.get_running_loop(), parse_address(address)
        try:
            if at.scheme == "unix":
                await _free_socket_path(at.path)
                server = await loop.create_unix_server(
                    lambda: RpcPeer(self), sock=bind_private(at.path), backlog=_BACKLOG
                )
                add_own_socket(at.path)
                self._paths.append(at.path)
            else:
                server = await loop.create_server(lambda: RpcPeer(self), at.host, at.port, backlog=_BACKLOG)
                at = Address("tcp", host=at.host, port=server.sockets[0].getsockname()[1])
        except OSError as error:
            raise ConfigError(f"cannot listen at {address}: {error.strerror or error}") from error
        self._servers.append(server)
        return str(at)

    def begin_turn(self, now_s: float) -> None:
        """Note the present turn of the event loop: whatever a connection reads first from now on in this turn had
        arrived by now, however long the handlers of other calls take meanwhile.
        """
        self.reads_left = 0  # every read of this turn asks
        recent = self._reads_per_turn * _TURN_S / max(now_s - self._noted_s, _TURN_S / _MAX_READS)
        self._reads_per_turn = max(1, min(int(recent), _MAX_READS))
        self.turn_s = self._noted_s = now_s
        self.turn += 1
        asyncio.get_running_loop().call_soon(self._end_turn)

    def _end_turn(self) -> None:
        self.turn_s, self.reads_left = None, self._reads_per_turn

    async def close(self) -> None:
        """Stop listening, end every connection, wait for the handlers to end. Idempotent."""
        self.closed = True
        loop = asyncio.get_running_loop()
        for sock in (sock for server in self._servers for sock in server.sockets):
            loop.remove_reader(sock.fileno())
        # A connection that was accepted in this turn gets its transport in the next one and is a peer in the one after.
        # Python 3.11 forgets it when the server is closed before: its client would wait for an answer.
        for _ in range(2):
            await asyncio.sleep(0)
        for server in self._servers:
            server.close()
        peers = list(self.peers)
        tasks = [task for peer in peers for task in peer.tasks()]
        for peer in peers:
            peer.abort()
        await asyncio.gather(*tasks, *(peer.ended.wait() for peer in peers), return_exceptions=True)
        self.large_frames.close()
        for path in self._paths:
            remove_own_socket(path)
        self._servers.clear()
        self._paths.clear()


async def _free_socket_path(path: str) -> None:
    """Remove the socket of a killed predecessor. ConfigError when a process serves at the path."""
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
    """Let the kernel detect that the machine of a peer without pings is gone, so that its sessions end."""
    sock = transport.get_extra_info("socket")
    if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_IDLE_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _KEEPALIVE_INTERVAL_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _KEEPALIVE_PROBES)


class RpcPeer(asyncio.Protocol):
    """One connection at the server. `hello` is the peer's introduction; None before it."""

    def __init__(self, server: RpcServer) -> None:
        self._server = server
        self._frames = FrameDecoder(MAX_HELLO_NBYTES)
        self._arrivals = ArrivalTimes()  # of what is in `_frames`
        self._read_turn = 0  # the latest turn that the server had noted at a read
        self._held: Frame | None = None  # a call that arrived while answers were unread
        self._held_since_s = 0.0
        self._turn: asyncio.Handle | None = None  # the scheduled next turn, while frames wait
        self._unread_nbytes = 0  # of answers, at the last check for silence
        self._running: dict[int, asyncio.Task[None]] = {}
        self._on_close: list[Callable[[], None]] = []
        self._is_writable = True  # as _writable, which takes longer to ask
        self._writable = asyncio.Event()
        self._writable.set()
        self._transport: asyncio.Transport | None = None
        self._greeting: AttendedTimer | None = None
        self._watch = SilenceWatch(server.silence_limits, lost=self._on_silence)
        self._watched = False  # the peer has promised pings
        self.hello: Hello | None = None
        self.closed = False
        self.was_silent = False  # it was disconnected because it had been silent for too long
        self.ended = asyncio.Event()

    def on_close(self, callback: Callable[[], None]) -> None:
        """Run `callback` once when the connection ends; at once if it has ended."""
        if self.closed:
            callback()
        else:
            self._on_close.append(callback)

    @property
    def pid(self) -> int:
        """Return the number of the peer's process; 0 if it is not known: on another machine, or over TCP."""
        sock = None if self._transport is None else self._transport.get_extra_info("socket")
        return peer_pid(sock) if sock is not None and sock.family == socket.AF_UNIX else 0

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
        if self._server.closed:  # it was accepted just before the server stopped listening
            self.abort()
            return
        if _is_other_user(transport):
            _LOG.warning("%s: a process of another user was turned away", self._server.hello.service)
            self.abort()
            return
        transport.set_write_buffer_limits(_UNREAD_NBYTES)
        _keep_alive(transport)

    def data_received(self, data: bytes) -> None:
        server = self._server
        server.reads_left -= 1
        waited_s = 0.0 if server.reads_left > 0 else self._waited_s()
        if not self._watched and not self._frames.held and self._is_writable and self.hello is not None:
            # The common case: one call of a client that waits for its answer.
            whole = whole_frame(_CALL, data, len(data))
            if whole is not None and whole[0] not in self._running:
                if not waited_s or not self._is_refused(whole[0], whole[2], waited_s):
                    self._on_call(whole[0], whole[1])
                return
        now_s = time.monotonic()
        self._watch.heard(now_s)
        (self._arrivals.add if self._frames.held else self._arrivals.begin)(len(data), now_s - waited_s)
        self._frames.push(data)
        if self._turn is None and self._held is None:
            self._take_turn(now_s)
        elif self._frames.nbytes > MAX_BACKLOG_NBYTES:
            self._set_reading(False)

    def _waited_s(self) -> float:
        """Return for how long the bytes that are read now have been here for certain."""
        server, now_s, before = self._server, time.monotonic(), self._read_turn
        if server.turn_s is None:
            server.begin_turn(now_s)
        self._read_turn, turn_s = server.turn, server.turn_s or now_s
        return 0.0 if server.turn == before else now_s - turn_s  # of the second read in a turn the bytes may be new

    def _take_turn(self, at_s: float | None = None) -> None:
        """Handle waiting frames, from `at_s` (default: now) until the time of one turn is used up."""
        self._turn = None
        now_s, next_frame, is_writable = time.monotonic, self._frames.next, self._writable.is_set
        arrivals, at_s = self._arrivals, now_s() if at_s is None else at_s
        until_s = at_s + TURN_S
        try:
            for _ in range(TURN_FRAMES):
                if arrivals.later:
                    arrivals.skip_to(self._frames.nbytes)
                since_s = self._held_since_s if self._held else arrivals.first_s
                frame, self._held = self._held or next_frame(), None
                if frame is None:
                    self._set_reading(self._server.large_frames.note(self, self._frames.nbytes))
                    return
                if frame.kind is FrameKind.CALL and not is_writable():
                    self._held, self._held_since_s = frame, since_s  # resume_writing() continues with it
                    return
                self._on_frame(frame, at_s - since_s)
                at_s = now_s()
                if at_s >= until_s:
                    break
        except MoonpoolError as error:
            self._end(error)
        else:
            if not self.closed:
                self._turn = asyncio.get_running_loop().call_soon(self._take_turn)

    def _set_reading(self, wanted: bool) -> None:
        assert self._transport is not None
        if not self._transport.is_closing() and self._transport.is_reading() != wanted:
            (self._transport.resume_reading if wanted else self._transport.pause_reading)()

    def _end(self, error: MoonpoolError) -> None:
        """Send the error, then close the connection."""
        self._send(encode_error(0, error))
        assert self._transport is not None
        self._transport.close()

    # rpc/intake.py

    def read_on(self) -> None:
        self._set_reading(True)

    def cut_off(self, reason: str) -> None:
        _LOG.warning("%s: a peer is cut off: %s", self._server.hello.service, reason)
        self._end(Overloaded(reason))

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = self._is_writable = True
        self._writable.set()
        self._server.peers.discard(self)
        self._server.large_frames.forget(self)
        self._watch.stop()
        if self._turn is not None:
            self._turn.cancel()
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
        self._is_writable = False
        self._writable.clear()

    def resume_writing(self) -> None:
        self._is_writable = True
        self._writable.set()
        if self._held is not None and self._turn is None:
            self._turn = asyncio.get_running_loop().call_soon(self._take_turn)

    # frames

    def _on_frame(self, frame: Frame, waited_s: float) -> None:
        if self.hello is None:
            self._greet(decode_hello(frame))
        elif frame.kind is FrameKind.CALL:
            if frame.call_id in self._running:
                raise ProtocolError(f"call {frame.call_id} is still running")
            if waited_s < _TURN_S or not self._is_refused(frame.call_id, frame.wait_ms, waited_s):
                self._on_call(frame.call_id, frame.body)
        elif frame.kind is FrameKind.PING:
            if self._writable.is_set():  # otherwise unread answers are the sign of life
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
        self._frames.max_body_nbytes = MAX_BODY_NBYTES
        assert self._greeting is not None
        self._greeting.cancel()
        self._send(encode_value(FrameKind.HELLO, 0, self._server.hello))
        if hello.pings:
            self._watched = True
            self._watch.start()

    def _on_silence(self) -> None:
        """Disconnect the peer, unless the server has stopped reading it (rpc/intake.py) and it has read answers
        meanwhile.
        """
        assert self.hello is not None
        assert self._transport is not None
        unread_nbytes, before = self._transport.get_write_buffer_size(), self._unread_nbytes
        self._unread_nbytes = unread_nbytes
        if self._held is not None and unread_nbytes != before:
            self._watch.start()
            return
        who, limit_s = self.hello.name or "a peer", self._watch.limits.silence_limit_s
        _LOG.warning("%s: %s has been silent for %g s and is cut off", self._server.hello.service, who, limit_s)
        self.was_silent = True
        self.abort()

    def _is_refused(self, call_id: int, wait_ms: int, waited_s: float) -> bool:
        """Refuse a call that has waited here for longer than its caller was to wait. Return whether it is refused.

        It is answered, as each call is: the client may wait for an answer to every number that it has used, and a
        caller that was stopped itself may still want this one.
        """
        if not 0 < wait_ms < waited_s * 1000:
            return False
        LateCalls.total += 1
        self._fail(call_id, TooLate(f"the call was not begun: its caller was to wait for {wait_ms / 1000:g} s"))
        return True

    def _on_call(self, call_id: int, body: bytes) -> None:
        server = self._server
        try:
            call = server.decoder.decode(body)
            if len(self._running) >= _MAX_CALLS_PER_PEER:
                raise Overloaded(f"over {_MAX_CALLS_PER_PEER} calls of one peer are running")
            answer = server.handlers[type(call)](call, self)
            if not call.streams and not hasattr(answer, "__await__"):  # isawaitable() would take longer than the rest
                data = encode_reply(call_id, answer)
                if not self.closed:
                    self._transport.write(data)  # type: ignore[union-attr]  # a call came over it
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
            await self._writable.wait()
            self._send(encode_reply(call_id, value))
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
