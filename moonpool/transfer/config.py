"""Settings of the transfer engine, each default in one place; and what roles report about the memory they serve."""

from __future__ import annotations

import ipaddress
import logging
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

from moonpool.base.address import parse_address
from moonpool.base.config import make_paths_absolute
from moonpool.base.descriptor import SegmentDescriptor
from moonpool.base.errors import ConfigError
from moonpool.base.security import TlsConfig
from moonpool.base.units import format_nbytes
from moonpool.transfer.paths.path_load import PlanConfig
from moonpool.transfer.paths.peer_queue import DEFAULT_SLICE_NBYTES
from moonpool.transfer.paths.priority import DEFAULT_PROMOTE_AFTER_S
from moonpool.transfer.topology import Sysfs
from moonpool.transfer.topology.discover import numa_nodes
from moonpool.transfer.transports.tcp.guard import Guard
from moonpool.transfer.transports.tcp.lanes import DEFAULT_LANES
from moonpool.transfer.transports.tcp.server import IDLE_TIMEOUT_S, MAX_CONNECTIONS

AUTO = "auto"


@dataclass(frozen=True, kw_only=True)
class WireConfig:
    """Settings of every role that serves or moves memory: how it is reached and how it reaches others.

    Without a secret, everybody who can connect to the tcp port can read and write the served segments. So the default
    is the loopback interface.
    """

    shm: bool = True  # share memory with processes on this machine
    tcp_host: str | None = "127.0.0.1"  # TCP address to listen on; auto: one address on every usable NIC
    tcp_hosts: tuple[str, ...] = ()  # more addresses of this machine, one per NIC; peers use all of them in parallel
    tcp_port: int = 0  # 0: any free port
    tcp_advertise_host: str | None = None  # address given to peers, if it differs from --tcp-host
    # most TCP connections from peers; at the limit, a new one replaces one that was idle for long
    tcp_max_connections: int = MAX_CONNECTIONS
    # close an incoming connection after this many idle seconds; above 120, when peers close theirs
    tcp_idle_s: float = IDLE_TIMEOUT_S
    lanes: int = DEFAULT_LANES  # connections per peer and path
    nixl: bool = False  # also transfer over NIXL (RDMA, NVLink) with peers that have it
    # JSON file that states which NICs serve which memory, instead of the discovered topology
    topology_file: str | None = None
    secret_file: str | None = None  # file (mode 600) with a secret; only peers with the same secret may connect
    tls_cert_file: str | None = None  # PEM certificate; with --tls-key-file and --tls-ca-file: mutual TLS
    tls_key_file: str | None = None  # PEM key of that certificate (mode 600)
    tls_ca_file: str | None = None  # PEM certificates of the authorities that peers' certificates must come from

    def __post_init__(self) -> None:
        make_paths_absolute(self)

    def wires(self) -> dict[str, Any]:
        """Return these settings as keywords, to pass on: TransferConfig(run_dir=..., **config.wires())."""
        return {field.name: getattr(self, field.name) for field in fields(WireConfig)}

    @property
    def is_guarded(self) -> bool:
        """Whether callers need a secret or a certificate; reads no file."""
        return any((self.secret_file, self.tls_cert_file, self.tls_key_file, self.tls_ca_file))

    def guard(self) -> Guard | None:
        """Return the check of callers of the tcp port; None: no check. ConfigError when a file cannot be used."""
        files = (self.tls_cert_file, self.tls_key_file, self.tls_ca_file)
        if any(files) and not all(files):
            raise ConfigError("TLS takes all three: tls_cert_file, tls_key_file and tls_ca_file")
        cert, key, ca = files
        return Guard.from_files(self.secret_file, TlsConfig(cert, key, ca) if cert and key and ca else None)


@dataclass(frozen=True, kw_only=True)
class TransferConfig(WireConfig):
    run_dir: str  # folder of the shared-memory socket
    timeout_s: float = 10.0  # of a transfer that states no timeout
    num_threads: int = 2  # threads that move slices, each to or from one peer at a time
    slice_nbytes: int = DEFAULT_SLICE_NBYTES  # largest part of a transfer that is sent at once
    max_queued_slices: int = 65_536  # per priority
    # a lower priority that waited this long gets a share, see priority.PriorityOrder
    promote_after_s: float = DEFAULT_PROMOTE_AFTER_S

    def __post_init__(self) -> None:
        super().__post_init__()
        if min(self.lanes, self.num_threads, self.slice_nbytes, self.max_queued_slices) < 1:
            raise ConfigError("lanes, num_threads, slice_nbytes and max_queued_slices must be at least 1")
        if self.tcp_hosts and self.tcp_host is None:
            raise ConfigError("tcp_hosts are further addresses; tcp_host is missing")

    @property
    def plan(self) -> PlanConfig:
        return PlanConfig(max_slice_nbytes=self.slice_nbytes, slices_per_path=self.lanes)


def check_numa_node(numa_node: int | None) -> None:
    """ConfigError when this machine has no such node: the kernel would silently put the memory anywhere."""
    known = [node.node for node in numa_nodes(Sysfs())]
    if numa_node is not None and numa_node not in known:
        listed = ", ".join(map(str, known))
        raise ConfigError(f"this machine has no NUMA node {numa_node}, only {listed}", param="numa_node")


def describe_segment(descriptor: SegmentDescriptor) -> str:
    """Return `n1.dram, 64 GB at cpu:0, reached by shm, tcp 10.0.0.1:4711, tcp 10.1.0.1:4712 (secondary)`."""
    ways = [_way(endpoint) for endpoint in descriptor.endpoints]
    ways += [f"{_way(endpoint)} (secondary)" for endpoint in descriptor.secondary]
    size = format_nbytes(descriptor.nbytes)
    return f"{descriptor.name}, {size} at {descriptor.location}, reached by {', '.join(ways) or 'nothing'}"


def warn_if_open(log: logging.Logger, config: WireConfig, addresses: Iterable[str]) -> None:
    """Log one warning when other machines can reach the memory without a secret or certificate. `addresses` are those
    of the engine.
    """
    named = {config.tcp_host, *config.tcp_hosts} - {None, AUTO}
    hosts = named | {parse_address(f"tcp:{address}").host for address in addresses}
    if any(not _is_loopback(host) for host in hosts if host) and not config.is_guarded:
        log.warning(
            "anyone who can connect to %s can read and write this memory; set --secret-file (or the --tls-* files) "
            "here and on all peers, or keep the port in a private network",
            ", ".join(f"tcp {address}" for address in addresses),
        )


def _way(endpoint: str) -> str:
    scheme, _, rest = endpoint.partition(":")
    return f"tcp {rest}" if scheme == "tcp" else scheme


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
