"""The client of the master: it retries, but never for longer than it was told."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from store_pool import LoopThread, break_connection
from waiting import HANG_S, wait_until

from moonpool.base.clock import Deadline, VirtualClock
from moonpool.base.errors import DeadlineExceeded, PeerLost
from moonpool.base.rpc import RpcPeer, RpcServer
from moonpool.base.rpc.breaker import BreakerLimits
from moonpool.store.client import master_client
from moonpool.store.client.master_client import MasterClient
from moonpool.store.messages import SERVICE, Exist


class FakeMaster:
    """Answers Exist, and can be away."""

    def __init__(self, folder: Path, loop: LoopThread) -> None:
        self.address = f"unix:{folder}/m.sock"
        self._loop = loop
        self._server: RpcServer | None = None
        self.num_asked = 0
        self.is_silent = False
        self.lost_answers = 0  # so many calls are done, and the connection ends instead of an answer

    def start(self) -> None:
        async def listen() -> RpcServer:
            self._speaks_again = asyncio.Event()
            server = RpcServer(SERVICE, {Exist: self._exist})
            await server.listen(self.address)
            return server

        self._server = self._loop.run(listen())

    def stop(self) -> None:
        server, self._server = self._server, None

        async def close() -> None:
            self._speaks_again.set()
            assert server is not None
            await server.close()

        if server is not None:
            self._loop.run(close())

    async def _exist(self, call: Exist, peer: RpcPeer) -> list[bool]:
        self.num_asked += 1
        if self.is_silent:
            await self._speaks_again.wait()
        if self.lost_answers:
            self.lost_answers -= 1
            peer.abort()
        return [True] * len(call.keys)


@pytest.fixture
def master(tmp_path: Path) -> Iterator[FakeMaster]:
    loop = LoopThread()
    master = FakeMaster(tmp_path, loop)
    yield master
    master.stop()
    loop.close()


def client_to(master: FakeMaster, **limits: float) -> MasterClient:
    given: dict[str, Any] = {"connect_timeout_s": HANG_S, "timeout_s": HANG_S, "retry_s": HANG_S, **limits}
    return MasterClient(master.address, name="t", limits=BreakerLimits(silence_s=HANG_S), **given)


def test_a_restart_is_ridden_through(master: FakeMaster) -> None:
    master.start()
    client = client_to(master)
    assert client.call_noting_repeats(Exist([b"k"])) == ([True], False)
    master.stop()
    answers: list[tuple[list[bool], bool]] = []
    asking = threading.Thread(target=lambda: answers.append(client.call_noting_repeats(Exist([b"k"]))))
    asking.start()
    master.start()
    asking.join(HANG_S)
    assert answers == [([True], True)]
    client.close()


def test_it_gives_up_when_it_was_told_to(master: FakeMaster) -> None:
    client = client_to(master, retry_s=0.1, timeout_s=600.0)
    started_s = time.monotonic()
    with pytest.raises(PeerLost):
        client.call(Exist([b"k"]))
    assert 0.1 <= time.monotonic() - started_s < HANG_S / 2, "not for as long as a call may take"
    client.close()


def test_an_answer_that_was_lost_is_asked_for_again(master: FakeMaster) -> None:
    master.start()
    client = client_to(master)
    master.lost_answers = 1
    assert client.call_noting_repeats(Exist([b"k"])) == ([True], True)
    assert master.num_asked == 2
    master.lost_answers = 1
    with pytest.raises(PeerLost):
        client.call_once(Exist([b"k"]))
    client.close()


def test_a_call_for_one_connection_is_sent_over_no_other(master: FakeMaster) -> None:
    master.start()
    client = client_to(master)
    client.call(Exist([b"k"]))
    first = client.connection
    assert client.call_once(Exist([b"k"]), first) == [True]
    break_connection(client)
    with pytest.raises(PeerLost, match="has ended"):  # and does not connect
        client.call_once(Exist([b"k"]), first)
    client.call(Exist([b"k"]))
    second = client.connection
    assert second is not first
    with pytest.raises(PeerLost, match="has ended"):
        client.call_once(Exist([b"k"]), first)
    assert master.num_asked == 3
    assert client.call_once(Exist([b"k"]), second) == [True]
    assert client.connection is second, "what was refused has not closed it"
    client.close()


@pytest.mark.parametrize("end", [MasterClient.begin_close, MasterClient.close])
def test_close_wakes_who_waits(master: FakeMaster, end: Callable[[MasterClient], None]) -> None:
    client = client_to(master, retry_s=600.0, timeout_s=600.0)
    errors: list[Exception] = []

    def ask() -> None:
        try:
            client.call(Exist([b"k"]))
        except (PeerLost, DeadlineExceeded) as error:
            errors.append(error)

    asking = threading.Thread(target=ask)
    asking.start()
    wait_until(lambda: client.counters()["master_outages"], "it waits for the master")
    end(client)
    asking.join(HANG_S / 2)
    assert not asking.is_alive()
    assert isinstance(errors[0], PeerLost)
    client.close()


def test_a_client_that_closes_does_not_begin_to_wait(master: FakeMaster) -> None:
    client = client_to(master, retry_s=600.0, timeout_s=600.0)
    client.begin_close()
    started_s = time.monotonic()
    for _ in range(3):
        with pytest.raises(PeerLost):
            client.call(Exist([b"k"]))
    assert not list(client.retry_pauses())
    assert time.monotonic() - started_s < HANG_S / 2
    client.close()


def test_the_last_calls_take_no_longer_than_one(master: FakeMaster, monkeypatch: pytest.MonkeyPatch) -> None:
    """All together, also when the master is silent and is not known to be away."""
    clock = VirtualClock()
    monkeypatch.setattr(master_client, "Deadline", partial(Deadline, clock=clock))
    master.start()
    client = client_to(master, timeout_s=600.0)
    client.begin_close()
    assert client.call(Exist([b"k"])) == [True]
    clock.advance(600.0)
    master.is_silent = True
    for send in (client.call, client.call_once):
        with pytest.raises(DeadlineExceeded):
            send(Exist([b"k"]))
    client.close()
