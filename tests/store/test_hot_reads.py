"""A hot prefix in a full pool, with real nodes and clients: it gets its second replicas, reads are divided over both
nodes, every value is right, and the bytes come back when it has cooled."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from severe import check_bytes
from store_pool import MIB, LocalPool
from waiting import wait_until

from moonpool.store.client import Put
from moonpool.transfer.memory.fence import Fence

NUM_BLOCKS, BLOCK_NBYTES, NUM_CLIENTS = 8, 64 * 1024, 4
HOT = {b"hot-%d" % number: bytes([number + 1]) * BLOCK_NBYTES for number in range(NUM_BLOCKS)}
WINDOW_S = 10.0


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[LocalPool]:
    """Two nodes, of which the master evicts little below what a put needs."""
    rules: dict[str, Any] = {
        "hot_hits": 4,
        "hot_window_s": WINDOW_S,
        "high_watermark": 0.97,
        "low_watermark": 0.95,
        "lease_s": 2.0,
    }
    made = LocalPool(tmp_path, 16 * MIB, 2, journal_sync_s=0.0, **rules)
    yield made
    made.check_integrity()
    made.close()


@pytest.fixture
def served(pool: LocalPool, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Bytes that each node has sent to readers: it checks the fence for every one of them."""
    monkeypatch.setattr("moonpool.store.client.remembered._REPORTED_USES", 1)  # so that no report waits for real time
    found, original = Counter[str](), Fence.check
    names = {id(node.segment.fence): node.config.name for node in pool.nodes}

    def check(self: Fence, offset: int, nbytes: int, generation: int) -> None:
        found[names.get(id(self), "elsewhere")] += nbytes
        original(self, offset, nbytes, generation)

    monkeypatch.setattr(Fence, "check", check)
    return found


def counters(pool: LocalPool) -> dict[str, int]:
    return pool.on_loop(lambda: pool.master.state.stats()).counters


def used_part(pool: LocalPool) -> float:
    stats = pool.on_loop(lambda: pool.master.state.stats())
    return stats.used_nbytes / stats.capacity_nbytes


def test_a_hot_prefix_in_a_full_pool(pool: LocalPool, served: Counter[str]) -> None:
    writer = pool.client(shm=False)
    for number in range(0, 1024, 64):  # twice as much as the pool can hold
        values = {b"other-%d" % other: bytes(BLOCK_NBYTES) for other in range(number, number + 64)}
        assert writer.put_many(values) == [None] * 64
    keys = list(HOT)
    puts = [Put(key, [HOT[key]], parent=parent) for key, parent in zip(keys, [b"", *keys], strict=False)]
    assert writer.put_objects(puts) == [None] * NUM_BLOCKS
    assert counters(pool)["evicted"] > 0
    assert used_part(pool) > 0.9

    readers = [pool.client(shm=False) for _ in range(NUM_CLIENTS)]

    def read_all() -> None:
        for reader in readers:
            for key, data in zip(keys, reader.get_many(keys), strict=True):
                assert data is not None, key
                check_bytes(data, HOT[key], f"the value of {key!r}")

    def is_replicated() -> bool:
        read_all()
        pool.advance(0.3)
        return counters(pool)["hot_objects"] == NUM_BLOCKS

    wait_until(is_replicated, "every block has its second replica")
    assert used_part(pool) > 0.9, "in a full pool"
    read_all()  # readers that remember one replica are told that there are two
    served.clear()
    before = counters(pool)["hot_saved_bytes"]
    for _ in range(4):
        read_all()
        pool.advance(0.5)
    assert min(served["n0"], served["n1"]) > 0.35 * sum(served.values()), served
    assert served["elsewhere"] == 0
    assert counters(pool)["hot_saved_bytes"] > before

    taken = counters(pool)["hot_bytes"]
    assert taken >= NUM_BLOCKS * BLOCK_NBYTES
    used = pool.on_loop(lambda: pool.master.state.stats()).used_nbytes
    for _ in range(20):
        pool.advance(WINDOW_S / 10)
    assert counters(pool)["hot_bytes"] == 0
    wait_until(
        lambda: pool.on_loop(lambda: pool.master.state.stats()).used_nbytes <= used - taken, "the bytes are back"
    )
    read_all()
