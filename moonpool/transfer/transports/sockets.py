"""Blocking sockets with deadlines, moving bytes straight between the kernel and the caller's memory.

Timeouts are the kernel's own (SO_RCVTIMEO, SO_SNDTIMEO): a call then blocks once for all its bytes, where Python's
socket timeouts would wake up for every piece. TimeoutError means that the deadline passed, ConnectionError that
the other side is gone; both leave the stream in an unknown state.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
from collections.abc import Sequence

from moonpool.base.clock import Deadline

# The kernel takes this many pieces per call at most.
_IOV_MAX = 1024
_KEEPALIVE_IDLE_S = 30
_TIMEVAL = struct.Struct("@ll")
_NO_LINGER = struct.pack("@ii", 1, 0)


def receive_exactly(sock: socket.socket, views: Sequence[memoryview], deadline: Deadline | None) -> None:
    """Fills all views in order. Without a deadline it waits until the other side sends or goes."""
    rest = [view for view in views if view.nbytes]
    while rest:
        _limit(sock, socket.SO_RCVTIMEO, deadline)
        try:
            if len(rest) == 1:
                count = sock.recv_into(rest[0], rest[0].nbytes, socket.MSG_WAITALL)
            else:
                count = sock.recvmsg_into(rest[:_IOV_MAX], 0, socket.MSG_WAITALL)[0]
        except BlockingIOError:
            continue  # the kernel's timer ran out; the next _limit() knows whether ours did
        if count == 0:
            raise ConnectionResetError("the other side closed the connection")
        rest = after(rest, count)


def receive_some(sock: socket.socket, view: memoryview, deadline: Deadline | None) -> int:
    """Waits for the first bytes and takes what has arrived by then, at most the view's size."""
    while True:
        _limit(sock, socket.SO_RCVTIMEO, deadline)
        try:
            count = sock.recv_into(view)
        except BlockingIOError:
            continue
        if count == 0:
            raise ConnectionResetError("the other side closed the connection")
        return count


def wait_readable(sock: socket.socket, deadline: Deadline) -> None:
    """Returns when a receive would not block; nothing is taken off the wire."""
    poller = select.poll()
    poller.register(sock, select.POLLIN)
    if not poller.poll(deadline.remaining_s() * 1000):
        raise TimeoutError("the deadline passed")


def receive_present(sock: socket.socket, view: memoryview) -> int:
    """Takes what has arrived already, at most the view's size. Call it after wait_readable()."""
    count = sock.recv_into(view, view.nbytes, socket.MSG_DONTWAIT)
    if count == 0:
        raise ConnectionResetError("the other side closed the connection")
    return count


def send_all(sock: socket.socket, views: Sequence[bytes | memoryview], deadline: Deadline | None) -> None:
    """Sends all views in order."""
    rest = [memoryview(view) for view in views if len(view)]
    while rest:
        _limit(sock, socket.SO_SNDTIMEO, deadline)
        try:
            count = sock.sendmsg(rest[:_IOV_MAX])
        except BlockingIOError:
            continue
        rest = after(rest, count)


def receive_with_fds(sock: socket.socket, nbytes: int, deadline: Deadline) -> tuple[bytes, list[int]]:
    """The next `nbytes` and the descriptors sent with them (at most one is taken); the caller closes those."""
    _limit(sock, socket.SO_RCVTIMEO, deadline)
    try:
        data, fds, _, _ = socket.recv_fds(sock, nbytes, 1, socket.MSG_WAITALL)
    except BlockingIOError as error:
        raise TimeoutError("the deadline passed") from error
    if len(data) < nbytes:
        for fd in fds:
            os.close(fd)
        raise ConnectionResetError("the other side closed the connection")
    return data, list(fds)


def connect_unix(path: str, deadline: Deadline) -> socket.socket:
    """A connection to the socket at `path`."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _limit(sock, socket.SO_SNDTIMEO, deadline)
        sock.connect(path)
    except OSError as error:
        sock.close()
        if isinstance(error, BlockingIOError):
            raise TimeoutError("the deadline passed") from error
        raise
    return sock


def is_quiet(sock: socket.socket) -> bool:
    """True when the idle connection is open and nothing was said on it: safe to use for a new request."""
    poller = select.poll()
    poller.register(sock, select.POLLIN)
    return not poller.poll(0)


def tune(sock: socket.socket) -> None:
    """Small frames leave at once; a peer whose machine vanished is noticed although nobody talks to it."""
    sock.settimeout(None)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_IDLE_S)


def abandon(sock: socket.socket) -> None:
    """Closes a connection together with what it has not sent yet.

    A plain close leaves the kernel to deliver those bytes whenever the peer can be reached again: a write that was
    given up, and done again elsewhere, would land once more over newer bytes.
    """
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
    sock.close()


def hang_up(sock: socket.socket) -> None:
    """Wakes a thread that waits on this socket. That thread owns the descriptor and closes it."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def _limit(sock: socket.socket, option: int, deadline: Deadline | None) -> None:
    remaining_s = 0.0  # the kernel's word for "no limit"
    if deadline is not None:
        remaining_s = deadline.remaining_s()
        if remaining_s <= 0.0:
            raise TimeoutError("the deadline passed")
        remaining_s = max(remaining_s, 0.001)
    sock.setsockopt(socket.SOL_SOCKET, option, _TIMEVAL.pack(int(remaining_s), int(remaining_s % 1 * 1e6)))


def after(views: list[memoryview], count: int) -> list[memoryview]:
    """What is left of the views when their first `count` bytes are done."""
    done = 0
    while done < len(views) and count >= views[done].nbytes:
        count -= views[done].nbytes
        done += 1
    rest = views[done:]
    if count:
        rest[0] = rest[0][count:]
    return rest
