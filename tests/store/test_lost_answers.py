"""An answer of the master that its client has given up: what it granted is free after the client's next message.

The master's clock stands still throughout, so nothing here waits for a time limit.
"""

from __future__ import annotations

import asyncio
import fcntl
import termios
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from store_pool import MIB, LocalPool
from waiting import HANG_S, wait_until

from moonpool.base.clock import VirtualClock
from moonpool.base.descriptor import SegmentDescriptor
from moonpool.base.errors import AlreadyExists, BreakerOpen, Cancelled, Unavailable
from moonpool.base.rpc import BlockingClient, Call, RpcPeer
from moonpool.base.rpc.aio_server import LateCalls
from moonpool.cli.stat import _as_lines
from moonpool.store import Store
from moonpool.store import messages as m
from moonpool.store.client import Put, PutOptions, PutRequest
from moonpool.store.client.put_session import PutSession

TIMES = {"late": 1, "cut": 2}  # until a call fails: one whose connection broke is sent once more
HASTY: dict[str, Any] = {"retry_s": 0.0, "silence_s": 0.2}  # of a client: it gives an answer up soon


class Answers:
    """Stands before the master's handlers: it may keep answers back, or end connections instead."""

    def __init__(self, pool: LocalPool) -> None:
        self._pool = pool
        assert pool.master._server is not None
        self._handlers = pool.master._server.handlers
        self.begun: Counter[str] = Counter()

    def lose(self, kind: type[Call[Any]], how: str, times: int = 1, *, is_carried_out: bool = True) -> None:
        """The next calls of that kind are carried out, or not, and not answered: `how` is "late", when the answer comes
        after its client has given it up, or "cut", when the connection ends.
        """
        original, left, later = self._handlers[kind], times, asyncio.Event

        def handle(call: Any, peer: RpcPeer) -> Any:
            nonlocal left
            self.begun[kind.__name__] += 1
            if not left:
                return original(call, peer)
            left -= 1
            answer = original(call, peer) if is_carried_out else None
            if how == "cut":
                peer.abort()
                return answer
            never = later()
            peer.on_close(never.set)

            async def wait() -> Any:
                await never.wait()
                return answer

            return wait()

        self._handlers[kind] = handle


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[LocalPool]:
    pool = LocalPool(tmp_path)
    yield pool
    pool.check_integrity()
    pool.close()


@pytest.fixture(params=[True, False], ids=["in place", "over a network"])
def client(pool: LocalPool, request: pytest.FixtureRequest) -> Store:
    client = pool.client(shm=request.param, ahead_nbytes=0, **HASTY)
    client.exist(b"connect")
    return client


@pytest.fixture(params=["late", "cut"])
def how(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def patiently(ask: Callable[[], Any]) -> Any:
    """The answer, once the client takes the master for there again."""
    found: list[Any] = []

    def is_answered() -> bool:
        try:
            found.append(ask())
        except BreakerOpen:
            return False
        return True

    wait_until(is_answered, "the master answers")
    return found[0]


def unfinished(pool: LocalPool) -> tuple[int, int, int]:
    """Puts, ended puts whose space is kept, and used bytes."""
    state = pool.master.state
    return pool.on_loop(lambda: (len(state.puts.pending), len(state.space.of_puts), state.stats().used_nbytes))


NEXT_CALLS: dict[str, Callable[[Store], object]] = {
    "exist": lambda store: store.exist(b"other"),
    "look-up": lambda store: store.get(b"other"),
    "stats": Store.stats,
    "pin": lambda store: store.pin(b"other"),
    "removal": lambda store: store.remove(b"other"),
}


@pytest.mark.parametrize("following", NEXT_CALLS)
def test_key_and_space_are_free_after_the_next_message(
    pool: LocalPool, client: Store, how: str, following: str
) -> None:
    """Whatever that message is: the key is not put again."""
    Answers(pool).lose(m.PutStart, how, TIMES[how])
    with pytest.raises(Unavailable):
        client.put(b"lost", b"x" * 100_000)
    patiently(lambda: NEXT_CALLS[following](client))
    assert unfinished(pool) == (0, 0, 0)
    other = pool.client(ahead_nbytes=0)
    assert other.put(b"lost", b"y"), "the key is free"
    assert other.get(b"lost") == b"y"
    assert pool.clock.now_s() == 0


def test_a_client_that_says_nothing_more_has_freed_it_when_the_master_is_back(pool: LocalPool, client: Store) -> None:
    Answers(pool).lose(m.PutStart, "late")
    with pytest.raises(Unavailable):
        client.put(b"lost", b"x" * 100_000)
    wait_until(lambda: unfinished(pool) == (0, 0, 0), "the thread that probed the master has told it")


def test_a_client_that_closes_has_freed_it(pool: LocalPool) -> None:
    client = pool.client(shm=False, ahead_nbytes=0, retry_s=0.0)
    client.exist(b"connect")
    Answers(pool).lose(m.PutStart, "late")

    def interrupt() -> bool:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        client.piece_puts.tools.calls.start([PutRequest(key=b"lost", piece_nbytes=(9,))], [9000], interrupt)
    assert unfinished(pool)[0] == 1
    client.close()
    assert unfinished(pool) == (0, 0, 0)


def test_what_is_asked_for_again_is_granted_once(pool: LocalPool, client: Store) -> None:
    """The first answer is lost with its connection; the key that it took is free for the second call."""
    answers = Answers(pool)
    answers.lose(m.PutStart, "cut")
    assert client.put(b"k", b"x" * 10_000)
    assert answers.begun["PutStart"] == 2
    assert unfinished(pool)[:2] == (0, 0)
    assert pool.master.state.stats().counters["unanswered"] == 1
    assert client.get(b"k") == b"x" * 10_000


def test_a_batch_of_256_mib_whose_answer_is_lost_leaves_the_pool_as_it_was(pool: LocalPool) -> None:
    """Again and again, in a pool that holds one such batch: on paper, since none is written."""
    state, now_s = pool.master.state, pool.clock.now_s()
    large = SegmentDescriptor(
        name="paper.dram",
        nbytes=320 * MIB,
        incarnation=1,
        host="elsewhere",
        endpoints=(),
        granule_nbytes=m.GRANULE_NBYTES,
    )
    pool.on_loop(lambda: state.mount("paper", large, now_s, registry_address=None))
    pool.on_loop(lambda: state.heartbeat("paper.dram", 1, now_s))
    client = pool.client(shm=False, ahead_nbytes=0, **HASTY)
    before = unfinished(pool)
    data = bytes(4 * MIB - 4096)
    for burst in range(3):
        Answers(pool).lose(m.PutStart, "late")
        puts = [Put(b"%d-%d" % (burst, at), [data], options=PutOptions(preferred=("paper.dram",))) for at in range(64)]
        outcomes = client.put_objects(puts)
        assert all(isinstance(each, BreakerOpen) for each in outcomes), "there was space for all of it"
        patiently(lambda: client.exist(b"other"))
        assert unfinished(pool) == before


@pytest.mark.parametrize("is_carried_out", [True, False])
def test_puts_whose_end_was_not_answered_are_objects_or_over(
    pool: LocalPool, client: Store, how: str, is_carried_out: bool
) -> None:
    Answers(pool).lose(m.PutEnd, how, TIMES[how], is_carried_out=is_carried_out)
    with pytest.raises(Unavailable):
        client.put(b"k", b"x" * 10_000)
    patiently(lambda: client.exist(b"other"))
    assert unfinished(pool)[:2] == (0, 0)
    assert patiently(lambda: client.get(b"k")) == (b"x" * 10_000 if is_carried_out else None)
    assert client.put(b"k", b"y") is not is_carried_out


def test_what_could_not_be_given_back_is_given_back_later(pool: LocalPool, client: Store, how: str) -> None:
    (begun,) = client.piece_puts.begin([PutRequest(key=b"k", piece_nbytes=(5000,))])
    assert not isinstance(begun, Exception)
    Answers(pool).lose(m.PutRevoke, how, is_carried_out=False)
    client.piece_puts.abort([begun])
    patiently(lambda: client.exist(b"other"))
    assert unfinished(pool) == (0, 0, 0)


def test_a_put_start_that_comes_after_it_was_given_up_is_refused(pool: LocalPool) -> None:
    """The client has left the connection over which it was on its way, and has spoken over another one."""
    left, taken = (BlockingClient(pool.address, m.SERVICE) for _ in range(2))
    late = m.PutStart(keys=[b"k"], sizes=[5000], options=PutOptions(), number=7)
    taken.call(m.PutDrop(7, [b"k"]))
    again = taken.call(m.PutStart(keys=[b"k"], sizes=[5000], options=PutOptions(), number=8))
    with pytest.raises(Cancelled):
        left.call(late)
    assert unfinished(pool)[0] == 1
    assert taken.call(m.PutEnd([b"k"], again.generations)) == {}
    left.close()
    taken.close()


def test_a_restarted_master_is_told_too(pool: LocalPool, client: Store) -> None:
    """What it knows of the grant is in the journal."""
    Answers(pool).lose(m.PutStart, "late")
    with pytest.raises(Unavailable):
        client.put(b"lost", b"x" * 100_000)
    pool.loop.run(pool.master.close())
    pool.start_master()
    wait_until(lambda: patiently(lambda: client.stats()).capacity_nbytes, "the node is there again")
    patiently(lambda: client.exist(b"other"))
    wait_until(lambda: unfinished(pool) == (0, 0, 0), "the grant of the earlier master is free")
    wait_until(lambda: has_put(client, b"lost"), "nothing is placed before the node has reported")


def test_puts_that_end_while_the_master_is_away_leave_nothing_behind(pool: LocalPool, client: Store) -> None:
    """The journal has them as unfinished, and nobody else knows of them."""
    requests = [PutRequest(key=b"k%d" % number, piece_nbytes=(5000,)) for number in range(6)]
    begun = [each for each in client.piece_puts.begin(requests) if isinstance(each, PutSession)]
    for each in begun:
        each.write_piece(0, b"x" * 5000)
    pool.loop.run(pool.master.close())
    with pytest.raises(Unavailable):
        client.piece_puts.finish(begun[:3])
    client.piece_puts.abort(begun[3:])
    pool.start_master()
    assert unfinished(pool)[0] == len(begun) == 6
    patiently(lambda: client.exist(b"other"))
    assert unfinished(pool) == (0, 0, 0)


def has_put(client: Store, key: bytes) -> bool:
    try:
        return client.put(key, b"y")
    except AlreadyExists:
        raise
    except Unavailable:
        return False


def test_an_overloaded_master_does_not_begin_calls_that_came_too_late(
    pool: LocalPool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Four clients ask while the event loop is held up. The first call takes longer than they wait: the master begins
    none of the others, and counts them. Here they wait all the same, as a process does that was stopped itself, and
    ask once more.
    """
    clock, num_waiting = VirtualClock(time.monotonic()), 4
    held_up, released = threading.Event(), threading.Event()
    monkeypatch.setattr("moonpool.base.rpc.aio_server.time", SimpleNamespace(monotonic=clock.now_s))
    monkeypatch.setattr("moonpool.base.rpc.aio_server._MAX_READS", 1)  # as after a quiet time: each turn is noted
    clients = [pool.client(ahead_nbytes=0, silence_s=600.0, rpc_timeout_s=600.0) for _ in range(num_waiting)]
    for each in clients:
        each.exist(b"connect")
    server, begun = pool.master._server, list[int]()
    assert server is not None
    original = server.handlers[m.Why]

    def slow(call: m.Why, peer: RpcPeer) -> Any:
        begun.append(len(begun))
        if len(begun) == 1:
            clock.advance(1000.0)
        return original(call, peer)

    server.handlers[m.Why] = slow
    late_before, answers = LateCalls.total, list[str]()

    def hold_up() -> None:
        held_up.set()
        released.wait(HANG_S)

    pool.loop.loop.call_soon_threadsafe(hold_up)
    assert held_up.wait(HANG_S)
    threads = [threading.Thread(target=lambda store=each: answers.append(store.why(b"k"))) for each in clients]
    for thread in threads:
        thread.start()
    wait_until(lambda: all(map(has_unread_call, clients)), "all calls are in the master's sockets")
    released.set()
    for thread in threads:
        thread.join(HANG_S)
    assert answers == ["this object was never stored"] * num_waiting
    assert LateCalls.total - late_before == num_waiting - 1, "of the first copies, only one was begun"
    assert len(begun) == num_waiting, "none was carried out twice"
    stats = clients[0].stats()
    assert stats.counters["late_calls"] >= num_waiting - 1
    assert "late calls" in _as_lines(stats, [], None, None)[-1]
    families = {family.name: family for family in clients[0].metrics()}
    assert families["moonpool_rpc_late_calls"].samples[0].value >= num_waiting - 1


def has_unread_call(client: Store) -> bool:
    sock = client.master._rpc._socket
    assert sock is not None
    return fcntl.ioctl(sock, termios.TIOCOUTQ, bytes(4)) != bytes(4)
