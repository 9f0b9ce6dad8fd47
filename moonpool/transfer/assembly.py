"""Puts an engine's transports together, fastest first, around its desk."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple, TypeVar

from moonpool.base.errors import ConfigError
from moonpool.transfer.config import AUTO, TransferConfig
from moonpool.transfer.control import ControlClient, ControlHandler
from moonpool.transfer.memory.segment import Segment
from moonpool.transfer.topology import Topology
from moonpool.transfer.topology.rails import Rail, find_rails, split_rails
from moonpool.transfer.transports.base import Transport
from moonpool.transfer.transports.cuda.transport import CudaTransport
from moonpool.transfer.transports.file.transport import FileTransport
from moonpool.transfer.transports.memory import MemoryFabric, MemoryTransport
from moonpool.transfer.transports.nixl.transport import NixlTransport
from moonpool.transfer.transports.shm.control_client import UnixControlClient
from moonpool.transfer.transports.shm.transport import ShmTransport
from moonpool.transfer.transports.tcp.guard import Guard
from moonpool.transfer.transports.tcp.transport import TcpTransport

T = TypeVar("T", bound=Transport)


class Endpoints(NamedTuple):
    """Where a segment is reached; by the secondary ones only while none of the others works."""

    preferred: tuple[str, ...]
    secondary: tuple[str, ...]


class Assembly:
    """The transports of one engine, fastest first, and which of them serve a segment. Closes what it made."""

    def __init__(
        self, config: TransferConfig, desk: ControlHandler, topology: Topology | None, fabric: MemoryFabric | None
    ) -> None:
        self._config = config
        self._desk = desk
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
        """Return how many connections others have to the tcp ports, and how many have ended, by reason."""
        found = [tcp.connections() for tcp in self._tcp]
        return sum(count for count, _ in found), sum((ended for _, ended in found), Counter())

    def line_to(self, endpoint: str) -> ControlClient:
        """To the desk at `unix:/path` or `tcp:host:port`."""
        scheme, _, rest = endpoint.partition(":")
        return UnixControlClient(rest) if scheme == "unix" else self._dialler.line(endpoint)

    def serve(self, segment: Segment) -> Endpoints:
        """By every transport that can, or none; where the topology is known, by the rails of its memory first."""
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
        config, desk = self._config, self._desk
        guard = config.guard()
        self._tcp = [self._add(self._tcp_at(rail, guard)) for rail in self._rails]
        self._dialler = self._tcp[0] if self._tcp else self._add(self._tcp_at(None, guard))
        shm = [self._add(ShmTransport(config.run_dir, desk=desk))] if config.shm else []
        tcp_desk = self._dialler.endpoint
        ordered: list[Transport] = [self._add(FileTransport())]
        if fabric is not None:
            ordered.append(self._add(MemoryTransport(fabric, desk=desk)))
        ordered.append(self._add(CudaTransport(desk, shm[0].desk_endpoint if shm else tcp_desk, self.line_to)))
        ordered += shm
        if config.nixl:
            ordered.append(self._add(NixlTransport(desk, tcp_desk, self.line_to)))
        return [*ordered, *(self._tcp or [self._dialler])]

    def _add(self, transport: T) -> T:
        self._made.append(transport)
        return transport

    def _tcp_at(self, rail: Rail | None, guard: Guard | None) -> TcpTransport:
        """Listening there; None: for dialling alone. What others are told instead of tcp_host is of the first one."""
        config = self._config
        return TcpTransport(
            rail.address if rail is not None else None,
            config.tcp_port,
            desk=self._desk,
            lanes=config.lanes,
            advertise_host=config.tcp_advertise_host if rail in self._rails[:1] else None,
            max_connections=config.tcp_max_connections,
            idle_timeout_s=config.tcp_idle_s,
            stall_timeout_s=config.timeout_s,
            guard=guard,
        )


def _rails(config: TransferConfig, topology: Topology | None) -> tuple[Rail, ...]:
    """Where to listen. Addresses that were named are rails of the NICs that have them, if that is known."""
    if config.tcp_host is None:
        return ()
    hosts = (config.tcp_host, *config.tcp_hosts)
    if config.tcp_host == AUTO:
        if topology is None or config.tcp_hosts:
            raise ConfigError("tcp_host=auto finds all addresses by itself; name none beside it")
        return find_rails(topology)
    nics = topology.hardware.nics if topology is not None else ()
    return tuple(Rail(next((nic.name for nic in nics if host in nic.addresses), ""), host) for host in hosts)
