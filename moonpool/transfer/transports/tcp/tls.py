"""TLS connections with deadlines: what sockets.py promises, for sockets that encrypt.

OpenSSL knows no deadlines, so the sockets are non-blocking underneath and Python waits for them (settimeout). A record
is the unit: 16 KiB at most, one call each, and nothing of it can be had before it is whole.
"""

from __future__ import annotations

import socket
import ssl
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from moonpool.base.clock import Deadline
from moonpool.base.security import TlsIdentity

_RECORD_NBYTES = 16 * 1024


def wrap_client(sock: socket.socket, tls: TlsIdentity, host: str) -> ssl.SSLSocket:
    """Take the connection over; call handshake() next. OSError when the other side has left: then it is closed."""
    name = host if tls.check_host else None
    with _closed_on_error(sock):
        return tls.client.wrap_socket(sock, server_hostname=name, do_handshake_on_connect=False)


def wrap_server(sock: socket.socket, tls: TlsIdentity) -> ssl.SSLSocket:
    """As wrap_client, for the side that accepted."""
    with _closed_on_error(sock):
        return tls.server.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)


@contextmanager
def _closed_on_error(sock: socket.socket) -> Iterator[None]:
    """Close the connection if wrap_socket() raises.

    When the other side has reset the connection, wrap_socket() raises after it has moved the descriptor to a new
    SSLSocket, to which only the traceback refers.
    """
    try:
        yield
    except BaseException as error:
        sock.close()
        for frame, _ in traceback.walk_tb(error.__traceback__):
            unreturned = frame.f_locals.get("self")
            if isinstance(unreturned, ssl.SSLSocket):
                unreturned.close()
        raise


def handshake(sock: ssl.SSLSocket, deadline: Deadline) -> None:
    """ssl.SSLError when the two do not agree, ConnectionResetError when the other side leaves. The dialling side must
    read once more to know that it was accepted.
    """
    _limit(sock, deadline)
    try:
        sock.do_handshake()
    except (ssl.SSLEOFError, ssl.SSLZeroReturnError) as error:
        raise ConnectionResetError("the other side closed the connection before it was secure") from error


def receive_exactly(sock: ssl.SSLSocket, views: Sequence[memoryview], deadline: Deadline | None) -> None:
    for view in views:
        at = 0
        while at < view.nbytes:
            at += receive_some(sock, view[at:], deadline)


def receive_some(sock: ssl.SSLSocket, view: memoryview, deadline: Deadline | None) -> int:
    _limit(sock, deadline)
    count = sock.recv_into(view, view.nbytes)
    if count == 0:
        raise ConnectionResetError("the other side closed the connection")
    return count


def receive_waiting(sock: ssl.SSLSocket, view: memoryview) -> int | None:
    """What is here now, 0 at the stream's end; None when there is nothing, or only a part of a record."""
    sock.settimeout(0.0)
    try:
        return sock.recv_into(view, view.nbytes)
    except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
        return None


def send_all(sock: ssl.SSLSocket, views: Iterable[memoryview], deadline: Deadline | None) -> None:
    for piece in _joined(views):
        at = 0
        while at < piece.nbytes:
            _limit(sock, deadline)
            at += sock.send(piece[at:])


def _joined(views: Iterable[memoryview]) -> Iterator[memoryview]:
    """The same bytes with small pieces put together: each costs a record and a system call."""
    small = bytearray()
    for view in views:
        if small and len(small) + view.nbytes > _RECORD_NBYTES:
            yield memoryview(small)
            small = bytearray()
        if view.nbytes >= _RECORD_NBYTES:
            yield view
        else:
            small += view
    if small:
        yield memoryview(small)


def _limit(sock: ssl.SSLSocket, deadline: Deadline | None) -> None:
    remaining_s = None
    if deadline is not None:
        remaining_s = deadline.remaining_s()
        if remaining_s <= 0.0:
            raise TimeoutError("the deadline passed")
    sock.settimeout(remaining_s)
