"""A small pool of connections to one peer. Made on demand, kept while idle, dropped on the first failure.

Behind a guard (tcp/guard.py) a connection is a lane only when both ends have shown who they are.
"""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from moonpool.base.address import host_port
from moonpool.base.clock import Deadline
from moonpool.base.errors import InvalidInput, MoonpoolError, PeerLost, Unauthorized
from moonpool.base.security import Secret, explain_tls
from moonpool.transfer.transports.sockets import (
    TimedSocket,
    abandon,
    hang_up,
    is_quiet,
    receive_exactly,
    send_all,
    tune,
)
from moonpool.transfer.transports.tcp import tls as tcp_tls
from moonpool.transfer.transports.tcp.frames import (
    MAGIC,
    MAX_ERROR_NBYTES,
    RESPONSE_NBYTES,
    check_body,
    unpack_error,
    unpack_response,
)
from moonpool.transfer.transports.tcp.guard import FRAME_NBYTES, CallerSide, Guard, read_refusal

IDLE_S = 120.0  # a lane that was not used for longer is not used again: its owner may be about to close it
DEFAULT_LANES = 2  # connections per peer and path
BUSY_TIMEOUT_S = 10.0  # callers wait at least so long for lanes on which others move much data


class LanePool:
    """At most `size` connections to host:port; further callers wait for one."""

    def __init__(self, host: str, port: int, size: int, guard: Guard | None = None) -> None:
        self._address = (host, port)
        self._size = size
        self._guard = guard
        self._lock = threading.RLock()  # the garbage collector may give a lane back while this thread holds the lock
        self._changed = threading.Condition(self._lock)
        self.num_waiting = 0  # callers
        self._num_broken = 0  # lanes that were given back as unusable
        self._idle: list[tuple[socket.socket, float]] = []  # and since when it is idle
        self._busy: set[socket.socket] = set()
        self._greeting: set[socket.socket] = set()  # connected, the handshake is not over
        self._connecting = 0
        self._closed = False

    def __str__(self) -> str:
        return f"tcp:{host_port(*self._address)}"

    def lane(self, timeout_s: float) -> LaneInUse:
        """Lend a connection for the time of a `with` block. Entering the block raises TimeoutError or OSError when no
        connection is free or made in time, Unauthorized when an end does not accept the other, PeerLost after close().
        A new connection has `timeout_s`. Waiting for one that others use may take longer, as long as none of theirs
        breaks: a peer that is busy for others is not silent.

        The connection goes back to the pool when the block ends; an exception closes it.
        """
        return LaneInUse(self, timeout_s)

    def close(self) -> None:
        """Close idle lanes and cut busy ones; their users get a lost connection. Idempotent."""
        with self._changed:
            self._closed = True
            idle, self._idle = self._idle, []
            for sock in self._busy | self._greeting:
                hang_up(sock)
            self._changed.notify_all()
        for sock, _ in idle:
            sock.close()

    def take(self, timeout_s: float) -> socket.socket:
        """Return a connection until give_back(). Only LaneInUse calls this."""
        patience: _Patience | None = None
        with self._lock:
            while not self._closed:
                sock = self._quiet_idle()
                if sock is not None:
                    self._busy.add(sock)
                    return sock
                if len(self._busy) + self._connecting < self._size:
                    self._connecting += 1
                    break
                patience = patience or _Patience(timeout_s, self._num_broken)
                self.num_waiting += 1
                try:
                    self._changed.wait(patience.remaining_s(self._num_broken))
                finally:
                    self.num_waiting -= 1
            else:
                raise PeerLost(f"{self} was closed on this side")
        return self._connect(Deadline(timeout_s))

    def _quiet_idle(self) -> socket.socket | None:
        """An idle lane whose peer has not hung up meanwhile, nor is about to; others are closed on the way."""
        while self._idle:
            sock, since_s = self._idle.pop()
            if time.monotonic() - since_s < IDLE_S and is_quiet(sock):
                return sock
            sock.close()
        return None

    def _connect(self, deadline: Deadline) -> socket.socket:
        try:
            sock = self._dial(deadline)
            if self._guard is not None:
                sock = self._greet(sock, self._guard, deadline)
        except BaseException:
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
        try:
            sock = TimedSocket.over(socket.create_connection(self._address, max(deadline.remaining_s(), 0.001)))
        except UnicodeError as error:
            raise InvalidInput(f"{self._address[0]!r} is not the name of a host") from error
        try:
            tune(sock)
        except OSError:
            sock.close()
            raise
        return sock

    def _greet(self, sock: socket.socket, guard: Guard, deadline: Deadline) -> socket.socket:
        """The connection, inside TLS if so configured, when both sides have shown who they are; else it is closed."""
        with self._changed:  # close() must see the plain connection or the one inside TLS, not none
            if guard.tls is not None:
                sock = tcp_tls.wrap_client(sock, guard.tls, self._address[0])
            self._greeting.add(sock)
            if self._closed:
                hang_up(sock)
        try:
            with self._explained():
                if isinstance(sock, ssl.SSLSocket):
                    tcp_tls.handshake(sock, deadline)
                _prove(sock, guard.secret, deadline)
        except BaseException:
            sock.close()
            raise
        finally:
            with self._changed:
                self._greeting.discard(sock)
        return sock

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Return the refusal with the peer's name and, for TLS, with what to do about it."""
        try:
            yield
        except ssl.SSLError as error:
            raise Unauthorized(
                f"{self}: {explain_tls(error)}; see tls_cert_file and tls_ca_file on both sides"
            ) from error
        except MoonpoolError as error:
            raise type(error)(f"{self}: {error}") from error

    def give_back(self, sock: socket.socket, healthy: bool) -> None:
        """End the use of a connection; close it unless it is `healthy`. Only LaneInUse calls this."""
        with self._lock:
            self._busy.discard(sock)
            keep = healthy and not self._closed
            if keep:
                self._idle.append((sock, time.monotonic()))
            else:
                self._num_broken += 1
                self._changed.notify_all()  # all who wait have less time now
            if self.num_waiting:
                self._changed.notify()
        if not keep:
            abandon(sock)


class _Patience:
    """How long a caller waits for a lane: its timeout, or longer while no lane breaks."""

    def __init__(self, timeout_s: float, num_broken: int) -> None:
        self._own, self._longest = Deadline(timeout_s), Deadline(max(timeout_s, BUSY_TIMEOUT_S))
        self._num_broken = num_broken

    def remaining_s(self, num_broken: int) -> float:
        """Return the seconds left. Raise TimeoutError when there are none."""
        limit = self._longest if num_broken == self._num_broken else self._own
        remaining_s = limit.remaining_s()
        if not remaining_s:
            raise TimeoutError("all lanes stayed busy")
        return remaining_s


class LaneInUse:
    """What LanePool.lane() returns. A class, because entering a generator takes longer than checking the socket."""

    __slots__ = ("_pool", "_sock", "_timeout_s")

    def __init__(self, pool: LanePool, timeout_s: float) -> None:
        self._pool, self._timeout_s = pool, timeout_s

    def __enter__(self) -> socket.socket:
        sock = self._sock = self._pool.take(self._timeout_s)
        return sock

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._pool.give_back(self._sock, kind is None)


def _prove(sock: socket.socket, secret: Secret | None, deadline: Deadline) -> None:
    """The caller's part of tcp/guard.py."""
    side = CallerSide(secret)
    proof = side.proof(_exchange(sock, side.hello(), deadline))
    side.check_welcome(_exchange(sock, proof, deadline))


def _exchange(sock: socket.socket, said: bytes, deadline: Deadline) -> memoryview:
    """The owner's next frame; raises what its refusal means."""
    send_all(sock, [said], deadline)
    frame = memoryview(bytearray(FRAME_NBYTES))
    head, rest = frame[:RESPONSE_NBYTES], frame[RESPONSE_NBYTES:]
    receive_exactly(sock, [head], deadline)
    if head[: len(MAGIC)] != MAGIC:
        receive_exactly(sock, [rest], deadline)
        return frame
    response = unpack_response(head)
    text = memoryview(bytearray(min(response.nbytes, MAX_ERROR_NBYTES)))
    receive_exactly(sock, [text], deadline)
    raise read_refusal(unpack_error(check_body(bytes(text), response.checksum)))
