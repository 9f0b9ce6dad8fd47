"""Lets callers of a guarded tcp port in, or not: the owner's part of tcp/guard.py on a real socket."""

from __future__ import annotations

import logging
import socket
import ssl
from collections.abc import Callable

from moonpool.base.clock import Deadline
from moonpool.base.errors import MoonpoolError, Overloaded, Unauthorized
from moonpool.base.log import RateLimitedLog
from moonpool.base.security import explain_tls
from moonpool.transfer.transports.sockets import part_ways, receive_exactly, send_all, wait_readable
from moonpool.transfer.transports.tcp import tls as tcp_tls
from moonpool.transfer.transports.tcp.frames import pack_refusal
from moonpool.transfer.transports.tcp.guard import FRAME_NBYTES, Guard, OwnerSide

_log = logging.getLogger(__name__)
_TLS_HANDSHAKE = b"\x16"  # the first byte of whoever opens a TLS connection
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
