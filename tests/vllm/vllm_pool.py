"""A pool of real processes for vLLM engines, and the prompts they are given."""

from __future__ import annotations

import random
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from store_pool import MIB, RoleProcess
from tiny_llama import VOCAB
from vllm_process import NodeProcess

from moonpool.integrations.mooncake import MooncakeDistributedStore

NUM_PROMPT_TOKENS = 2000


def prompt_of(seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, VOCAB) for _ in range(NUM_PROMPT_TOKENS)]


class Pool:
    """A master as a process, and a client of Mooncake's API to look into the pool; memory comes with add_node()."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.address = f"unix:{folder}/m.sock"
        self._folder = folder
        self._stack = stack
        master = RoleProcess("master", data_dir=str(folder / "master"), listen=self.address)
        stack.callback(master.close)
        self.store = MooncakeDistributedStore()
        stack.callback(self.store.close)
        assert self.store.setup("127.0.0.1", "", 0, 1, "tcp", "", self.address) == 0

    def add_node(self) -> NodeProcess:
        node = NodeProcess(
            self._folder / "node.log",
            name="n0",
            master_address=self.address,
            dram_nbytes=64 * MIB,
            run_dir=str(self._folder / "run"),
        )
        self._stack.callback(node.close)
        return node

    def settings(self, offered_nbytes: int = 0) -> dict[str, Any]:
        """Upstream's configuration file for the connector."""
        return {
            "mode": "embedded" if offered_nbytes else "standalone-store",
            "metadata_server": "P2PHANDSHAKE",
            "master_server_address": self.address,
            "protocol": "tcp",
            "global_segment_size": offered_nbytes,
            "local_buffer_size": 1,
        }
