"""Blocking sockets with deadlines, moving bytes straight between the kernel and the caller's memory.

Timeouts are the kernel's own (SO_RCVTIMEO, SO_SNDTIMEO): a call then blocks once for all its bytes, where Python's
socket timeouts would wake up for every piece. TimeoutError means that the deadline has passed, ConnectionError that the
peer is gone; after either, the state of the stream is unknown. All functions take TLS connections too (tcp/tls.py),
except those for Unix sockets. PeerErrors turns both errors into ours, for all transports with sockets.

Setting a timer takes a tenth of the time of a small request. A TimedSocket keeps its timers from one call to the next:
the kernel's timer may end before the deadline, never after it, and a wait that it ended goes on.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
from collections.abc import Sequence
from ssl import SSLSocket
from types import TracebackType

from moonpool.base.clock import Deadline
from moonpool.base.errors import DeadlineExceeded, PeerLost
from moonpool.transfer.transports.tcp import tls as tcp_tls


class PeerErrors:
    """`with PeerErrors(peer):` around whatever talks to it. The peer is named in the message by its str().

    A class: the generator kind would keep the frames of a failure, and with them mappings, until the next collection.
    """

    __slots__ = ("_peer", "_timeout_s")

    def __init__(self, peer: object, timeout_s: float | None = None) -> None:
        self._peer = peer
        self._timeout_s = timeout_s

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, TimeoutError):
            when = "in time" if self._timeout_s is None else f"within {self._timeout_s:g} s"
            raise DeadlineExceeded(f"{self._peer} did not answer {when}") from error
        if isinstance(error, OSError):
            raise PeerLost(f"{self._peer} is out of reach: {error.strerror or error}") from error


class TimedSocket(socket.socket):
    """A connection that remembers what the kernel was told about it. Used by one thread at a time."""

    # By option, in seconds; missing: never set.
    timers: dict[int, float]
    poller: select.poll

    @classmethod
    def over(cls, sock: socket.socket) -> TimedSocket:
        """Take the connection over; `sock` is not usable any more."""
        made = cls(sock.family, sock.type, sock.proto, fileno=sock.detach())
        made.timers = {}
        made.poller = select.poll()
        made.poller.register(made, select.POLLIN)
        return made


# The kernel takes this many pieces per call at most.
_IOV_MAX = 1024
_KEEPALIVE_IDLE_S = 30
_TIMEVAL = struct.Struct("@ll")
_FAREWELL_NBYTES = 64 * 1024
_FAREWELLS = 16
_NO_LINGER = struct.pack("@ii", 1, 0)


def receive_exactly(sock: socket.socket, views: Sequence[memoryview], deadline: Deadline | None) -> None:
    """Fills all views in order. Without a deadline it waits until the other side sends or goes."""
    if isinstance(sock, SSLSocket):
        tcp_tls.receive_exactly(sock, views, deadline)
        return
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
    if isinstance(sock, SSLSocket):
        return tcp_tls.receive_some(sock, view, deadline)
    while True:
        _limit(sock, socket.SO_RCVTIMEO, deadline)
        try:
            count = sock.recv_into(view)
        except BlockingIOError:
            continue
        if count == 0:
            raise ConnectionResetError("the other side closed the connection")
        return count


def receive_first(sock: socket.socket, views: Sequence[memoryview], deadline: Deadline | None) -> int:
    """As receive_some(), into several views in order. Not for TLS."""
    while True:
        _limit(sock, socket.SO_RCVTIMEO, deadline)
        try:
            count = sock.recvmsg_into(views)[0]
        except BlockingIOError:
            continue
        if count == 0:
            raise ConnectionResetError("the other side closed the connection")
        return count


def wait_readable(sock: socket.socket, deadline: Deadline) -> None:
    """Returns when a receive would not block; nothing is taken off the wire."""
    if isinstance(sock, SSLSocket) and sock.pending():
        return
    _wait_raw(sock, deadline)


def receive_present(sock: socket.socket, view: memoryview) -> int:
    """Takes what has arrived already, at most the view's size; 0 when that is nothing of use yet."""
    count = _receive_waiting(sock, view)
    if count == 0:
        raise ConnectionResetError("the other side closed the connection")
    return count or 0


def receive_ahead(sock: socket.socket, view: memoryview) -> int:
    """As receive_present(), for who does not depend on it: 0 also when nothing will come any more."""
    return _receive_waiting(sock, view) or 0


def _receive_waiting(sock: socket.socket, view: memoryview) -> int | None:
    """None: nothing is here. 0: nothing will come any more."""
    if isinstance(sock, SSLSocket):
        return tcp_tls.receive_waiting(sock, view)
    try:
        return sock.recv_into(view, 0, socket.MSG_DONTWAIT)
    except BlockingIOError:
        return None


def send_all(sock: socket.socket, views: Sequence[bytes | memoryview], deadline: Deadline | None) -> None:
    """Sends all views in order."""
    rest = [memoryview(view) for view in views if len(view)]
    if isinstance(sock, SSLSocket):
        tcp_tls.send_all(sock, rest, deadline)
        return
    while rest:
        _limit(sock, socket.SO_SNDTIMEO, deadline)
        try:
            count = sock.sendmsg(rest[:_IOV_MAX])
        except BlockingIOError:
            continue
        rest = after(rest, count)


def send_message(sock: socket.socket, data: bytes, timeout_s: float) -> None:
    """send_all() of one small message. Mostly the kernel takes it at once: then no timer is looked at."""
    rest: bytes | memoryview = data
    if type(sock) is TimedSocket:
        try:
            count = sock.send(data, socket.MSG_DONTWAIT)
        except BlockingIOError:
            count = 0
        if count == len(data):
            return
        rest = memoryview(data)[count:]
    send_all(sock, [rest], Deadline(timeout_s))


def send_views(sock: TimedSocket, views: list[memoryview], nbytes: int, deadline: Deadline) -> None:
    """send_all() of a few views, of `nbytes` in total, without TLS. Mostly the kernel takes them at once: then no timer
    is looked at.
    """
    try:
        count = sock.sendmsg(views, (), socket.MSG_DONTWAIT)
    except BlockingIOError:
        count = 0
    if count < nbytes:
        send_all(sock, after(views, count), deadline)


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
    if type(sock) is TimedSocket:
        return not sock.poller.poll(0)
    if isinstance(sock, SSLSocket) and sock.pending():
        return False
    poller = select.poll()
    poller.register(sock, select.POLLIN)
    return not poller.poll(0)


def tune(sock: socket.socket) -> None:
    """Send small frames at once, and let the kernel notice a vanished machine while the connection is idle."""
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
        # The plain one: a TLS socket's own would take the encryption away from under the thread that uses it.
        socket.socket.shutdown(sock, socket.SHUT_RDWR)


def part_ways(sock: socket.socket, deadline: Deadline) -> None:
    """Ends a connection such that what was sent last arrives: a plain close resets it while bytes of the other side
    lie unread, and the reset overtakes them. Takes a bounded part of what still comes, within the deadline.
    """
    scratch = bytearray(_FAREWELL_NBYTES)
    with contextlib.suppress(OSError):
        socket.socket.shutdown(sock, socket.SHUT_WR)
        for _ in range(_FAREWELLS):
            _wait_raw(sock, deadline)
            if not socket.socket.recv_into(sock, scratch, 0, socket.MSG_DONTWAIT):
                return


def _wait_raw(sock: socket.socket, deadline: Deadline) -> None:
    poller = select.poll()
    poller.register(sock, select.POLLIN)
    if not poller.poll(deadline.remaining_s() * 1000):
        raise TimeoutError("the deadline passed")


def _limit(sock: socket.socket, option: int, deadline: Deadline | None) -> None:
    remaining_s = 0.0  # the kernel's word for "no limit"
    if deadline is not None:
        remaining_s = deadline.remaining_s()
        if remaining_s <= 0.0:
            raise TimeoutError("the deadline passed")
        remaining_s = max(remaining_s, 0.001)
    if type(sock) is TimedSocket:
        timer_s = sock.timers.get(option, -1.0)
        if remaining_s / 2 <= timer_s <= remaining_s:
            return
        # A little less, so that the next call, which has as long, finds a timer that it can use.
        remaining_s = sock.timers[option] = max(remaining_s * 0.9, 0.001) if remaining_s else 0.0
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
