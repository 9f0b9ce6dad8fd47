"""Everything that one `setup` starts, and its orderly end: the client, its transfer engine, the memory offered."""

from __future__ import annotations

import atexit
import itertools
import logging
import os
import threading
from contextlib import ExitStack, suppress

from moonpool.base.errors import BreakerOpen, MoonpoolError
from moonpool.base.own_folder import OwnFolder
from moonpool.integrations.mooncake.engine_session import FORCE_TCP
from moonpool.integrations.mooncake.offered_memory import OfferedMemory
from moonpool.integrations.mooncake.range_sessions import OpenPuts, OpenReads
from moonpool.integrations.mooncake.segment_names import SegmentNames, node_name, reserve_port
from moonpool.integrations.mooncake.setup_config import SetupConfig
from moonpool.integrations.mooncake.types import ReplicateConfig
from moonpool.node.config import NodeConfig
from moonpool.store import Store
from moonpool.store.client import ClientConfig
from moonpool.store.client.config import credentials
from moonpool.store.messages import Segments
from moonpool.transfer.config import TransferConfig
from moonpool.transfer.engine import TransferEngine

_LOG = logging.getLogger(__name__)
_START_WAIT_S = 1.0  # a master that starts at the same time may be a moment later; calls never wait for one
_NUMBERS = itertools.count(1)  # a process may set up several stores


class MooncakeSession:
    """Raises what a client or a node raises when it cannot start, and leaves nothing behind then."""

    def __init__(self, config: SetupConfig) -> None:
        self.config = config
        self.namespace = config.namespace
        self.segment_name: str | None = None  # of the memory that setup() offers
        with ExitStack() as stack:
            port = config.port
            if port is None:
                port = stack.enter_context(reserve_port()).getsockname()[1]
            self.hostname = config.hostname(port)
            self._run_dir = OwnFolder("mp.mooncake-")
            run_dir = stack.enter_context(self._run_dir)
            self.client = client = self._connect(stack, str(run_dir))
            self.open_puts, self.open_reads = OpenPuts(client), OpenReads(client)
            self.names = SegmentNames(lambda: client.master.call(Segments()))
            self._greet_master()
            self.memory = OfferedMemory(client, self._node_config)
            stack.callback(self.memory.close)
            if config.offered_nbytes:
                self.segment_name, _ = self.memory.offer(config.offered_nbytes)
            own = () if self.segment_name is None else (self.segment_name,)
            self.plain_options = ReplicateConfig().options(own)  # of puts without a ReplicateConfig
            self._stack = stack.pop_all()

    def close(self) -> None:
        """Idempotent."""
        self.open_puts.close()
        self._stack.close()

    def close_soon(self) -> None:
        """close() on a thread of its own: the garbage collector calls this anywhere, even while locks are held."""
        atexit.unregister(self.leave_quietly)
        with suppress(RuntimeError):  # the interpreter is ending, and leave_quietly() was called
            threading.Thread(target=self._close_quietly, name="mooncake-close", daemon=True).start()

    def leave_quietly(self) -> None:
        """For a process that ends without close(): takes its memory out of the pool and removes its sockets. close()
        would fail then: the interpreter starts no more threads.
        """
        try:
            self.memory.leave()
        except MoonpoolError as error:
            _LOG.warning("this process ends without close(), and its memory stays in the pool for now: %s", error)
        self._run_dir.close()

    def _close_quietly(self) -> None:
        try:
            self.close()
        except MoonpoolError as error:
            _LOG.warning("a store that was not closed: %s", error)

    def _greet_master(self) -> None:
        try:
            self.client.exist_many([])
        except BreakerOpen:
            if not self.client.wait_for_master(_START_WAIT_S):
                raise
            self.client.exist_many([])

    def _connect(self, stack: ExitStack, run_dir: str) -> Store:
        wires = TransferConfig(
            run_dir=run_dir, tcp_host=None, num_threads=1, shm=FORCE_TCP not in os.environ, **credentials()
        )
        engine = stack.enter_context(TransferEngine(wires))
        settings = ClientConfig(name=self._new_name())  # retry_s 0: an engine that waits computes nothing meanwhile
        return stack.enter_context(Store(self.config.master_address, engine=engine, config=settings))

    def _node_config(self, nbytes: int, numa_node: int | None) -> NodeConfig:
        return NodeConfig(
            name=self._new_name(),
            master_address=self.config.master_address,
            dram_nbytes=nbytes,
            run_dir=str(self._run_dir.path / "node"),
            tcp_host=self.config.host,
            numa_node=numa_node,
            **credentials(),
        )

    def _new_name(self) -> str:
        return node_name(self.hostname, os.getpid(), next(_NUMBERS))
