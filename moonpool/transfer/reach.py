"""What every role that serves memory says about it at its start: how it is reached, and whether anybody may."""

from __future__ import annotations

import ipaddress
import logging
from collections.abc import Iterable

from moonpool.base.address import parse_address
from moonpool.base.descriptor import SegmentDescriptor
from moonpool.base.errors import ConfigError
from moonpool.base.units import format_nbytes
from moonpool.transfer.config import AUTO, WireConfig
from moonpool.transfer.topology import Sysfs
from moonpool.transfer.topology.discover import numa_nodes


def check_numa_node(numa_node: int | None) -> None:
    """ConfigError when this machine has no such node: the kernel would put the memory anywhere without a word."""
    known = [node.node for node in numa_nodes(Sysfs())]
    if numa_node is not None and numa_node not in known:
        listed = ", ".join(map(str, known))
        raise ConfigError(f"this machine has no NUMA node {numa_node}, only {listed}", param="numa_node")


def in_words(descriptor: SegmentDescriptor) -> str:
    """`n1.dram, 64 GB at cpu:0, reached by shm, tcp 10.0.0.1:4711, tcp 10.1.0.1:4712 (secondary)`."""
    ways = [_way(endpoint) for endpoint in descriptor.endpoints]
    ways += [f"{_way(endpoint)} (secondary)" for endpoint in descriptor.secondary]
    size = format_nbytes(descriptor.nbytes)
    return f"{descriptor.name}, {size} at {descriptor.location}, reached by {', '.join(ways) or 'nothing'}"


def warn_if_open(log: logging.Logger, config: WireConfig, addresses: Iterable[str]) -> None:
    """One warning when other machines reach the memory and none of them has to show anything. `addresses` are the
    engine's.
    """
    named = {config.tcp_host, *config.tcp_hosts} - {None, AUTO}
    hosts = named | {parse_address(f"tcp:{address}").host for address in addresses}
    if any(not _is_loopback(host) for host in hosts if host) and not config.is_guarded:
        log.warning(
            "whoever reaches %s can read and write this memory; set --secret-file (or the --tls-* files) here and on "
            "all peers, or keep the port in a private network",
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
