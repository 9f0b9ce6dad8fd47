"""The parts of a machine that matter for moving bytes (NUMA nodes, NICs, GPUs, NVMe drives) and the choice of NICs.

All types are plain data, which may be sent to a peer: a peer that knows our topology can choose the NIC at our end too.
None means that the machine does not tell.

apply_override() lets a person overrule the discovered matrix with a JSON file that names the NICs of a memory location:

    {"net": {"cuda:0": {"preferred": ["eth1"], "secondary": ["eth0"]}}, "rdma": {...}}

A location in the file uses the NICs given there and no others, even NICs that are down; other locations stay as
discovered. Unknown keys, locations and NICs raise ConfigError.
"""

from __future__ import annotations

from collections import Counter
from typing import Literal, TypeAlias

import msgspec

from moonpool.base.errors import ConfigError


class _Override(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    net: Matrix = {}
    rdma: Matrix = {}


def apply_override(topology: Topology, text: str | bytes) -> Topology:
    """Return the topology with the choices of `text` in place of the discovered ones."""
    try:
        override = msgspec.json.decode(text, type=_Override)
    except msgspec.DecodeError as error:  # what does not fit the types is one of these too
        raise ConfigError(f"the topology override is wrong: {error}") from error
    return msgspec.structs.replace(
        topology,
        net=_overridden(topology, "net", topology.net, override.net),
        rdma=_overridden(topology, "rdma", topology.rdma, override.rdma),
    )


def _overridden(topology: Topology, kind: NicKind, discovered: Matrix, wanted: Matrix) -> Matrix:
    nics = {nic.name for nic in topology.hardware.nics if nic.kind == kind}
    for location, choice in wanted.items():
        if location not in discovered:
            raise _wrong(f"there is no memory location {location!r}; known are: {', '.join(discovered)}")
        _check_choice(f"{kind}.{location}", choice, nics)
    return discovered | wanted


def _check_choice(where: str, choice: NicChoice, known: set[str]) -> None:
    if not choice.preferred:
        raise _wrong(f"{where} prefers no NIC; name at least one")
    for name, times in Counter((*choice.preferred, *choice.secondary)).items():
        if name not in known:
            raise _wrong(f"{where} names the NIC {name!r}; known are: {', '.join(sorted(known)) or 'none'}")
        if times > 1:
            raise _wrong(f"{where} names the NIC {name!r} more than once")


def _wrong(message: str) -> ConfigError:
    return ConfigError(f"the topology override is wrong: {message}")


NicKind: TypeAlias = Literal["net", "rdma"]


class DevicePlace(msgspec.Struct, frozen=True, kw_only=True):
    """Where a device sits. `pci` leads from the host bridge down to the device; it is empty off the PCI bus."""

    pci: tuple[str, ...] = ()
    numa_node: int | None = None

    @property
    def pci_address(self) -> str | None:
        return self.pci[-1] if self.pci else None


class NumaNode(msgspec.Struct, frozen=True, kw_only=True):
    """`distances` is the firmware's table: node -> cost of reaching its memory from here (10 is local)."""

    node: int
    cpus: tuple[int, ...]
    memory_nbytes: int | None = None
    distances: dict[int, int] = {}


class Nic(msgspec.Struct, frozen=True, kw_only=True):
    """A network interface (kind "net", used by tcp) or an RDMA device (kind "rdma", used by nixl).

    One card is often both, under two names and at one place. `addresses` are the interface's own IP addresses.
    """

    name: str
    kind: NicKind
    place: DevicePlace
    up: bool
    virtual: bool = False
    loopback: bool = False
    speed_gbit_s: float | None = None
    addresses: tuple[str, ...] = ()
    link_layer: str | None = None


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """`index` is NVML's, or the order on the PCI bus: the machine's numbering, whatever CUDA_VISIBLE_DEVICES says."""

    index: int
    place: DevicePlace
    uuid: str | None = None
    name: str | None = None


class NvmeDrive(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    place: DevicePlace
    model: str | None = None
    state: str | None = None
    nbytes: int | None = None


class Hardware(msgspec.Struct, frozen=True, kw_only=True):
    nodes: tuple[NumaNode, ...]
    nics: tuple[Nic, ...] = ()
    gpus: tuple[Gpu, ...] = ()
    drives: tuple[NvmeDrive, ...] = ()


class NicChoice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """NICs for one memory location: the preferred ones share the work, the secondary ones stand in, best first."""

    preferred: tuple[str, ...]
    secondary: tuple[str, ...] = ()


# Memory location ("cpu:0", "cuda:3") -> NICs.
Matrix: TypeAlias = dict[str, NicChoice]


class Topology(msgspec.Struct, frozen=True, kw_only=True):
    """The hardware and one matrix per kind of NIC. A kind without any NIC has empty choices."""

    hardware: Hardware
    net: Matrix
    rdma: Matrix
