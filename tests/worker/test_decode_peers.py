"""The connections over which hand-offs are opened and committed: real sockets, calls from threads."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

import pytest
from waiting import until

from moonpool.base.cluster import WORKER_SERVICE
from moonpool.base.errors import PeerLost, StaleGeneration
from moonpool.base.rpc import AsyncClient, Call, RpcPeer, RpcServer
from moonpool.worker.kv_link.decode_peers import DecodePeers
from moonpool.worker.messages import AbortHandoff, CommitHandoff, OpenHandoff, TokenOut

T = TypeVar("T")


class PlayedDecode:
    """A decode worker's server: notes the calls and who made them, and keeps commits waiting until `may_commit`."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.made: list[tuple[type[Call[None]], RpcPeer]] = []
        self.may_commit = asyncio.Event()
        self.closed: list[RpcPeer] = []
        self.server = RpcServer(
            WORKER_SERVICE, {OpenHandoff: self._open, CommitHandoff: self._commit, AbortHandoff: self._note}
        )

    def _note(self, call: Call[None], peer: RpcPeer) -> None:
        self.made.append((type(call), peer))

    def _open(self, call: OpenHandoff, peer: RpcPeer) -> None:
        self._note(call, peer)
        peer.on_close(lambda: self.closed.append(peer))
        if not call.generation:
            raise StaleGeneration("too late")

    async def _commit(self, call: CommitHandoff, peer: RpcPeer) -> None:
        self._note(call, peer)
        await self.may_commit.wait()

    @property
    def counts(self) -> Counter[type[Call[None]]]:
        return Counter(kind for kind, _ in self.made)


def opening(generation: int = 1) -> OpenHandoff:
    return OpenHandoff(request_id="r", epoch=1, generation=generation)


def commit() -> CommitHandoff:
    return CommitHandoff(request_id="r", epoch=1, generation=1, first=TokenOut(1), num_tokens=1, checksums=b"")


async def answer(future: Future[T]) -> T:
    return await asyncio.wrap_future(future)


@pytest.fixture
async def decode(tmp_path: Path) -> AsyncIterator[PlayedDecode]:
    played = PlayedDecode(f"unix:{tmp_path}/d.sock")
    await played.server.listen(played.address)
    yield played
    await played.server.close()


@pytest.fixture
async def peers(decode: PlayedDecode) -> AsyncIterator[DecodePeers]:
    made = DecodePeers("p", asyncio.get_running_loop())
    yield made
    made.close()
    await until(lambda: not decode.server.peers, "its connections are closed")


async def test_calls_of_all_hand_offs_are_under_way_at_once_on_one_connection(
    decode: PlayedDecode, peers: DecodePeers
) -> None:
    lines = await asyncio.gather(*(answer(peers.open(decode.address, opening())) for _ in range(20)))
    assert len(set(lines)) == 1
    commits = [peers.call(lines[0], commit()) for _ in range(20)]
    await until(lambda: decode.counts[CommitHandoff] == 20, "all commits are there, and none is answered")
    assert await answer(peers.open(decode.address, opening())) is lines[0]
    assert not any(each.done() for each in commits)
    decode.may_commit.set()
    await asyncio.gather(*map(answer, commits))
    assert len({peer for _, peer in decode.made}) == 1
    peers.send(lines[0], AbortHandoff(request_id="r", epoch=1, generation=1))
    await until(lambda: decode.counts[AbortHandoff] == 1, "what is sent arrives")


async def test_a_refusal_leaves_the_connection_to_the_others(decode: PlayedDecode, peers: DecodePeers) -> None:
    line = await answer(peers.open(decode.address, opening()))
    with pytest.raises(StaleGeneration):
        await answer(peers.open(decode.address, opening(generation=0)))
    assert await answer(peers.open(decode.address, opening())) is line


async def test_a_connection_that_has_died_is_replaced_by_the_next_hand_off_alone(
    decode: PlayedDecode, peers: DecodePeers
) -> None:
    line = await answer(peers.open(decode.address, opening()))
    under_way = peers.call(line, commit())
    await until(lambda: decode.counts[CommitHandoff], "the commit is there")
    decode.made[0][1].abort()
    with pytest.raises(PeerLost):
        await answer(under_way)
    assert await answer(peers.open(decode.address, opening())) is not line
    with pytest.raises(PeerLost):  # the decode worker knows another connection as its writer
        await answer(peers.call(line, commit()))
    assert len(decode.closed) == 1


async def test_the_connection_is_made_again_when_its_death_shows_at_the_call(
    decode: PlayedDecode, peers: DecodePeers
) -> None:
    line = await answer(peers.open(decode.address, opening()))
    line.close()  # and asyncio has not told the client yet
    again = await answer(peers.open(decode.address, opening()))
    assert again is not line
    assert decode.counts[OpenHandoff] == 2


async def test_a_worker_that_is_away_fails_each_hand_off_anew(tmp_path: Path, peers: DecodePeers) -> None:
    for _ in range(2):
        with pytest.raises(PeerLost):
            await answer(peers.open(f"unix:{tmp_path}/none.sock", opening()))


async def test_after_close_calls_fail_and_no_connection_is_made(decode: PlayedDecode, peers: DecodePeers) -> None:
    line = await answer(peers.open(decode.address, opening()))
    under_way = peers.call(line, commit())
    await until(lambda: decode.counts[CommitHandoff], "the commit is there")
    await asyncio.to_thread(peers.close)
    peers.close()
    with pytest.raises(PeerLost):
        await answer(under_way)
    with pytest.raises(PeerLost, match="shutting down"):
        await answer(peers.open(decode.address, opening()))
    assert decode.counts[OpenHandoff] == 1


async def test_a_writer_that_stands_still_keeps_its_pages(decode: PlayedDecode, peers: DecodePeers) -> None:
    """It may be in the middle of a write to them, so only the kernel may end its connection (base/rpc/silence.py)."""
    line = await answer(peers.open(decode.address, opening()))
    [(_, writer)] = decode.made
    assert writer.hello is not None
    assert not writer.hello.pings, "it has not promised to be heard"
    assert isinstance(line, AsyncClient)
