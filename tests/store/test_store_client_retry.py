"""The client of the master: it retries, but never for longer than it was told."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from store_pool import LoopThread

from moonpool.base.errors import DeadlineExceeded, PeerLost
from moonpool.base.rpc import RpcPeer, RpcServer
from moonpool.store.client.master_client import MasterClient
from moonpool.store.messages import SERVICE, Exist


class FakeMaster:
    """Answers Exist, and can be away."""

    def __init__(self, folder: Path, loop: LoopThread) -> None:
        self.address = f"unix:{folder}/m.sock"
        self._loop = loop
        self._server: RpcServer | None = None
        self.num_asked = 0
        self.lost_answers = 0  # so many calls are done, and the connection ends instead of an answer

    def start(self) -> None:
        async def listen() -> RpcServer:
            server = RpcServer(SERVICE, {Exist: self._exist})
            await server.listen(self.address)
            return server

        self._server = self._loop.run(listen())

    def stop(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            self._loop.run(server.close())

    def _exist(self, call: Exist, peer: RpcPeer) -> list[bool]:
        self.num_asked += 1
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


def client_to(master: FakeMaster, **limits: float | None) -> MasterClient:
    given = {"connect_timeout_s": 1.0, "timeout_s": 10.0, "retry_s": 10.0, **limits}
    return MasterClient(master.address, name="t", **given)  # type: ignore[arg-type]


def test_a_restart_is_ridden_through(master: FakeMaster) -> None:
    master.start()
    client = client_to(master)
    assert client.call_noting_repeats(Exist([b"k"])) == ([True], False)
    master.stop()
    answers: list[tuple[list[bool], bool]] = []
    asking = threading.Thread(target=lambda: answers.append(client.call_noting_repeats(Exist([b"k"]))))
    asking.start()
    master.start()
    asking.join(10)
    assert answers == [([True], True)]
    client.close()


def test_it_gives_up_when_it_was_told_to(master: FakeMaster) -> None:
    client = client_to(master, retry_s=0.1)
    started_s = time.monotonic()
    with pytest.raises(PeerLost):
        client.call(Exist([b"k"]))
    assert 0.1 <= time.monotonic() - started_s < 5
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
    client._rpc._drop()
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


def test_close_wakes_who_waits(master: FakeMaster) -> None:
    client = client_to(master)
    errors: list[Exception] = []

    def ask() -> None:
        try:
            client.call(Exist([b"k"]))
        except (PeerLost, DeadlineExceeded) as error:
            errors.append(error)

    asking = threading.Thread(target=ask)
    asking.start()
    client.close()
    asking.join(5)
    assert not asking.is_alive()
    assert isinstance(errors[0], PeerLost)
