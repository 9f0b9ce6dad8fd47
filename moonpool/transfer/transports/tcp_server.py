"""The owner's side of the tcp transport: one listening thread, one thread per connection (tcp_connection.py), a bounded
number of them.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading

from moonpool.base.clock import Deadline
from moonpool.base.errors import Overloaded
from moonpool.transfer.transports.base import ServedSegments
from moonpool.transfer.transports.sockets import hang_up, send_all, tune
from moonpool.transfer.transports.tcp_connection import TcpConnection
from moonpool.transfer.transports.tcp_frames import pack_refusal

_log = logging.getLogger(__name__)
_JOIN_TIMEOUT_S = 5.0
_ACCEPT_PAUSE_S = 0.05


class TcpServer:
    """Listens from construction to close()."""

    def __init__(
        self, served: ServedSegments, host: str, port: int, *, stall_timeout_s: float, max_connections: int
    ) -> None:
        self._served = served
        self._stall_timeout_s = stall_timeout_s
        self._max_connections = max_connections
        self._lock = threading.Lock()
        self._connections: dict[socket.socket, threading.Thread] = {}
        self._closed = threading.Event()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, port), family=family, backlog=128)
        self.port: int = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._listen, name=f"tcp-listen-{self.port}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Idempotent. Stops listening, hangs up every connection and waits for their threads."""
        with self._lock:
            if self._closed.is_set():
                return
            self._closed.set()
            connections = dict(self._connections)
        hang_up(self._listener)
        for sock in connections:
            hang_up(sock)
        for thread in (self._thread, *connections.values()):
            thread.join(_JOIN_TIMEOUT_S)
        self._listener.close()

    def _listen(self) -> None:
        while not self._closed.is_set():
            try:
                sock, _ = self._listener.accept()
            except OSError as error:
                # Out of descriptors, or a caller that left again: the others must still be served.
                if not self._closed.wait(_ACCEPT_PAUSE_S):
                    _log.warning("tcp: could not accept a connection: %s", error)
                continue
            self._start(sock)

    def _start(self, sock: socket.socket) -> None:
        with self._lock:
            if not self._closed.is_set() and len(self._connections) < self._max_connections:
                thread = threading.Thread(target=self._run, args=(sock,), name=f"tcp-serve-{self.port}", daemon=True)
                self._connections[sock] = thread
                thread.start()
                return
        with sock, contextlib.suppress(OSError):
            if not self._closed.is_set():
                send_all(sock, [pack_refusal(0, Overloaded("too many connections to this owner"))], Deadline(0.1))
                sock.shutdown(socket.SHUT_WR)

    def _run(self, sock: socket.socket) -> None:
        try:
            with sock:
                tune(sock)
                TcpConnection(sock, self._served, self._stall_timeout_s).serve()
        except OSError as error:
            _log.debug("tcp: connection ended: %s", error)
        finally:
            with self._lock:
                self._connections.pop(sock, None)
