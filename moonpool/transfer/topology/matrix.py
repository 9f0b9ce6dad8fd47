"""Which NICs serve which memory, and which addresses of this machine to listen on. Pure.

NICs are ordered by rank, then by distance. Fast hardware NICs come first, then NICs far slower than the fastest one
(management ports), then virtual ones (veth, bridges without hardware). Loopback, interfaces that are down and
interfaces without an address are left out unless there is nothing else. Of the best rank, the closest NICs are
preferred; all others are secondary, best first.

A rail is a NIC that is preferred for some memory of the machine, with one of its addresses. Management ports and
virtual interfaces (a container bridge has the same address on every machine) are rails only if there is nothing better.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import NamedTuple

from moonpool.base.errors import ConfigError
from moonpool.transfer.topology.devices import (
    DevicePlace,
    Hardware,
    Matrix,
    Nic,
    NicChoice,
    NicKind,
    NumaNode,
    Topology,
)
from moonpool.transfer.topology.discover import natural_key


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


# A NIC slower than this part of the fastest one is worth less than a fast one at the other end of the machine.
SLOW_RATIO = 1 / 8
_UNKNOWN_NUMA_DISTANCE = 255  # what firmware's tables use for "cannot be reached"


class Level(IntEnum):
    """How far apart two devices are; what lies between them."""

    SWITCH = 0  # PCIe switches only
    ROOT = 1  # one host bridge
    NODE = 2  # one NUMA node
    FAR = 3  # the link between NUMA nodes


class Distance(NamedTuple):
    """Compares by level, then within it: by PCIe hops behind a switch, by the firmware's table between nodes."""

    level: Level
    steps: int = 0


class _Rank(IntEnum):
    FAST = 0
    SLOW = 1
    VIRTUAL = 2
    LOOPBACK = 3
    UNUSABLE = 4


def build_topology(hardware: Hardware) -> Topology:
    return Topology(hardware=hardware, net=rank_nics(hardware, "net"), rdma=rank_nics(hardware, "rdma"))


def rank_nics(hardware: Hardware, kind: NicKind) -> Matrix:
    """A choice for every memory location of the machine."""
    ranked = _candidates([nic for nic in hardware.nics if nic.kind == kind])
    return {location: _choose(place, ranked, hardware.nodes) for location, place in locations(hardware).items()}


def locations(hardware: Hardware) -> dict[str, DevicePlace]:
    """Every memory location and where it is: "cpu:N" is the memory of NUMA node N, "cuda:N" that of GPU N."""
    cpus = {f"cpu:{node.node}": DevicePlace(numa_node=node.node) for node in hardware.nodes}
    return cpus | {f"cuda:{gpu.index}": gpu.place for gpu in hardware.gpus}


def distance(one: DevicePlace, other: DevicePlace, nodes: Sequence[NumaNode]) -> Distance:
    """How far apart two places are. Unknown NUMA nodes count as far: nothing speaks for them."""
    shared = _shared_steps(one.pci, other.pci)
    if shared > 1:  # the host bridge and at least one bridge below it
        return Distance(Level.SWITCH, len(one.pci) + len(other.pci) - 2 * shared)
    if shared == 1:
        return Distance(Level.ROOT)
    if one.numa_node is not None and one.numa_node == other.numa_node:
        return Distance(Level.NODE)
    return Distance(Level.FAR, _numa_distance(one.numa_node, other.numa_node, nodes))


def _shared_steps(one: Sequence[str], other: Sequence[str]) -> int:
    shared = 0
    for mine, its in zip(one, other, strict=False):
        if mine != its:
            break
        shared += 1
    return shared


def _numa_distance(one: int | None, other: int | None, nodes: Sequence[NumaNode]) -> int:
    for node in nodes:
        if node.node == one and other is not None:
            return node.distances.get(other, _UNKNOWN_NUMA_DISTANCE)
    return _UNKNOWN_NUMA_DISTANCE


def _candidates(nics: Sequence[Nic]) -> list[tuple[_Rank, Nic]]:
    """The usable NICs with their ranks, or all of them when none is usable."""
    fastest = max((nic.speed_gbit_s or 0.0 for nic in nics if _is_usable(nic) and not nic.virtual), default=0.0)
    ranked = [(_rank(nic, fastest), nic) for nic in nics]
    usable = [(rank, nic) for rank, nic in ranked if rank < _Rank.LOOPBACK]
    return usable or ranked


def _rank(nic: Nic, fastest_gbit_s: float) -> _Rank:
    if not _is_usable(nic):
        return _Rank.LOOPBACK if nic.loopback and nic.up else _Rank.UNUSABLE
    if nic.virtual:
        return _Rank.VIRTUAL
    if nic.speed_gbit_s is not None and nic.speed_gbit_s < fastest_gbit_s * SLOW_RATIO:
        return _Rank.SLOW
    return _Rank.FAST


def _is_usable(nic: Nic) -> bool:
    """tcp needs an address to bind to; RDMA needs an active port only."""
    return nic.up and not nic.loopback and (nic.kind == "rdma" or bool(nic.addresses))


def _choose(place: DevicePlace, ranked: Iterable[tuple[_Rank, Nic]], nodes: Sequence[NumaNode]) -> NicChoice:
    keyed = [((rank, distance(place, nic.place, nodes)), nic) for rank, nic in ranked]
    keyed.sort(key=lambda entry: (entry[0], -(entry[1].speed_gbit_s or 0.0), natural_key(entry[1].name)))
    best = [nic.name for key, nic in keyed if key == keyed[0][0]]
    return NicChoice(preferred=tuple(best), secondary=tuple(nic.name for _, nic in keyed[len(best) :]))
