"""One connection cannot take the server's memory or its time from the others."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import uvloop
from waiting import HANG_S, until

from moonpool.base.errors import ProtocolError
from moonpool.base.frames import HEADER_NBYTES, Frame, FrameDecoder, FrameKind, encode_frame
from moonpool.base.rpc import AsyncClient, Call, Hello, RpcPeer, RpcServer, intake
from moonpool.base.rpc.intake import LargeFrames
from moonpool.base.rpc.protocol import decode_error, encode_call, encode_value

HELLO = encode_value(FrameKind.HELLO, 0, Hello("testing"))
PINGING = encode_value(FrameKind.HELLO, 0, Hello("testing", pings=True))


Run = Callable[[Awaitable[None]], None]


class Take(Call[bytes]):
    """Answered with that many bytes; `who` is counted."""

    who: str
    nbytes: int = 0


class TakeLater(Take):
    """As Take, by a coroutine."""


class Send(Call[int]):
    data: bytes


class Counting:
    def __init__(self, path: Path) -> None:
        self.handled: Counter[str] = Counter()
        handlers: dict[type[Call[Any]], Callable[[Any, RpcPeer], Any]] = {
            Take: self.take,
            TakeLater: self.take_later,
            Send: lambda call, _: len(call.data),
        }
        self.server = RpcServer("testing", handlers)
        self.address = f"unix:{path}/s.sock"

    def take(self, call: Take, _: object) -> bytes:
        self.handled[call.who] += 1
        return bytes(call.nbytes)

    async def take_later(self, call: Take, _: object) -> bytes:
        return self.take(call, None)

    def connect(self, first: bytes = HELLO) -> socket.socket:
        """A connection whose bytes are written and read by hand."""
        raw = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        raw.connect(self.address[5:])
        raw.setblocking(False)
        raw.send(first)
        return raw


@contextlib.asynccontextmanager
async def counting(path: Path) -> AsyncIterator[Counting]:
    service = Counting(path)
    await service.server.listen(service.address)
    try:
        yield service
    finally:
        await service.server.close()


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Run:
    return asyncio.run if request.param == "asyncio" else uvloop.run  # type: ignore[return-value]


async def standing_still(service: Counting, number: Callable[[], int]) -> int:
    """The number once it does not change while the server handles many calls of another."""
    last, other = -1, await AsyncClient.connect(service.address, "testing")
    while last != number():
        last = number()
        for _ in range(50):
            await other.call(Take("marker"))
    other.close()
    await other.closed.wait()
    return last


def unread_nbytes(peer: RpcPeer) -> int:
    transport = peer._transport
    assert transport is not None
    return transport.get_write_buffer_size()


def find_silent(peer: RpcPeer) -> None:
    """As its timer does."""
    peer._on_silence()


async def greeted(raw: socket.socket) -> FrameDecoder:
    frames, loop = FrameDecoder(), asyncio.get_running_loop()
    while not frames.feed(await loop.sock_recv(raw, 1)):
        pass
    return frames


async def read_frames(raw: socket.socket, frames: FrameDecoder, count: int) -> list[Frame]:
    loop, got = asyncio.get_running_loop(), list[Frame]()
    async with asyncio.timeout(HANG_S):
        while len(got) < count:
            data = await loop.sock_recv(raw, 1 << 20)
            if not data:
                break
            got += frames.feed(data)
    return got


@pytest.mark.parametrize("call", [Take, TakeLater])
def test_calls_wait_while_answers_are_unread(tmp_path: Path, run: Run, call: type[Take]) -> None:
    async def main() -> None:
        async with counting(tmp_path) as service:
            with service.connect() as raw:
                frames = await greeted(raw)
                calls = b"".join(encode_call(call("greedy", 700_000), number) for number in range(1, 201))
                await asyncio.get_running_loop().sock_sendall(raw, calls)
                (peer,) = service.server.peers
                handled = await standing_still(service, lambda: service.handled["greedy"])
                assert handled < 8 or call is TakeLater  # coroutines begin at once, and wait with what they return
                assert unread_nbytes(peer) < 2_000_000
                other = await AsyncClient.connect(service.address, "testing")
                assert await other.call(Take("polite", 5)) == bytes(5)
                other.close()
                await other.closed.wait()
                got = await read_frames(raw, frames, 200)  # nothing is lost
                assert sorted(frame.call_id for frame in got) == list(range(1, 201))
                assert service.handled["greedy"] == 200

    run(main())


def test_a_peer_that_is_not_read_and_reads_nothing_is_silent(tmp_path: Path, run: Run) -> None:
    async def main() -> None:
        async with counting(tmp_path) as service:
            with service.connect(PINGING) as raw:
                frames = await greeted(raw)
                calls = [encode_call(Take("greedy", 700_000), number) for number in range(1, 21)]
                await asyncio.get_running_loop().sock_sendall(raw, b"".join(calls))
                (peer,) = service.server.peers
                await standing_still(service, lambda: service.handled["greedy"])
                find_silent(peer)  # its answers are on their way: it has not been silent
                assert not peer.closed
                await read_frames(raw, frames, 1)
                await standing_still(service, lambda: service.handled["greedy"])
                find_silent(peer)
                find_silent(peer)  # nothing was read since
                async with asyncio.timeout(HANG_S):
                    await peer.ended.wait()

    run(main())


def test_one_connection_with_many_calls_does_not_hold_up_another(tmp_path: Path, run: Run) -> None:
    async def main() -> None:
        async with counting(tmp_path) as service:
            with service.connect() as busy, service.connect() as polite:
                frames = [await greeted(busy), await greeted(polite)]
                calls = b"".join(encode_call(Take("busy"), number) for number in range(1, 4001))
                assert busy.send(calls) == len(calls)
                polite.send(encode_call(Take("polite"), 1))
                await read_frames(polite, frames[1], 1)
                # The call came when the others were there already; it waited for a turn or two, not for all of them.
                assert service.handled["busy"] <= 4 * intake.TURN_FRAMES
                await read_frames(busy, frames[0], 4000)
                assert service.handled == {"busy": 4000, "polite": 1}

    run(main())


def test_what_comes_before_the_hello_is_small(tmp_path: Path, run: Run) -> None:
    async def main() -> None:
        async with counting(tmp_path) as service:
            with service.connect(encode_frame(FrameKind.HELLO, 0, bytes(60_000_000))[: HEADER_NBYTES + 100]) as raw:
                (answer,) = await read_frames(raw, FrameDecoder(), 2)
                assert "the limit is 4096" in str(decode_error(answer.body))

    run(main())


def test_unfinished_large_calls_share_a_limit(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Twenty that never finish: some are read, the rest waits; a large call that does finish is answered."""
    caplog.set_level(logging.ERROR)

    async def main() -> None:
        async with counting(tmp_path) as service:
            service.server.large_frames = LargeFrames(4_000_000, max_wait_s=0.05)
            never = [service.connect() for _ in range(20)]
            feeding = [asyncio.create_task(feed_part(raw)) for raw in never]
            await asyncio.wait(feeding, timeout=HANG_S)  # one is read, the others are cut off: no timer runs any more
            held = await standing_still(service, lambda: service.server.large_frames.nbytes)
            assert 1_000_000 < held < 8_000_000
            other = await AsyncClient.connect(service.address, "testing")
            for _ in range(3):
                assert await other.call(Send(bytes(3_000_000))) == 3_000_000
            other.close()
            await other.closed.wait()
            for task in feeding:
                task.cancel()
            await asyncio.gather(*feeding, return_exceptions=True)
            for raw in never:
                raw.close()
            await until(lambda: not service.server.peers, "all connections have ended")
            assert service.server.large_frames.nbytes == 0

    async def feed_part(raw: socket.socket) -> None:
        await greeted(raw)
        with contextlib.suppress(OSError):
            await asyncio.get_running_loop().sock_sendall(raw, encode_call(Send(bytes(6_000_000)), 1)[:-1])

    run(main())


class FakeSender:
    def __init__(self) -> None:
        self.is_read = True
        self.why: str | None = None

    def reads(self) -> bool:
        return self.is_read

    def read_on(self) -> None:
        self.is_read = True

    def cut_off(self, reason: str) -> None:
        self.why = reason


@pytest.fixture
def now_s() -> list[float]:
    return [100.0]


async def test_large_frames_wait_for_the_first_one(now_s: list[float]) -> None:
    shared = LargeFrames(1_000_000, max_wait_s=5.0, clock=lambda: now_s[0])
    first, second, third = FakeSender(), FakeSender(), FakeSender()
    assert shared.note(first, 800_000)
    assert shared.note(second, 100_000)
    assert shared.note(third, 50_000)  # a small one needs no room
    assert shared.nbytes == 900_000
    second.is_read = shared.note(second, 300_000)
    assert not second.reads()
    assert shared.note(first, 1_500_000)  # the first may always finish
    shared.forget(first)
    assert second.reads()
    assert (shared.nbytes, first.why) == (300_000, None)
    shared.forget(second)
    assert shared.nbytes == 0
    shared.close()


async def test_the_first_is_cut_off_when_others_wait_for_too_long(now_s: list[float]) -> None:
    shared = LargeFrames(1_000_000, max_wait_s=5.0, clock=lambda: now_s[0])
    first, second = FakeSender(), FakeSender()
    assert shared.note(first, 900_000)
    now_s[0] += 60.0
    assert shared.note(first, 950_000)  # nobody waits, so it has time
    assert shared.note(second, 300_000)  # it began long ago
    assert first.why is not None
    assert "others wait" in first.why
    assert (shared.nbytes, second.why) == (300_000, None)
    shared.close()


def test_a_decoder_that_never_runs_empty_keeps_only_what_is_left() -> None:
    frame = encode_frame(FrameKind.CALL, 1, bytes(1000))
    decoder = FrameDecoder()
    decoder.push(frame)
    for _ in range(1000):
        decoder.push(frame)
        assert decoder.next() is not None
    assert decoder.nbytes == len(frame)
    assert len(decoder.held) <= 3 * len(frame)


def test_a_decoder_with_a_limit_of_its_own() -> None:
    decoder = FrameDecoder(max_body_nbytes=10)
    assert decoder.feed(encode_frame(FrameKind.CALL, 1, bytes(10)))
    decoder.push(encode_frame(FrameKind.CALL, 1, bytes(11))[:HEADER_NBYTES])
    with pytest.raises(ProtocolError, match="11 bytes, the limit is 10"):
        decoder.next()
