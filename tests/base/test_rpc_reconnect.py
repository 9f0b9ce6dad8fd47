"""A connection that is made again when it is lost, with what runs on it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from waiting import HANG_S, until

from moonpool.base.backoff import Backoff
from moonpool.base.errors import MoonpoolError, NotFound, PeerLost
from moonpool.base.rpc import AsyncClient, Call, RpcServer, reconnect
from moonpool.base.rpc.reconnect import ReconnectingClient


class Echo(Call[int]):
    number: int


class Owner:
    """Notes what it is told; its first duty does what `todo` says, once per connection."""

    def __init__(self, address: str) -> None:
        self.todo: list[str] = []
        self.lost: list[tuple[type[MoonpoolError], bool]] = []
        self.num_cancelled = 0
        self.connections: asyncio.Queue[AsyncClient] = asyncio.Queue()
        self.link = ReconnectingClient(
            address,
            "testing",
            [self.act, self.wait],
            name="t",
            backoff=Backoff(0.01, 0.01),
            on_lost=lambda error, was_connected: self.lost.append((type(error), was_connected)),
        )

    async def act(self, client: AsyncClient) -> None:
        assert await client.call(Echo(3)) == 3
        self.connections.put_nowait(client)
        match self.todo.pop(0) if self.todo else "wait":
            case "return":
                return
            case "raise":
                raise NotFound("no such thing")
            case "bug":
                raise ValueError("a bug")
            case "lose":
                try:
                    await asyncio.Event().wait()
                finally:
                    raise PeerLost("lost meanwhile")
        await asyncio.Event().wait()

    async def wait(self, client: AsyncClient) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            self.num_cancelled += 1

    async def connected(self) -> AsyncClient:
        async with asyncio.timeout(HANG_S):
            return await self.connections.get()


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[tuple[RpcServer, str]]:
    server = RpcServer("testing", {Echo: lambda call, peer: call.number})
    address = f"unix:{tmp_path}/s"
    await server.listen(address)
    yield server, address
    await server.close()


@contextlib.asynccontextmanager
async def running(owner: Owner) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(owner.link.run())
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.wait([task])
        owner.link.close()


@pytest.mark.parametrize(("end", "error"), [("return", PeerLost), ("raise", NotFound)])
async def test_a_duty_that_ends_makes_a_new_connection(
    server: tuple[RpcServer, str], end: str, error: type[MoonpoolError]
) -> None:
    owner = Owner(server[1])
    owner.todo = [end]
    async with running(owner):
        first, second = await owner.connected(), await owner.connected()
        assert first.closed.is_set()
        assert owner.link.client is second
        assert owner.lost == [(error, True)]
        assert owner.num_cancelled == 1
        answer = await asyncio.to_thread(owner.link.call_from_thread, Echo(5), timeout_s=HANG_S)
        assert answer == 5


async def test_an_outage_is_told_and_ends_with_a_connection(server: tuple[RpcServer, str], tmp_path: Path) -> None:
    owner = Owner(server[1])
    async with running(owner):
        await owner.connected()
        await server[0].close()
        async with asyncio.timeout(HANG_S):
            while len(owner.lost) < 3:  # noqa: ASYNC110 - a list that grows
                await asyncio.sleep(0.01)
        assert owner.link.client is None
        with pytest.raises(PeerLost, match="not connected"):
            owner.link.call_from_thread(Echo(5), timeout_s=1.0)
        assert owner.lost[0] == (PeerLost, True)
        assert set(owner.lost[1:]) == {(PeerLost, False)}
        again = RpcServer("testing", {Echo: lambda call, peer: call.number})
        await again.listen(server[1])
        await owner.connected()
    await again.close()


async def test_the_log_names_a_socket_that_cannot_be_reached_once(
    server: tuple[RpcServer, str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(reconnect, "SAY_AFTER_S", 0.0)
    caplog.set_level("INFO")
    owner = Owner(server[1])
    await server[0].close()
    async with running(owner):
        await until(lambda: len(owner.lost) >= 3, "it has tried three times")
        (said,) = [record.getMessage() for record in caplog.records]
        assert said == f"t: no connection to service testing: {server[1]}: No such file or directory; it is tried again"
        again = RpcServer("testing", {Echo: lambda call, peer: call.number})
        await again.listen(server[1])
        await owner.connected()
        assert caplog.messages[1].startswith(f"t: connected to {server[1]} after ")
        await again.close()
        await until(lambda: len(caplog.messages) == 3, "the next outage is named, too")


async def test_what_is_back_soon_is_not_worth_a_line(
    server: tuple[RpcServer, str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(reconnect, "SAY_AFTER_S", 600.0)
    owner = Owner(server[1])
    await server[0].close()
    async with running(owner):
        await until(lambda: len(owner.lost) >= 3, "it has tried three times")
    assert caplog.messages == []


async def test_a_bug_ends_it(server: tuple[RpcServer, str]) -> None:
    owner = Owner(server[1])
    owner.todo = ["bug"]
    async with running(owner) as task:
        await asyncio.wait([task], timeout=HANG_S)
        with pytest.raises(ValueError, match="a bug"):
            task.result()


async def test_ends_when_the_connection_is_lost_while_it_is_cancelled(server: tuple[RpcServer, str]) -> None:
    """A node that was stopped and then told to end lost its connection at the same time, and never ended."""
    owner = Owner(server[1])
    owner.todo = ["lose"]
    task = asyncio.create_task(owner.link.run())
    await owner.connected()
    task.cancel()
    done, _ = await asyncio.wait([task], timeout=HANG_S)
    assert done
    assert task.cancelled()
