"""Between machines: our own binary protocol (tcp_frames.py) over a few lanes per peer.

A caller takes a lane (a connection) for one request and its answer and gives it back; when all lanes are busy it
waits, within its deadline. A lane on which anything went wrong is dropped, since its state is unknown.
"""

from __future__ import annotations

import itertools
import socket
import threading
from collections.abc import Sequence

from moonpool.base.address import parse_address
from moonpool.base.clock import Deadline
from moonpool.base.errors import ConfigError, DeadlineExceeded, InvalidInput, MoonpoolError, PeerLost, ProtocolError
from moonpool.transfer.buffers import Buffer, as_bytes_views, total_nbytes
from moonpool.transfer.descriptor import SegmentDescriptor
from moonpool.transfer.segment import Segment
from moonpool.transfer.transports.base import RemoteSegment, ServedSegments, Transport, check_bounds
from moonpool.transfer.transports.lanes import LanePool
from moonpool.transfer.transports.sockets import receive_exactly, send_all
from moonpool.transfer.transports.tcp_frames import (
    RESPONSE_NBYTES,
    Op,
    Request,
    Status,
    pack_request,
    unpack_error,
    unpack_response,
)
from moonpool.transfer.transports.tcp_server import TcpServer

MAX_CONNECTIONS = 256
STALL_TIMEOUT_S = 10.0
_WILDCARDS = ("0.0.0.0", "::")


class TcpTransport(Transport):
    """Listens on `host` (None: opens other's segments only). `port` 0 takes a free one."""

    scheme = "tcp"

    def __init__(
        self,
        host: str | None = "127.0.0.1",
        port: int = 0,
        *,
        lanes: int = 2,
        advertise_host: str | None = None,
        max_connections: int = MAX_CONNECTIONS,
        stall_timeout_s: float = STALL_TIMEOUT_S,
    ) -> None:
        self._served = ServedSegments()
        self._pools: dict[tuple[str, int], LanePool] = {}
        self._lanes = lanes
        self._lock = threading.Lock()
        self._closed = False
        self._server: TcpServer | None = None
        self._advertise_host = advertise_host or host
        if host is not None:
            if self._advertise_host in _WILDCARDS:
                raise ConfigError(f"listening on {host} needs an address to tell others (tcp_advertise_host)")
            self._server = TcpServer(
                self._served, host, port, stall_timeout_s=stall_timeout_s, max_connections=max_connections
            )

    def can_serve(self, segment: Segment) -> bool:
        return self._server is not None

    def serve(self, segment: Segment) -> str:
        if self._server is None:
            raise InvalidInput("this tcp transport does not listen")
        self._served.add(segment)
        return f"{self.scheme}:{self._advertise_host}:{self._server.port}"

    def unserve(self, name: str) -> None:
        self._served.remove(name)

    def usable(self, descriptor: SegmentDescriptor, endpoint: str) -> bool:
        return True

    def open(self, descriptor: SegmentDescriptor, endpoint: str, *, timeout_s: float) -> TcpRemote:
        address = parse_address(endpoint)
        if address.scheme != self.scheme:
            raise InvalidInput(f"{endpoint!r} is not a tcp endpoint")
        remote = TcpRemote(self._pool(address.host, address.port), descriptor)
        remote.probe(timeout_s)
        return remote

    def close(self) -> None:
        with self._lock:
            self._closed = True
            pools = list(self._pools.values())
        for pool in pools:
            pool.close()
        if self._server is not None:
            self._server.close()
        self._served.clear()

    def _pool(self, host: str, port: int) -> LanePool:
        with self._lock:
            if self._closed:
                raise PeerLost("this transport is closed")
            return self._pools.setdefault((host, port), LanePool(host, port, self._lanes))


class TcpRemote(RemoteSegment):
    transport = TcpTransport.scheme

    def __init__(self, pool: LanePool, descriptor: SegmentDescriptor) -> None:
        self.nbytes = descriptor.nbytes
        self._pool = pool
        self._descriptor = descriptor
        self._ids = itertools.count(1)  # atomic in CPython; 0 means the connection itself
        self._closed = False

    def probe(self, timeout_s: float) -> None:
        """Raises what a read would; the last byte's address is checked, so a smaller segment is found out."""
        self._request(Op.READ, self.nbytes, 0, 0, [], [], timeout_s)

    def read_into(self, offset: int, buffers: Sequence[Buffer], *, timeout_s: float) -> None:
        views = as_bytes_views(buffers, writable=True)
        nbytes = total_nbytes(views)
        check_bounds(offset, nbytes, self.nbytes)
        self._request(Op.READ, offset, nbytes, 0, [], views, timeout_s)

    def write_from(self, offset: int, buffers: Sequence[Buffer], *, generation: int, timeout_s: float) -> None:
        views = as_bytes_views(buffers, writable=False)
        nbytes = total_nbytes(views)
        check_bounds(offset, nbytes, self.nbytes)
        self._request(Op.WRITE, offset, nbytes, generation, views, [], timeout_s)

    def close(self) -> None:
        """The lanes stay: they belong to the transport and serve its other handles."""
        self._closed = True

    def _request(
        self,
        op: Op,
        offset: int,
        nbytes: int,
        generation: int,
        outgoing: list[memoryview],
        incoming: list[memoryview],
        timeout_s: float,
    ) -> None:
        if self._closed:
            raise PeerLost(f"this handle of segment {self._descriptor.name!r} is closed")
        name, incarnation, deadline = self._descriptor.name, self._descriptor.incarnation, Deadline(timeout_s)
        request = Request(op, next(self._ids), name, incarnation, offset, nbytes, generation)
        head = pack_request(request)
        try:
            with self._pool.lane(deadline) as sock:
                send_all(sock, [head, *outgoing], deadline)
                refusal = _receive_answer(sock, request, incoming, deadline)
        except TimeoutError as error:
            raise DeadlineExceeded(f"{self._pool} did not answer within {timeout_s:g} s") from error
        except OSError as error:
            raise PeerLost(f"{self._pool}: {error}") from error
        if refusal is not None:
            raise refusal


def _receive_answer(
    sock: socket.socket, request: Request, incoming: list[memoryview], deadline: Deadline
) -> MoonpoolError | None:
    """The owner's refusal if it sent one; raises when the connection is of no more use."""
    frame = memoryview(bytearray(RESPONSE_NBYTES))
    receive_exactly(sock, [frame], deadline)
    response = unpack_response(frame)
    if response.request_id not in (request.request_id, 0):
        raise ProtocolError(f"the owner answered request {response.request_id} instead of {request.request_id}")
    if response.status is Status.ERROR:
        text = memoryview(bytearray(response.nbytes))
        receive_exactly(sock, [text], deadline)
        error = unpack_error(text)
        if response.request_id == 0:
            raise error
        return error
    if response.nbytes != total_nbytes(incoming):
        raise ProtocolError(f"the owner sent {response.nbytes} bytes instead of {total_nbytes(incoming)}")
    receive_exactly(sock, incoming, deadline)
    return None
