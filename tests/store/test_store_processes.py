"""The pool as processes, killed with -9 at the worst moments."""

from __future__ import annotations

import random
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from store_pool import MIB, LocalPool, ProcessPool, RoleProcess, forked_roles
from waiting import HANG_S, wait_until

from moonpool.base.errors import MoonpoolError, NoSpace
from moonpool.store import Store
from moonpool.store.client import ahead
from moonpool.store.client.put_request import PutRequest


@pytest.fixture(scope="module", autouse=True)
def roles() -> Iterator[None]:
    with forked_roles():
        yield


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[ProcessPool]:
    with ExitStack() as stack:
        yield ProcessPool(tmp_path, stack)


@pytest.fixture
def client(pool: ProcessPool) -> Store:
    return pool.client()


@pytest.fixture
def timed(tmp_path: Path) -> Iterator[LocalPool]:
    """Its master's time passes when the test says so."""
    pool = LocalPool(tmp_path, 4 * MIB, put_discard_s=30.0, put_release_s=60.0)
    yield pool
    pool.close()


def puts_work(client: Store, key: bytes, data: bytes) -> bool:
    try:
        return client.put(key, data)
    except MoonpoolError:
        return False


def test_clients_in_several_processes_agree(pool: ProcessPool, client: Store) -> None:
    pool.start_master()
    pool.start_node("n0", MIB)  # too small for all of it, so there is eviction
    clients = [pool.start_client("put_and_get", seed=seed, num_keys=150, shm=seed != 2) for seed in range(3)]
    assert [each.finish() for each in clients] == [0, 0, 0]
    stats = client.stats()
    assert stats.counters["evicted"] > 0
    assert stats.counters["puts_in_progress"] == 0


def test_a_client_killed_mid_put_blocks_its_key_only_for_a_while(timed: LocalPool) -> None:
    client = timed.client()
    client.put(b"pinned", b"1")
    writer = RoleProcess("hang", address=timed.address, run_dir=str(timed.tmp_path / "run"), key="k")
    try:
        assert not client.put(b"k", b"mine"), "another put is under way"
        assert not client.remove_many([b"pinned"])[0]
    finally:
        writer.kill()
    timed.advance(31.0)  # from now on also if its node has not seen the end of the process
    assert client.put(b"k", b"mine")
    assert client.get(b"k") == b"mine"
    timed.advance(60.0)
    wait_until(lambda: client.remove_many([b"pinned"])[0], "the pin ends with its connection")
    client.close()  # with the space that it holds for puts to come
    wait_until(lambda: timed.on_loop(timed.master.state.stats).used_nbytes == 2 * 4096, "no other space is used")


def test_space_held_by_a_killed_client_is_free_again(pool: ProcessPool, client: Store) -> None:
    pool.start_master()
    pool.start_node()
    writer = pool.start_client("put_and_hang", num_puts=3)
    assert client.stats().counters["ahead_bytes"] > 0
    writer.kill()
    wait_until(lambda: client.stats().counters["ahead_bytes"] == 0, "the space is free")
    assert client.stats().used_nbytes == 3 * 2 * 4096
    assert client.get(b"hung-2") == b"v"


def test_space_that_a_killed_master_granted_is_given_back(
    pool: ProcessPool, client: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next master may not know of it, so it is not used."""
    monkeypatch.setattr(ahead, "_IDLE_S", 60.0)  # on busy cores a master takes longer to start than space is kept idle
    monkeypatch.setattr(ahead, "_USABLE", 2.5)
    master = pool.start_master()
    pool.start_node()
    for number in range(3):
        assert client.put(b"before-%d" % number, b"v")
    held = client.piece_puts.tools.calls.ahead
    assert client.stats().counters["ahead_bytes"] == held.held_nbytes > 0
    master.kill()
    pool.start_master()
    # In the ordinary way, for its size: until the node's first heartbeat the master asks for what is held on it.
    wait_until(
        lambda: puts_work(client, b"of another size", bytes(50_000)) or client.exist(b"of another size"), "puts work"
    )
    assert client.put(b"after", b"new")
    assert not client.put(b"before-0", b"new")
    assert client.get(b"after") == b"new"
    assert client.get(b"before-0") == b"v"
    wait_until(
        lambda: client.stats().counters["ahead_bytes"] == held.held_nbytes, "the master's account is the client's"
    )


def test_a_view_outlives_a_registration_that_a_stopped_node_does_not_answer(pool: ProcessPool) -> None:
    """The client needs another session while its node is stopped. The node goes on, and still knows the first one."""
    pool.start_master()
    node = pool.start_node()
    old = random.Random(0).randbytes(MIB)
    client = pool.client(connect_timeout_s=0.5)
    assert client.put(b"viewed", old)
    sessions = client._view_sessions
    with client.view(b"viewed") as view:
        assert not view.is_copy
        node.process.send_signal(signal.SIGSTOP)
        sessions.renew(sessions.number)
        assert sessions.session() == 0, "the node did not answer"
        node.process.send_signal(signal.SIGCONT)
        assert sessions.session() != 0
        assert client.remove_many([b"viewed"], force=True) == [True]
        for number in range(8):  # twice the pool
            wait_until(lambda number=number: puts_work(client, b"new-%d" % number, bytes(MIB - 8192)), "puts work")  # type: ignore[misc]
        assert b"".join(bytes(piece) for piece in view.pieces) == old


def test_a_killed_node_leaves_the_other_replica(tmp_path: Path) -> None:
    pool = LocalPool(tmp_path, num_nodes=0, segment_ttl_s=10.0)
    with ExitStack() as stack:
        stack.callback(pool.close)
        nodes = {f"n{number}.dram": start_node(stack, pool, f"n{number}") for number in range(2)}
        client, data = pool.client(), random.Random(0).randbytes(100_000)
        assert client.put(b"both", data, num_replicas=2)
        info = client.lookup([b"both"])[0]
        assert info is not None
        killed, other = (place.segment for place in info.replicas)
        nodes[killed].kill()
        assert client.get(b"both") == data, "before the master knows"
        forget(pool, other)
        assert [each.name for each in client.stats().segments] == [other]
        assert client.get(b"both") == data
        assert client.put(b"more", data, num_replicas=2)
        assert client.get(b"more") == data
        assert client.counters()["corrupt_replicas"] == 0


def start_node(stack: ExitStack, pool: LocalPool, name: str) -> RoleProcess:
    run_dir = str(pool.tmp_path / "run")
    node = RoleProcess("node", name=name, master_address=pool.address, dram_nbytes=4 * MIB, run_dir=run_dir)
    stack.callback(node.close)
    return node


def forget(pool: LocalPool, other: str) -> None:
    """The master's time passes until a node that is silent is gone, and the other one is heard meanwhile."""

    def heard_s() -> float:
        return next(each.heard_s for each in pool.master.state.table_of_segments.all() if each.name == other)

    for _ in range(3):
        pool.advance(4.0)
        now_s = pool.clock.now_s()
        wait_until(lambda now_s=now_s: pool.on_loop(heard_s) == now_s, "the other node is heard")  # type: ignore[misc]


def test_a_killed_master_comes_back(pool: ProcessPool, client: Store) -> None:
    master = pool.start_master()
    pool.start_node()
    assert client.put(b"k", b"old")
    master.kill()
    got: list[bytes | None] = []
    asking = threading.Thread(target=lambda: got.append(client.get(b"k")))
    asking.start()
    pool.start_master()
    asking.join(HANG_S)
    assert got == [b"old"], "who asked meanwhile has waited, and nothing is forgotten"
    wait_until(lambda: puts_work(client, b"l", b"new"), "puts work")
    assert client.get(b"l") == b"new"
    assert not client.put(b"k", b"new")


def test_a_killed_node_comes_back_as_another(pool: ProcessPool, client: Store) -> None:
    pool.start_master()
    node = pool.start_node()
    assert client.put(b"k", b"old")
    session = client.piece_puts.begin([PutRequest(b"late", (10,))])[0]
    assert not isinstance(session, MoonpoolError)
    node.kill()
    pool.start_node()
    assert client.get(b"k") is None
    assert client.put(b"k", b"new")
    assert client.get(b"k") == b"new"
    with pytest.raises(MoonpoolError):
        session.write_piece(0, bytes(10))
    client.piece_puts.abort([session])
    assert client.put(b"late", b"again")


def test_a_full_pool_refuses_and_recovers(pool: ProcessPool, client: Store) -> None:
    pool.start_master()
    pool.start_node("n0", 64 * 1024)
    assert client.put(b"hard", bytes(20_000), pinned=True)
    assert client.put(b"held", bytes(20_000))
    client.pin_many([b"held"])
    with pytest.raises(NoSpace):
        client.put(b"new", bytes(20_000))
    client.unpin_many([b"held"])
    assert client.put(b"new", bytes(20_000))
    assert client.exist_many([b"hard", b"held", b"new"]) == [True, False, True]
