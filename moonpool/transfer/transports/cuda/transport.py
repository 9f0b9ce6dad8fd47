"""GPU memory between processes of one machine, by CUDA IPC: the owner says where its memory lies, the other maps it and
copies between it and its own memory, main or GPU's. The owner does nothing for a transfer.

The control handler of the owner says where the memory is, whether it is still served, and whether the fence allows a
write. It is asked before each transfer: an owner that has ended, or serves other memory under the name, is noticed
before a byte moves, and the old mapping is dropped. A peer that maps a segment can reach the whole allocation around
it, so the control handler should be one that only this user's processes reach (a Unix socket).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from weakref import WeakKeyDictionary, WeakSet

from moonpool.base.clock import Deadline
from moonpool.base.descriptor import SegmentDescriptor
from moonpool.base.errors import InvalidInput, MoonpoolError, NotFound, PeerLost, Unavailable
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
from moonpool.transfer.memory.buffers import Buffer, Memory, as_memory
from moonpool.transfer.memory.fence import Spans, merge_spans
from moonpool.transfer.memory.location import host_id
from moonpool.transfer.memory.segment import Segment
from moonpool.transfer.transports.base import RemoteSegment, Transport, check_bounds, rest_of
from moonpool.transfer.transports.cuda.copy import Mover, Placed, mover_of
from moonpool.transfer.transports.cuda.driver import driver
from moonpool.transfer.transports.cuda.ipc import Offers, Reach, decode_offer, hello, reach
from moonpool.transfer.transports.cuda.segment import DeviceSegment, memories_nbytes, place

_WATCH_EVERY_S = 0.5
_JOIN_TIMEOUT_S = 2.0


class CudaTransport(Transport):
    """`control_endpoint` is where others reach `control` ("unix:/path", "tcp:host:port"); with None the transport only
    opens segments of others. `line_to` makes a control client of such an endpoint.
    """

    scheme = "cuda"

    def __init__(
        self, control: ControlHandler, control_endpoint: str | None, line_to: Callable[[str], ControlClient]
    ) -> None:
        self.control = control
        self._desk_endpoint = control_endpoint
        self._line_to = line_to
        self._offers: WeakKeyDictionary[DeviceSegment, Offers] = WeakKeyDictionary()
        self._remotes: WeakSet[CudaRemote] = WeakSet()
        self._watch: threading.Thread | None = None
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._closed = False
        control.on_attach(self.scheme, self._answer)

    def can_serve(self, segment: Segment) -> bool:
        return self._desk_endpoint is not None and isinstance(segment, DeviceSegment)

    def serve(self, segment: Segment) -> str:
        if self._desk_endpoint is None or not isinstance(segment, DeviceSegment):
            raise InvalidInput(f"segment {segment.name!r} cannot be served by {self.scheme}")
        with self._lock:
            if self._closed:
                raise PeerLost("this transport is closed")
            self.control.serve(segment)
            self._offers[segment] = Offers(segment)
        return f"{self.scheme}:{self._desk_endpoint}"

    def unserve(self, name: str) -> None:
        self.control.withdraw(name)

    def usable(self, descriptor: SegmentDescriptor, endpoint: str) -> bool:
        if descriptor.host != host_id():
            return False
        try:
            driver()
        except Unavailable:
            return False
        return True

    def open(self, descriptor: SegmentDescriptor, endpoint: str, *, timeout_s: float) -> CudaRemote:
        if self._closed:
            raise PeerLost("this transport is closed")
        remote = CudaRemote(self._line_to(rest_of(endpoint, self.scheme)), descriptor, timeout_s)
        with self._lock:
            self._remotes.add(remote)
            if self._watch is None:
                self._watch = threading.Thread(target=self._watch_owners, name="cuda-owners", daemon=True)
                self._watch.start()
        return remote

    def _watch_owners(self) -> None:
        """Unmap the memory of owners that have ended: the GPU keeps memory as long as a process maps it."""
        while not self._ended.wait(_WATCH_EVERY_S):
            with self._lock:
                remotes = list(self._remotes)
            for remote in remotes:
                remote.check_owner(_WATCH_EVERY_S)
            del remotes

    def close(self) -> None:
        self._ended.set()
        with self._lock:
            self._closed = True
            self._offers.clear()
            watch = self._watch
        if watch is not None:
            watch.join(_JOIN_TIMEOUT_S)
        self.control.close()

    def _answer(self, segment: Segment, asked: bytes) -> bytes:
        """Runs on a thread of the control handler."""
        offers = self._offers.get(segment) if isinstance(segment, DeviceSegment) else None
        if offers is None:
            raise NotFound(f"segment {segment.name!r} is not served by {self.scheme} here")
        return offers.answer(asked)


class CudaRemote(RemoteSegment):
    """A peer's handle. Buffers may lie in main memory (fastest when pinned) or on a GPU."""

    transport = CudaTransport.scheme
    takes_gpu_memory = True
    run_nbytes = 256 * 1024 * 1024  # the owner is asked three times per call, and a GPU copies a MiB in 1 us

    def __init__(self, line: ControlClient, descriptor: SegmentDescriptor, timeout_s: float) -> None:
        self.nbytes = descriptor.nbytes
        self._line = line
        self._name, self._incarnation = descriptor.name, descriptor.incarnation
        self._attach = Attach(self.transport, self._name, self._incarnation, hello())
        self._lock = threading.Lock()
        self._reached: tuple[bytes, Reach] | None = None
        self._fenced = False
        self._closed = False
        self._reach(Deadline(timeout_s))

    def read_into(self, offset: int, buffers: Sequence[Buffer], *, timeout_s: float) -> None:
        memories = [as_memory(buffer, writable=True) for buffer in buffers]
        check_bounds(offset, memories_nbytes(memories), self.nbytes)
        self._read(place(offset, memories), Deadline(timeout_s))

    def write_from(self, offset: int, buffers: Sequence[Buffer], *, generation: int, timeout_s: float) -> None:
        memories = [as_memory(buffer, writable=False) for buffer in buffers]
        nbytes = memories_nbytes(memories)
        check_bounds(offset, nbytes, self.nbytes)
        deadline = Deadline(timeout_s)
        with self._memory(deadline) as (address, mover), self._fence([(offset, nbytes)], generation, deadline):
            mover.write(place(address + offset, memories), deadline)

    def read_many(self, items: Sequence[tuple[int, Buffer]], *, timeout_s: float) -> None:
        self._read(self._place(items, writable=True), Deadline(timeout_s))

    def write_many(self, items: Sequence[tuple[int, Buffer]], *, generation: int, timeout_s: float) -> None:
        placed = self._place(items, writable=False)
        deadline = Deadline(timeout_s)
        spans = [(offset, memory.nbytes) for offset, memory in placed]
        with self._memory(deadline) as (address, mover), self._fence(spans, generation, deadline):
            mover.write([(address + offset, memory) for offset, memory in placed], deadline)

    def notify(self, message: bytes, *, timeout_s: float) -> None:
        check_message(message)
        self._check_open()
        self._line.ask(Notify(self._name, self._incarnation, message), timeout_s)

    def check_owner(self, timeout_s: float) -> None:
        """Unmap the owner's memory if the owner has ended. The next transfer asks the owner again."""
        if self._reached is not None and not self._closed:
            with contextlib.suppress(MoonpoolError):
                self._reach(Deadline(timeout_s))

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._reached = None

    def _place(self, items: Sequence[tuple[int, Buffer]], writable: bool) -> list[tuple[int, Memory]]:
        placed = [(offset, as_memory(buffer, writable)) for offset, buffer in items]
        for offset, memory in placed:
            check_bounds(offset, memory.nbytes, self.nbytes)
        return placed

    def _check_open(self) -> None:
        if self._closed:
            raise PeerLost(f"this handle of segment {self._name!r} is closed")

    def _read(self, placed: Sequence[Placed], deadline: Deadline) -> None:
        # Asked before, not during the copy: memory that its owner has freed meanwhile must not be touched.
        with self._memory(deadline) as (address, mover):
            mover.read([(address + offset, memory) for offset, memory in placed], deadline)

    @contextmanager
    def _memory(self, deadline: Deadline) -> Iterator[tuple[int, Mover]]:
        """Where the owner's memory begins, and who copies there; it stays mapped until the block ends."""
        span, device = self._reach(deadline)
        try:
            yield span.address, mover_of(device)
        finally:
            del span  # an error's traceback would keep it, and so the memory of a dead owner

    def _reach(self, deadline: Deadline) -> Reach:
        """The owner's memory as it stands now; raises what base.py lists when there is none."""
        self._check_open()
        try:
            answer = self._line.ask(self._attach, deadline.remaining_s())
        except (NotFound, PeerLost):
            self._reached = None
            raise
        reached = self._reached
        if reached is not None and reached[0] == answer:
            return reached[1]
        return self._reach_anew(answer)

    def _reach_anew(self, answer: bytes) -> Reach:
        offer = decode_offer(answer)
        check_bounds(0, self.nbytes, offer.nbytes)
        self._reached = None  # first: the old memory may be all that keeps the GPU full
        made = reach(offer)
        with self._lock:
            self._check_open()
            self._fenced = offer.fenced
            self._reached = answer, made
        return made

    @contextmanager
    def _fence(self, spans: list[tuple[int, int]], generation: int, deadline: Deadline) -> Iterator[None]:
        """Asks the owner before a write and, that it stayed, after it."""
        merged = merge_spans(spans) if self._fenced else []
        if merged:
            self._ask(Admit, merged, generation, deadline)
        yield
        self._ask(Confirm, merged, generation, deadline)

    def _ask(self, call: type[Admit | Confirm], spans: Spans, generation: int, deadline: Deadline) -> None:
        try:
            ask_fence(self._line, call, self._name, self._incarnation, spans, generation, deadline)
        except (NotFound, PeerLost):
            self._reached = None
            raise
