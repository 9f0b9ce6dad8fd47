"""Everything that one `setup` starts, and its orderly end: the client, its transfer engine, the memory offered.

The offered memory belongs to an `EmbeddedNode`: a node on its own event loop, in its own thread. It ends with close(),
or with leave() when the process ends. A process that is killed takes its memory with it; the master notices that the
node is silent.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import tempfile
import threading
from collections.abc import Coroutine
from contextlib import ExitStack
from typing import Any

from moonpool.base.errors import BreakerOpen, DeadlineExceeded, Unavailable
from moonpool.integrations.mooncake.range_sessions import OpenPuts, OpenReads
from moonpool.integrations.mooncake.segment_names import SegmentNames, node_name, reserve_port
from moonpool.integrations.mooncake.setup_config import SetupConfig
from moonpool.node.config import NodeConfig
from moonpool.node.service import Node
from moonpool.store import Store
from moonpool.store.client import ClientConfig
from moonpool.store.client.config import credentials
from moonpool.store.messages import Segments
from moonpool.transfer.config import TransferConfig
from moonpool.transfer.engine import TransferEngine

_START_TIMEOUT_S = 60.0  # it takes all of its memory at once
_CLOSE_TIMEOUT_S = 10.0
_LEAVE_TIMEOUT_S = 2.0  # a process that wants to end is not kept for long
_START_WAIT_S = 1.0  # a master that starts at the same time may be a moment later; calls never wait for one
_NUMBERS = itertools.count(1)  # a process may set up several stores


class EmbeddedNode:
    """Started when it is made; raises what Node.start() raises, and leaves nothing behind then."""

    def __init__(self, config: NodeConfig) -> None:
        self._node = Node(config)
        self._loop = asyncio.new_event_loop()
        # A daemon: an engine that exits without close() must not hang in it.
        self._thread = threading.Thread(target=self._loop.run_forever, name="mooncake-node", daemon=True)
        self._thread.start()
        try:
            self._run(self._node.start(), _START_TIMEOUT_S)
        except BaseException:
            self._stop_loop()
            raise

    @property
    def segment_name(self) -> str:
        return self._node.segment_name

    def close(self) -> None:
        """Takes the memory back from the pool. Call it once."""
        try:
            self._run(self._node.close(), _CLOSE_TIMEOUT_S)
        finally:
            self._stop_loop()

    def leave(self) -> None:
        """Takes the memory out of the pool in a process that is ending: no thread can be started there any more."""
        self._run(self._node.leave(), _LEAVE_TIMEOUT_S)

    def _run(self, coroutine: Coroutine[Any, Any, None], timeout_s: float) -> None:
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            future.result(timeout_s)
        except TimeoutError as error:
            future.cancel()
            raise DeadlineExceeded(f"the embedded node took longer than {timeout_s:g} s") from error
        except OSError as error:
            raise Unavailable(f"the embedded node: {error}") from error

    def _stop_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CLOSE_TIMEOUT_S)
        if not self._thread.is_alive():
            self._loop.close()


class MooncakeSession:
    """Raises what a client or a node raises when it cannot start, and leaves nothing behind then."""

    def __init__(self, config: SetupConfig) -> None:
        self.config = config
        self._node: EmbeddedNode | None = None
        with ExitStack() as stack:
            port = config.port
            if port is None:
                port = stack.enter_context(reserve_port()).getsockname()[1]
            self.hostname = config.hostname(port)
            self.name = node_name(self.hostname, os.getpid(), next(_NUMBERS))
            self._run_dir = tempfile.TemporaryDirectory(prefix="mp-mc-")
            run_dir = stack.enter_context(self._run_dir)
            self.client = client = self._connect(stack, run_dir)
            self.open_puts, self.open_reads = OpenPuts(client), OpenReads(client)
            self.names = SegmentNames(lambda: client.master.call(Segments()))
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
        self.open_puts.close()
        self._stack.close()

    def leave(self) -> None:
        """For a process that ends without close(): takes its memory out of the pool and removes its sockets."""
        if self._node is not None:
            self._node.leave()
        self._run_dir.cleanup()

    def _greet_master(self) -> None:
        try:
            self.client.exist_many([])
        except BreakerOpen:
            if not self.client.wait_for_master(_START_WAIT_S):
                raise
            self.client.exist_many([])

    def _connect(self, stack: ExitStack, run_dir: str) -> Store:
        wires = TransferConfig(run_dir=run_dir, tcp_host=None, num_threads=1, **credentials())
        engine = stack.enter_context(TransferEngine(wires))
        settings = ClientConfig(name=self.name)  # retry_s 0: an engine that waits computes nothing meanwhile
        return stack.enter_context(Store(self.config.master_address, engine=engine, config=settings))

    def _node_config(self, run_dir: str) -> NodeConfig:
        return NodeConfig(
            name=self.name,
            master_address=self.config.master_address,
            dram_nbytes=self.config.offered_nbytes,
            run_dir=os.path.join(run_dir, "node"),
            tcp_host=self.config.host,
            **credentials(),
        )
