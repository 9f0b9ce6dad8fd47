"""Stores of Mooncake's API on real pools."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from store_pool import MIB, LocalPool

from moonpool.integrations.mooncake import MooncakeDistributedStore

MakeStore = Callable[..., MooncakeDistributedStore]


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[LocalPool]:
    made = LocalPool(tmp_path, dram_nbytes=4 * MIB)
    yield made
    made.close()


@pytest.fixture
def make_store(pool: LocalPool) -> Iterator[MakeStore]:
    """A store on the pool; settings by name."""
    with ExitStack() as stack:

        def make(**settings: object) -> MooncakeDistributedStore:
            store = MooncakeDistributedStore()
            stack.callback(store.close)
            base = {
                "local_hostname": "127.0.0.1",
                "metadata_server": "P2PHANDSHAKE",
                "global_segment_size": 0,
                "master_server_addr": pool.address,
            }
            assert store.setup(base | settings) == 0
            return store

        yield make


@pytest.fixture
def store(make_store: MakeStore) -> MooncakeDistributedStore:
    return make_store()
