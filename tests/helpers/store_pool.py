"""Pools for tests: in this process on a loop of their own, or as real processes that can be killed."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

from forked_script import ForkedProcess, ForkServer, fork_server
from waiting import HANG_S, wait_until

from moonpool.base.clock import Clock, VirtualClock
from moonpool.master.service import Master, MasterConfig
from moonpool.node.config import NodeConfig
from moonpool.node.service import Node
from moonpool.store import Store
from moonpool.store.client import ClientConfig
from moonpool.store.client.master_client import MasterClient
from moonpool.store.messages import SegmentStats
from moonpool.transfer.config import TransferConfig
from moonpool.transfer.engine import TransferEngine

T = TypeVar("T")
MIB = 1024 * 1024
# A host that stalls for a moment is no outage: only tests of the silence itself, which pass 0.2, count it as one.
SILENCE_S = 60.0


class LoopThread:
    """An event loop beside the test, so that blocking clients can be used here."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T], timeout_s: float = HANG_S) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(timeout_s)

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


def patient_config(**settings: Any) -> ClientConfig:
    """Settings of a client on a machine that runs many tests, which may keep a master waiting."""
    limits = ("retry_s", "rpc_timeout_s", "silence_s", "connect_timeout_s", "read_timeout_s", "transfer_timeout_s")
    return ClientConfig(**{**dict.fromkeys(limits, SILENCE_S), **settings})


def break_connection(master: MasterClient) -> None:
    """The connection of a client to its master ends, and the client has not noticed."""
    master._rpc._drop()


class LocalPool:
    """A master whose clock the test moves, and nodes with real memory, over real sockets. `as_seen` makes the master's
    clock from the test's.
    """

    def __init__(
        self,
        tmp_path: Path,
        dram_nbytes: int = MIB,
        num_nodes: int = 1,
        *,
        as_seen: Callable[[VirtualClock], Clock] = lambda clock: clock,
        **rules: Any,
    ) -> None:
        self.tmp_path = tmp_path
        self.address = f"unix:{tmp_path}/m.sock"
        self.clock = VirtualClock()
        self._master_clock = as_seen(self.clock)
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
        config = MasterConfig(data_dir=str(self.tmp_path / "master"), listen=self.address, **self._rules)
        self.master = Master(config, self._master_clock)
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
        wait_until(lambda: self._segment(f"{name}.ssd").num_objects >= num_objects, f"{num_objects} objects on the SSD")
        self.nodes.remove(node)
        self.loop.run(node.close())
        again = Node(config)
        self.loop.run(again.start())
        self.nodes.append(again)
        wait_until(lambda: self._segment(f"{name}.ssd").status == "ok", "the SSD is there again")

    def _segment(self, name: str) -> SegmentStats:
        return next(each for each in self.on_loop(self.master.state.stats).segments if each.name == name)

    def client(self, *, shm: bool = True, **config: Any) -> Store:
        engine = TransferEngine(TransferConfig(run_dir=str(self.tmp_path / "run"), shm=shm, tcp_host=None))
        self._stack.callback(engine.close)
        return self._stack.enter_context(Store(self.address, engine=engine, config=patient_config(**config)))

    def break_memory(self, number: int) -> None:
        """The node's memory cannot be reached any more, as if the node had died: before the master knows."""
        engine = self.nodes[number]._engine
        assert engine is not None
        engine.close()

    def sessions_at(self, number: int) -> list[int]:
        """The processes that the node knows."""
        registry = self.nodes[number]._registry
        assert registry is not None
        return registry.sessions()

    def advance(self, seconds: float) -> None:
        """Moves the master's clock and lets it act on it."""
        self.clock.advance(seconds)
        self.loop.run(self._tick())

    async def _tick(self) -> None:
        while self.master.state.tick(self.master.clock.now_s()):
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


_SCRIPT = Path(__file__).with_name("store_role.py")
_forks: list[ForkServer] = []


@contextmanager
def forked_roles() -> Iterator[None]:
    """Meanwhile a RoleProcess is a fork of one process, and costs milliseconds."""
    with fork_server(_SCRIPT) as server:
        _forks.append(server)
        try:
            yield
        finally:
            _forks.remove(server)


class RoleProcess:
    """One role as a process of its own (store_role.py). `line` is what it said when it was ready."""

    process: subprocess.Popen[str] | ForkedProcess

    def __init__(self, role: str, **config: Any) -> None:
        if _forks:
            self.process = _forks[-1].start(role, json.dumps(config))
        else:
            self.process = subprocess.Popen(
                [sys.executable, str(_SCRIPT), role, json.dumps(config)], stdout=subprocess.PIPE, text=True
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

    def finish(self, timeout_s: float = HANG_S) -> int:
        code = self.process.wait(timeout_s)
        self.close()
        return code

    def close(self) -> None:
        """Idempotent. Ends it, also when it is stopped. Raise TimeoutExpired when it had to be killed."""
        assert self.process.stdout is not None
        try:
            if self.process.poll() is None:
                self.process.terminate()
                self.process.send_signal(signal.SIGCONT)
                self.process.wait(HANG_S)
        finally:
            self.process.kill()
            self.process.wait()
            self.process.stdout.close()
            if self.process.stdin is not None:
                self.process.stdin.close()


class ProcessPool:
    """A master and nodes as processes, and Stores on them, all ended by `stack`."""

    def __init__(self, tmp_path: Path, stack: ExitStack) -> None:
        self.tmp_path, self._stack = tmp_path, stack
        self.address = f"unix:{tmp_path}/m.sock"

    def start_master(self, **rules: Any) -> RoleProcess:
        """Start the master, or another one on the same data."""
        # A node that is away is remembered for so long that no test sees it forgotten.
        times = {"heartbeat_s": 0.1, "segment_ttl_s": 600.0, "tick_s": 0.01, "lease_s": 0.2}
        data_dir = str(self.tmp_path / "data")
        self.master = self.start("master", data_dir=data_dir, listen=self.address, **{**times, **rules})
        return self.master

    def start_node(self, name: str = "n0", dram_nbytes: int = 4 * MIB, **more: Any) -> RoleProcess:
        more = {"run_dir": str(self.tmp_path), "retry_s": 0.05, **more}
        return self.start("node", name=name, master_address=self.address, dram_nbytes=dram_nbytes, **more)

    def start_client(self, role: str, **config: Any) -> RoleProcess:
        """Start a program that uses the pool (store_role.py)."""
        return self.start(role, address=self.address, run_dir=str(self.tmp_path), **config)

    def start(self, role: str, **config: Any) -> RoleProcess:
        process = RoleProcess(role, **config)
        self._stack.callback(process.close)
        return process

    def client(self, **config: Any) -> Store:
        engine = TransferEngine(TransferConfig(run_dir=str(self.tmp_path), tcp_host=None))
        self._stack.enter_context(engine)
        return self._stack.enter_context(Store(self.address, engine=engine, config=patient_config(**config)))
