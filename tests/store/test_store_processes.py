"""The pool as processes, killed with -9 at the worst moments."""

from __future__ import annotations

import random
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from store_pool import MIB, RoleProcess, wait_until

from moonpool.base.errors import MoonpoolError, NoSpace
from moonpool.store import Store
from moonpool.store.client import ClientConfig, ahead
from moonpool.store.client.put_request import PutRequest
from moonpool.transfer.config import TransferConfig
from moonpool.transfer.engine import TransferEngine

Start = Callable[..., RoleProcess]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a role; all are ended afterwards."""
    with ExitStack() as stack:

        def start(role: str, **config: Any) -> RoleProcess:
            process = RoleProcess(role, **config)
            stack.callback(process.close)
            return process

        yield start


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Store]:
    with (
        TransferEngine(TransferConfig(run_dir=str(tmp_path), tcp_host=None)) as engine,
        Store(address(tmp_path), engine=engine, config=ClientConfig(retry_s=10.0)) as client,
    ):
        yield client


def address(tmp_path: Path) -> str:
    return f"unix:{tmp_path}/m.sock"


def master_config(tmp_path: Path, **rules: Any) -> dict[str, Any]:
    times = {"heartbeat_s": 0.1, "segment_ttl_s": 5.0, "tick_s": 0.01, "lease_s": 0.2}
    return {"data_dir": str(tmp_path / "data"), "listen": address(tmp_path), **times, **rules}


def node_config(tmp_path: Path, name: str, dram_nbytes: int = 4 * MIB) -> dict[str, Any]:
    return {
        "name": name,
        "master_address": address(tmp_path),
        "dram_nbytes": dram_nbytes,
        "run_dir": str(tmp_path),
        "retry_s": 0.05,
    }


def puts_work(client: Store, key: bytes, data: bytes) -> bool:
    try:
        return client.put(key, data)
    except MoonpoolError:
        return False


def test_clients_in_several_processes_agree(tmp_path: Path, start: Start, client: Store) -> None:
    start("master", **master_config(tmp_path))
    start("node", **node_config(tmp_path, "n0", MIB))  # too small for all of it, so there is eviction
    clients = [
        start("put_and_get", address=address(tmp_path), run_dir=str(tmp_path), seed=seed, num_keys=150, shm=seed != 2)
        for seed in range(3)
    ]
    assert [each.finish() for each in clients] == [0, 0, 0]
    stats = client.stats()
    assert stats.counters["evicted"] > 0
    assert stats.counters["puts_in_progress"] == 0


def test_a_client_killed_mid_put_blocks_its_key_only_for_a_while(tmp_path: Path, start: Start, client: Store) -> None:
    start("master", **master_config(tmp_path, put_discard_s=0.5, put_release_s=0.6))
    start("node", **node_config(tmp_path, "n0"))
    client.put(b"pinned", b"1")
    writer = start("hang", address=address(tmp_path), run_dir=str(tmp_path), key="k")
    assert not client.put(b"k", b"mine"), "another put is under way"
    assert not client.remove_many([b"pinned"])[0]
    writer.kill()
    wait_until(lambda: client.put(b"k", b"mine"))
    assert client.get(b"k") == b"mine"
    wait_until(lambda: client.remove_many([b"pinned"])[0])
    wait_until(lambda: client.stats().used_nbytes == 2 * 4096)


def test_space_held_by_a_killed_client_is_free_again(tmp_path: Path, start: Start, client: Store) -> None:
    start("master", **master_config(tmp_path))
    start("node", **node_config(tmp_path, "n0"))
    writer = start("put_and_hang", address=address(tmp_path), run_dir=str(tmp_path), num_puts=3)
    assert client.stats().counters["ahead_bytes"] > 0
    writer.kill()
    wait_until(lambda: client.stats().counters["ahead_bytes"] == 0)
    assert client.stats().used_nbytes == 3 * 2 * 4096
    assert client.get(b"hung-2") == b"v"


def test_space_held_outlives_a_killed_master(
    tmp_path: Path, start: Start, client: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ahead, "_IDLE_S", 60.0)  # on busy cores a master takes longer to start than space is kept idle
    monkeypatch.setattr(ahead, "_USABLE", 2.5)
    master = start("master", **master_config(tmp_path))
    start("node", **node_config(tmp_path, "n0"))
    for number in range(3):
        assert client.put(b"before-%d" % number, b"v")
    held = client.stats().counters["ahead_bytes"]
    assert held > 0
    master.kill()
    start("master", **master_config(tmp_path))
    # In the ordinary way, for its size: until the node's first heartbeat the master asks for what is held on it.
    wait_until(lambda: puts_work(client, b"of another size", bytes(50_000)) or client.exist(b"of another size"))
    assert client.put(b"after", b"new")
    assert not client.put(b"before-0", b"new")
    assert client.get(b"after") == b"new"
    assert client.get(b"before-0") == b"v"
    assert client.stats().counters["ahead_bytes"] < held, "one of these places was used"


def test_a_view_outlives_a_registration_that_a_stopped_node_does_not_answer(tmp_path: Path, start: Start) -> None:
    """The client needs another session while its node is stopped. The node goes on, and still knows the first one."""
    start("master", **master_config(tmp_path))
    node = start("node", **node_config(tmp_path, "n0"))
    old = random.Random(0).randbytes(MIB)
    with (
        TransferEngine(TransferConfig(run_dir=str(tmp_path), tcp_host=None)) as engine,
        Store(address(tmp_path), engine=engine, config=ClientConfig(retry_s=10.0, connect_timeout_s=0.5)) as client,
    ):
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
                wait_until(lambda number=number: puts_work(client, b"new-%d" % number, bytes(MIB - 8192)))  # type: ignore[misc]
            assert b"".join(bytes(piece) for piece in view.pieces) == old


def test_a_killed_node_leaves_the_other_replica(tmp_path: Path, start: Start, client: Store) -> None:
    start("master", **master_config(tmp_path, segment_ttl_s=1.0))
    nodes = {f"n{number}.dram": start("node", **node_config(tmp_path, f"n{number}")) for number in range(2)}
    data = random.Random(0).randbytes(100_000)
    assert client.put(b"both", data, num_replicas=2)
    info = client.lookup([b"both"])[0]
    assert info is not None
    nodes[info.replicas[0].segment].kill()
    assert client.get(b"both") == data, "before the master knows"
    wait_until(lambda: len(client.stats().segments) == 1)
    assert client.get(b"both") == data
    assert client.put(b"more", data, num_replicas=2)
    assert client.get(b"more") == data
    assert client.counters()["corrupt_replicas"] == 0


def test_a_killed_master_comes_back(tmp_path: Path, start: Start, client: Store) -> None:
    master = start("master", **master_config(tmp_path))
    start("node", **node_config(tmp_path, "n0"))
    assert client.put(b"k", b"old")
    master.kill()
    got: list[bytes | None] = []
    asking = threading.Thread(target=lambda: got.append(client.get(b"k")))
    asking.start()
    start("master", **master_config(tmp_path))
    asking.join(20)
    assert got == [b"old"], "who asked meanwhile has waited, and nothing is forgotten"
    wait_until(lambda: puts_work(client, b"l", b"new"))
    assert client.get(b"l") == b"new"
    assert not client.put(b"k", b"new")


def test_a_killed_node_comes_back_as_another(tmp_path: Path, start: Start, client: Store) -> None:
    start("master", **master_config(tmp_path))
    node = start("node", **node_config(tmp_path, "n0"))
    assert client.put(b"k", b"old")
    session = client.piece_puts.begin([PutRequest(b"late", (10,))])[0]
    assert not isinstance(session, MoonpoolError)
    node.kill()
    start("node", **node_config(tmp_path, "n0"))
    assert client.get(b"k") is None
    assert client.put(b"k", b"new")
    assert client.get(b"k") == b"new"
    with pytest.raises(MoonpoolError):
        session.write_piece(0, bytes(10))
    client.piece_puts.abort([session])
    assert client.put(b"late", b"again")


def test_a_full_pool_refuses_and_recovers(tmp_path: Path, start: Start, client: Store) -> None:
    start("master", **master_config(tmp_path))
    start("node", **node_config(tmp_path, "n0", 64 * 1024))
    assert client.put(b"hard", bytes(20_000), pinned=True)
    assert client.put(b"held", bytes(20_000))
    client.pin_many([b"held"])
    with pytest.raises(NoSpace):
        client.put(b"new", bytes(20_000))
    client.unpin_many([b"held"])
    assert client.put(b"new", bytes(20_000))
    assert client.exist_many([b"hard", b"held", b"new"]) == [True, False, True]
