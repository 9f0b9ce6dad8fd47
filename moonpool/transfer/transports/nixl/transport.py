"""Between machines through NIXL and UCX: RDMA, RoCE, EFA or NVLink where there is one of them, plain TCP elsewhere.

The bytes do not pass the owner's control handler. It says how to reach a segment, asks the fence before and after a
write, and says after every transfer whether the segment is still served. Only bytes that it confirms count.

An owner has one agent per served segment. It costs a thread, some sockets and 40 ms; but closing an agent is the only
way that NIXL has to revoke access: when unserve() returns, no peer reaches the memory any more, not even with a
transfer that was under way.

A write that ended with DeadlineExceeded or PeerLost may still land, as long as owner and writer live and are connected.
"""

from __future__ import annotations

import contextlib
import ipaddress
import threading
from collections.abc import Callable, Sequence

import msgspec

from moonpool.base.address import parse_address
from moonpool.base.clock import Deadline
from moonpool.base.descriptor import SegmentDescriptor
from moonpool.base.errors import DeadlineExceeded, InvalidInput, MoonpoolError, NotFound, PeerLost
from moonpool.transfer.control import (
    Admit,
    Attach,
    Confirm,
    ControlClient,
    ControlHandler,
    Notify,
    ask_fence,
    check_message,
)
from moonpool.transfer.memory.buffers import Buffer, address_of, as_bytes_views, total_nbytes
from moonpool.transfer.memory.fence import Spans, merge_spans
from moonpool.transfer.memory.location import parse_location
from moonpool.transfer.memory.segment import Segment
from moonpool.transfer.transports.base import RemoteSegment, Transport, check_bounds, place_items, rest_of
from moonpool.transfer.transports.nixl.agent import Agent, Memory, NixlOp, check_installed
from moonpool.transfer.transports.nixl.link import MAX_SLOTS, SLOT_NBYTES, NixlLink
from moonpool.transfer.transports.nixl.peer import NixlAddress, NixlPeer, decode_address
from moonpool.transfer.transports.nixl.staging import cut_chunks

_PULSE_TIMEOUT_S = 1.0  # for an owner to say that it lives, while a transfer is under way


class NixlTransport(Transport):
    """`control_endpoint` is where peers reach `control` ("tcp:10.0.0.1:4711"); with None the transport only opens
    segments of others. `lines` makes a control client of such an endpoint. When the endpoint is of the loopback
    interface, UCX stays off the network too. Raise ConfigError when NIXL is not installed.
    """

    scheme = "nixl"

    def __init__(
        self,
        control: ControlHandler,
        control_endpoint: str | None,
        lines: Callable[[str], ControlClient],
        *,
        staging_slot_nbytes: int = SLOT_NBYTES,
        max_staging_slots: int = MAX_SLOTS,
    ) -> None:
        check_installed()
        self._control = control
        self._desk_endpoint = control_endpoint
        self._lines = lines
        self._slot_nbytes, self._max_slots = staging_slot_nbytes, max_staging_slots
        self._loopback_only = control_endpoint is not None and _is_loopback(control_endpoint)
        self._lock = threading.Lock()
        self._offers: dict[str, _Offer] = {}
        self._link: NixlLink | None = None
        self._closed = False
        control.on_attach(self.scheme, self._answer)

    def can_serve(self, segment: Segment) -> bool:
        return self._desk_endpoint is not None and segment.in_memory and parse_location(segment.location).kind == "cpu"

    def serve(self, segment: Segment) -> str:
        if not self.can_serve(segment):
            raise InvalidInput(f"segment {segment.name!r} cannot be served by this nixl transport")
        with self._lock:
            if self._closed:
                raise PeerLost("this transport is closed")
            offer = self._offers.get(segment.name)
            if offer is None or offer.segment is not segment:
                self._offers[segment.name] = self._make_offer(segment)
                if offer is not None:  # the control handler has dropped it already
                    offer.close()
        return f"{self.scheme}:{self._desk_endpoint}"

    def unserve(self, name: str) -> None:
        self._control.withdraw(name)
        with self._lock:
            offer = self._offers.pop(name, None)
        if offer is not None:
            offer.close()

    def usable(self, descriptor: SegmentDescriptor, endpoint: str) -> bool:
        return True

    def open(self, descriptor: SegmentDescriptor, endpoint: str, *, timeout_s: float) -> NixlRemote:
        """Reads a byte, too: where UCX finds no way, the engine shall take another transport."""
        remote = NixlRemote(self._get_link(), self._lines(rest_of(endpoint, self.scheme)), descriptor)
        try:
            remote.read_into(descriptor.nbytes - 1, [bytearray(1)], timeout_s=timeout_s)
        except BaseException:
            remote.close()
            raise
        return remote

    def close(self) -> None:
        """The control is not ours and stays open."""
        with self._lock:
            self._closed = True
            offers, self._offers = list(self._offers.values()), {}
            link = self._link
        for offer in offers:
            offer.close()
        if link is not None:
            link.close()

    def _make_offer(self, segment: Segment) -> _Offer:
        offer = _Offer(segment, loopback_only=self._loopback_only)
        try:
            self._control.serve(segment)
        except BaseException:
            offer.close()
            raise
        return offer

    def _get_link(self) -> NixlLink:
        with self._lock:
            if self._closed:
                raise PeerLost("this transport is closed")
            if self._link is None:
                self._link = NixlLink(
                    loopback_only=self._loopback_only, slot_nbytes=self._slot_nbytes, max_slots=self._max_slots
                )
            return self._link

    def _answer(self, segment: Segment, hello: bytes) -> bytes:
        with self._lock:
            offer = self._offers.get(segment.name)
        if offer is None or offer.segment is not segment:
            raise NotFound(f"segment {segment.name!r} is not served by {self.scheme} here")
        return offer.address


class _Offer:
    """A served segment and the agent that lets others at its memory."""

    def __init__(self, segment: Segment, *, loopback_only: bool) -> None:
        self.segment = segment
        self._memory: memoryview | None = segment.memory  # keeps it mapped for as long as the agent lives
        self._agent = Agent(loopback_only=loopback_only)
        found = Memory(address_of(self._memory), segment.nbytes)
        self._agent.register(found)
        self.address = msgspec.msgpack.encode(
            NixlAddress(
                metadata=self._agent.metadata(),
                address=found.address,
                nbytes=found.nbytes,
                device=found.device,
                kind=found.kind,
                fenced=segment.fence is not None,
            )
        )

    def close(self) -> None:
        self._agent.close()
        self._memory = None


class NixlRemote(RemoteSegment):
    """Connects at the first use, and again after the connection was lost."""

    transport = NixlTransport.scheme

    def __init__(self, link: NixlLink, line: ControlClient, descriptor: SegmentDescriptor) -> None:
        self.nbytes = descriptor.nbytes
        self._link = link
        self._line = line
        self._name, self._incarnation = descriptor.name, descriptor.incarnation
        self._connecting = threading.Lock()  # held while the owner is asked
        self._lock = threading.Lock()
        self._peer: NixlPeer | None = None
        self._closed = False

    def read_into(self, offset: int, buffers: Sequence[Buffer], *, timeout_s: float) -> None:
        self._move(NixlOp.READ, self._place(offset, buffers, writable=True), 0, timeout_s)

    def write_from(self, offset: int, buffers: Sequence[Buffer], *, generation: int, timeout_s: float) -> None:
        self._move(NixlOp.WRITE, self._place(offset, buffers, writable=False), generation, timeout_s)

    def read_many(self, items: Sequence[tuple[int, Buffer]], *, timeout_s: float) -> None:
        self._move(NixlOp.READ, place_items(items, self.nbytes, writable=True), 0, timeout_s)

    def write_many(self, items: Sequence[tuple[int, Buffer]], *, generation: int, timeout_s: float) -> None:
        self._move(NixlOp.WRITE, place_items(items, self.nbytes, writable=False), generation, timeout_s)

    def notify(self, message: bytes, *, timeout_s: float) -> None:
        check_message(message)
        self._check_open()
        self._line.ask(Notify(self._name, self._incarnation, message), timeout_s)

    def close(self) -> None:
        self._closed = True
        if self._peer is not None:
            self._disconnect(self._peer)

    def _place(self, offset: int, buffers: Sequence[Buffer], *, writable: bool) -> list[tuple[int, memoryview]]:
        views = as_bytes_views(buffers, writable)
        check_bounds(offset, total_nbytes(views), self.nbytes)
        placed = []
        for view in views:
            placed.append((offset, view))
            offset += view.nbytes
        return placed

    def _move(self, op: NixlOp, placed: list[tuple[int, memoryview]], generation: int, timeout_s: float) -> None:
        deadline = Deadline(timeout_s)
        with self._link.in_use():
            try:
                self._move_once(op, placed, generation, deadline)
            except _ConnectionLost:
                # The owner lives, and may have withdrawn and served the segment again since we connected.
                self._move_again(op, placed, generation, deadline)

    def _move_again(
        self, op: NixlOp, placed: list[tuple[int, memoryview]], generation: int, deadline: Deadline
    ) -> None:
        try:
            self._move_once(op, placed, generation, deadline)
        except _ConnectionLost as error:
            raise PeerLost(str(error)) from error

    def _move_once(self, op: NixlOp, placed: list[tuple[int, memoryview]], generation: int, deadline: Deadline) -> None:
        peer = self._connect(deadline)
        spans = (
            merge_spans((offset, view.nbytes) for offset, view in placed)
            if op is NixlOp.WRITE and peer.address.fenced
            else []
        )
        if op is NixlOp.WRITE:
            self._ask_fence(Admit, spans, generation, deadline)
        chunks = cut_chunks(placed, self._link.slot_nbytes)
        try:
            self._link.move(peer, op, chunks, deadline, self._check_pulse)
        except (PeerLost, NotFound) as error:
            self._disconnect(peer)
            raise self._reason(error, deadline) from error
        self._ask_fence(Confirm, spans, generation, deadline)

    def _connect(self, deadline: Deadline) -> NixlPeer:
        """The peer to use; one thread connects, the others wait for it, each within its own deadline."""
        self._check_open()
        peer = self._peer
        if peer is not None:
            return peer
        if not self._connecting.acquire(timeout=deadline.remaining_s()):
            raise DeadlineExceeded(f"the owner of segment {self._name!r} did not answer in time")
        try:
            peer = self._peer or self._attach(deadline)
            with self._lock:
                self._peer = peer
        finally:
            self._connecting.release()
        if self._closed:  # while this thread connected: close() may not have seen the new peer
            self._disconnect(peer)
        self._check_open()
        return peer

    def _attach(self, deadline: Deadline) -> NixlPeer:
        ask = Attach(NixlTransport.scheme, self._name, self._incarnation)
        address = decode_address(self._line.ask(ask, deadline.remaining_s()))
        check_bounds(0, self.nbytes, address.nbytes)
        return self._link.connect(address)

    def _disconnect(self, peer: NixlPeer) -> None:
        with self._lock:
            if self._peer is peer:
                self._peer = None
        peer.retire()

    def _ask_fence(self, call: type[Admit | Confirm], spans: Spans, generation: int, deadline: Deadline) -> None:
        ask_fence(self._line, call, self._name, self._incarnation, spans, generation, deadline)

    def _check_pulse(self, deadline: Deadline) -> None:
        """Raises when the owner is gone or has withdrawn the segment; an owner that is only slow may go on."""
        with contextlib.suppress(DeadlineExceeded):
            self._ask_pulse(deadline)

    def _ask_pulse(self, deadline: Deadline) -> None:
        timeout_s = min(_PULSE_TIMEOUT_S, deadline.remaining_s())
        self._line.ask(Admit(self._name, self._incarnation, [], 0), timeout_s)

    def _reason(self, error: MoonpoolError, deadline: Deadline) -> MoonpoolError:
        """Why the transfer broke off, in the owner's own words if it still has any."""
        try:
            self._check_open()
            self._ask_pulse(deadline)
        except DeadlineExceeded:
            return error
        except MoonpoolError as better:
            return better
        return _ConnectionLost(str(error))

    def _check_open(self) -> None:
        if self._closed:
            raise PeerLost(f"this handle of segment {self._name!r} is closed")


class _ConnectionLost(PeerLost):
    """To the agent of an owner that lives."""


def _is_loopback(endpoint: str) -> bool:
    address = parse_address(endpoint)
    if address.scheme != "tcp":
        return True  # a Unix socket
    try:
        return ipaddress.ip_address(address.host).is_loopback
    except ValueError:
        return address.host == "localhost"
