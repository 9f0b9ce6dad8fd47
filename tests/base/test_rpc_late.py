"""A call whose caller no longer waits is not begun: what clients state, and from when on the server counts."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st
from waiting import HANG_S

from moonpool.base.clock import VirtualClock
from moonpool.base.errors import MoonpoolError, ProtocolError, TooLate
from moonpool.base.frames import MAX_WAIT_MS, Frame, FrameDecoder, FrameKind, encode_frame
from moonpool.base.metrics import process_metrics
from moonpool.base.rpc import AsyncClient, BlockingClient, Call, Hello, RpcPeer, RpcServer, StreamCall
from moonpool.base.rpc.aio_server import LateCalls
from moonpool.base.rpc.breaker import BreakerLimits
from moonpool.base.rpc.intake import ArrivalTimes
from moonpool.base.rpc.protocol import decode_error, encode_call, encode_error, encode_value, wait_ms_of

HELLO = encode_value(FrameKind.HELLO, 0, Hello("testing"))
Run = Callable[[Awaitable[None]], None]


class Work(Call[bytes]):
    """Keeps the server busy for so long, and is answered with so many bytes."""

    who: str
    seconds: float = 0.0
    nbytes: int = 0


class WorkLater(Work):
    """As Work, by a coroutine."""


class GiveBack(Call[None]):
    outlives_caller: ClassVar[bool] = True


class Items(StreamCall[int]):
    pass


class Busy:
    """A server whose handlers take time of a clock that stands still otherwise."""

    def __init__(self, path: Path, patch: pytest.MonkeyPatch) -> None:
        self.clock, self.begun = VirtualClock(1000.0), Counter[str]()
        patch.setattr("moonpool.base.rpc.aio_server.time", SimpleNamespace(monotonic=self.clock.now_s))
        patch.setattr("moonpool.base.rpc.aio_server._MAX_READS", 1)  # as after a quiet time: each turn is noted
        handlers: dict[type[Call[Any]], Callable[[Any, RpcPeer], Any]] = {
            Work: self.work,
            WorkLater: self.work_later,
            GiveBack: lambda call, _: self.begun.update(["give back"]),
            Items: self.items,
        }
        self.server = RpcServer("testing", handlers)
        self.address = f"unix:{path}/s.sock"
        self.late_before = LateCalls.total

    @property
    def num_late(self) -> int:
        return LateCalls.total - self.late_before

    def work(self, call: Work, _: object) -> bytes:
        self.begun[call.who] += 1
        self.clock.advance(call.seconds)
        return bytes(call.nbytes)

    async def work_later(self, call: WorkLater, _: object) -> bytes:
        return self.work(call, None)

    async def items(self, call: Items, _: object) -> AsyncIterator[int]:
        self.begun["items"] += 1
        yield 1


class Connection:
    """One whose bytes are written and read by hand."""

    def __init__(self, busy: Busy) -> None:
        self.raw = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.raw.connect(busy.address[5:])
        self.raw.setblocking(False)
        self._frames = FrameDecoder()

    def send(self, *frames: bytes) -> None:
        self.raw.sendall(b"".join(frames))

    async def read(self, count: int = 1) -> list[Frame]:
        got: list[Frame] = []
        async with asyncio.timeout(HANG_S):
            while len(got) < count:
                data = await asyncio.get_running_loop().sock_recv(self.raw, 1 << 20)
                if not data:
                    break
                got += self._frames.feed(data)
        return got

    async def outcomes(self, count: int = 1) -> list[str]:
        """The kinds of the answers; TooLate where it is that error."""
        errors = (decode_error(each.body) if each.kind is FrameKind.ERROR else None for each in await self.read(count))
        return ["answered" if each is None else type(each).__name__ for each in errors]


@contextlib.asynccontextmanager
async def busy_server(path: Path, patch: pytest.MonkeyPatch, num: int) -> AsyncIterator[tuple[Busy, list[Connection]]]:
    """With so many connections."""
    busy = Busy(path, patch)
    await busy.server.listen(busy.address)
    connections = []
    try:
        for _ in range(num):
            connections.append(Connection(busy))
            connections[-1].send(HELLO)
            await connections[-1].read()
        yield busy, connections
    finally:
        await busy.server.close()
        for each in connections:
            each.raw.close()


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Run:
    return asyncio.run if request.param == "asyncio" else uvloop.run  # type: ignore[return-value]


def test_calls_of_others_that_waited_behind_a_long_one_are_not_begun(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All were there when the event loop looked at its sockets, so it knows how long they have waited."""

    async def main() -> None:
        async with busy_server(tmp_path, monkeypatch, 7) as (busy, connections):
            calls = [
                encode_call(Work("first", 1.0), 1, 200),
                encode_call(Work("short"), 2, 999),
                encode_call(WorkLater("short"), 3, 200),
                encode_call(Items(), 4, 200),
                encode_call(Work("long"), 5, 1001),
                encode_call(Work("no deadline"), 6),
                encode_call(GiveBack(), 7, 200),
            ]
            for connection, call in zip(connections, calls, strict=True):
                connection.send(call)
            outcomes = [await each.outcomes() for each in connections]
            assert outcomes == [["answered"], *[["TooLate"]] * 3, *[["answered"]] * 3]
            assert busy.begun == {"first": 1, "long": 1, "no deadline": 1, "give back": 1}
            assert busy.num_late == 3

    run(main())


@pytest.mark.parametrize("first", ["in order", "reversed"])
def test_whoever_is_read_after_the_long_one_is_refused(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    """Two long calls: whichever comes first, the other one has waited for too long."""

    async def main() -> None:
        async with busy_server(tmp_path, monkeypatch, 2) as (busy, connections):
            for connection in connections if first == "in order" else reversed(connections):
                connection.send(encode_call(Work("long", 1.0), 1, 200))
            outcomes = [await each.outcomes() for each in connections]
            assert sorted(outcomes) == [["TooLate"], ["answered"]]
            assert busy.begun["long"] == 1
            assert busy.num_late == 1
            connections[0].send(encode_call(Work("next"), 2, 200))
            assert await connections[0].outcomes() == ["answered"], "the next turn of the event loop begins anew"

    run(main())


def test_calls_that_waited_in_the_servers_own_queue_are_not_begun(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with busy_server(tmp_path, monkeypatch, 1) as (busy, [connection]):
            connection.send(
                encode_call(Work("first", 1.0), 1, 200),
                encode_call(Work("short"), 2, 200),
                encode_call(Items(), 3, 999),
                encode_call(Work("long"), 4, 1001),
                encode_call(GiveBack(), 5, 1),
                encode_call(Work("no deadline"), 6),
            )
            wanted = ["answered", "TooLate", "TooLate", "answered", "answered", "answered"]
            assert await connection.outcomes(6) == wanted
            assert busy.begun == {"first": 1, "long": 1, "give back": 1, "no deadline": 1}
            assert busy.num_late == 2

    run(main())


def test_a_call_that_waited_until_answers_were_read_is_not_begun(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with busy_server(tmp_path, monkeypatch, 1) as (busy, [connection]):
            connection.send(encode_call(Work("large", nbytes=8_000_000), 1))
            (peer,) = busy.server.peers
            while peer._is_writable:  # noqa: ASYNC110 - a turn of the loop, as many as it needs
                await asyncio.sleep(0)
            connection.send(encode_call(Work("short"), 2, 200), encode_call(Work("long"), 3, 2000))
            while peer._held is None:  # noqa: ASYNC110
                await asyncio.sleep(0)
            busy.clock.advance(1.0)
            assert await connection.outcomes(3) == ["answered", "TooLate", "answered"]
            assert busy.begun == {"large": 1, "long": 1}

    run(main())


def test_a_call_that_was_there_when_the_server_went_on_is_carried_out(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody knows how long the kernel has had it: the process was stopped, or busy with something else."""

    async def main() -> None:
        async with busy_server(tmp_path, monkeypatch, 2) as (busy, connections):
            for each in connections:
                each.send(encode_call(Work("stopped"), 1, 200))
            busy.clock.advance(30.0)
            assert [await each.outcomes() for each in connections] == [["answered"], ["answered"]]
            assert busy.num_late == 0

    run(main())


def test_late_calls_are_among_the_metrics_of_every_role(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with busy_server(tmp_path, monkeypatch, 1) as (_, [connection]):
            before = num_late_in_metrics()
            connection.send(encode_call(Work("first", 1.0), 1), encode_call(Work("short"), 2, 200))
            await connection.read(2)
            assert num_late_in_metrics() == before + 1

    asyncio.run(main())


def num_late_in_metrics() -> float:
    (found,) = [each for each in process_metrics() if each.name == "moonpool_rpc_late_calls"]
    return found.samples[0].value


# what clients state


class Recorder:
    """A server by hand that answers each call with nothing, and keeps what it stated."""

    def __init__(self, path: Path) -> None:
        self.address, self.waits_ms = f"unix:{path}/r.sock", list[int]()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        frames = FrameDecoder()
        while data := await reader.read(65536):
            for frame in frames.feed(data):
                if frame.kind is FrameKind.HELLO:
                    writer.write(HELLO)
                elif frame.kind is FrameKind.CALL:
                    self.waits_ms.append(frame.wait_ms)
                    kind = FrameKind.END if b"Items" in frame.body else FrameKind.REPLY
                    writer.write(encode_frame(kind, frame.call_id, b"\xc4\0" if b"Work" in frame.body else b"\xc0"))
        writer.close()


@contextlib.asynccontextmanager
async def recorder(path: Path) -> AsyncIterator[Recorder]:
    made = Recorder(path)
    async with await asyncio.start_unix_server(made.serve, made.address[5:]):
        yield made


async def test_an_asyncio_client_states_how_long_it_waits(tmp_path: Path) -> None:
    async with recorder(tmp_path) as server:
        client = await AsyncClient.connect(server.address, "testing")
        await client.call(Work("x"), timeout_s=600.0)
        await client.call(GiveBack(), timeout_s=600.0)
        assert [item async for item in client.stream(Items(), timeout_s=700.0)] == []
        assert [item async for item in client.stream(Items())] == []
        client.send(GiveBack())
        await client.call(Work("x"), timeout_s=10**9)
        client.close()
        await client.closed.wait()
        assert server.waits_ms == [600_001, 0, 700_001, 0, 0, MAX_WAIT_MS]


async def test_a_blocking_client_states_how_long_it_waits(tmp_path: Path) -> None:
    """With a silent server: that is what its callers get."""
    async with recorder(tmp_path) as server:
        for limits, wanted_ms in ((None, 600_001), (BreakerLimits(silence_s=400.0), 400_001)):
            client = BlockingClient(server.address, "testing", limits=limits)
            await asyncio.to_thread(client.call, Work("connects"), timeout_s=HANG_S)
            server.waits_ms.clear()
            for _ in range(2):  # the second one finds the kernel's limit set, and takes the fast path
                await asyncio.to_thread(client.call, Work("x"), timeout_s=600.0)
            assert max(server.waits_ms) == wanted_ms
            assert min(server.waits_ms) >= wanted_ms - 60_000
            await asyncio.to_thread(client.call, GiveBack(), timeout_s=600.0)
            assert server.waits_ms[-1] == 0
            await asyncio.to_thread(client.close)


async def test_time_that_a_call_waited_for_its_turn_is_not_stated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = VirtualClock()
    monkeypatch.setattr("moonpool.base.clock._SYSTEM_CLOCK", clock)
    async with recorder(tmp_path) as server:
        client = BlockingClient(server.address, "testing", gate=lambda: clock.advance(100.0))
        await asyncio.to_thread(client.call, Work("x"), timeout_s=600.0)
        assert server.waits_ms == [500_001]
        await asyncio.to_thread(client.close)


def test_times_are_stated_in_milliseconds_rounded_up() -> None:
    assert [wait_ms_of(each) for each in (None, 0.0, 0.0004, 0.2, 1e12, float("inf"))] == [
        0,
        1,
        1,
        201,
        MAX_WAIT_MS,
        MAX_WAIT_MS,
    ]


# peers of the earlier format, whose frames have no such field

HELLO_2 = bytes.fromhex("4d500200886225ae10000000efffffff000000000000000094a573746f7265a6636c69656e7405c2")
BOTH = "version 2 of the RPC protocol, this side version 3"


async def test_a_client_of_the_earlier_format_is_told_both_versions(tmp_path: Path) -> None:
    """In a frame that it cannot read, but its version: so it finds the same sentence by itself."""
    server = RpcServer("store", {Work: lambda call, _: b""})
    await server.listen(f"unix:{tmp_path}/s.sock")
    reader, writer = await asyncio.open_unix_connection(f"{tmp_path}/s.sock")
    writer.write(HELLO_2)
    async with asyncio.timeout(HANG_S):
        answer = await reader.read()
    assert answer[:3] == b"MP\3", "what the other side names, in the place where it looks first"
    error = decode_error(FrameDecoder().feed(answer)[0].body)
    assert isinstance(error, ProtocolError)
    assert BOTH in str(error)
    writer.close()
    await server.close()


async def test_a_server_of_the_earlier_format_is_named_with_both_versions(tmp_path: Path) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(HELLO_2)
        await reader.read()
        writer.close()

    address = f"unix:{tmp_path}/s.sock"
    async with await asyncio.start_unix_server(serve, address[5:]):
        with pytest.raises(ProtocolError, match=BOTH):
            await AsyncClient.connect(address, "store")
        client = BlockingClient(address, "store")
        with pytest.raises(ProtocolError, match=BOTH):
            await asyncio.to_thread(client.connect)
        client.close()


def test_the_error_crosses_the_wire_as_what_it_is() -> None:
    (frame,) = FrameDecoder().feed(encode_error(3, TooLate("not begun")))
    error: MoonpoolError = decode_error(frame.body)
    assert type(error) is TooLate
    assert error.code == "too_late"


# when waiting bytes have arrived


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 30)), max_size=150))
def test_the_time_of_waiting_bytes_is_that_of_their_read(steps: list[tuple[int, int]]) -> None:
    """Reads of some bytes, after each of which the server handles some. The time is never too early."""
    arrivals, waiting, now_s = ArrivalTimes(), list[float](), 0.0
    for nbytes, num_handled in steps:
        now_s += 1.0
        (arrivals.add if waiting else arrivals.begin)(nbytes, now_s)
        waiting += [now_s] * nbytes
        del waiting[:num_handled]
        arrivals.skip_to(len(waiting))
        if waiting:
            assert arrivals.first_s >= waiting[0]
            assert arrivals.first_s == waiting[0] or len(set(waiting)) > 60, "only a long queue is not known exactly"
        assert len(arrivals.later) <= 64
