"""Pools for tests: in this process on a loop of their own, or as real processes that can be killed."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

from moonpool.base.clock import VirtualClock
from moonpool.master.service import Master, MasterConfig
from moonpool.node.config import NodeConfig
from moonpool.node.service import Node
from moonpool.store import Store
from moonpool.store.client import ClientConfig
from moonpool.store.messages import SegmentStats
from moonpool.transfer.config import TransferConfig
from moonpool.transfer.engine import TransferEngine

T = TypeVar("T")
MIB = 1024 * 1024


def wait_until(holds: Callable[[], bool], timeout_s: float = 10.0) -> None:
    """For what another process or thread brings about in its own time."""
    end = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.005)


class LoopThread:
    """An event loop beside the test, so that blocking clients can be used here."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T], timeout_s: float = 20.0) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(timeout_s)

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


class LocalPool:
    """A master whose clock the test moves, and nodes with real memory, over real sockets."""

    def __init__(self, tmp_path: Path, dram_nbytes: int = MIB, num_nodes: int = 1, **rules: Any) -> None:
        self.tmp_path = tmp_path
        self.address = f"unix:{tmp_path}/m.sock"
        self.clock = VirtualClock()
        self.loop = LoopThread()
        self._stack = ExitStack()
        self._rules = {"heartbeat_s": 0.02, "tick_s": 0.01, "segment_ttl_s": 1e9, **rules}
        self.nodes: list[Node] = []
        try:
            self.master = self.start_master()
            for number in range(num_nodes):
                self.start_node(f"n{number}", dram_nbytes)
        except BaseException:
            self.close()
            raise

    def start_master(self) -> Master:
        self.master = Master(
            MasterConfig(data_dir=str(self.tmp_path / "master"), listen=self.address, **self._rules), self.clock
        )
        self.loop.run(self.master.start())
        return self.master

    def start_node(self, name: str, dram_nbytes: int = MIB, **settings: Any) -> Node:
        node = Node(
            NodeConfig(
                name=name,
                master_address=self.address,
                dram_nbytes=dram_nbytes,
                run_dir=str(self.tmp_path / "run"),
                retry_s=0.02,
                fence_check_s=0.0,
                **settings,
            )
        )
        self.loop.run(node.start())
        self.nodes.append(node)
        return node

    def leave_on_ssd(self, node: Node, num_objects: int) -> None:
        """Waits until the node has written that number of objects to its SSD, and starts it again with empty memory."""
        name, config = node.config.name, node.config
        wait_until(lambda: self._segment(f"{name}.ssd").num_objects >= num_objects, 30)
        self.nodes.remove(node)
        self.loop.run(node.close())
        again = Node(config)
        self.loop.run(again.start())
        self.nodes.append(again)
        wait_until(lambda: self._segment(f"{name}.ssd").status == "ok", 30)

    def _segment(self, name: str) -> SegmentStats:
        return next(each for each in self.on_loop(self.master.state.stats).segments if each.name == name)

    def client(self, *, shm: bool = True, **config: Any) -> Store:
        engine = TransferEngine(TransferConfig(run_dir=str(self.tmp_path / "run"), shm=shm, tcp_host=None))
        self._stack.callback(engine.close)
        patient = {"retry_s": 10.0, **config}  # a machine that runs many tests may keep a master waiting
        return self._stack.enter_context(Store(self.address, engine=engine, config=ClientConfig(**patient)))

    def advance(self, seconds: float) -> None:
        """Moves the master's clock and lets it act on it."""
        self.clock.advance(seconds)
        self.loop.run(self._tick())

    async def _tick(self) -> None:
        while self.master.state.tick(self.clock.now_s()):
            pass

    def on_loop(self, action: Callable[[], T]) -> T:
        """Runs `action` where the master runs, so that it sees a consistent state."""

        async def run() -> T:
            return action()

        return self.loop.run(run())

    def check_integrity(self) -> None:
        self.on_loop(self.master.state.check_integrity)

    def close(self) -> None:
        self._stack.close()
        for node in self.nodes:
            self.loop.run(node.close())
        if hasattr(self, "master"):
            self.loop.run(self.master.close())
        self.loop.close()


class RoleProcess:
    """One role as a process of its own (store_role.py). `line` is what it said when it was ready."""

    def __init__(self, role: str, **config: Any) -> None:
        script = Path(__file__).with_name("store_role.py")
        self.process = subprocess.Popen(
            [sys.executable, str(script), role, json.dumps(config)], stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.line = self.process.stdout.readline().strip()
        if not self.line:
            self.process.stdout.close()
            raise AssertionError(f"{role} ended with {self.process.wait()}")

    def kill(self) -> None:
        """kill -9, and waits until it is gone."""
        self.process.kill()
        self.close()

    def finish(self, timeout_s: float = 30.0) -> int:
        code = self.process.wait(timeout_s)
        self.close()
        return code

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()
