"""Prompts that wait for a worker, and blocks that the pool has on SSD: what no page is free for comes to the pool's
memory meanwhile. With a real pool and a real disk."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from scheduler_model import scheduler, sequence
from store_pool import MIB, LocalPool
from waiting import wait_until

from moonpool.base.clock import SystemClock
from moonpool.base.keys import object_key
from moonpool.engine.kv_memory import KvLayout
from moonpool.engine.sequence import FullBlock, Sequence
from moonpool.store import Store
from moonpool.worker.kv_link.pieces import HostPieces
from moonpool.worker.kv_link.pool import PoolWriter
from moonpool.worker.kv_link.pull import Puller
from moonpool.worker.kv_link.pull_ahead import AheadPuller
from moonpool.worker.metrics import Samples

IDENTITY = bytes(range(32))
LAYOUT = KvLayout(num_pages=16, num_layers=2, num_kv_heads=1, block_tokens=4, head_dim=8, dtype="float32")
NUM_PROMPTS, NUM_BLOCKS = 3, 4  # a pull ahead may use four of the pages


class Loop:
    """Runs what the puller posts when the test wants it."""

    def __init__(self) -> None:
        self.posted: list[object] = []

    def post(self, action: object) -> None:
        self.posted.append(action)


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[LocalPool]:
    pool = LocalPool(tmp_path, num_nodes=0)
    yield pool
    pool.close()


def tiers(store: Store, prompt: Sequence) -> str:
    """Where each block is read from: d for memory, s for SSD."""
    infos = store.lookup([object_key(key) for key in prompt.keys[:NUM_BLOCKS]], reads=False)
    assert all(info is not None for info in infos)
    return "".join("d" if info and info.replicas[0].segment.endswith("dram") else "s" for info in infos)


def test_blocks_beyond_the_budget_of_pages_come_to_the_pools_memory(pool: LocalPool, tmp_path: Path) -> None:
    node = pool.start_node("n0", 4 * MIB, ssd_dir=str(tmp_path / "disk"), ssd_nbytes=64 * MIB, ssd_file_nbytes=4 * MIB)
    store, sched = pool.client(), scheduler(LAYOUT.num_pages)
    memory = HostPieces(memoryview(bytearray(LAYOUT.total_nbytes)), LAYOUT)
    np.frombuffer(memory.memory(0, range(2)), dtype=np.uint8)[:] = 7
    prompts = [sequence(f"r{at}", 4 * NUM_BLOCKS + 1, start=50 * at, prefill_only=True) for at in range(NUM_PROMPTS)]
    writer = PoolWriter(store, memory, IDENTITY)
    for prompt in prompts:
        blocks = enumerate(prompt.keys[:NUM_BLOCKS])
        writer.put_pages({page: FullBlock(prompt.request_id, page, page, key) for page, key in blocks})
    pool.leave_on_ssd(node, NUM_PROMPTS * NUM_BLOCKS)
    assert [tiers(store, prompt) for prompt in prompts] == ["ssss"] * NUM_PROMPTS

    puller, loop = Puller(store, memory, IDENTITY), Loop()
    try:
        ahead = AheadPuller(sched, puller, Samples(), lambda _: 60.0, lambda _: 0.0, SystemClock())
        ahead.loop = loop  # type: ignore[assignment]
        for prompt in prompts:
            prompt.num_pool_blocks = puller.count_stored(prompt.keys[:NUM_BLOCKS])
            sched.add(prompt)
        sched.pages.allocate(7)  # the first prompt alone has room now
        ahead.at_boundary()
        ahead.at_boundary()  # it asks once
        wait_until(lambda: [tiers(store, prompt) for prompt in prompts[1:]] == ["dddd"] * 2, "all is in memory")
        assert tiers(store, prompts[0]) == "ssss", "the first one is pulled from SSD, into pages"
        assert pool.on_loop(pool.master.state.stats).counters["promoted"] == 2 * NUM_BLOCKS
        wait_until(lambda: len(loop.posted) == 2, "the engine is told that the prompt may join, and of the end")
        for action in loop.posted:
            action()  # type: ignore[operator]
        assert sched.ahead.end_of("r0") == sched.ahead.num_pages == NUM_BLOCKS
    finally:
        puller.close()
