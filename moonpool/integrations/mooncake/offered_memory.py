"""The memory that one store offers to the pool: embedded nodes, each with an event loop in a thread of its own.

A node ends with close(), or with leave() when the process ends. A process that is killed takes its memory with it; the
master notices that the node is silent.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine
from typing import Any

from moonpool.base.errors import DeadlineExceeded, MoonpoolError, Unavailable
from moonpool.node.config import NodeConfig
from moonpool.node.service import Node
from moonpool.store import Store
from moonpool.store.messages import GRANULE_NBYTES, num_granules

_START_TIMEOUT_S = 60.0  # it takes all of its memory at once
_CLOSE_TIMEOUT_S = 10.0
_LEAVE_TIMEOUT_S = 2.0  # a process that wants to end is not kept for long
_DRAIN_POLL_S = 0.05


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
        """Take the memory back from the pool. Call it once."""
        try:
            self._run(self._node.close(), _CLOSE_TIMEOUT_S)
        finally:
            self._stop_loop()

    def leave(self) -> None:
        """Take the memory out of the pool in a process that is ending, which cannot start threads any more."""
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


class OfferedMemory:
    """All embedded nodes of a store. Thread-safe. `config` makes the settings of a node: its memory, its NUMA node."""

    def __init__(self, client: Store, config: Callable[[int, int | None], NodeConfig]) -> None:
        self._client = client
        self._config = config
        self._lock = threading.Lock()
        self._nodes: dict[str, EmbeddedNode] = {}  # by segment
        self._leaving: list[threading.Thread] = []
        self._ended = threading.Event()

    def offer(self, nbytes: int, numa_node: int | None = None) -> tuple[str, int]:
        """Offer that much, in whole pages. Return the segment's name and its size. Raise what Node.start() raises."""
        nbytes = num_granules(nbytes) * GRANULE_NBYTES
        node = EmbeddedNode(self._config(nbytes, numa_node))
        with self._lock:
            if not self._ended.is_set():
                self._nodes[node.segment_name] = node
                return node.segment_name, nbytes
        node.close()
        raise Unavailable("this store was closed")

    def segments(self) -> tuple[str, ...]:
        """Return the names of the segments that are offered now."""
        with self._lock:
            return tuple(self._nodes)

    def take_back(self, segment: str, grace_s: float) -> bool:
        """Free the segment; with `grace_s`, move its objects away first, in the background and for so long at most.
        Return False when there is no such segment.
        """
        with self._lock:
            node = self._nodes.pop(segment, None)
            if node is None:
                return False
            if grace_s > 0:
                thread = threading.Thread(target=self._drain, args=(node, grace_s), name="mooncake-drain", daemon=True)
                self._leaving = [each for each in self._leaving if each.is_alive()] + [thread]
                thread.start()
                return True
        node.close()
        return True

    def close(self) -> None:
        """Take everything back now. Idempotent. Raise the first error after all nodes were closed."""
        with self._lock:
            self._ended.set()
            nodes, self._nodes = list(self._nodes.values()), {}
            leaving, self._leaving = self._leaving, []
        with contextlib.ExitStack() as stack:
            for thread in leaving:
                stack.callback(thread.join, _CLOSE_TIMEOUT_S)
            for node in nodes:
                stack.callback(node.close)

    def leave(self) -> None:
        """For a process that ends without close()."""
        for node in list(self._nodes.values()):
            node.leave()

    def _drain(self, node: EmbeddedNode, grace_s: float) -> None:
        with contextlib.suppress(MoonpoolError):  # without a master, or without room elsewhere, the objects are lost
            task_id = self._client.tasks.drain(node.segment_name)
            for _ in range(max(1, int(grace_s / _DRAIN_POLL_S))):
                task = self._client.tasks.query(task_id)
                if task is None or task.state != "running" or self._ended.wait(_DRAIN_POLL_S):
                    break
        with contextlib.suppress(MoonpoolError):
            node.close()
