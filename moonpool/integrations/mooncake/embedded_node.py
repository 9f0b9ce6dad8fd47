"""Memory of this process, offered to the pool: a node on an event loop of its own, in a thread of its own.

It ends with close(), or with leave() when the process ends. A process that is killed takes the memory along; the master
notices by the silence.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any

from moonpool.base.errors import DeadlineExceeded, Unavailable
from moonpool.node.config import NodeConfig
from moonpool.node.service import Node

_START_TIMEOUT_S = 60.0  # it takes all of its memory at once
_CLOSE_TIMEOUT_S = 10.0
_LEAVE_TIMEOUT_S = 2.0  # a process that wants to end is not kept for long


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
