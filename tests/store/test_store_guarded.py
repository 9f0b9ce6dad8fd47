"""Nodes that ask for a secret or for TLS: who has it works as ever; who has not is told, and never sees a miss."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from store_pool import MIB, LocalPool

from moonpool.base.clock import VirtualClock
from moonpool.base.descriptor import SegmentDescriptor
from moonpool.base.errors import ConfigError, Unauthorized
from moonpool.node.config import NodeConfig
from moonpool.node.service import Node
from moonpool.store import Store
from moonpool.store.client import ClientConfig
from moonpool.store.client.directory import REFUSED_FOR_S, SegmentDirectory
from moonpool.store.messages import Placement, SegmentInfo, Tier
from moonpool.transfer.config import TransferConfig
from moonpool.transfer.engine import TransferEngine

DATA = b"KV" * 1000


class GuardedPool(LocalPool):
    """Clients reach the nodes by tcp, as from another machine."""

    def start_guarded(self, name: str, **wires: Any) -> Node:
        config = NodeConfig(
            name=name, master_address=self.address, dram_nbytes=MIB, run_dir=str(self.tmp_path / "run"), **wires
        )
        node = Node(config)
        self.loop.run(node.start())
        self.nodes.append(node)
        return node

    def far_client(self, **wires: Any) -> Store:
        config = TransferConfig(run_dir=str(self.tmp_path / "far"), shm=False, tcp_host=None, **wires)
        engine = TransferEngine(config)
        self._stack.callback(engine.close)
        return self._stack.enter_context(Store(self.address, engine=engine, config=ClientConfig(retry_s=10.0)))

    def puts_in_progress(self) -> int:
        return self.on_loop(lambda: self.master.state.stats().counters["puts_in_progress"])


def secret(folder: Path, text: str) -> str:
    path = folder / text
    path.write_text(text * 16)
    path.chmod(0o600)
    return str(path)


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[GuardedPool]:
    made = GuardedPool(tmp_path, num_nodes=0)
    yield made
    made.close()


def test_with_the_secret_all_is_as_ever(pool: GuardedPool, tmp_path: Path) -> None:
    pool.start_guarded("n", secret_file=secret(tmp_path, "right"))
    client = pool.far_client(secret_file=secret(tmp_path, "right"))
    assert client.put(b"k", DATA)
    assert client.get(b"k") == DATA


def test_with_tls_all_is_as_ever(pool: GuardedPool, tmp_path: Path) -> None:
    from tls_authority import Authority

    tls = Authority(tmp_path).issue("node")
    wires = {"tls_cert_file": tls.cert_file, "tls_key_file": tls.key_file, "tls_ca_file": tls.ca_file}
    pool.start_guarded("n", **wires)
    client = pool.far_client(**wires)
    assert client.put(b"k", DATA)
    assert client.get(b"k") == DATA
    with pytest.raises(Unauthorized, match="tls_cert_file"):
        pool.far_client().get(b"k")


@pytest.mark.parametrize("has", [None, "wrong"])
def test_without_it_the_error_says_what_to_set(pool: GuardedPool, tmp_path: Path, has: str | None) -> None:
    pool.start_guarded("n", secret_file=secret(tmp_path, "right"))
    assert pool.client().put(b"k", DATA), "shared memory asks for no secret: files of this user do"
    client = pool.far_client(secret_file=None if has is None else secret(tmp_path, has))
    with pytest.raises(Unauthorized, match=r"'n\.dram'.*secret_file"):
        client.get(b"k")
    with pytest.raises(Unauthorized, match=r"'n\.dram'.*secret_file"):
        client.put(b"other", DATA)
    assert client.counters()["refused_invalid_api_key"] == 2
    assert pool.puts_in_progress() == 0, "its space was given back"
    assert pool.client().get(b"other") is None
    pool.check_integrity()


def test_one_node_with_another_secret_costs_its_replica_only(pool: GuardedPool, tmp_path: Path) -> None:
    pool.start_guarded("n0", secret_file=secret(tmp_path, "other"))
    pool.start_guarded("n1", secret_file=secret(tmp_path, "right"))
    assert pool.client().put(b"both", DATA, num_replicas=2)
    client = pool.far_client(secret_file=secret(tmp_path, "right"))
    assert client.get(b"both") == DATA
    assert client.put(b"mine", DATA, num_replicas=2)
    assert client.get(b"mine") == DATA
    assert client.counters()["refused_invalid_api_key"] >= 1


def test_a_missing_secret_file_stops_the_node_before_it_takes_memory(pool: GuardedPool, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        pool.start_guarded("n", secret_file=str(tmp_path / "nowhere"))


class ClosedEngine:
    """Lets nobody in, and counts who asked."""

    def __init__(self) -> None:
        self.num_asked = 0

    def open(self, descriptor: SegmentDescriptor, *, timeout_s: float | None = None) -> None:
        self.num_asked += 1
        raise Unauthorized("set secret_file")

    def forget(self, descriptor: SegmentDescriptor) -> None:
        pass


def test_an_owner_that_refused_is_left_alone_for_a_while() -> None:
    engine, clock, incarnations = ClosedEngine(), VirtualClock(), [1]

    def segments() -> list[SegmentInfo]:
        found = SegmentDescriptor(name="s", nbytes=1, incarnation=incarnations[-1], host="h", endpoints=())
        return [SegmentInfo(found, "n", Tier.DRAM, None)]

    directory = SegmentDirectory(engine, segments, clock)  # type: ignore[arg-type]

    def ask() -> None:
        with pytest.raises(Unauthorized, match=r"'s': set secret_file"):
            directory.open(Placement(segment="s", incarnation=incarnations[-1], offset=0, generation=1))

    for _ in range(3):
        ask()
    assert engine.num_asked == 1
    clock.advance(REFUSED_FOR_S)
    ask()
    assert engine.num_asked == 2
    incarnations.append(2)  # it was restarted, with another secret perhaps
    ask()
    assert engine.num_asked == 3
