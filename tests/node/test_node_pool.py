"""Nodes with disks in a whole pool: a real master, real clients, restarts of either."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

import pytest
from node_world import LOG_FILE_NBYTES, MIB, config
from store_pool import LoopThread, RoleProcess, forked_roles
from waiting import wait_until

from moonpool.base.errors import MoonpoolError
from moonpool.master.service import Master, MasterConfig
from moonpool.node.service import Node
from moonpool.store import Store
from moonpool.store.client import ClientConfig
from moonpool.store.messages import DrainSegment, SegmentStats, Tier
from moonpool.transfer.config import TransferConfig
from moonpool.transfer.engine import TransferEngine

NBYTES = 150_000


class Pool:
    """A master and nodes on a loop beside the test."""

    def __init__(self, tmp_path: Path, stack: ExitStack) -> None:
        self.tmp_path = tmp_path
        self.stack = stack
        self.loop = LoopThread()
        stack.callback(self.loop.close)
        self.nodes: dict[str, Node] = {}
        self.master = self.start_master()
        stack.callback(self._close)
        self.client = self.new_client()

    def start_master(self) -> Master:
        rules = {"heartbeat_s": 0.05, "tick_s": 0.01, "segment_ttl_s": 5.0, "lease_s": 0.2}
        listen = f"unix:{self.tmp_path}/m.sock"
        self.master = Master(MasterConfig(data_dir=str(self.tmp_path / "master"), listen=listen, **rules))  # type: ignore[arg-type]
        self.loop.run(self.master.start())
        return self.master

    def start_node(self, name: str = "n0", **settings: object) -> Node:
        self.nodes[name] = node = Node(config(self.tmp_path, name=name, **settings))  # type: ignore[arg-type]
        self.loop.run(node.start())
        if node.config.ssd_dir is not None:
            wait_until(lambda: self.segment(f"{name}.ssd").status == "ok", f"{name}.ssd is mounted")
        return node

    def new_client(self, *, shm: bool = True) -> Store:
        engine = TransferEngine(TransferConfig(run_dir=str(self.tmp_path / "run"), shm=shm, tcp_host=None))
        self.stack.callback(engine.close)
        client = Store(f"unix:{self.tmp_path}/m.sock", engine=engine, config=ClientConfig(retry_s=10.0))
        return self.stack.enter_context(client)

    def segment(self, name: str) -> SegmentStats:
        """Its figures; with the status "missing" when there is none."""
        found = {each.name: each for each in self.client.stats().segments}
        return found.get(name) or SegmentStats(name, "", 0, 0, 0, status="missing")

    def counter(self, name: str) -> int:
        return self.client.stats().counters.get(name, 0)

    def put_all(self, count: int, start: int = 0) -> None:
        for number in range(start, start + count):
            assert self.client.put(key(number), value(number))

    def read_all(self, count: int) -> list[int]:
        """The numbers of those that are there, all of them right."""
        found = []
        for number in range(count):
            data = self.client.get(key(number))
            if data is not None:
                assert data == value(number)
                found.append(number)
        return found

    def wait_offloaded(self, count: int, node: str = "n0") -> None:
        wait_until(lambda: self.segment(f"{node}.ssd").num_objects >= count, f"{count} objects are on disk")

    def replicas(self, number: int) -> list[str]:
        """The segments that have it."""
        info = self.client.lookup([key(number)])[0]
        return [] if info is None else [placement.segment for placement in info.replicas]

    def _close(self) -> None:
        for node in self.nodes.values():
            self.loop.run(node.close())
        self.loop.run(self.master.close())


def key(number: int) -> bytes:
    return b"key-%d" % number


def value(number: int) -> bytes:
    return random.Random(number).randbytes(NBYTES + number)


@pytest.fixture(scope="module", autouse=True)
def roles() -> Iterator[None]:
    with forked_roles():
        yield


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Pool]:
    with ExitStack() as stack:
        yield Pool(tmp_path, stack)


def put_soon(pool: Pool, number: int) -> None:
    """As soon as there is room."""

    def is_put() -> bool:
        try:
            return pool.client.put(key(number), value(number))
        except MoonpoolError:
            return False

    wait_until(is_put, f"there is room for object {number}")


def test_what_memory_has_no_room_for_is_read_from_disk(pool: Pool) -> None:
    pool.start_node(dram_nbytes=4 * MIB)
    pool.put_all(20)
    pool.wait_offloaded(20)
    for number in range(20, 80):
        put_soon(pool, number)
        if number % 10 == 9:
            pool.wait_offloaded(number)
    pool.wait_offloaded(80)
    assert pool.counter("evicted") > 0
    assert pool.read_all(80) == list(range(80))
    assert pool.counter("corrupt_replicas") == 0


def test_what_is_asked_for_again_comes_back_to_memory(pool: Pool) -> None:
    node = pool.start_node()
    pool.put_all(4)
    pool.wait_offloaded(4)
    pool.loop.run(node.close())
    pool.start_node()
    assert pool.replicas(0) == ["n0.ssd"]
    wait_until(lambda: pool.client.get(key(0)) == value(0) and "n0.dram" in pool.replicas(0), "it is in memory again")
    assert pool.read_all(4) == [0, 1, 2, 3]


def test_a_restarted_node_has_what_was_on_its_disk(pool: Pool) -> None:
    for _ in range(2):
        node = pool.start_node()
        pool.client.put(key(0), value(0))
        pool.put_all(10, start=1) if not pool.replicas(1) else None
        pool.wait_offloaded(11)
        pool.loop.run(node.close())
        assert pool.segment("n0.ssd").status == "away"
    pool.start_node()
    assert pool.read_all(11) == list(range(11))


def test_a_disk_emptied_meanwhile_is_not_believed_in(pool: Pool, tmp_path: Path) -> None:
    node = pool.start_node()
    pool.put_all(5)
    pool.wait_offloaded(5)
    pool.loop.run(node.close())
    for file in (tmp_path / "n0.disk").glob("log-*"):
        file.unlink()
    pool.start_node()
    wait_until(lambda: pool.client.stats().num_objects == 0, "all objects are gone")
    assert pool.read_all(5) == []


def test_a_restarted_master_knows_memory_and_disk(pool: Pool) -> None:
    node = pool.start_node()
    pool.start_node("n1", ssd_nbytes=0)
    pool.put_all(12)
    incarnation = node.segment.incarnation
    pool.loop.run(pool.master.close())
    pool.start_master()
    names = ("n0.dram", "n0.ssd", "n1.dram")
    wait_until(lambda: {pool.segment(name).status for name in names} == {"ok"}, "all segments are mounted")
    assert node.segment.incarnation == incarnation
    assert pool.read_all(12) == list(range(12))
    put_soon(pool, 50)
    assert pool.client.get(key(50)) == value(50)


def test_a_drained_segment_is_emptied(pool: Pool) -> None:
    pool.start_node(ssd_nbytes=0)
    pool.put_all(6)
    pool.start_node("n1", ssd_nbytes=0)
    pool.client.master.call(DrainSegment(segment="n0.dram"))
    wait_until(lambda: pool.segment("n0.dram").status == "drained", "n0.dram is drained")
    assert pool.read_all(6) == list(range(6))
    assert pool.segment("n1.dram").num_objects == 6


def test_damage_in_memory_is_not_carried_to_disk(pool: Pool) -> None:
    node = pool.start_node(ssd_nbytes=0)
    pool.put_all(3)
    info = pool.client.lookup([key(1)])[0]
    assert info is not None
    node.segment.memory[info.replicas[0].offset + 50_000] ^= 1
    pool.start_node("n1", ssd_nbytes=0)
    pool.client.master.call(DrainSegment(segment="n0.dram"))
    wait_until(lambda: pool.counter("corrupt_replicas") == 1, "the master hears of the damage")
    assert pool.read_all(3) == [0, 2]


def test_the_disk_is_bounded_and_stays_usable(pool: Pool) -> None:
    node = pool.start_node(dram_nbytes=4 * MIB, ssd_nbytes=6 * LOG_FILE_NBYTES, ssd_rest_s=0.3)
    for number in range(400):
        put_soon(pool, number)
    wait_until(lambda: pool.counter("evicted_ssd") > 0, "the disk evicts")
    found = pool.read_all(400)
    assert found
    folder = Path(node.config.ssd_dir or "")
    assert sum(file.stat().st_size for file in folder.iterdir()) <= 6 * LOG_FILE_NBYTES + MIB
    assert node.ssd is not None
    node.ssd.log.check_integrity()


def test_tiers_are_told_apart(pool: Pool) -> None:
    pool.start_node()
    tiers = {each.name: each.tier for each in pool.client.stats().segments}
    assert tiers == {"n0.dram": Tier.DRAM, "n0.ssd": Tier.SSD}


@pytest.mark.parametrize("seed", range(3))
def test_a_killed_node_loses_nothing_that_was_on_its_disk(pool: Pool, seed: int) -> None:
    settings = asdict(config(pool.tmp_path, dram_nbytes=16 * MIB))
    node = RoleProcess("node", **settings)
    try:
        wait_until(lambda: pool.segment("n0.ssd").status == "ok", "n0.ssd is mounted")
        pool.put_all(60)
        wait_until(lambda: pool.segment("n0.ssd").num_objects >= 10 + 20 * seed, "objects are on disk")
        node.kill()
        safe = pool.segment("n0.ssd").num_objects
        node = RoleProcess("node", **settings)
        wait_until(lambda: pool.segment("n0.ssd").status == "ok", "n0.ssd is mounted")
        assert len(pool.read_all(60)) >= safe
        wait_until(lambda: pool.segment("n0.dram").status == "ok", "n0.dram is mounted")
        assert pool.client.put(b"again", value(7))
        assert pool.client.get(b"again") == value(7)
        pool.loop.run(check_integrity(pool.master))
    finally:
        node.close()


async def check_integrity(master: Master) -> None:
    master.state.check_integrity()


def test_closing_in_the_middle_of_it_all(pool: Pool) -> None:
    node = pool.start_node()
    pool.put_all(20)
    pool.loop.run(node.close())
    pool.loop.run(asyncio.sleep(0))
    again = pool.start_node()
    assert again.ssd is not None
    again.ssd.log.check_integrity()
