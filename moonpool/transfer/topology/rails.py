"""Which addresses of this machine to listen on, and which of them serve which memory: the matrix, applied to tcp. Pure.

A rail is a NIC that is preferred for some memory of the machine, with one address of it. Management ports and virtual
interfaces (a container bridge has the same address on every machine) are no rails unless there is nothing better.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from typing import NamedTuple

from moonpool.base.errors import ConfigError
from moonpool.transfer.topology import Nic, NicChoice, Topology


class Rail(NamedTuple):
    nic: str
    address: str


def find_rails(topology: Topology) -> tuple[Rail, ...]:
    """One for each NIC that some memory prefers, in the matrix's order; ConfigError when none has an address."""
    nics = {nic.name: nic for nic in topology.hardware.nics if nic.kind == "net"}
    wanted = dict.fromkeys(name for choice in topology.net.values() for name in choice.preferred)
    rails = tuple(Rail(name, address) for name in wanted if (address := _address(nics[name])) is not None)
    if not rails:
        raise ConfigError("no network interface with an address was found; name the address to listen on")
    return rails


def split_rails(topology: Topology, rails: Sequence[Rail], location: str) -> tuple[list[Rail], list[Rail]]:
    """(preferred, secondary) for memory at `location`; a rail that the matrix does not name for it is neither. Where
    it says nothing (a drive; memory of no known node, if the nodes differ) all are preferred. An address of no known
    NIC is secondary.
    """
    choice = topology.net.get(location) or _only_choice(topology, location)
    near = [rail for rail in rails if choice is not None and rail.nic in choice.preferred]
    if choice is None or not near:
        return list(rails), []
    return near, [rail for rail in rails if rail.nic in choice.secondary or not rail.nic]


def _only_choice(topology: Topology, location: str) -> NicChoice | None:
    """For main memory of whatever node, when all nodes choose the same."""
    choices = {choice for place, choice in topology.net.items() if place.startswith("cpu:")}
    return choices.pop() if location == "cpu" and len(choices) == 1 else None


def _address(nic: Nic) -> str | None:
    """Its first IPv4 address, or else its first IPv6 one."""
    return min(nic.addresses, key=lambda text: ipaddress.ip_address(text).version, default=None)
