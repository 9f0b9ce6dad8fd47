"""Two tcp listeners of one owner, used together as an engine does: the way "paths" of the transport suite."""

from __future__ import annotations

import threading

from moonpool.base.descriptor import SegmentDescriptor
from moonpool.transfer.batch import Batch
from moonpool.transfer.control import ControlHandler
from moonpool.transfer.memory.segment import Segment
from moonpool.transfer.paths.multipath import MultiPathRemote
from moonpool.transfer.paths.path_load import PlanConfig
from moonpool.transfer.paths.peer_paths import PeerPaths
from moonpool.transfer.paths.slice_queue import SliceOrder, SliceQueue
from moonpool.transfer.transports.base import RemoteSegment, Transport, rest_of
from moonpool.transfer.transports.tcp.transport import TcpTransport


class PathsTransport(Transport):
    """Its endpoints name those of both listeners."""

    scheme = "paths"

    def __init__(self) -> None:
        self.control = ControlHandler()
        self._rails = [TcpTransport("127.0.0.1", control=self.control) for _ in range(2)]
        self._lock = threading.Lock()
        self._peers: dict[str, PeerPaths[Batch]] = {}
        self._queue: SliceQueue[Batch] = SliceQueue(SliceOrder(1000, threads_per_peer=2))

    def can_serve(self, segment: Segment) -> bool:
        return all(rail.can_serve(segment) for rail in self._rails)

    def serve(self, segment: Segment) -> str:
        return f"{self.scheme}:{'+'.join(rail.serve(segment) for rail in self._rails)}"

    def unserve(self, name: str) -> None:
        for rail in self._rails:
            rail.unserve(name)

    def usable(self, descriptor: SegmentDescriptor, endpoint: str) -> bool:
        return True

    def open(self, descriptor: SegmentDescriptor, endpoint: str, *, timeout_s: float) -> MultiPathRemote:
        endpoints = rest_of(endpoint, self.scheme).split("+")
        with self._lock:
            paths = self._peers.setdefault(endpoint, PeerPaths[Batch](endpoints, PlanConfig()))

        def open_by(own_endpoint: str, timeout_s: float) -> RemoteSegment:
            return self._rails[0].open(descriptor, own_endpoint, timeout_s=timeout_s)

        openers = [lambda timeout_s, own=own: open_by(own, timeout_s) for own in endpoints]
        remote = MultiPathRemote(self._queue, paths, descriptor.nbytes, openers)
        remote.connect(timeout_s)
        return remote

    def close(self) -> None:
        self._queue.close()
        for rail in self._rails:
            rail.close()
        self._queue.join(5)
