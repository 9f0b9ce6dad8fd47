"""The owner's side of the tcp transport: one listening thread, one thread per connection (tcp/connection.py), a bounded
number of them.

Behind a guard a caller first proves itself (tcp/door.py). Those who have not yet are counted apart, have little time,
and make room for new ones, the oldest first: they cannot take the places of those who have.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import ssl
import threading

from moonpool.base.address import host_port
from moonpool.base.clock import Deadline
from moonpool.base.errors import ConfigError, MoonpoolError, Overloaded
from moonpool.transfer.desk import Desk
from moonpool.transfer.transports.sockets import hang_up, send_all, tune
from moonpool.transfer.transports.tcp.connection import TcpConnection
from moonpool.transfer.transports.tcp.door import Door
from moonpool.transfer.transports.tcp.frames import pack_refusal
from moonpool.transfer.transports.tcp.guard import Guard
from moonpool.transfer.transports.tcp.staging import staging_buffers

_log = logging.getLogger(__name__)
_JOIN_TIMEOUT_S = 5.0
_ACCEPT_PAUSE_S = 0.05
_LEAVE_TIMEOUT_S = 0.2


class _Caller:
    """A connection and the thread that serves it. Inside TLS `sock` is replaced once, under the server's lock."""

    def __init__(self, sock: socket.socket, address: str, proven: bool) -> None:
        self.sock = sock
        self.address = address
        self.proven = proven
        self.thread: threading.Thread | None = None


class TcpServer:
    """Listens from construction to close(); ConfigError when it cannot, because the port is taken, for instance."""

    def __init__(
        self,
        desk: Desk,
        host: str,
        port: int,
        *,
        stall_timeout_s: float,
        max_connections: int,
        guard: Guard | None = None,
    ) -> None:
        self._desk = desk
        self._staging = staging_buffers()
        self._stall_timeout_s = stall_timeout_s
        self._max_connections = max_connections
        self._door = None if guard is None else Door(guard)
        self._changed = threading.Condition()
        self._callers: dict[_Caller, None] = {}  # in order of arrival
        self._closed = threading.Event()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._listener = socket.create_server((host, port), family=family, backlog=128)
        except OSError as error:
            raise ConfigError(f"cannot listen at tcp:{host_port(host, port)}: {error.strerror or error}") from error
        self.port: int = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._listen, name=f"tcp-listen-{self.port}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Idempotent. Stops listening, hangs up every connection and waits for their threads."""
        with self._changed:
            if self._closed.is_set():
                return
            self._closed.set()
            threads = [caller.thread for caller in self._callers if caller.thread is not None]
            for caller in self._callers:
                hang_up(caller.sock)
        hang_up(self._listener)
        for thread in (self._thread, *threads):
            thread.join(_JOIN_TIMEOUT_S)
        self._listener.close()

    def _listen(self) -> None:
        while not self._closed.is_set():
            try:
                sock, address = self._listener.accept()
            except OSError as error:
                # Out of descriptors, or a caller that left again: the others must still be served.
                if not self._closed.wait(_ACCEPT_PAUSE_S):
                    _log.warning("tcp: could not accept a connection: %s", error)
                continue
            if not self._start(_Caller(sock, str(address[0]), proven=self._door is None)):
                self._refuse(sock)

    def _start(self, caller: _Caller) -> bool:
        with self._changed:
            if not self._has_room(caller) or self._closed.is_set():  # in this order: making room takes a moment
                return False
            caller.thread = threading.Thread(
                target=self._run, args=(caller,), name=f"tcp-serve-{self.port}", daemon=True
            )
            try:
                caller.thread.start()
            except RuntimeError as error:
                _log.warning("tcp: no thread for a new connection: %s", error)
                return False
            self._callers[caller] = None
            return True

    def _has_room(self, caller: _Caller) -> bool:
        if caller.proven:
            return self._num_proven() < self._max_connections
        assert self._door is not None
        unproven = [other for other in self._callers if not other.proven]
        if len(unproven) < self._door.guard.max_unproven:
            return True
        hang_up(unproven[0].sock)
        return self._changed.wait_for(lambda: unproven[0].proven or unproven[0] not in self._callers, _LEAVE_TIMEOUT_S)

    def _num_proven(self) -> int:
        return sum(caller.proven for caller in self._callers)

    def _refuse(self, sock: socket.socket) -> None:
        with sock, contextlib.suppress(OSError):
            if self._door is None and not self._closed.is_set():
                send_all(sock, [pack_refusal(0, Overloaded("too many connections to this owner"))], Deadline(0.1))
                sock.shutdown(socket.SHUT_WR)

    def _run(self, caller: _Caller) -> None:
        try:
            tune(caller.sock)
            if self._door is None or self._admit(caller, self._door):
                TcpConnection(caller.sock, self._desk, self._staging, self._stall_timeout_s).serve()
        except OSError as error:
            _log.debug("tcp: connection ended: %s", error)
        finally:
            caller.sock.close()
            with self._changed:
                self._callers.pop(caller, None)
                self._changed.notify_all()

    def _admit(self, caller: _Caller, door: Door) -> bool:
        """Whether the caller was let in; else it was told."""
        deadline = Deadline(door.guard.timeout_s)
        try:
            door.check_opening(caller.sock, deadline)
            with self._changed:  # whoever hangs up must find the socket that is in use
                caller.sock = door.wrap(caller.sock)
            door.admit(caller.sock, lambda: self._take_place(caller), deadline)
            return True
        except (MoonpoolError, ssl.SSLError) as error:
            door.turn_away(caller.sock, caller.address, error)
            return False

    def _take_place(self, caller: _Caller) -> None:
        with self._changed:
            if self._num_proven() >= self._max_connections:
                raise Overloaded("too many connections to this owner")
            caller.proven = True
            self._changed.notify_all()
