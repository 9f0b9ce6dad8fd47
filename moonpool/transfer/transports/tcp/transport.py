"""Between machines: our own binary protocol (tcp/frames.py) over a few connections ("lanes") per peer.

A caller takes a lane for its requests and their answers and gives it back. When all lanes are busy the caller waits,
within its deadline. A lane on which anything went wrong is dropped, because its state is unknown. Control calls
(transfer/control.py) use a lane too: one ASK frame, one answer.

With a guard (tcp/guard.py) both ends of every connection prove who they are first; Unauthorized means that one end does
not accept the other. Without a guard every process that reaches the port can use it.
"""

from __future__ import annotations

import socket
import threading
from collections import Counter, deque
from collections.abc import Generator, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

import msgspec

from moonpool.base.address import host_port, parse_address
from moonpool.base.clock import Deadline
from moonpool.base.descriptor import SegmentDescriptor
from moonpool.base.errors import ConfigError, InvalidInput, MoonpoolError, PeerLost, ProtocolError, StaleGeneration
from moonpool.base.rpc.protocol import Call, decode_reply
from moonpool.transfer.control import ControlClient, ControlHandler, Notify, check_message
from moonpool.transfer.memory.buffers import Buffer, as_bytes_views, total_nbytes
from moonpool.transfer.memory.segment import Segment
from moonpool.transfer.transports.base import RemoteSegment, Transport, check_bounds, place_items
from moonpool.transfer.transports.sockets import PeerErrors, TimedSocket, receive_exactly, send_all
from moonpool.transfer.transports.tcp import single
from moonpool.transfer.transports.tcp.frames import (
    MAX_ANSWER_NBYTES,
    RESPONSE_NBYTES,
    FrameOp,
    FrameStatus,
    RequestPacker,
    check_body,
    pack_ask,
    unpack_error,
    unpack_response,
)
from moonpool.transfer.transports.tcp.guard import Guard
from moonpool.transfer.transports.tcp.lanes import DEFAULT_LANES, LanePool
from moonpool.transfer.transports.tcp.pipeline import (
    Pipeline,
    PipelinedRequest,
    PipelineTarget,
    merge_alike,
    merge_neighbours,
)
from moonpool.transfer.transports.tcp.server import IDLE_TIMEOUT_S, MAX_CONNECTIONS, TcpServer

R = TypeVar("R")
_WRITE = FrameOp.WRITE  # looking an attribute up takes longer than using it
_REQUEST_ID = 1  # one question at a time, and no answer is ever left on a lane


class TcpControlClient:
    """Calls a control handler over a pool of lanes, which carries data too."""

    def __init__(self, pool: LanePool) -> None:
        self._pool = pool

    def ask(self, call: Call[R], timeout_s: float) -> R:
        frame = pack_ask(_REQUEST_ID, msgspec.msgpack.encode(call))
        with PeerErrors(self._pool, timeout_s), self._pool.lane(timeout_s) as sock:
            deadline = Deadline(timeout_s)
            send_all(sock, [frame], deadline)
            answer = _receive_answer(sock, deadline)
        if isinstance(answer, MoonpoolError):
            raise answer
        reply: R = decode_reply(call, answer)
        return reply


def _receive_answer(sock: socket.socket, deadline: Deadline) -> bytes | MoonpoolError:
    """The body, or the owner's refusal; a refused connection is raised, so that the lane is dropped."""
    head = memoryview(bytearray(RESPONSE_NBYTES))
    receive_exactly(sock, [head], deadline)
    response = unpack_response(head)
    if response.request_id not in (_REQUEST_ID, 0) or response.nbytes > MAX_ANSWER_NBYTES:
        raise ProtocolError(f"the owner answered request {response.request_id} with {response.nbytes} bytes")
    body = memoryview(bytearray(response.nbytes))
    receive_exactly(sock, [body], deadline)
    checked = check_body(bytes(body), response.checksum)
    if response.status is FrameStatus.OK:
        return checked
    error = unpack_error(checked)
    if response.request_id == 0:
        raise error
    return error


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
        control: ControlHandler | None = None,
        lanes: int = DEFAULT_LANES,
        advertise_host: str | None = None,
        max_connections: int = MAX_CONNECTIONS,
        idle_timeout_s: float = IDLE_TIMEOUT_S,
        stall_timeout_s: float = STALL_TIMEOUT_S,
        guard: Guard | None = None,
    ) -> None:
        self.control = control or ControlHandler()
        self._pools: dict[tuple[str, int], LanePool] = {}
        self._lanes = lanes
        self._guard = guard
        self._lock = threading.Lock()
        self._closed = False
        self._server: TcpServer | None = None
        self._advertise_host = advertise_host or host
        if host is not None:
            if self._advertise_host in _WILDCARDS:
                raise ConfigError(f"listening on {host} needs an address to tell others (tcp_advertise_host)")
            self._server = TcpServer(
                self.control,
                host,
                port,
                stall_timeout_s=stall_timeout_s,
                max_connections=max_connections,
                idle_timeout_s=idle_timeout_s,
                guard=guard,
            )

    @property
    def endpoint(self) -> str | None:
        """The address at which peers reach the segments and the control handler; None without a server."""
        if self._server is None or self._advertise_host is None:
            return None
        return f"{self.scheme}:{host_port(self._advertise_host, self._server.port)}"

    def connections(self) -> tuple[int, Counter[str]]:
        """Return how many connections others have to this process, and how many have ended, by reason."""
        return (0, Counter()) if self._server is None else (self._server.num_connections, self._server.ended.copy())

    def can_serve(self, segment: Segment) -> bool:
        return self._server is not None

    def serve(self, segment: Segment) -> str:
        endpoint = self.endpoint
        if endpoint is None:
            raise InvalidInput("this tcp transport does not listen")
        self.control.serve(segment)
        return endpoint

    def unserve(self, name: str) -> None:
        self.control.withdraw(name)

    def usable(self, descriptor: SegmentDescriptor, endpoint: str) -> bool:
        return True

    def open(self, descriptor: SegmentDescriptor, endpoint: str, *, timeout_s: float) -> TcpRemote:
        remote = TcpRemote(self._pool_at(endpoint), descriptor)
        remote.probe(timeout_s)
        return remote

    def line(self, endpoint: str) -> ControlClient:
        """Return a client of the control handler at `endpoint`."""
        return TcpControlClient(self._pool_at(endpoint))

    def close(self) -> None:
        with self._lock:
            self._closed = True
            pools = list(self._pools.values())
        for pool in pools:
            pool.close()
        if self._server is not None:
            self._server.close()
        self.control.close()

    def _pool_at(self, endpoint: str) -> LanePool:
        address = parse_address(endpoint)
        if address.scheme != self.scheme:
            raise InvalidInput(f"{endpoint!r} is not a tcp endpoint")
        host, port = address.host, address.port
        with self._lock:
            if self._closed:
                raise PeerLost("this transport is closed")
            return self._pools.setdefault((host, port), LanePool(host, port, self._lanes, self._guard))


class TcpRemote(RemoteSegment):
    transport = TcpTransport.scheme
    pipelines_writes = True

    def __init__(self, pool: LanePool, descriptor: SegmentDescriptor) -> None:
        self.nbytes = descriptor.nbytes
        self._pool = pool
        self._descriptor = descriptor
        self._target = PipelineTarget(descriptor.name, descriptor.incarnation)
        self._packer = RequestPacker(descriptor.name, descriptor.incarnation)
        self._closed = False

    @property
    def peer(self) -> Hashable:
        return self._pool

    def probe(self, timeout_s: float) -> None:
        """Raises what a read would; the last byte's address is checked, so a smaller segment is found out."""
        self._one(FrameOp.READ, PipelinedRequest(self.nbytes, 0, []), timeout_s)

    def read_into(self, offset: int, buffers: Sequence[Buffer], *, timeout_s: float) -> None:
        self._one(FrameOp.READ, self._order(offset, as_bytes_views(buffers, writable=True)), timeout_s)

    def write_from(self, offset: int, buffers: Sequence[Buffer], *, generation: int, timeout_s: float) -> None:
        self._one(FrameOp.WRITE, self._order(offset, as_bytes_views(buffers, writable=False), generation), timeout_s)

    def write_views(self, offset: int, views: list[memoryview], generation: int, timeout_s: float) -> None:
        self._one(_WRITE, self._order(offset, views, generation), timeout_s)

    def read_many(self, items: Sequence[tuple[int, Buffer]], *, timeout_s: float) -> None:
        self._exchange(FrameOp.READ, merge_neighbours(place_items(items, self.nbytes, writable=True)), timeout_s)

    def write_many(self, items: Sequence[tuple[int, Buffer]], *, generation: int, timeout_s: float) -> None:
        orders = merge_neighbours(place_items(items, self.nbytes, writable=False), generation)
        self._exchange(FrameOp.WRITE, orders, timeout_s)

    def read_in_turn(
        self, batches: Iterable[Sequence[tuple[int, Buffer]]], *, timeout_s: float
    ) -> Generator[int, None, None]:
        self._check_open()
        orders = (merge_neighbours(place_items(items, self.nbytes, writable=True)) for items in batches)
        with PeerErrors(self._pool, timeout_s), self._pool.lane(timeout_s) as sock:
            pipeline = Pipeline(sock, FrameOp.READ, self._target, Deadline(timeout_s))
            for number, _ in enumerate(pipeline.in_turn(orders, timeout_s)):
                for refusal in pipeline.refusals.values():
                    raise refusal  # drop the lane: unread answers are on it
                yield number

    def read_expecting(
        self, batches: Iterable[Sequence[tuple[int, Buffer, int]]], *, timeout_s: float
    ) -> Generator[set[int], None, None]:
        self._check_open()
        sizes: deque[list[int]] = deque()  # per batch under way, how many items each order has

        def orders() -> Iterator[list[PipelinedRequest]]:
            for items in batches:
                placed = place_items([(offset, buffer) for offset, buffer, _ in items], self.nbytes, writable=True)
                made = merge_alike([(at, view, each[2]) for (at, view), each in zip(placed, items, strict=True)])
                sizes.append([len(order.views) for order in made])
                yield made

        with PeerErrors(self._pool, timeout_s), self._pool.lane(timeout_s) as sock:
            pipeline = Pipeline(sock, FrameOp.READ, self._target, Deadline(timeout_s))
            num_done = 0
            for _ in pipeline.in_turn(orders(), timeout_s):
                of_batch, first = sizes.popleft(), num_done
                num_done += len(of_batch)
                if not pipeline.refusals:
                    yield set()
                    continue
                refused = {at: pipeline.refusals.pop(first + at, None) for at in range(len(of_batch))}
                yield _stale_items(of_batch, refused)

    def read_unchanged(self, offset: int, buffers: Sequence[Buffer], *, generation: int, timeout_s: float) -> None:
        if generation < 1:
            raise InvalidInput(f"a read expects generation 1 or greater, not {generation}")
        self._one(FrameOp.READ, self._order(offset, as_bytes_views(buffers, writable=True), generation), timeout_s)

    def write_each(
        self, items: Sequence[tuple[int, Sequence[Buffer], int]], *, timeout_s: float
    ) -> list[MoonpoolError | None]:
        orders = [
            self._order(offset, as_bytes_views(buffers, writable=False), generation)
            for offset, buffers, generation in items
        ]
        refusals = self._carry_out(FrameOp.WRITE, orders, timeout_s)
        return [refusals.get(position) for position in range(len(orders))]

    def notify(self, message: bytes, *, timeout_s: float) -> None:
        check_message(message)
        self._check_open()
        TcpControlClient(self._pool).ask(
            Notify(self._descriptor.name, self._descriptor.incarnation, message), timeout_s
        )

    def close(self) -> None:
        """The lanes stay: they belong to the transport and serve its other handles."""
        self._closed = True

    def _order(self, offset: int, views: list[memoryview], generation: int = 0) -> PipelinedRequest:
        nbytes = total_nbytes(views)
        check_bounds(offset, nbytes, self.nbytes)
        return PipelinedRequest(offset, nbytes, views, generation)

    def _one(self, op: FrameOp, order: PipelinedRequest, timeout_s: float) -> None:
        """Carry out one request. Raise the owner's refusal."""
        refusal = self._refusal_of(op, order, timeout_s)
        if refusal is not None:
            raise refusal

    def _refusal_of(self, op: FrameOp, order: PipelinedRequest, timeout_s: float) -> MoonpoolError | None:
        """Carry out one request. Return the owner's refusal."""
        self._check_open()
        with PeerErrors(self._pool, timeout_s), self._pool.lane(timeout_s) as sock:
            deadline = Deadline(timeout_s)
            if len(order.views) <= single.MAX_VIEWS and type(sock) is TimedSocket:
                act = single.write_one if op is _WRITE else single.read_one
                return act(sock, self._packer, *order, deadline)
            pipeline = Pipeline(sock, op, self._target, deadline)
            pipeline.run([order])
        return pipeline.refusals.get(0)

    def _exchange(self, op: FrameOp, orders: list[PipelinedRequest], timeout_s: float) -> None:
        """Carry out the requests. Raise the first refusal when all are answered."""
        for refusal in self._carry_out(op, orders, timeout_s).values():
            raise refusal

    def _carry_out(self, op: FrameOp, orders: list[PipelinedRequest], timeout_s: float) -> dict[int, MoonpoolError]:
        """Carries the orders out on one lane; the refusals by position."""
        self._check_open()
        if not orders:
            return {}
        if len(orders) == 1:
            refusal = self._refusal_of(op, orders[0], timeout_s)
            return {} if refusal is None else {0: refusal}
        with PeerErrors(self._pool, timeout_s), self._pool.lane(timeout_s) as sock:
            pipeline = Pipeline(sock, op, self._target, Deadline(timeout_s))
            pipeline.run(orders)
        return pipeline.refusals

    @property
    def checks_generation(self) -> bool:  # type: ignore[override]
        return self._descriptor.granule_nbytes is not None

    def _check_open(self) -> None:
        if self._closed:
            raise PeerLost(f"this handle of segment {self._descriptor.name!r} is closed")


def _stale_items(sizes: Sequence[int], refusals: Mapping[int, MoonpoolError | None]) -> set[int]:
    """The positions of items whose order was refused as stale; raises any other refusal. `sizes` is items per order."""
    stale: set[int] = set()
    first = 0
    for at, count in enumerate(sizes):
        refusal = refusals[at]
        if isinstance(refusal, StaleGeneration):
            stale.update(range(first, first + count))
        elif refusal is not None:
            raise refusal
        first += count
    return stale
