"""A real RPC service for the tests of both drivers."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from moonpool.base.errors import NotFound, Overloaded
from moonpool.base.rpc import Call, RpcPeer, RpcServer, SilenceLimits, StreamCall
from moonpool.base.rpc.silence import DEFAULT_SILENCE_LIMITS


class Echo(Call[bytes]):
    data: bytes


class Slow(Call[str]):
    """Answered when Service.gate is set."""


class Fail(Call[None]):
    kind: str


class Count(StreamCall[int]):
    upto: int
    fail_at: int | None = None


class Blobs(StreamCall[bytes]):
    """Endless items of that size."""

    nbytes: int


class Ticks(StreamCall[int]):
    """An item every so often, without end."""

    every_s: float


class Block(Call[None]):
    """Stops the server's whole event loop for that long."""

    seconds: float


class Big(Call[bytes]):
    nbytes: int


class Unsendable(Call[int]):
    pass


class Unknown(Call[int]):
    """No server here knows it."""


class Service:
    """Make it on the loop that serves it. Its numbers say what happened inside."""

    def __init__(self, silence_limits: SilenceLimits = DEFAULT_SILENCE_LIMITS) -> None:
        self.gate = asyncio.Event()
        self.started = asyncio.Event()
        self.ended = asyncio.Event()  # a slow call or a stream was cancelled
        self.peer_closed = asyncio.Event()
        self.blobs_made = 0
        self.server = RpcServer(
            "testing",
            {
                Echo: self.echo,
                Slow: self.slow,
                Fail: self.fail,
                Count: self.count,
                Blobs: self.blobs,
                Ticks: self.ticks,
                Block: lambda call, peer: time.sleep(call.seconds),
                Big: lambda call, peer: bytes(call.nbytes),
                Unsendable: lambda call, peer: object(),
            },
            name="server-1",
            incarnation=77,
            silence_limits=silence_limits,
        )

    def echo(self, call: Echo, peer: RpcPeer) -> bytes:
        peer.on_close(self.peer_closed.set)
        return call.data

    async def slow(self, call: Slow, peer: RpcPeer) -> str:
        self.started.set()
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.ended.set()
            raise
        return "at last"

    async def fail(self, call: Fail, peer: RpcPeer) -> None:
        if call.kind == "bug":
            raise KeyError("a bug")
        if call.kind == "cancelled":
            raise asyncio.CancelledError
        raise {"missing": NotFound("not here"), "busy": Overloaded("later", retry_after_s=3.0)}[call.kind]

    async def count(self, call: Count, peer: RpcPeer) -> AsyncIterator[int]:
        for number in range(call.upto):
            if number == call.fail_at:
                raise NotFound(f"no {number}")
            yield number

    async def blobs(self, call: Blobs, peer: RpcPeer) -> AsyncIterator[bytes]:
        try:
            while True:
                self.blobs_made += 1
                yield bytes(call.nbytes)
                await asyncio.sleep(0)
        finally:
            self.ended.set()

    async def ticks(self, call: Ticks, peer: RpcPeer) -> AsyncIterator[int]:
        for number in itertools.count():
            yield number
            await asyncio.sleep(call.every_s)


class ServedService:
    """A Service on a loop and a thread of its own, for blocking callers."""

    def __init__(self, listen_at: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.service: Service = self.do(self._make())
        self.address: str = self.do(self.service.server.listen(listen_at))

    async def _make(self) -> Service:
        return Service()

    def do(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(10)

    def soon(self, callback: Callable[[], object]) -> None:
        self._loop.call_soon_threadsafe(callback)

    def close(self) -> None:
        self.do(self.service.server.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()
