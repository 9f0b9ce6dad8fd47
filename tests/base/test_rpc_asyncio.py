"""The asyncio driver and the server: many calls at once, streams, cancellation, lost peers, nonsense."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import struct
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import uvloop
from rpc_service import Big, Blobs, Count, Echo, Fail, Service, Slow, Unknown, Unsendable
from waiting import HANG_S, until

from moonpool.base.errors import (
    Cancelled,
    ConfigError,
    DamagedFrame,
    DeadlineExceeded,
    Internal,
    MoonpoolError,
    NotFound,
    Overloaded,
    PeerLost,
    ProtocolError,
    Unreachable,
)
from moonpool.base.frames import MAX_BODY_NBYTES, VERSION, FrameDecoder, FrameKind, encode_frame
from moonpool.base.rpc import AsyncClient, Call, Hello, RpcPeer, RpcServer
from moonpool.base.rpc.protocol import decode_error, encode_call, encode_error, encode_value

Served = tuple[Service, str]


@pytest.fixture
async def client(service: Served) -> AsyncIterator[AsyncClient]:
    client = await AsyncClient.connect(service[1], "testing", name="client-1", incarnation=5)
    yield client
    client.close()
    await client.closed.wait()


async def soon(event: asyncio.Event) -> None:
    async with asyncio.timeout(HANG_S):
        await event.wait()


async def test_many_calls_at_once(service: Served, client: AsyncClient) -> None:
    assert client.peer == Hello("testing", "server-1", 77)
    slow = asyncio.create_task(client.call(Slow()))
    sent = [str(number).encode() for number in range(500)]
    assert await asyncio.gather(*(client.call(Echo(data)) for data in sent)) == sent
    assert not slow.done()
    service[0].gate.set()
    assert await slow == "at last"


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (Fail("missing"), NotFound),
        (Fail("busy"), Overloaded),
        (Fail("bug"), Internal),
        (Fail("cancelled"), Cancelled),
        (Unsendable(), Internal),
        (Unknown(), ProtocolError),
        (Big(MAX_BODY_NBYTES), ProtocolError),
        (Echo(bytes(MAX_BODY_NBYTES)), ProtocolError),
    ],
)
async def test_errors_fail_one_call_only(client: AsyncClient, call: Call[object], error: type[MoonpoolError]) -> None:
    with pytest.raises(error):
        await client.call(call, timeout_s=HANG_S)
    assert await client.call(Echo(b"still here")) == b"still here"


async def test_calls_whose_answers_do_not_matter(service: Served, client: AsyncClient) -> None:
    client.send(Fail("bug"))
    client.send(Echo(b"dropped"))  # type: ignore[arg-type]
    assert await client.call(Echo(b"next")) == b"next", "answers to others are not taken for this one's"
    client.close()
    await client.closed.wait()
    client.send(Echo(b"too late"))  # type: ignore[arg-type]


async def test_deadline_cancels_the_handler(service: Served, client: AsyncClient) -> None:
    with pytest.raises(DeadlineExceeded):
        await client.call(Slow(), timeout_s=0.05)
    await soon(service[0].ended)
    assert await client.call(Echo(b"x")) == b"x"


async def test_cancelling_the_caller_cancels_the_handler(service: Served, client: AsyncClient) -> None:
    call = asyncio.create_task(client.call(Slow()))
    await soon(service[0].started)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await soon(service[0].ended)


async def test_streams(client: AsyncClient) -> None:
    assert [item async for item in client.stream(Count(5))] == [0, 1, 2, 3, 4]
    assert [item async for item in client.stream(Count(0))] == []
    stream = client.stream(Count(9, fail_at=3))
    assert [await anext(stream) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(NotFound, match="no 3"):
        await anext(stream)


async def test_leaving_a_stream_ends_it_at_the_server(service: Served, client: AsyncClient) -> None:
    async with contextlib.aclosing(client.stream(Blobs(10))) as blobs:
        async for _ in blobs:
            break
    await soon(service[0].ended)
    assert await client.call(Echo(b"x")) == b"x"


async def test_a_stream_item_may_be_late(client: AsyncClient, service: Served) -> None:
    with pytest.raises(DeadlineExceeded, match="did not end its stream"):
        async for _ in client.stream(Slow(), timeout_s=0.05):
            pass
    await soon(service[0].ended)


async def test_a_slow_reader_holds_the_server_back(service: Served) -> None:
    """A peer that does not read makes the stream wait, not the server's memory grow."""
    server, address = service
    connect = asyncio.open_unix_connection(address[5:], limit=1024) if address.startswith("unix") else None
    reader, writer = await (connect or asyncio.open_connection("127.0.0.1", int(address.rsplit(":", 1)[1]), limit=1024))
    writer.write(encode_value(FrameKind.HELLO, 0, Hello("testing")) + encode_call(Blobs(1 << 20), 1))
    await until(lambda: server.blobs_made > 0, "the server makes blobs")
    made, other = -1, await AsyncClient.connect(address, "testing")
    while made != server.blobs_made:  # until it stands still, though the server goes on
        made = server.blobs_made
        assert made < 64
        for _ in range(50):
            await other.call(Echo(b"x"))
    other.close()
    await other.closed.wait()
    writer.close()
    await soon(server.ended)
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    assert reader is not None


async def test_a_stream_that_is_never_read_fails_instead_of_filling_memory(
    client: AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moonpool.base.rpc.aio_client._MAX_WAITING_ITEMS", 50)
    stream = client.stream(Count(100_000))
    assert await anext(stream) == 0
    await client.call(Echo(b"meanwhile"))
    with pytest.raises(Overloaded, match="not read"):
        [await client.call(Echo(b"slow reader")) async for _ in stream]


async def test_server_gone_fails_everything_at_once(listen_at: str) -> None:
    service = Service()
    client = await AsyncClient.connect(await service.server.listen(listen_at), "testing")
    call = asyncio.create_task(client.call(Slow()))
    blobs = client.stream(Blobs(1))
    await anext(blobs)
    await service.server.close()
    with pytest.raises(PeerLost):
        await call
    with pytest.raises(PeerLost):
        async for _ in blobs:
            pass
    await soon(client.closed)
    with pytest.raises(PeerLost):
        await client.call(Echo(b"x"))
    with pytest.raises(PeerLost):
        await anext(client.stream(Count(1)))
    with pytest.raises(PeerLost):
        await AsyncClient.connect(client.address, "testing")
    client.close()


@pytest.fixture
async def complaints() -> list[str]:
    """What the event loop logs about errors that were never read."""
    said: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: said.append(context["message"]))
    return said


async def test_a_caller_cancelled_as_the_connection_ends_leaves_no_error_behind(
    service: Served, client: AsyncClient, complaints: list[str]
) -> None:
    calling = asyncio.create_task(client.call(Slow()))
    await soon(service[0].started)
    client.connection_lost(None)
    calling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await calling
    gc.collect()
    assert complaints == []


async def test_connecting_that_is_cancelled_leaves_no_error_behind(service: Served, complaints: list[str]) -> None:
    class CancelledOnceConnected(AsyncClient):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            super().connection_made(transport)
            tasks[0].cancel()  # before it knows that it is connected

    tasks = [asyncio.create_task(CancelledOnceConnected.connect(service[1], "testing"))]
    await asyncio.wait(tasks)
    assert tasks[0].cancelled()
    tasks.clear()  # with the task goes all that it held
    for _ in range(5):  # the transport ends
        await asyncio.sleep(0)
    gc.collect()
    assert complaints == []


async def test_client_gone_cancels_its_handlers_and_tells_the_owner(service: Served, client: AsyncClient) -> None:
    await client.call(Echo(b"x"))
    call = asyncio.create_task(client.call(Slow()))
    await soon(service[0].started)
    client.close()
    with pytest.raises(PeerLost):
        await call
    await soon(service[0].ended)
    await soon(service[0].peer_closed)
    assert not service[0].server.peers


async def test_close_waits_for_the_owners_of_connections(listen_at: str) -> None:
    service = Service()
    client = await AsyncClient.connect(await service.server.listen(listen_at), "testing")
    await client.call(Echo(b"x"))
    await service.server.close()
    assert service.peer_closed.is_set()
    await service.server.close()
    await soon(client.closed)


@pytest.mark.parametrize("num_turns", range(5))
async def test_a_connection_accepted_while_the_server_closes_ends_too(listen_at: str, num_turns: int) -> None:
    """In each of the turns in which asyncio sees it, accepts it, makes its transport and tells the server."""
    server = Service().server
    address = await server.listen(listen_at)
    scheme, _, place = address.partition(":")
    with socket.socket(socket.AF_UNIX if scheme == "unix" else socket.AF_INET) as raw:
        raw.connect(place if scheme == "unix" else (place.split(":")[0], int(place.split(":")[1])))
        for _ in range(num_turns):
            await asyncio.sleep(0)
        await server.close()
        for _ in range(10):
            await asyncio.sleep(0)
        assert not server.peers
        raw.setblocking(False)
        with contextlib.suppress(ConnectionResetError):
            assert raw.recv(1) == b"", "the connection has ended"


async def test_wrong_service(service: Served) -> None:
    with pytest.raises(ProtocolError, match="this is 'testing', not 'store'"):
        await AsyncClient.connect(service[1], "store")


async def test_nobody_there(tmp_path: Path) -> None:
    with pytest.raises(PeerLost):
        await AsyncClient.connect(f"unix:{tmp_path}/none.sock", "testing")


async def test_a_server_that_never_greets(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as mute:
        mute.bind(f"{tmp_path}/mute.sock")
        mute.listen(1)
        with pytest.raises(PeerLost, match=r"within 0\.05 s"):
            await AsyncClient.connect(f"unix:{tmp_path}/mute.sock", "testing", timeout_s=0.05)


async def raw_exchange(address: str, data: bytes) -> bytes:
    """All that the server says to `data` until it hangs up."""
    if address.startswith("unix"):
        reader, writer = await asyncio.open_unix_connection(address[5:])
    else:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(address.rsplit(":", 1)[1]))
    writer.write(data)
    try:
        async with asyncio.timeout(HANG_S):
            return await reader.read()
    finally:
        writer.close()


HELLO = encode_value(FrameKind.HELLO, 0, Hello("testing"))


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        bytes(64),
        encode_call(Echo(b"no hello"), 1),
        encode_error(0, Overloaded("an error as a greeting")),
        encode_frame(FrameKind.HELLO, 0, b"\xc1"),
        HELLO + encode_frame(FrameKind.REPLY, 1, b""),
        HELLO + struct.pack("<2sBBIIIQI", b"MP", VERSION, 1, 0, 2**32 - 1, 0, 1, 0),
        HELLO + encode_call(Slow(), 4) + encode_call(Slow(), 4),
    ],
    ids=["http", "zeros", "no hello", "error first", "not msgpack", "a reply", "too large", "same id twice"],
)
async def test_nonsense_ends_that_connection_only(service: Served, client: AsyncClient, data: bytes) -> None:
    assert (await raw_exchange(service[1], data)).count(b"MP") >= 1  # it says why
    assert await client.call(Echo(b"x")) == b"x"
    assert len(service[0].server.peers) == 1


async def test_a_damaged_call_is_not_carried_out(service: Served) -> None:
    """Its caller learns that the connection is lost, and why."""
    call = bytearray(encode_call(Slow(), 3))
    call[-1] ^= 1
    answer = await raw_exchange(service[1], HELLO + call)
    last = FrameDecoder().feed(answer)[-1]
    assert last.kind is FrameKind.ERROR
    assert isinstance(decode_error(last.body), DamagedFrame)
    assert not service[0].started.is_set()


async def test_cancel_together_with_its_call(service: Served) -> None:
    """Both in one packet: the handler never begins, and nothing is left un-awaited."""
    data = HELLO + encode_call(Slow(), 3) + encode_frame(FrameKind.CANCEL, 3) + b"and now garbage, as long as a header"
    await raw_exchange(service[1], data)
    assert not service[0].started.is_set()


async def test_silent_connections_are_ended(service: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moonpool.base.rpc.aio_server._HELLO_TIMEOUT_S", 0.05)
    with contextlib.suppress(ConnectionResetError):
        assert await raw_exchange(service[1], b"MP") == b""


async def test_an_owners_bug_does_not_stop_the_others(listen_at: str, caplog: pytest.LogCaptureFixture) -> None:
    seen: list[str] = []

    def echo(call: Echo, peer: RpcPeer) -> bytes:
        peer.on_close(lambda: [][1])
        peer.on_close(lambda: seen.append("told"))
        return call.data

    server = RpcServer("testing", {Echo: echo})
    client = await AsyncClient.connect(await server.listen(listen_at), "testing")
    await client.call(Echo(b"x"))
    await server.close()
    assert seen == ["told"]
    assert "IndexError" in caplog.text


async def test_an_address_in_use_is_refused(listen_at: str) -> None:
    first, second = Service(), Service()
    address = await first.server.listen(listen_at)
    with pytest.raises(ConfigError, match="cannot listen"):
        await second.server.listen(address)
    client = await AsyncClient.connect(address, "testing")
    assert await client.call(Echo(b"x")) == b"x"
    client.close()
    await first.server.close()


async def test_a_socket_left_behind_is_taken_over_but_no_other_file(tmp_path: Path) -> None:
    stale, precious = tmp_path / "stale.sock", tmp_path / "precious"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as dead:
        dead.bind(str(stale))
    precious.write_text("data")
    service = Service()
    await service.server.listen(f"unix:{stale}")
    with pytest.raises(ConfigError):
        await service.server.listen(f"unix:{precious}")
    assert precious.read_text() == "data"
    await service.server.close()
    assert not stale.exists()


def test_on_uvloop(listen_at: str) -> None:
    async def main() -> list[int]:
        service = Service()
        client = await AsyncClient.connect(await service.server.listen(listen_at), "testing")
        assert await client.call(Echo(b"x")) == b"x"
        numbers = [item async for item in client.stream(Count(3))]
        call = asyncio.create_task(client.call(Slow(), timeout_s=5 * HANG_S))
        await soon(service.started)
        start = time.monotonic()
        await service.server.close()
        with pytest.raises(PeerLost):
            await call
        assert time.monotonic() - start < HANG_S / 2
        return numbers

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(main()) == [0, 1, 2]


async def test_a_machine_that_does_not_answer_is_unreachable() -> None:
    """A kernel that ignores connections behaves like one that is off: here, because the queue is full."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.socket())
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        address = server.getsockname()
        for _ in range(4):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(address)
        with pytest.raises(Unreachable, match=r"has not answered within 0\.2 s"):
            await AsyncClient.connect(f"tcp:127.0.0.1:{address[1]}", "any", reach_s=0.2)


async def test_a_server_that_hangs_is_not_unreachable() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        address = f"tcp:127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(PeerLost, match="did not answer") as raised:
            await AsyncClient.connect(address, "any", timeout_s=0.3, reach_s=0.2)
    assert not isinstance(raised.value, Unreachable)
    with pytest.raises(PeerLost) as raised:
        await AsyncClient.connect(address, "any", reach_s=5.0)
    assert not isinstance(raised.value, Unreachable), "its machine refuses at once: the server may start again"
