"""An owner of one segment behind a guard, and callers with guards of their own."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from moonpool.base.checksum import crc32c
from moonpool.base.descriptor import SegmentDescriptor
from moonpool.transfer.control import ControlHandler
from moonpool.transfer.memory.segment import Segment
from moonpool.transfer.transports.tcp.guard import Guard
from moonpool.transfer.transports.tcp.lanes import LanePool
from moonpool.transfer.transports.tcp.server import TcpServer
from moonpool.transfer.transports.tcp.transport import TcpRemote

NBYTES = 64 * 1024


class Port:
    def __init__(self, guard: Guard | None, **settings: Any) -> None:
        self.segment = Segment.allocate("seg", NBYTES, granule_nbytes=4096, incarnation=1)
        self.control = ControlHandler()
        self.control.serve(self.segment)
        settings = {"stall_timeout_s": 2.0, "max_connections": 16} | settings
        self.server = TcpServer(self.control, "127.0.0.1", 0, guard=guard, **settings)
        self.endpoint = f"tcp:127.0.0.1:{self.server.port}"
        self._pools: list[LanePool] = []

    def connect(self) -> socket.socket:
        """A bare connection."""
        return socket.create_connection(("127.0.0.1", self.server.port), timeout=5)

    def pool(self, guard: Guard | None, host: str = "127.0.0.1", via: int | None = None) -> LanePool:
        made = LanePool(host, via or self.server.port, 2, guard)
        self._pools.append(made)
        return made

    def remote(self, guard: Guard | None, host: str = "127.0.0.1", via: int | None = None) -> TcpRemote:
        """A handle, not opened yet; `via` is another port that leads here."""
        descriptor = SegmentDescriptor(
            name="seg", nbytes=NBYTES, incarnation=1, host="h", endpoints=(self.endpoint,), granule_nbytes=4096
        )
        return TcpRemote(self.pool(guard, host, via), descriptor)

    def close(self) -> None:
        for pool in self._pools:
            pool.close()
        self.server.close()
        self.segment.close()


@contextmanager
def many_ports() -> Iterator[Callable[..., Port]]:
    """Makes ports, and closes them at the end."""
    with ExitStack() as stack:

        def make(guard: Guard | None, **settings: float) -> Port:
            made = Port(guard, **settings)
            stack.callback(made.close)
            return made

        yield make


def resealed(frame: bytes, kind: int) -> bytes:
    """A frame of the guard made one of another kind, with a right checksum."""
    changed = frame[:5] + bytes([kind]) + frame[6:52]
    return changed + crc32c(changed).to_bytes(4, "little")
