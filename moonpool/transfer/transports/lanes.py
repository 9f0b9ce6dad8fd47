"""A small pool of connections to one peer. Made on demand, kept while idle, dropped on the first failure."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from moonpool.base.clock import Deadline
from moonpool.base.errors import PeerLost
from moonpool.transfer.transports.sockets import abandon, hang_up, is_quiet, tune


class LanePool:
    """At most `size` connections to host:port; further callers wait for one."""

    def __init__(self, host: str, port: int, size: int) -> None:
        self._address = (host, port)
        self._size = size
        self._changed = threading.Condition()
        self._idle: list[socket.socket] = []
        self._busy: set[socket.socket] = set()
        self._connecting = 0
        self._closed = False

    def __str__(self) -> str:
        return f"tcp:{self._address[0]}:{self._address[1]}"

    @contextmanager
    def lane(self, deadline: Deadline) -> Iterator[socket.socket]:
        """A connection of one's own. TimeoutError or OSError when there is none in time, PeerLost after close().

        It goes back to the pool when the block ends well; any exception drops it.
        """
        sock = self._take(deadline)
        healthy = False
        try:
            yield sock
            healthy = True
        finally:
            self._give_back(sock, healthy)

    def close(self) -> None:
        """Idempotent. Closes idle lanes and hangs up busy ones; whoever uses them sees a lost connection."""
        with self._changed:
            self._closed = True
            idle, self._idle = self._idle, []
            for sock in self._busy:
                hang_up(sock)
            self._changed.notify_all()
        for sock in idle:
            sock.close()

    def _take(self, deadline: Deadline) -> socket.socket:
        with self._changed:
            while not self._closed:
                sock = self._quiet_idle()
                if sock is not None:
                    self._busy.add(sock)
                    return sock
                if len(self._busy) + self._connecting < self._size:
                    self._connecting += 1
                    break
                if not self._changed.wait(deadline.remaining_s()):
                    raise TimeoutError("all lanes stayed busy")
            else:
                raise PeerLost(f"{self} was closed on this side")
        return self._connect(deadline)

    def _quiet_idle(self) -> socket.socket | None:
        """An idle lane whose peer has not hung up meanwhile; dead ones are closed on the way."""
        while self._idle:
            sock = self._idle.pop()
            if is_quiet(sock):
                return sock
            sock.close()
        return None

    def _connect(self, deadline: Deadline) -> socket.socket:
        try:
            sock = self._dial(deadline)
        except OSError:
            with self._changed:
                self._connecting -= 1
                self._changed.notify()
            raise
        with self._changed:
            self._connecting -= 1
            self._busy.add(sock)
            if self._closed:
                hang_up(sock)
        return sock

    def _dial(self, deadline: Deadline) -> socket.socket:
        sock = socket.create_connection(self._address, max(deadline.remaining_s(), 0.001))
        try:
            tune(sock)
        except OSError:
            sock.close()
            raise
        return sock

    def _give_back(self, sock: socket.socket, healthy: bool) -> None:
        with self._changed:
            self._busy.discard(sock)
            keep = healthy and not self._closed
            if keep:
                self._idle.append(sock)
            self._changed.notify()
        if not keep:
            abandon(sock)
