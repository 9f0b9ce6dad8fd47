"""The asyncio client: one connection, any number of calls and streams at once.

When the connection ends, or the other process is silent for too long (rpc/silence.py), every waiting call gets
PeerLost at once. A client never reconnects by itself; rpc/reconnect.py does. Cancelling the waiting task makes the
server cancel the handler.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import socket
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import TypeVar, cast

from moonpool.base.address import parse_address
from moonpool.base.backoff import Backoff
from moonpool.base.errors import DeadlineExceeded, MoonpoolError, Overloaded, PeerLost, ProtocolError, Unreachable
from moonpool.base.frames import Frame, FrameDecoder, FrameKind, encode_frame
from moonpool.base.rpc.protocol import (
    DEFAULT_TIMEOUT_S,
    Call,
    Hello,
    decode_error,
    decode_hello,
    decode_reply,
    encode_call,
    encode_value,
    wait_ms_of,
)
from moonpool.base.rpc.silence import DEFAULT_SILENCE_LIMITS, SilenceLimits, SilenceWatch

R = TypeVar("R")
# A reader this far behind is stuck: its stream fails, and the reader may start a new one.
_FULL_PAUSE_S, _MAX_FULL_PAUSE_S = 0.002, 0.1  # between attempts to reach a server with a full queue
_MAX_WAITING_ITEMS = 65_536
_UNREACHABLE = {errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN, errno.ETIMEDOUT}
_PING = encode_frame(FrameKind.PING, 0)


async def _connect_unix(path: str) -> socket.socket:
    """Return a connected socket. Wait while the server's queue of connections is full: the kernel makes a TCP client
    wait then, but refuses a Unix client at once (uvloop raises that, asyncio takes it for a connection).
    """
    backoff = Backoff(_FULL_PAUSE_S, _MAX_FULL_PAUSE_S)
    while True:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            sock.connect(path)
            return sock
        except BlockingIOError:
            sock.close()
        except BaseException:
            sock.close()
            raise
        await asyncio.sleep(backoff.next_s())


@asynccontextmanager
async def _reaching(address: str, reach_s: float | None) -> AsyncIterator[None]:
    """Raise Unreachable if what is done takes longer."""
    limit = asyncio.timeout(reach_s)
    try:
        async with limit:
            yield
    except TimeoutError as error:
        if not limit.expired():
            raise
        raise Unreachable(f"the machine of {address} has not answered within {reach_s:g} s") from error


def _expire(future: asyncio.Future[Frame]) -> None:
    if not future.done():
        future.set_exception(TimeoutError())


class AsyncClient(asyncio.Protocol):
    """Make one with `await AsyncClient.connect(...)`."""

    def __init__(self, address: str, hello: Hello, silence_limits: SilenceLimits = DEFAULT_SILENCE_LIMITS) -> None:
        self.address = address
        self.peer: Hello | None = None
        self.closed = asyncio.Event()
        self._hello = hello
        self._frames = FrameDecoder()
        self._ids = itertools.count(1)
        self._greeted: asyncio.Future[Hello] = asyncio.get_running_loop().create_future()
        self._calls: dict[int, asyncio.Future[Frame]] = {}
        self._streams: dict[int, asyncio.Queue[Frame | MoonpoolError]] = {}
        self._transport: asyncio.Transport | None = None
        self._watch = SilenceWatch(silence_limits, lost=self._on_silence, ping=self._ping)

    @classmethod
    async def connect(
        cls,
        address: str,
        service: str,
        *,
        name: str = "",
        incarnation: int = 0,
        timeout_s: float = 5.0,
        reach_s: float | None = None,
        silence_limits: SilenceLimits = DEFAULT_SILENCE_LIMITS,
        may_stand_still: bool = False,
    ) -> AsyncClient:
        """Connect. PeerLost when there is no server or it does not answer within `timeout_s`, ProtocolError when it is
        another service. Unreachable when its machine does not answer within `reach_s`, which a kernel does at once even
        if the server hangs.

        With `may_stand_still` the server does not take this process's silence for its end: only the kernel ends the
        connection. For servers that keep memory for a connection into which this process may still write.
        """
        loop, at = asyncio.get_running_loop(), parse_address(address)
        client = cls(address, Hello(service, name, incarnation, pings=not may_stand_still), silence_limits)
        try:
            async with asyncio.timeout(timeout_s):
                if at.scheme == "unix":
                    await loop.create_unix_connection(lambda: client, sock=await _connect_unix(at.path))
                else:
                    async with _reaching(address, reach_s):
                        await loop.create_connection(lambda: client, at.host, at.port)
                client.peer = await client._greeted
        except TimeoutError as error:
            client.close()
            raise PeerLost(f"{address} did not answer within {timeout_s:g} s") from error
        except OSError as error:
            client.close()
            lost = Unreachable if error.errno in _UNREACHABLE else PeerLost
            raise lost(f"{address}: {error.strerror or error}") from error
        except BaseException:
            client.close()  # cancelled, or refused by the server
            raise
        return client

    async def call(self, call: Call[R], *, timeout_s: float = DEFAULT_TIMEOUT_S) -> R:
        """Return the answer, or raise the server's error; DeadlineExceeded or PeerLost when no answer came."""
        loop = asyncio.get_running_loop()
        call_id, future = next(self._ids), loop.create_future()
        self._write(encode_call(call, call_id, wait_ms_of(timeout_s)))
        self._calls[call_id] = future
        timer = loop.call_later(timeout_s, _expire, future)  # cheaper than asyncio.timeout()
        try:
            frame: Frame = await future
        except TimeoutError as error:
            self._cancel(call_id)
            raise DeadlineExceeded(f"{self.address} did not answer within {timeout_s:g} s") from error
        except asyncio.CancelledError:
            self._cancel(call_id)
            if not future.cancelled():
                future.exception()  # of a connection that has ended too: asyncio logs what is never read
            raise
        finally:
            timer.cancel()
            self._calls.pop(call_id, None)
        if frame.kind is FrameKind.ERROR:
            raise decode_error(frame.body)
        answer: R = decode_reply(call, frame.body)
        return answer

    def send(self, call: Call[None]) -> None:
        """Send a call whose answer does not matter: it is not waited for, and an error is not reported. Do nothing when
        the connection has ended."""
        self._send(encode_call(call, next(self._ids)))

    async def stream(self, call: Call[R], *, timeout_s: float | None = None) -> AsyncGenerator[R, None]:
        """Yield the items as they come. Raise DeadlineExceeded if the stream has not ended after `timeout_s`; earlier
        items are yielded first. Leaving the loop early cancels the work at the server (use aclosing)."""
        call_id = next(self._ids)
        queue: asyncio.Queue[Frame | MoonpoolError] = asyncio.Queue()
        self._write(encode_call(call, call_id, wait_ms_of(timeout_s)))
        self._streams[call_id] = queue
        timer = self._end_after(queue, timeout_s)
        done = False
        try:
            while True:
                item = await queue.get()
                if isinstance(item, MoonpoolError):
                    done = not isinstance(item, DeadlineExceeded)
                    raise item
                if item.kind is FrameKind.ITEM:
                    yield decode_reply(call, item.body)
                    continue
                done = True
                if item.kind is FrameKind.ERROR:
                    raise decode_error(item.body)
                return
        finally:
            if timer is not None:
                timer.cancel()
            self._streams.pop(call_id, None)
            if not done:
                self._cancel(call_id)

    def close(self) -> None:
        """Idempotent. Waiting calls get PeerLost."""
        self._greeted.cancel()  # connect(), if it has not ended, does not wait for it any more
        if self._transport is not None:
            self._transport.abort()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast(asyncio.Transport, transport)  # uvloop does not derive its own from it
        self._transport = transport
        transport.write(encode_value(FrameKind.HELLO, 0, self._hello))
        self._watch.start()

    def data_received(self, data: bytes) -> None:
        self._watch.heard(time.monotonic())
        try:
            for frame in self._frames.feed(data):
                self._on_frame(frame)
        except MoonpoolError as error:
            self._fail_all(error)
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._watch.stop()
        self._fail_all(PeerLost(f"{self.address} closed the connection"))
        self.closed.set()

    def _on_frame(self, frame: Frame) -> None:
        if not self._greeted.done():
            self._greeted.set_result(decode_hello(frame))
        elif frame.kind is FrameKind.PONG:
            return  # data_received() has noted the sign of life
        elif frame.call_id in self._calls:
            future = self._calls[frame.call_id]
            if not future.done():
                future.set_result(frame)
        elif frame.call_id in self._streams:
            self._on_item(frame, self._streams[frame.call_id])
        elif frame.call_id == 0:
            raise decode_error(frame.body) if frame.kind is FrameKind.ERROR else ProtocolError("stray frame")
        # Otherwise the frame answers a call that was cancelled or timed out, or one of send().

    def _on_item(self, frame: Frame, queue: asyncio.Queue[Frame | MoonpoolError]) -> None:
        if queue.qsize() < _MAX_WAITING_ITEMS:
            queue.put_nowait(frame)
            return
        del self._streams[frame.call_id]
        self._cancel(frame.call_id)
        queue.put_nowait(Overloaded(f"a stream from {self.address} was not read for too long"))

    def _end_after(
        self, queue: asyncio.Queue[Frame | MoonpoolError], timeout_s: float | None
    ) -> asyncio.TimerHandle | None:
        """Start the one timer of a stream: a timeout around every item would cost more than reading the item."""
        if timeout_s is None:
            return None
        late = DeadlineExceeded(f"{self.address} did not end its stream within {timeout_s:g} s")
        return asyncio.get_running_loop().call_later(timeout_s, queue.put_nowait, late)

    def _ping(self) -> None:
        self._send(_PING)

    def _on_silence(self) -> None:
        self._fail_all(PeerLost(f"{self.address} has not answered for {self._watch.limits.silence_limit_s:g} s"))
        self.close()

    def _fail_all(self, error: MoonpoolError) -> None:
        if not self._greeted.done():
            self._greeted.set_exception(error)
        for future in self._calls.values():
            if not future.done():
                future.set_exception(error)
        for queue in self._streams.values():
            queue.put_nowait(error)

    def _cancel(self, call_id: int) -> None:
        self._send(encode_frame(FrameKind.CANCEL, call_id))  # a server cancels the calls of an ended connection itself

    def _write(self, data: bytes) -> None:
        if not self._send(data):
            raise PeerLost(f"{self.address} is not connected")

    def _send(self, data: bytes) -> bool:
        """Send the bytes. Return False when the connection has ended."""
        if self._transport is None or self._transport.is_closing():
            return False
        self._transport.write(data)
        self._watch.said()
        return True
