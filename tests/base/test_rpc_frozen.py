"""Frozen processes at either end of a connection: real processes, real SIGSTOP, on asyncio and on uvloop."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
import weakref
from collections.abc import AsyncIterator, Awaitable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import uvloop
from rpc_child import Child, child
from rpc_service import Block, Echo, Service, Slow, Ticks
from waiting import HANG_S, until

from moonpool.base.errors import PeerLost
from moonpool.base.frames import FrameDecoder, FrameKind, encode_frame
from moonpool.base.rpc import AsyncClient, Hello, SilenceLimits
from moonpool.base.rpc.protocol import encode_value

QUICK = SilenceLimits(ping_interval_s=0.1, silence_limit_s=0.8)  # notices a frozen peer
CALM = SilenceLimits(ping_interval_s=0.2, silence_limit_s=3.0)  # must not lose one that is merely slow
ENDLESS = SilenceLimits(ping_interval_s=0.1, silence_limit_s=600.0)  # pings, and never gives up
Place = tuple[str, str]


@pytest.fixture(params=["unix on asyncio", "tcp on uvloop"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, str]:
    """Where to listen, and on which kind of loop."""
    return (f"unix:{tmp_path}/s.sock", "asyncio") if "unix" in request.param else ("tcp:127.0.0.1:0", "uvloop")


def run(loop_kind: str, main: Coroutine[Any, Any, None]) -> None:
    factory = uvloop.new_event_loop if loop_kind == "uvloop" else asyncio.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(main)


@contextlib.asynccontextmanager
async def serving(address: str, silence_limits: SilenceLimits) -> AsyncIterator[tuple[Service, str]]:
    service = Service(silence_limits)
    try:
        yield service, await service.server.listen(address)
    finally:
        await service.server.close()


@contextlib.asynccontextmanager
async def connected(address: str, silence_limits: SilenceLimits) -> AsyncIterator[AsyncClient]:
    client = await AsyncClient.connect(address, "testing", silence_limits=silence_limits)
    try:
        yield client
    finally:
        client.close()
        await client.closed.wait()


async def lost(waiting: Awaitable[object]) -> None:
    async with asyncio.timeout(HANG_S):
        with pytest.raises(PeerLost, match=r"has not answered for 0\.8 s"):
            await waiting


def test_a_frozen_server_fails_calls_and_streams(place: Place) -> None:
    async def main() -> None:
        async with child("server", *place, QUICK) as server:
            address = await server.line()
            async with connected(address, QUICK) as client:
                ticks = client.stream(Ticks(3600.0))
                assert await anext(ticks) == 0
                slow = asyncio.create_task(client.call(Slow()))
                assert await client.call(Echo(b"alive")) == b"alive"
                server.stop()
                stopped_s = time.monotonic()
                await lost(slow)
                assert time.monotonic() - stopped_s > 0.5  # not merely because a signal came
                await lost(anext(ticks))
                with pytest.raises(PeerLost):
                    await client.call(Echo(b"x"))
            server.resume()
            async with connected(address, QUICK) as again:
                assert await again.call(Echo(b"back")) == b"back"

    run(place[1], main())


def test_a_frozen_client_is_forgotten_and_may_come_back(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with (
            serving(place[0], QUICK) as (service, address),
            child("client", address, place[1], QUICK) as client,
        ):
            assert await client.line() == "connected"
            client.stop()
            async with asyncio.timeout(HANG_S):
                await service.peer_closed.wait()
            assert not service.server.peers
            assert "child has been silent for 0.8 s" in caplog.text
            client.resume()
            assert await client.line() == "connected"

    run(place[1], main())


def test_a_silent_client_that_may_stand_still_is_kept(place: Place) -> None:
    """Its end is that of its process, which the kernel tells."""
    mute = SilenceLimits(ping_interval_s=200.0, silence_limit_s=600.0)

    async def main() -> None:
        async with serving(place[0], QUICK) as (service, address), connected(address, mute) as promised:
            still = await AsyncClient.connect(address, "testing", silence_limits=mute, may_stand_still=True)
            async with asyncio.timeout(HANG_S):
                await promised.closed.wait()
            assert await still.call(Echo(b"x")) == b"x"
            assert len(service.server.peers) == 1
            still.close()
            await still.closed.wait()

    run(place[1], main())


def test_a_blocked_loop_survives_at_both_ends(place: Place) -> None:
    async def main() -> None:
        async with child("server", *place, CALM) as server:
            async with connected(await server.line(), CALM) as client:
                slow = asyncio.create_task(client.call(Slow()))
                await client.call(Block(1.0))  # the server's loop
                time.sleep(1.0)  # and ours  # noqa: ASYNC251 - that is the point
                assert await client.call(Echo(b"x")) == b"x"
                assert not slow.done()
                slow.cancel()

    run(place[1], main())


async def suspend(process: Child, for_s: float) -> None:
    process.stop()
    await asyncio.sleep(for_s)
    process.resume()


def test_a_client_that_was_stopped_keeps_its_healthy_server(place: Place) -> None:
    """Its own timer comes late by more than the limit; that says nothing about the server."""

    async def main() -> None:
        async with (
            serving(place[0], ENDLESS) as (service, address),
            child("client", address, place[1], QUICK) as client,
        ):
            assert await client.line() == "connected"
            await suspend(client, 1.2)
            with pytest.raises(TimeoutError):  # for longer than its limit nothing happens
                async with asyncio.timeout(1.0):
                    await service.peer_closed.wait()

    run(place[1], main())


def test_a_server_that_was_stopped_keeps_its_healthy_clients(place: Place) -> None:
    async def main() -> None:
        async with child("server", *place, QUICK) as server:
            async with connected(await server.line(), ENDLESS) as client:
                slow = asyncio.create_task(client.call(Slow()))
                await suspend(server, 1.2)
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(slow, 1.0)

    run(place[1], main())


async def test_a_client_that_only_listens_is_heard_of(tmp_path: Path) -> None:
    """A stream brings news all the time, so the client is never in doubt; the server must not be either."""
    async with serving(f"unix:{tmp_path}/s.sock", CALM) as (service, address), connected(address, CALM) as client:
        await client.call(Echo(b"x"))
        async with contextlib.aclosing(client.stream(Ticks(0.05))) as ticks:
            until_s = time.monotonic() + 1.2 * CALM.silence_limit_s
            async for _ in ticks:
                if time.monotonic() > until_s:
                    break
        assert not service.peer_closed.is_set()


class Recorder:
    """A server by hand that answers pings and echoes, and keeps the kinds of all frames."""

    def __init__(self) -> None:
        self.kinds: list[FrameKind] = []
        self.greeting = encode_value(FrameKind.HELLO, 0, Hello("testing"))

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        frames = FrameDecoder()
        while data := await reader.read(65536):
            for frame in frames.feed(data):
                self.kinds.append(frame.kind)
                answer = encode_value(FrameKind.REPLY, frame.call_id, b"")
                writer.write({FrameKind.HELLO: self.greeting, FrameKind.PING: _PONG}.get(frame.kind, answer))
        writer.close()


_PONG = encode_frame(FrameKind.PONG, 0)


async def test_busy_connections_send_no_pings_and_quiet_ones_do(tmp_path: Path) -> None:
    recorder, silence_limits = Recorder(), SilenceLimits(ping_interval_s=0.25, silence_limit_s=5.0)
    server = await asyncio.start_unix_server(recorder.serve, f"{tmp_path}/s.sock")
    async with server, connected(f"unix:{tmp_path}/s.sock", silence_limits) as client:
        until_s, num_quiet = time.monotonic() + 4 * silence_limits.ping_interval_s, 0
        while (began_s := time.monotonic()) < until_s:
            await client.call(Echo(b"x"))
            await asyncio.sleep(0.005)
            num_quiet += int(2 * (time.monotonic() - began_s) / silence_limits.ping_interval_s)
        assert recorder.kinds.count(FrameKind.PING) <= num_quiet  # none, unless the machine made it quiet
        await until(lambda: recorder.kinds.count(FrameKind.PING) >= 2, "two pings have come")
        assert not client.closed.is_set()


async def test_a_client_that_promised_no_pings_may_be_silent(tmp_path: Path) -> None:
    async with serving(f"unix:{tmp_path}/s.sock", QUICK) as (service, _):
        reader, writer = await asyncio.open_unix_connection(f"{tmp_path}/s.sock")
        writer.write(encode_value(FrameKind.HELLO, 0, Hello("testing")))
        await reader.readexactly(16)
        await asyncio.sleep(1.5 * QUICK.silence_limit_s)
        assert len(service.server.peers) == 1
        writer.write(encode_frame(FrameKind.PING, 0))  # and is answered if it asks after all
        assert (await reader.readuntil(_PONG)).endswith(_PONG)
        writer.close()
        await writer.wait_closed()


def test_no_timer_outlives_its_connection(place: Place) -> None:
    """The loop would keep whatever a pending timer points to."""

    async def main() -> None:
        ends: list[weakref.ref[object]] = []
        async with serving(place[0], ENDLESS) as (service, address):
            async with connected(address, ENDLESS) as client:
                await client.call(Echo(b"x"))
                watched: list[object] = [client, *service.server.peers]
                ends += map(weakref.ref, watched)
                del watched
            await until(service.peer_closed.is_set, "the server sees the end")
            del client
            await until(lambda: gc.collect() >= 0 and [end() for end in ends] == [None, None], "nothing points to them")

    run(place[1], main())
