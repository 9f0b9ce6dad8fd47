"""A pool of real processes for vLLM engines, and the prompts they are given."""

from __future__ import annotations

import random
from contextlib import ExitStack
from pathlib import Path

from store_pool import MIB, RoleProcess
from tiny_llama import VOCAB
from vllm_process import Connector, NodeProcess

from moonpool.integrations.mooncake import MooncakeDistributedStore

NUM_PROMPT_TOKENS = 2000
FEWEST_LOADED = NUM_PROMPT_TOKENS * 9 // 10
NUM_BLOCKS = NUM_PROMPT_TOKENS // 128  # full ones; 128 tokens are vLLM's default on a CPU


def prompt_of(seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, VOCAB) for _ in range(NUM_PROMPT_TOKENS)]


class Pool:
    """A master as a process, and a client of Mooncake's API to look into the pool; memory comes with add_node()."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.address = f"unix:{folder}/m.sock"
        self._folder = folder
        self._stack = stack
        self.master = self.start_master()
        self.store = MooncakeDistributedStore()
        stack.callback(self.store.close)
        assert self.store.setup("127.0.0.1", "", 0, 1, "tcp", "", self.address) == 0

    def start_master(self) -> RoleProcess:
        """Also after the last one was killed: it reads that one's journal."""
        self.master = RoleProcess("master", data_dir=str(self._folder / "master"), listen=self.address)
        self._stack.callback(self.master.close)
        return self.master

    def add_node(self, name: str = "n0") -> NodeProcess:
        node = NodeProcess(
            self._folder / f"{name}.log",
            name=name,
            master_address=self.address,
            dram_nbytes=64 * MIB,
            run_dir=str(self._folder / "run"),
            tcp_host="127.0.0.1",
        )
        self._stack.callback(node.close)
        return node

    def connector(
        self, *, offered_nbytes: int = 0, force_tcp: bool = False, policy: str | None = "recompute"
    ) -> Connector:
        """vLLM's settings, and upstream's configuration file. With `force_tcp` the engine reads and writes the nodes'
        memory as from another machine. `policy` None is vLLM's default.
        """
        return Connector(
            config={
                "kv_connector": "MooncakeStoreConnector",
                "kv_role": "kv_both",
                **({} if policy is None else {"kv_load_failure_policy": policy}),
            },
            mooncake={
                "mode": "embedded" if offered_nbytes else "standalone-store",
                "metadata_server": "P2PHANDSHAKE",
                "master_server_address": self.address,
                "protocol": "tcp",
                "global_segment_size": offered_nbytes,
                "local_buffer_size": 1,
            },
            env={"MC_FORCE_TCP": "1"} if force_tcp else {},
        )
