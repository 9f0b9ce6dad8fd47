"""The blocking client: one socket, one call at a time, for threads that may wait.

A call that fails by timeout or by a lost connection closes the socket, so that the next call connects again. An error
that the server answered leaves the connection open. Thread-safe: calls queue on a lock, for no longer than their
deadline. The client sends no pings: the deadline of a call ends its wait for a frozen server; with `limits` the
server's silence ends it sooner (rpc/breaker.py). Then the connection is kept, with the sessions that the server holds
for it, and the late answer to the abandoned call is skipped. With `keeps_connection` a timeout keeps it, too.
"""

from __future__ import annotations

import contextlib
import itertools
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from moonpool.base.address import parse_address
from moonpool.base.clock import Deadline
from moonpool.base.errors import BreakerOpen, DeadlineExceeded, PeerLost, PeerSilent, ProtocolError, Unavailable
from moonpool.base.frames import HEADER_NBYTES, Frame, FrameKind, decode_header, encode_frame, whole_frame
from moonpool.base.rpc.breaker import BreakerLimits, CallWait
from moonpool.base.rpc.protocol import (
    DEFAULT_TIMEOUT_S,
    Call,
    Hello,
    decode_error,
    decode_hello,
    decode_reply,
    encode_call,
    encode_value,
    wait_ms_of,
)

R = TypeVar("R")
_INBOX_NBYTES = 64 * 1024  # most answers come in one piece
_SLACK_S = 0.02  # tolerated error of a wait's deadline; beyond it the socket's timeout is set again
_TIMEVAL = struct.Struct("@ll")
_UNSET_S = -1.0
_PING = encode_frame(FrameKind.PING, 0)
_REPLY = FrameKind.REPLY  # looking an attribute up takes longer than using it


class BlockingClient:
    """Calls one service. `peer` is the Hello of the server we are connected to.

    With `limits`, calls raise PeerSilent when the server is silent. `gate` is called before a call that had to wait
    for others; what it raises ends the call. `keeps_connection` is for servers to which the end of the connection means
    the end of this process.
    """

    def __init__(
        self,
        address: str,
        service: str,
        *,
        name: str = "",
        connect_timeout_s: float = 5.0,
        limits: BreakerLimits | None = None,
        gate: Callable[[], None] | None = None,
        keeps_connection: bool = False,
    ) -> None:
        self._address = parse_address(address)
        self._hello = Hello(service, name)
        self._connect_timeout_s = connect_timeout_s if limits is None else min(connect_timeout_s, limits.silence_s)
        self._limits, self._gate, self._keeps_connection = limits, gate, keeps_connection
        self._longest_s = float("inf") if limits is None else limits.look_every_s  # of one wait in the kernel
        self._patience_s = float("inf") if limits is None else limits.silence_s  # with a server that sends nothing
        self._wait_ms = wait_ms_of(self._patience_s)
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._limit_s = _UNSET_S  # the socket's timeout
        self._wait: CallWait | None = None  # of the current call, after its first look at the clock
        self._is_torn = False  # a frame is half sent or half received
        self._is_patient = False  # during a ping: only the deadline ends the wait
        self._given_up: set[int] = set()  # abandoned calls, whose late answers are skipped
        self._inbox = bytearray(_INBOX_NBYTES)
        self._filled = 0  # bytes in it
        self._ids = itertools.count(1)
        self._closed = False
        self.peer: Hello | None = None

    def call(
        self, call: Call[R], *, timeout_s: float = DEFAULT_TIMEOUT_S, meanwhile: Callable[[], bool] | None = None
    ) -> R:
        """Return the answer, or raise the server's error; DeadlineExceeded or PeerLost when no answer came.

        `meanwhile` is called after the request was sent, again and again while it returns True and no answer is there;
        it is not called when the request had to wait for the connection.
        """
        call_id = next(self._ids)
        wait_ms = self._wait_ms if timeout_s >= self._patience_s else wait_ms_of(timeout_s)
        request = encode_call(call, call_id, wait_ms)
        body: bytes | Frame | None = self._quick_exchange(request, call_id, timeout_s, meanwhile)
        if body is None:
            with self._turn(timeout_s, call_id) as deadline:
                body = self._exchange(call, call_id, deadline)
        return _decoded(call, body)

    def call_on(self, peer: object, call: Call[R], *, timeout_s: float = DEFAULT_TIMEOUT_S) -> R:
        """As call(), over the connection on which the server's Hello was `peer`. PeerLost, with nothing sent, if that
        connection has ended."""
        call_id, body = next(self._ids), None
        with self._turn(timeout_s, call_id) as deadline:
            if self._socket is not None and self.peer is peer:
                body = self._exchange(call, call_id, deadline)
        if body is None:  # raised here, because what fails within the turn closes the connection
            raise PeerLost(f"the connection to {self._address} has ended, and there may be another one")
        return _decoded(call, body)

    def connect(self, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> Hello:
        """Connect now (call() connects by itself). Return the server's Hello."""
        with self._turn(timeout_s) as deadline:
            self._connected(deadline)
            assert self.peer is not None
            return self.peer

    def ping(self, *, timeout_s: float) -> None:
        """Wait for a sign of life, on the open connection or else on a new one. `gate` is not called.

        PeerLost when there is no server, PeerSilent when nothing came in time; the connection is kept then.
        """
        with self._turn(timeout_s, is_gated=False) as deadline:
            self._is_patient = True
            try:
                is_new = self._socket is None
                sock = self._connected(deadline)
                if not is_new:
                    self._send(sock, _PING, deadline.remaining_s())
                    frame = self._receive(sock, deadline)
                    self._given_up.discard(frame.call_id)
            except TimeoutError as error:
                raise PeerSilent(f"{self._address} has not answered for {timeout_s:g} s") from error
            finally:
                self._is_patient = False

    def close(self) -> None:
        """Close the connection. A thread that waits in call() gets PeerLost. Idempotent."""
        self._closed = True
        sock = self._socket
        if sock is not None:
            # The waiting thread owns the descriptor; shutdown wakes it without racing for the number.
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        with self._lock:
            self._drop()

    # A small call takes 20 us on the wire and in the kernel, so every microsecond around it counts. Most calls find an
    # unused connection and get their answer in one piece: those take the fast path.

    def _quick_exchange(
        self, request: bytes, call_id: int, timeout_s: float, meanwhile: Callable[[], bool] | None
    ) -> bytes | Frame | None:
        """Return the answer, or its body alone; None, with nothing sent, when the call must take the slow path."""
        lock, sock = self._lock, self._socket
        if sock is None or not lock.acquire(False):
            return None
        try:
            limit_s = min(timeout_s, self._longest_s)
            if self._socket is not sock or self._closed or self._filled or abs(limit_s - self._limit_s) > _SLACK_S:
                return None
            self._wait, self._is_torn = None, True
            try:
                sent = sock.send(request)
            except BlockingIOError:
                sent, self._is_torn = 0, False
                self._look()
            if sent < len(request):
                self._send(sock, memoryview(request)[sent:], timeout_s)
            self._is_torn = False
            while meanwhile is not None and meanwhile() and not _is_readable(sock):
                pass
            inbox = self._inbox
            try:
                count = sock.recv_into(inbox)
            except BlockingIOError:
                self._look()
                return self._answer(sock, call_id, Deadline(timeout_s))
            answer = whole_frame(_REPLY, inbox, count)
            if answer is not None and answer[0] == call_id:
                return answer[1]
            if count == 0:
                raise PeerLost(f"{self._address} closed the connection")
            self._filled = count
            return self._answer(sock, call_id, Deadline(timeout_s))
        except BaseException as error:
            self._leave(error, call_id)
            if isinstance(error, OSError):
                raise self._named(error, timeout_s) from error
            raise
        finally:
            lock.release()

    @contextlib.contextmanager
    def _turn(self, timeout_s: float, call_id: int = 0, is_gated: bool = True) -> Iterator[Deadline]:
        """Hold the lock for one exchange. Close the socket when the exchange fails."""
        deadline = Deadline(timeout_s)
        if not self._lock.acquire(timeout=timeout_s):
            raise DeadlineExceeded(f"{self._address} was busy with other calls for {timeout_s:g} s")
        try:
            if is_gated and self._gate is not None:
                self._gate()
            self._wait = None
            yield deadline
        except BaseException as error:
            self._leave(error, call_id)
            if isinstance(error, OSError):
                raise self._named(error, timeout_s) from error
            raise
        finally:
            self._lock.release()

    def _leave(self, error: BaseException, call_id: int) -> None:
        """Clean up after a failed exchange. After a silence between two frames the stream is intact and can be kept."""
        is_late = isinstance(error, (TimeoutError, BlockingIOError)) and self._keeps_connection
        if (is_late or isinstance(error, PeerSilent)) and not self._is_torn:
            self._given_up.add(call_id)
        elif not isinstance(error, BreakerOpen):
            self._drop()

    def _named(self, error: OSError, timeout_s: float) -> Unavailable:
        if isinstance(error, (TimeoutError, BlockingIOError)):
            return DeadlineExceeded(f"{self._address} did not answer within {timeout_s:g} s")
        return PeerLost(f"{self._address}: {error}")

    def _exchange(self, call: Call[Any], call_id: int, deadline: Deadline) -> Frame:
        sock = self._connected(deadline)
        self._wait_at_most(sock, deadline)
        left_s = deadline.remaining_s()  # less than at first: the call has waited for its turn or for the connection
        self._send(sock, encode_call(call, call_id, wait_ms_of(min(left_s, self._patience_s))), left_s)
        return self._answer(sock, call_id, deadline)

    def _send(self, sock: socket.socket, data: bytes | memoryview, timeout_s: float) -> None:
        """Send all bytes. A server that reads is not silent."""
        if self._limits is None:
            count = sock.send(data)
            if count < len(data):
                self._is_torn = True
                sock.sendall(memoryview(data)[count:])
            self._is_torn = False
            return
        self._is_torn = True
        count = self._send_some(sock, data)
        if count < len(data):
            rest, deadline = memoryview(data)[count:], Deadline(timeout_s)
            while rest:
                self._wait_at_most(sock, deadline)
                rest = rest[self._send_some(sock, rest) :]
        self._is_torn = False

    def _send_some(self, sock: socket.socket, data: bytes | memoryview) -> int:
        """Return how many bytes the kernel took within one wait. PeerSilent when it took none for too long."""
        try:
            count = sock.send(data)
        except BlockingIOError:
            self._look()
            return 0
        self._wait = None
        return count

    def _look(self) -> None:
        """Handle one wait without data. Raise PeerSilent when there was no data for too long."""
        if self._limits is None:
            raise TimeoutError
        if self._is_patient:
            return
        now_s = time.monotonic()
        if self._wait is None:
            self._wait = CallWait(self._limits, now_s - self._limits.look_every_s)
        if self._wait.is_silent(now_s):
            raise PeerSilent(f"{self._address} has not answered for {self._limits.silence_s:g} s")

    def _answer(self, sock: socket.socket, call_id: int, deadline: Deadline) -> Frame:
        while True:
            frame = self._receive(sock, deadline)
            if frame.kind is FrameKind.PONG:  # a sign of life, not an answer
                continue
            if frame.call_id not in self._given_up:
                break
            self._given_up.discard(frame.call_id)
        if frame.call_id == 0 and frame.kind is FrameKind.ERROR:
            raise decode_error(frame.body)  # an error of the whole connection
        if frame.call_id != call_id:
            raise ProtocolError(f"{self._address} answered call {frame.call_id} instead of {call_id}")
        return frame

    def _connected(self, deadline: Deadline) -> socket.socket:
        if self._closed:
            raise PeerLost(f"this client of {self._address} is closed")
        if self._socket is None:
            self._socket = self._open(min(deadline.remaining_s(), self._connect_timeout_s))
            self._socket.settimeout(None)  # the kernel keeps the time: one system call less per wait
            self._limit_s, self._filled = _UNSET_S, 0
            self._is_torn = True  # until both hellos are exchanged
            self._wait_at_most(self._socket, deadline)
            self._socket.sendall(encode_value(FrameKind.HELLO, 0, self._hello))
            self.peer = decode_hello(self._receive(self._socket, deadline, is_first=True))
            self._is_torn = False
        return self._socket

    def _open(self, timeout_s: float) -> socket.socket:
        try:
            return self._connect_socket(timeout_s or 0.001)
        except (TimeoutError, BlockingIOError) as error:
            if self._limits is None:
                raise
            raise PeerSilent(f"{self._address} does not take connections") from error

    def _connect_socket(self, timeout_s: float) -> socket.socket:
        if self._address.scheme == "unix":
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                # The kernel keeps the time: a connect with Python's timeout fails at once when the server's queue of
                # connections is full, this one waits for room in it.
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(timeout_s))
                sock.connect(self._address.path)
            except OSError:
                sock.close()
                raise
            return sock
        sock = socket.create_connection((self._address.host, self._address.port), timeout_s)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return sock

    def _receive(self, sock: socket.socket, deadline: Deadline, *, is_first: bool = False) -> Frame:
        self._fill(sock, HEADER_NBYTES, deadline)
        header = decode_header(self._inbox, is_first=is_first)
        end = HEADER_NBYTES + header.nbytes
        if end > len(self._inbox):
            return header.with_body(self._large_body(sock, header.nbytes, deadline))
        self._fill(sock, end, deadline)
        body = bytes(memoryview(self._inbox)[HEADER_NBYTES:end])
        self._filled -= end
        if self._filled:  # the next frame has begun
            self._inbox[: self._filled] = self._inbox[end : end + self._filled]
        return header.with_body(body)

    def _fill(self, sock: socket.socket, nbytes: int, deadline: Deadline) -> None:
        """Receive until the inbox has at least `nbytes`."""
        while self._filled < nbytes:
            self._filled += self._take(sock, memoryview(self._inbox)[self._filled :], deadline)

    def _large_body(self, sock: socket.socket, nbytes: int, deadline: Deadline) -> bytes:
        body = bytearray(nbytes)
        view, got = memoryview(body), self._filled - HEADER_NBYTES
        view[:got] = memoryview(self._inbox)[HEADER_NBYTES : self._filled]
        self._filled, self._is_torn = 0, True
        while got < nbytes:
            got += self._take(sock, view[got:], deadline)
        self._is_torn = False
        return bytes(body)

    def _take(self, sock: socket.socket, into: memoryview, deadline: Deadline) -> int:
        while True:
            self._wait_at_most(sock, deadline)
            try:
                count = sock.recv_into(into)
            except BlockingIOError:
                self._look()
                continue
            if count == 0:
                raise PeerLost(f"{self._address} closed the connection")
            self._wait = None
            return count

    def _wait_at_most(self, sock: socket.socket, deadline: Deadline) -> None:
        """Set the socket's timeout to the deadline, within a tolerance. TimeoutError when the deadline has passed."""
        left_s = deadline.remaining_s()
        if left_s <= 0.0:
            raise TimeoutError
        left_s = min(left_s, self._longest_s)
        if abs(left_s - self._limit_s) > min(_SLACK_S, left_s / 10):
            self._limit_s = left_s
            value = _timeval(left_s)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)

    def _drop(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        self._is_torn = False
        self._given_up.clear()


def _decoded(call: Call[R], body: bytes | Frame) -> R:
    if isinstance(body, Frame):
        if body.kind is FrameKind.ERROR:
            raise decode_error(body.body)
        body = body.body
    answer: R = decode_reply(call, body)
    return answer


def _timeval(seconds: float) -> bytes:
    """Return a struct timeval, never zero: the kernel takes zero for no limit."""
    return _TIMEVAL.pack(int(seconds), int(seconds % 1 * 1e6) + 1)


def _is_readable(sock: socket.socket) -> bool:
    try:
        sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    return True
