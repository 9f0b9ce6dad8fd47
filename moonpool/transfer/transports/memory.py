"""Between engines of one process that were given the same fabric: no socket, no second mapping. For tests, for
single-process serving, and as the reference the other transports are compared with.
"""

from __future__ import annotations

import threading
import uuid

from moonpool.base.descriptor import SegmentDescriptor
from moonpool.base.errors import PeerLost
from moonpool.transfer.control import ControlHandler, Notify, check_message
from moonpool.transfer.memory.segment import Borrowed, Segment
from moonpool.transfer.transports.base import Transport, check_bounds, rest_of
from moonpool.transfer.transports.mapped import MappedRemote


class MemoryFabric:
    """Who is alive in this process, by a name no other process has."""

    def __init__(self) -> None:
        self._owners: dict[str, ControlHandler] = {}
        self._lock = threading.Lock()

    def join(self, owner: str, control: ControlHandler) -> None:
        with self._lock:
            self._owners[owner] = control

    def leave(self, owner: str) -> None:
        with self._lock:
            self._owners.pop(owner, None)

    def desk_of(self, owner: str) -> ControlHandler | None:
        return self._owners.get(owner)


class MemoryTransport(Transport):
    scheme = "memory"

    def __init__(self, fabric: MemoryFabric, *, control: ControlHandler | None = None) -> None:
        self._fabric = fabric
        self._owner = uuid.uuid4().hex
        self.control = control or ControlHandler()
        fabric.join(self._owner, self.control)

    def can_serve(self, segment: Segment) -> bool:
        return segment.in_memory

    def serve(self, segment: Segment) -> str:
        self.control.serve(segment)
        return f"{self.scheme}:{self._owner}"

    def unserve(self, name: str) -> None:
        self.control.withdraw(name)

    def usable(self, descriptor: SegmentDescriptor, endpoint: str) -> bool:
        return self._fabric.desk_of(rest_of(endpoint, self.scheme)) is not None

    def open(self, descriptor: SegmentDescriptor, endpoint: str, *, timeout_s: float) -> MemoryRemote:
        return MemoryRemote(self._fabric, rest_of(endpoint, self.scheme), descriptor)

    def close(self) -> None:
        self._fabric.leave(self._owner)
        self.control.close()


class MemoryRemote(MappedRemote):
    transport = MemoryTransport.scheme

    def __init__(self, fabric: MemoryFabric, owner: str, descriptor: SegmentDescriptor) -> None:
        self._fabric = fabric
        self._owner = owner
        self._name, self._incarnation = descriptor.name, descriptor.incarnation
        self._closed = False
        self.nbytes = descriptor.nbytes
        check_bounds(0, self.nbytes, self._borrow(0.0).memory.nbytes)

    def close(self) -> None:
        self._closed = True

    def notify(self, message: bytes, *, timeout_s: float) -> None:
        check_message(message)
        self._control().answer(Notify(self._name, self._incarnation, message))

    def _borrow(self, timeout_s: float) -> Borrowed:
        return self._control().segments.find(self._name, self._incarnation).borrow()

    def _control(self) -> ControlHandler:
        if self._closed:
            raise PeerLost(f"this handle of segment {self._name!r} is closed")
        control = self._fabric.desk_of(self._owner)
        if control is None:
            raise PeerLost(f"the owner of segment {self._name!r} is gone")
        return control
