"""The owner's side of the tcp transport: one listening thread, one thread per connection (tcp/connection.py), and a
limit on connections.

A caller first proves itself: with a guard by the exchange of tcp/guard.py, without one by a first valid request.
Connections that have not proved themselves are counted apart and have little time; when there are too many, the oldest
silent one is closed, so that they cannot take the places of the others. Proven connections are closed after a long
silence; when all their places are taken, the one that has been silent longest is closed for a new one.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import ssl
import threading
from collections import Counter
from collections.abc import Callable

from moonpool.base.address import host_port
from moonpool.base.clock import Deadline
from moonpool.base.errors import ConfigError, MoonpoolError, Overloaded, Unauthorized
from moonpool.base.log import RateLimitedLog
from moonpool.base.security import explain_tls
from moonpool.transfer.control import ControlHandler
from moonpool.transfer.transports.sockets import (
    TimedSocket,
    hang_up,
    is_quiet,
    part_ways,
    receive_exactly,
    send_all,
    tune,
    wait_readable,
)
from moonpool.transfer.transports.tcp import tls as tcp_tls
from moonpool.transfer.transports.tcp.connection import TcpConnection, staging_buffers
from moonpool.transfer.transports.tcp.frames import pack_refusal
from moonpool.transfer.transports.tcp.guard import FRAME_NBYTES, Guard, OwnerSide

_TLS_HANDSHAKE = b"\x16"  # the first byte that a TLS client sends
_FAREWELL_S = 1.0


class ConnectionLimiter:
    """One per server; used by the threads of all its connections."""

    def __init__(self, guard: Guard) -> None:
        self.guard = guard
        self._rare_log = RateLimitedLog(_log)

    def wrap(self, sock: socket.socket) -> socket.socket:
        """The connection as it will be used; takes `sock` over. Says nothing yet."""
        return sock if self.guard.tls is None else tcp_tls.wrap_server(sock, self.guard.tls)

    def check_opening(self, sock: socket.socket, deadline: Deadline) -> None:
        """Unauthorized for a caller without TLS where it is asked for. Call it before wrap()."""
        if self.guard.tls is None:
            return
        wait_readable(sock, deadline)
        if sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) not in (_TLS_HANDSHAKE, b""):
            raise Unauthorized("this owner speaks TLS only; set tls_cert_file, tls_key_file and tls_ca_file")

    def admit(self, sock: socket.socket, take_place: Callable[[], None], deadline: Deadline) -> None:
        """Returns when the caller has proved itself and knows it. `take_place` raises Overloaded when all are taken."""
        if isinstance(sock, ssl.SSLSocket):
            tcp_tls.handshake(sock, deadline)
        side = OwnerSide(self.guard.secret)
        frame = memoryview(bytearray(FRAME_NBYTES))
        receive_exactly(sock, [frame], deadline)
        send_all(sock, [side.challenge(frame)], deadline)
        receive_exactly(sock, [frame], deadline)
        welcome = side.welcome(frame)
        take_place()
        send_all(sock, [welcome], deadline)

    def turn_away(self, sock: socket.socket, address: str, error: MoonpoolError | ssl.SSLError) -> None:
        """Tells the caller why, where the two understand each other, and the log if it was not told lately."""
        why = explain_tls(error) if isinstance(error, ssl.SSLError) else str(error)
        if not isinstance(error, Overloaded):
            self._rare_log.warning("tcp: %s was not let in: %s", address, why, key=address)
        if isinstance(error, MoonpoolError):
            send_all(sock, [pack_refusal(0, error)], Deadline(_FAREWELL_S))
        part_ways(sock, Deadline(_FAREWELL_S))


_log = logging.getLogger(__name__)
_JOIN_TIMEOUT_S = 5.0
_ACCEPT_PAUSE_S = 0.05
_LEAVE_TIMEOUT_S = 0.2
_FIRST_REQUEST_S = 5.0  # for a caller of an open port to say what it wants
_LEAST_IDLE_S = 5.0  # a connection that was used less long ago does not make room for another
MAX_CONNECTIONS = 256
IDLE_TIMEOUT_S = 300.0  # above lanes.IDLE_S, so that callers drop a lane before its owner does


class _Caller:
    """A connection and the thread that serves it. Inside TLS `sock` is replaced once, under the server's lock."""

    def __init__(self, sock: socket.socket, address: str) -> None:
        self.sock = sock
        self.address = address
        self.proven = False
        self.thread: threading.Thread | None = None
        self.connection: TcpConnection | None = None

    def idle_s(self) -> float:
        """For how long it has asked for nothing; 0 while a request is under way."""
        return 0.0 if self.connection is None else self.connection.idle_s()


class TcpServer:
    """Listens from construction to close(); ConfigError when it cannot, because the port is taken, for instance."""

    def __init__(
        self,
        control: ControlHandler,
        host: str,
        port: int,
        *,
        stall_timeout_s: float,
        max_connections: int,
        idle_timeout_s: float = IDLE_TIMEOUT_S,
        guard: Guard | None = None,
    ) -> None:
        self._control = control
        self._staging = staging_buffers()
        self._stall_timeout_s = stall_timeout_s
        self._max_connections = max_connections
        self._idle_timeout_s = idle_timeout_s
        self._max_unproven = Guard.max_unproven if guard is None else guard.max_unproven
        self.ended: Counter[str] = Counter()  # connections by why they ended
        self._door = None if guard is None else ConnectionLimiter(guard)
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
            sock = TimedSocket.over(sock)
            if not self._start(_Caller(sock, str(address[0]))):
                self.ended["refused"] += 1
                self._refuse(sock)

    def _start(self, caller: _Caller) -> bool:
        with self._changed:
            if not self._has_room() or self._closed.is_set():  # in this order: making room takes a moment
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

    @property
    def num_connections(self) -> int:
        return len(self._callers)

    def _has_room(self) -> bool:
        """For a caller that has not proved itself yet."""
        unproven = [caller for caller in self._callers if not caller.proven]
        if len(unproven) < self._max_unproven:
            return True
        # Behind a guard any may go: proving oneself takes several steps. At an open port who has spoken is served next.
        victim = next((each for each in unproven if self._door is not None or is_quiet(each.sock)), None)
        if victim is not None:
            self.ended["pushed out"] += 1
            hang_up(victim.sock)
        return self._changed.wait_for(
            lambda: sum(not each.proven for each in self._callers) < self._max_unproven, _LEAVE_TIMEOUT_S
        )

    def num_proven(self) -> int:
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
                self.ended[self._serve(caller)] += 1
            else:
                self.ended["not let in"] += 1
        except OSError as error:
            self.ended["stalled" if isinstance(error, TimeoutError) else "closed"] += 1
            _log.debug("tcp: connection ended: %s", error)
        finally:
            caller.sock.close()
            with self._changed:
                self._callers.pop(caller, None)
                self._changed.notify_all()

    def _serve(self, caller: _Caller) -> str:
        """Answer the caller's requests; return why that ended."""
        caller.connection = TcpConnection(
            caller.sock, self._control, self._staging, self._stall_timeout_s, self._idle_timeout_s
        )
        if caller.proven:
            return caller.connection.serve()
        return caller.connection.serve(_FIRST_REQUEST_S, lambda: self._take_place(caller))

    def _admit(self, caller: _Caller, door: ConnectionLimiter) -> bool:
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
            if self.num_proven() >= self._max_connections and not self._make_place():
                raise Overloaded("too many connections to this owner")
            caller.proven = True
            self._changed.notify_all()

    def _make_place(self) -> bool:
        """Let the caller go that has been silent longest, if it has been for a while."""
        longest = max((caller for caller in self._callers if caller.proven), key=_Caller.idle_s, default=None)
        if longest is None or longest.idle_s() < _LEAST_IDLE_S:
            return False
        self.ended["pushed out"] += 1
        hang_up(longest.sock)
        return self._changed.wait_for(lambda: self.num_proven() < self._max_connections, _LEAVE_TIMEOUT_S)
