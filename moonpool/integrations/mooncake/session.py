"""Everything one `setup` starts, and its orderly end: the client, its transfer engine, the memory offered."""

from __future__ import annotations

import itertools
import os
import tempfile
from contextlib import ExitStack

from moonpool.base.errors import BreakerOpen
from moonpool.integrations.mooncake.embedded_node import EmbeddedNode
from moonpool.integrations.mooncake.pool import MooncakePool
from moonpool.integrations.mooncake.setup_config import SetupConfig, credentials
from moonpool.node.config import NodeConfig
from moonpool.store.client import ClientConfig, StoreClient
from moonpool.transfer.config import TransferConfig
from moonpool.transfer.engine import TransferEngine

_START_PATIENCE_S = 1.0  # a master that starts at the same time may be a moment later; calls never wait for one
_HOST_CHARS = 40  # of it in a name, which is part of a socket's path, which has 107
_NUMBERS = itertools.count(1)  # a process may set up several stores


class MooncakeSession:
    """Raises what a client or a node raises when it cannot start, and leaves nothing behind then."""

    def __init__(self, config: SetupConfig) -> None:
        self.config = config
        self.name = f"mooncake-{config.host[:_HOST_CHARS]}-{os.getpid()}-{next(_NUMBERS)}"
        self._node: EmbeddedNode | None = None
        with ExitStack() as stack:
            self._run_dir = tempfile.TemporaryDirectory(prefix="mp-mc-")
            run_dir = stack.enter_context(self._run_dir)
            self.client = self._connect(stack, run_dir)
            self.pool = MooncakePool(self.client)
            self._greet_master()
            if config.offered_nbytes:
                self._node = EmbeddedNode(self._node_config(run_dir))
                stack.callback(self._node.close)
            self._stack = stack.pop_all()

    @property
    def segment_name(self) -> str | None:
        """Of the memory it offers; None when it offers none."""
        return None if self._node is None else self._node.segment_name

    def close(self) -> None:
        """Idempotent."""
        self._stack.close()

    def leave(self) -> None:
        """For a process that ends without close(): takes its memory out of the pool and removes its sockets."""
        if self._node is not None:
            self._node.leave()
        self._run_dir.cleanup()

    def _greet_master(self) -> None:
        try:
            self.pool.is_well()
        except BreakerOpen:
            if not self.client.wait_for_master(_START_PATIENCE_S):
                raise
            self.pool.is_well()

    def _connect(self, stack: ExitStack, run_dir: str) -> StoreClient:
        wires = TransferConfig(run_dir=run_dir, tcp_host=None, num_threads=1, **credentials())
        engine = stack.enter_context(TransferEngine(wires))
        settings = ClientConfig(name=self.name)  # retry_s 0: an engine that waits computes nothing meanwhile
        return stack.enter_context(StoreClient(self.config.master_address, engine, settings))

    def _node_config(self, run_dir: str) -> NodeConfig:
        return NodeConfig(
            name=self.name,
            master_address=self.config.master_address,
            dram_nbytes=self.config.offered_nbytes,
            run_dir=os.path.join(run_dir, "node"),
            tcp_host=self.config.host,
            **credentials(),
        )
