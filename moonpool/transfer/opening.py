"""Opens segments of others: by the fastest transport that works, each once."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial
from weakref import WeakValueDictionary

from moonpool.base.descriptor import SegmentDescriptor
from moonpool.base.errors import NotFound, PeerLost, Unavailable
from moonpool.transfer.paths.multipath import MultiPathRemote
from moonpool.transfer.paths.path_load import PlanConfig
from moonpool.transfer.paths.peer_paths import PeerPaths
from moonpool.transfer.transports.base import RemoteSegment, Transport
from moonpool.transfer.transports.tcp.transport import TcpTransport


class Remotes:
    """The handles an engine has opened. Thread-safe; borrows the transports, fastest first."""

    def __init__(self, transports: Sequence[Transport], plan: PlanConfig, timeout_s: float) -> None:
        self._transports = transports
        self._plan = plan
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        # Not by name and incarnation alone: two owners may have chosen the same.
        self._remotes: dict[SegmentDescriptor, RemoteSegment] = {}
        # By their preferred and secondary endpoints; held by their remotes.
        self._peers: WeakValueDictionary[tuple[tuple[str, ...], tuple[str, ...]], PeerPaths] = WeakValueDictionary()
        self._closed_peers: list[PeerPaths] = []
        self._closed = False

    def find(self, descriptor: SegmentDescriptor) -> RemoteSegment | None:
        """The handle, if it was opened before."""
        with self._lock:
            return self._remotes.get(descriptor)

    def open(self, descriptor: SegmentDescriptor) -> RemoteSegment:
        """The same handle each time for a descriptor."""
        return self.find(descriptor) or self._keep(descriptor, self._connect(descriptor))

    def forget(self, descriptor: SegmentDescriptor) -> None:
        with self._lock:
            remote = self._remotes.pop(descriptor, None)
        if remote is not None:
            remote.close()

    def close(self) -> None:
        """Idempotent. What is under way by several paths fails; join() once the transports are closed."""
        with self._lock:
            self._closed = True
            remotes, self._remotes = list(self._remotes.values()), {}
            self._closed_peers += self._peers.values()
            self._peers.clear()
        for peer in self._closed_peers:
            peer.close()
        for remote in remotes:
            remote.close()

    def join(self, timeout_s: float) -> None:
        for peer in self._closed_peers:
            peer.join(timeout_s)

    def _keep(self, descriptor: SegmentDescriptor, remote: RemoteSegment) -> RemoteSegment:
        """The handle to use from now on: this one, or one that another thread opened first."""
        with self._lock:
            kept = None if self._closed else self._remotes.setdefault(descriptor, remote)
        if kept is not remote:
            remote.close()
        if kept is None:
            raise PeerLost("the transfer engine is closed")
        return kept

    def _connect(self, descriptor: SegmentDescriptor) -> RemoteSegment:
        failure: Unavailable | None = None
        for transport, endpoints in self._ways_to(descriptor):
            try:
                secondary = descriptor.secondary if transport.scheme == TcpTransport.scheme else ()
                if transport.scheme == TcpTransport.scheme and len(endpoints) + len(secondary) > 1:
                    return self._connect_paths(transport, descriptor, endpoints, secondary)
                return self._connect_first(transport, descriptor, endpoints)
            except Unavailable as error:
                failure = error
        raise failure or NotFound(f"segment {descriptor.name!r} has no endpoint that can be reached from here")

    def _connect_first(
        self, transport: Transport, descriptor: SegmentDescriptor, endpoints: Sequence[str]
    ) -> RemoteSegment:
        failure: Unavailable | None = None
        for endpoint in endpoints:
            try:
                return transport.open(descriptor, endpoint, timeout_s=self._timeout_s)
            except Unavailable as error:
                failure = error
        assert failure is not None
        raise failure

    def _connect_paths(
        self, transport: Transport, descriptor: SegmentDescriptor, preferred: Sequence[str], secondary: Sequence[str]
    ) -> MultiPathRemote:
        openers = [
            partial(_open_for, transport, descriptor, endpoint)  # takes the timeout
            for endpoint in (*preferred, *secondary)
        ]
        remote = MultiPathRemote(self._paths_to(tuple(preferred), tuple(secondary)), descriptor.nbytes, openers)
        remote.connect(self._timeout_s)
        return remote

    def _paths_to(self, preferred: tuple[str, ...], secondary: tuple[str, ...]) -> PeerPaths:
        with self._lock:
            if self._closed:
                raise PeerLost("the transfer engine is closed")
            paths = self._peers.get((preferred, secondary))
            if paths is None:
                paths = PeerPaths((*preferred, *secondary), self._plan, num_secondary=len(secondary))
                self._peers[preferred, secondary] = paths
            return paths

    def _ways_to(self, descriptor: SegmentDescriptor) -> list[tuple[Transport, list[str]]]:
        """Usable endpoints by transport, fastest first. Of several listeners of one scheme the first opens for all."""
        by_scheme: dict[str, tuple[Transport, list[str]]] = {}
        for transport in self._transports:
            own = [e for e in descriptor.endpoints if e.partition(":")[0] == transport.scheme]
            usable = [endpoint for endpoint in own if transport.usable(descriptor, endpoint)]
            if usable:
                by_scheme.setdefault(transport.scheme, (transport, usable))
        return list(by_scheme.values())


def _open_for(transport: Transport, descriptor: SegmentDescriptor, endpoint: str, timeout_s: float) -> RemoteSegment:
    return transport.open(descriptor, endpoint, timeout_s=timeout_s)
