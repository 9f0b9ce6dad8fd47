"""The transports of an engine, fastest first: they serve its segments and open those of others."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple, TypeVar
from weakref import WeakValueDictionary

from moonpool.base.descriptor import SegmentDescriptor
from moonpool.base.errors import ConfigError, NotFound, PeerLost, Unavailable
from moonpool.transfer.batch import Batch
from moonpool.transfer.config import AUTO, TransferConfig
from moonpool.transfer.control import ControlClient, ControlHandler
from moonpool.transfer.memory.segment import Segment
from moonpool.transfer.paths.multipath import MultiPathRemote
from moonpool.transfer.paths.path_load import PlanConfig
from moonpool.transfer.paths.peer_paths import PeerPaths
from moonpool.transfer.paths.slice_queue import SliceQueue
from moonpool.transfer.topology import Topology
from moonpool.transfer.topology.matrix import Rail, find_rails, split_rails
from moonpool.transfer.transports.base import RemoteSegment, Transport
from moonpool.transfer.transports.cuda.transport import CudaTransport
from moonpool.transfer.transports.file.transport import FileTransport
from moonpool.transfer.transports.memory import MemoryFabric, MemoryTransport
from moonpool.transfer.transports.nixl.transport import NixlTransport
from moonpool.transfer.transports.shm.transport import ShmTransport, UnixControlClient
from moonpool.transfer.transports.tcp.guard import Guard
from moonpool.transfer.transports.tcp.transport import TcpTransport

T = TypeVar("T", bound=Transport)


class Endpoints(NamedTuple):
    """How a segment is reached. The secondary endpoints are used only while none of the others works."""

    preferred: tuple[str, ...]
    secondary: tuple[str, ...]


class Assembly:
    """Makes and closes the transports of one engine, and serves segments by them."""

    def __init__(
        self, config: TransferConfig, control: ControlHandler, topology: Topology | None, fabric: MemoryFabric | None
    ) -> None:
        self._config = config
        self._control = control
        self._topology = topology
        self._rails = _rails(config, topology)
        self._made: list[Transport] = []
        try:
            self.transports = self._make(fabric)
        except BaseException:
            self.close()
            raise

    @property
    def addresses(self) -> tuple[str, ...]:
        """`host:port` of each tcp port."""
        return tuple(tcp.endpoint.removeprefix("tcp:") for tcp in self._tcp if tcp.endpoint is not None)

    def connections(self) -> tuple[int, Counter[str]]:
        """Return the number of connections of others to the tcp ports, and how many have ended, by reason."""
        found = [tcp.connections() for tcp in self._tcp]
        return sum(count for count, _ in found), sum((ended for _, ended in found), Counter())

    def control_client(self, endpoint: str) -> ControlClient:
        """Return a client of the control handler at `unix:/path` or `tcp:host:port`."""
        scheme, _, rest = endpoint.partition(":")
        return UnixControlClient(rest) if scheme == "unix" else self._client.line(endpoint)

    def serve(self, segment: Segment) -> Endpoints:
        """Serve the segment by every transport that can, or by none if one fails. Where the topology is known, prefer
        the rails near the segment's memory.
        """
        try:
            made = {each: each.serve(segment) for each in self.transports if each.can_serve(segment)}
        except BaseException:
            self.unserve(segment.name)
            raise
        near, far = list(self._rails), list[Rail]()
        if self._topology is not None:
            near, far = split_rails(self._topology, self._rails, segment.location)
        rail_of: dict[Transport, Rail] = dict(zip(self._tcp, self._rails, strict=True))
        return Endpoints(
            tuple(made[each] for each in made if each not in rail_of or rail_of[each] in near),
            tuple(made[each] for each in made if each in rail_of and rail_of[each] in far),
        )

    def unserve(self, name: str) -> None:
        for transport in self.transports:
            transport.unserve(name)

    def close(self) -> None:
        """Idempotent."""
        for transport in self._made:
            transport.close()

    def _make(self, fabric: MemoryFabric | None) -> list[Transport]:
        config, control = self._config, self._control
        guard = config.guard()
        self._tcp = [self._add(self._tcp_at(rail, guard)) for rail in self._rails]
        self._client = self._tcp[0] if self._tcp else self._add(self._tcp_at(None, guard))
        shm = [self._add(ShmTransport(config.run_dir, control=control))] if config.shm else []
        tcp_control = self._client.endpoint
        ordered: list[Transport] = [self._add(FileTransport())]
        if fabric is not None:
            ordered.append(self._add(MemoryTransport(fabric, control=control)))
        ordered.append(
            self._add(CudaTransport(control, shm[0].control_endpoint if shm else tcp_control, self.control_client))
        )
        ordered += shm
        if config.nixl:
            ordered.append(self._add(NixlTransport(control, tcp_control, self.control_client)))
        return [*ordered, *(self._tcp or [self._client])]

    def _add(self, transport: T) -> T:
        self._made.append(transport)
        return transport

    def _tcp_at(self, rail: Rail | None, guard: Guard | None) -> TcpTransport:
        """Make a transport that listens on the rail, or only connects to others (None). Only the first rail advertises
        `tcp_advertise_host`.
        """
        config = self._config
        return TcpTransport(
            rail.address if rail is not None else None,
            config.tcp_port,
            control=self._control,
            lanes=config.lanes,
            advertise_host=config.tcp_advertise_host if rail in self._rails[:1] else None,
            max_connections=config.tcp_max_connections,
            idle_timeout_s=config.tcp_idle_s,
            stall_timeout_s=config.timeout_s,
            guard=guard,
        )


def _rails(config: TransferConfig, topology: Topology | None) -> tuple[Rail, ...]:
    """Return where to listen. A configured address is a rail of the NIC that has it, if the topology is known."""
    if config.tcp_host is None:
        return ()
    hosts = (config.tcp_host, *config.tcp_hosts)
    if config.tcp_host == AUTO:
        if topology is None or config.tcp_hosts:
            raise ConfigError("tcp_host=auto finds all addresses by itself; set no tcp_hosts with it")
        return find_rails(topology)
    nics = topology.hardware.nics if topology is not None else ()
    return tuple(Rail(next((nic.name for nic in nics if host in nic.addresses), ""), host) for host in hosts)


class Remotes:
    """The handles that an engine has opened, each once. Thread-safe; borrows the transports, fastest first, and the
    queue of slices."""

    def __init__(
        self, transports: Sequence[Transport], queue: SliceQueue[Batch], plan: PlanConfig, timeout_s: float
    ) -> None:
        self._transports = transports
        self._queue = queue
        self._plan = plan
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        # By the whole descriptor: two owners may have chosen the same name and incarnation.
        self._remotes: dict[SegmentDescriptor, RemoteSegment] = {}
        # By their preferred and secondary endpoints; their remotes keep them alive.
        self._peers: WeakValueDictionary[tuple[tuple[str, ...], tuple[str, ...]], PeerPaths[Batch]] = (
            WeakValueDictionary()
        )
        self._closed = False

    def find(self, descriptor: SegmentDescriptor) -> RemoteSegment | None:
        """Return the handle, if it was opened before."""
        with self._lock:
            return self._remotes.get(descriptor)

    def open(self, descriptor: SegmentDescriptor, timeout_s: float | None = None) -> RemoteSegment:
        """Return a handle by the fastest transport that works, the same one each time for a descriptor."""
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        return self.find(descriptor) or self._keep(descriptor, self._connect(descriptor, timeout_s))

    def forget(self, descriptor: SegmentDescriptor) -> None:
        with self._lock:
            remote = self._remotes.pop(descriptor, None)
        if remote is not None:
            remote.close()

    def close(self) -> None:
        """Idempotent."""
        with self._lock:
            self._closed = True
            remotes, self._remotes = list(self._remotes.values()), {}
        for remote in remotes:
            remote.close()

    def _keep(self, descriptor: SegmentDescriptor, remote: RemoteSegment) -> RemoteSegment:
        """Return the handle to use: this one, or one that another thread opened first."""
        with self._lock:
            kept = None if self._closed else self._remotes.setdefault(descriptor, remote)
        if kept is not remote:
            remote.close()
        if kept is None:
            raise PeerLost("the transfer engine is closed")
        return kept

    def _connect(self, descriptor: SegmentDescriptor, timeout_s: float) -> RemoteSegment:
        failure: Unavailable | None = None
        for transport, endpoints in self._endpoints_of(descriptor):
            try:
                secondary = descriptor.secondary if transport.scheme == TcpTransport.scheme else ()
                if transport.scheme == TcpTransport.scheme and len(endpoints) + len(secondary) > 1:
                    return self._connect_paths(transport, descriptor, endpoints, secondary, timeout_s)
                return self._connect_first(transport, descriptor, endpoints, timeout_s)
            except Unavailable as error:
                failure = error
        raise failure or NotFound(f"segment {descriptor.name!r} has no endpoint that can be reached from here")

    def _connect_first(
        self, transport: Transport, descriptor: SegmentDescriptor, endpoints: Sequence[str], timeout_s: float
    ) -> RemoteSegment:
        failure: Unavailable | None = None
        for endpoint in endpoints:
            try:
                return transport.open(descriptor, endpoint, timeout_s=timeout_s)
            except Unavailable as error:
                failure = error
        assert failure is not None
        raise failure

    def _connect_paths(
        self,
        transport: Transport,
        descriptor: SegmentDescriptor,
        preferred: Sequence[str],
        secondary: Sequence[str],
        timeout_s: float,
    ) -> MultiPathRemote:
        openers = [
            partial(_open_for, transport, descriptor, endpoint)  # takes the timeout
            for endpoint in (*preferred, *secondary)
        ]
        paths = self._paths_to(tuple(preferred), tuple(secondary))
        remote = MultiPathRemote(self._queue, paths, descriptor.nbytes, openers)
        remote.connect(timeout_s)
        return remote

    def _paths_to(self, preferred: tuple[str, ...], secondary: tuple[str, ...]) -> PeerPaths[Batch]:
        with self._lock:
            if self._closed:
                raise PeerLost("the transfer engine is closed")
            paths = self._peers.get((preferred, secondary))
            if paths is None:
                paths = PeerPaths((*preferred, *secondary), self._plan, num_secondary=len(secondary))
                self._peers[preferred, secondary] = paths
            return paths

    def _endpoints_of(self, descriptor: SegmentDescriptor) -> list[tuple[Transport, list[str]]]:
        """Return usable endpoints by transport, fastest first. The first transport of a scheme opens for all of it."""
        by_scheme: dict[str, tuple[Transport, list[str]]] = {}
        for transport in self._transports:
            own = [e for e in descriptor.endpoints if e.partition(":")[0] == transport.scheme]
            usable = [endpoint for endpoint in own if transport.usable(descriptor, endpoint)]
            if usable:
                by_scheme.setdefault(transport.scheme, (transport, usable))
        return list(by_scheme.values())


def _open_for(transport: Transport, descriptor: SegmentDescriptor, endpoint: str, timeout_s: float) -> RemoteSegment:
    return transport.open(descriptor, endpoint, timeout_s=timeout_s)
