"""The owner's side of the shm transport: hands a segment's memfd to processes that ask over a Unix socket.

A client asks once, with one CALL frame, and gets a REPLY frame, or an ERROR frame. If it asked for a segment the reply
has the descriptor attached, and the client keeps the connection open and sends nothing more: as long as it is open the
owner lives and serves the segment. Control calls (transfer/control.py) are taken too. One thread does it all.
"""

from __future__ import annotations

import contextlib
import glob
import logging
import os
import selectors
import socket
import threading
from typing import Any

import msgspec

from moonpool.base.address import add_own_socket, bind_private, is_own_user, remove_own_socket
from moonpool.base.errors import MoonpoolError, NotFound, Overloaded, ProtocolError
from moonpool.base.frames import HEADER_NBYTES, FrameDecoder, FrameKind
from moonpool.base.rpc.protocol import Call, CallDecoder, encode_error, encode_value
from moonpool.transfer.control import CALLS, ControlHandler
from moonpool.transfer.memory.segment import LAYOUT_VERSION
from moonpool.transfer.transports.sockets import hang_up

_log = logging.getLogger(__name__)
_JOIN_TIMEOUT_S = 5.0
_ACCEPT_PAUSE_S = 0.05
PREFIX, SUFFIX, _UNNAMED = "shm-", ".sock", ".new"  # of the sockets' names
_MAX_REQUEST_NBYTES = HEADER_NBYTES + 64 * 1024  # on one connection, in all


class SegmentMemory(msgspec.Struct, frozen=True, array_like=True):
    """How to map the memfd that comes with it (layout: transfer/memory/segment.py). Moonpool before layout 2 names no
    layout, in either message.
    """

    nbytes: int
    granule_nbytes: int | None
    layout: int = 1


class AskSegment(Call[SegmentMemory]):
    name: str
    incarnation: int
    layout: int = 1


def check_layout(layout: int) -> None:
    """Raise ProtocolError if the peer maps memory in another layout than this process."""
    if layout != LAYOUT_VERSION:
        raise ProtocolError(
            f"the peer uses layout {layout} of shared memory, this process layout {LAYOUT_VERSION}: "
            "run the same version of Moonpool in both"
        )


_CALLS = CallDecoder([AskSegment, *CALLS])


class _Client:
    """A connection and what it asked for."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.frames = FrameDecoder()
        self.received_nbytes = 0
        self.segment: str | None = None


class ShmServer:
    """Listens at `path` from construction to close(), which removes the path again."""

    def __init__(self, control: ControlHandler, path: str, *, max_connections: int) -> None:
        self._control = control
        self._path = path
        self._max_connections = max_connections
        self._lock = threading.Lock()
        self._clients: set[_Client] = set()
        self._listener = _listen(path)
        self._wake, self._woken = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="shm-serve", daemon=True)
        self._closed = threading.Event()
        self._thread.start()

    def hang_up_segment(self, name: str) -> None:
        """Ends the connections of those who mapped this segment; they notice at their next call."""
        with self._lock:
            for client in self._clients:
                if client.segment == name:
                    hang_up(client.sock)

    def close(self) -> None:
        """Idempotent. The thread ends, all connections are closed, the path is gone."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._wake.close()
        self._thread.join(_JOIN_TIMEOUT_S)
        remove_own_socket(self._path)

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector, self._listener, self._woken:
            selector.register(self._listener, selectors.EVENT_READ)
            selector.register(self._woken, selectors.EVENT_READ)
            while True:
                ready = [key for key, _ in selector.select()]
                if any(key.fileobj is self._woken for key in ready):
                    break
                for key in ready:
                    self._handle(selector, key.data)
            with self._lock:
                for client in self._clients:
                    client.sock.close()
                self._clients.clear()

    def _handle(self, selector: selectors.BaseSelector, client: _Client | None) -> None:
        try:
            if client is None:
                self._accept(selector)
            elif not self._answer(client):
                self._forget(selector, client)
        except OSError as error:
            _log.debug("shm: connection ended: %s", error)
            if client is not None:
                self._forget(selector, client)
            else:
                self._closed.wait(_ACCEPT_PAUSE_S)  # out of descriptors: do not spin

    def _accept(self, selector: selectors.BaseSelector) -> None:
        sock, _ = self._listener.accept()
        sock.setblocking(False)
        if not is_own_user(sock):
            _log.warning("shm: a process of another user was turned away")
            sock.close()
            return
        if len(self._clients) >= self._max_connections:
            with sock:
                sock.send(encode_error(0, Overloaded("too many processes have mapped segments of this owner")))
            return
        client = _Client(sock)
        with self._lock:
            self._clients.add(client)
        selector.register(sock, selectors.EVENT_READ, client)

    def _forget(self, selector: selectors.BaseSelector, client: _Client) -> None:
        selector.unregister(client.sock)
        with self._lock:
            self._clients.discard(client)
        client.sock.close()

    def _answer(self, client: _Client) -> bool:
        """Takes what the client sent; False when the connection is over."""
        data = client.sock.recv(_MAX_REQUEST_NBYTES)
        client.received_nbytes += len(data)
        if not data or client.received_nbytes > _MAX_REQUEST_NBYTES:
            return False
        try:
            frames = client.frames.feed(data)
            if client.segment is None and frames:
                self._reply(client, frames[0].call_id, _decode(frames[0].kind, frames[0].body))
        except MoonpoolError as error:
            client.sock.send(encode_error(0, error))
            return False
        return True

    def _reply(self, client: _Client, call_id: int, call: Call[Any]) -> None:
        if isinstance(call, AskSegment):
            self._grant(client, call_id, call)
            return
        reply = encode_value(FrameKind.REPLY, call_id, self._control.answer(call))
        # This thread never waits for a reader: an answer fits into the socket's buffer or fails.
        if client.sock.send(reply) < len(reply):
            raise ConnectionAbortedError(f"an answer of {len(reply)} bytes did not fit")

    def _grant(self, client: _Client, call_id: int, ask: AskSegment) -> None:
        check_layout(ask.layout)
        # Under the lock, so that after hang_up_segment() no client is being given a descriptor that is about to close.
        with self._lock:
            segment = self._control.segments.find(ask.name, ask.incarnation)
            fence, fd = segment.fence, segment.fd
            if fd is None:
                raise NotFound(f"segment {ask.name!r} is closed")
            client.segment = ask.name
            granule_nbytes = fence.granule_nbytes if fence is not None else None
            memory = SegmentMemory(segment.nbytes, granule_nbytes, LAYOUT_VERSION)
            socket.send_fds(client.sock, [encode_value(FrameKind.REPLY, call_id, memory)], [fd])


def _decode(kind: FrameKind, body: bytes) -> Call[Any]:
    if kind is not FrameKind.CALL:
        raise ProtocolError("the first frame must be a CALL")
    return _CALLS.decode(body)


def _listen(path: str) -> socket.socket:
    """A listening socket that only this user may open. It gets its name when it listens: a named socket that refuses a
    connection is that of a process that has ended."""
    unnamed = path.removesuffix(SUFFIX) + _UNNAMED
    listener = bind_private(unnamed)
    try:
        listener.listen(128)
        listener.setblocking(False)
        os.rename(unnamed, path)
        add_own_socket(path)
    except OSError:
        listener.close()
        raise
    return listener


def sweep_sockets(run_dir: str) -> list[str]:
    """Remove the sockets of owners that were killed. Return their paths."""
    dead = [path for path in glob.glob(os.path.join(glob.escape(run_dir), f"{PREFIX}*{SUFFIX}")) if _is_dead(path)]
    for path in dead:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
    return dead


def _is_dead(path: str) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)  # a queue that is full belongs to a living process
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            return True
        except OSError:
            return False
    return False
