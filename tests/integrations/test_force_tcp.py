"""MC_FORCE_TCP: a store that uses no shared memory, as if each node were another machine."""

from __future__ import annotations

from pathlib import Path

import pytest
from store_pool import MIB, LocalPool

from moonpool.integrations.mooncake import MooncakeDistributedStore, ReplicateConfig
from moonpool.node.config import NodeConfig
from moonpool.node.service import Node


def add_node_without_tcp(pool: LocalPool) -> None:
    config = NodeConfig(
        name="local", master_address=pool.address, dram_nbytes=MIB, run_dir=str(pool.tmp_path / "run"), tcp_host=None
    )
    node = Node(config)
    pool.loop.run(node.start())
    pool.nodes.append(node)


def test_shared_memory_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = LocalPool(tmp_path, num_nodes=0)
    store, forced = MooncakeDistributedStore(), MooncakeDistributedStore()
    try:
        add_node_without_tcp(pool)
        assert store.setup("127.0.0.1", "", 0, 1, "tcp", "", pool.address) == 0
        monkeypatch.setenv("MC_FORCE_TCP", "1")
        assert forced.setup("127.0.0.1", "", 0, 1, "tcp", "", pool.address) == 0
        assert store.put("key", b"value") == 0
        assert forced.get("key") == b""
        assert forced.put("other", b"value") < 0
        pool.start_node("reachable")
        there = ReplicateConfig()
        there.preferred_segment = "reachable.dram"
        assert forced.put("third", b"value" * 1000, there) == 0
        assert store.get("third") == forced.get("third") == b"value" * 1000
    finally:
        store.close()
        forced.close()
        pool.close()
