"""Finds the machine's parts through a Sysfs. Reads only; what cannot be read is left out or None, never an error."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping, Sequence
from typing import TypeVar

import msgspec

from moonpool.transfer.topology.devices import DevicePlace, Gpu, Hardware, Nic, NumaNode, NvmeDrive
from moonpool.transfer.topology.nvml import NvmlGpu
from moonpool.transfer.topology.sysfs import Sysfs, parse_cpulist

_NODES = "devices/system/node"
_NET, _RDMA, _NVME, _PCI = "class/net", "class/infiniband", "class/nvme", "bus/pci/devices"
_IFF_UP, _IFF_LOOPBACK = 0x1, 0x8
_VENDOR_NVIDIA = 0x10DE
_DISPLAY_CLASSES = (0x0300, 0x0302)  # VGA controller, 3D controller
_SECTOR_NBYTES = 512  # sysfs counts in these whatever the drive does
_RATE = re.compile(r"([0-9.]+)\s*Gb/sec")
_NODE_MEMORY = re.compile(r"MemTotal:\s+([0-9]+) kB")

_Device = TypeVar("_Device", Nic, Gpu, NvmeDrive)


def discover(
    sysfs: Sysfs, addresses: Mapping[str, tuple[str, ...]], nvml_gpus: Sequence[NvmlGpu] | None = None
) -> Hardware:
    """`addresses` are those of the interfaces (addresses.py); `nvml_gpus` what NVML says, None if it says nothing."""
    nodes = numa_nodes(sysfs)
    only = nodes[0].node if len(nodes) == 1 else None  # with one node, firmware often does not say which
    return Hardware(
        nodes=nodes,
        nics=tuple(_at_home(nic, only) for nic in (*net_interfaces(sysfs, addresses), *rdma_devices(sysfs))),
        gpus=tuple(_at_home(gpu, only) for gpu in gpus(sysfs, nvml_gpus)),
        drives=tuple(_at_home(drive, only) for drive in nvme_drives(sysfs)),
    )


def numa_nodes(sysfs: Sysfs) -> tuple[NumaNode, ...]:
    """Nodes that have memory or CPUs; a machine that does not say is one node."""
    found = (_numa_node(sysfs, name) for name in sysfs.names(_NODES) if re.fullmatch(r"node[0-9]+", name))
    return tuple(node for node in found if node.cpus or node.memory_nbytes) or (NumaNode(node=0, cpus=()),)


def net_interfaces(sysfs: Sysfs, addresses: Mapping[str, tuple[str, ...]]) -> list[Nic]:
    """Those of sysfs; and those that have addresses and are not in it, because it is another namespace's: the
    machine's own /sys inside a container.
    """
    names = _folders(sysfs, _NET)
    unseen = [_unseen_interface(name, addresses[name]) for name in addresses if name not in names]
    return [*(_net_interface(sysfs, name, addresses.get(name, ())) for name in names), *unseen]


def rdma_devices(sysfs: Sysfs) -> list[Nic]:
    return [_rdma_device(sysfs, name) for name in _folders(sysfs, _RDMA)]


def nvme_drives(sysfs: Sysfs) -> list[NvmeDrive]:
    return [
        NvmeDrive(
            name=name,
            place=sysfs.place(f"{_NVME}/{name}"),
            model=sysfs.text(f"{_NVME}/{name}/model"),
            state=sysfs.text(f"{_NVME}/{name}/state"),
            nbytes=_drive_nbytes(sysfs, name),
        )
        for name in _folders(sysfs, _NVME)
    ]


def gpus(sysfs: Sysfs, nvml_gpus: Sequence[NvmlGpu] | None = None) -> list[Gpu]:
    """NVML's list if there is one: it has the numbering, and in a container sysfs shows GPUs that are not ours."""
    places = {place.pci_address: place for place in _gpu_places(sysfs)}
    if nvml_gpus is None:
        return [Gpu(index=index, place=place) for index, place in enumerate(places.values())]
    return [
        Gpu(index=gpu.index, place=places.get(gpu.pci_address, DevicePlace()), uuid=gpu.uuid, name=gpu.name)
        for gpu in nvml_gpus
    ]


def _at_home(device: _Device, only_node: int | None) -> _Device:
    if only_node is None or device.place.numa_node is not None:
        return device
    return msgspec.structs.replace(device, place=msgspec.structs.replace(device.place, numa_node=only_node))


def _numa_node(sysfs: Sysfs, name: str) -> NumaNode:
    folder = f"{_NODES}/{name}"
    memory = _NODE_MEMORY.search(sysfs.text(f"{folder}/meminfo") or "")
    return NumaNode(
        node=int(name.removeprefix("node")),
        cpus=_cpus(sysfs.text(f"{folder}/cpulist")),
        memory_nbytes=int(memory[1]) * 1024 if memory else None,
        distances=_distances(sysfs, sysfs.text(f"{folder}/distance")),
    )


def _cpus(text: str | None) -> tuple[int, ...]:
    try:
        return parse_cpulist(text or "")
    except ValueError:
        return ()


def _distances(sysfs: Sysfs, text: str | None) -> dict[int, int]:
    """The table has one number per node that is online, in their order."""
    try:
        online = parse_cpulist(sysfs.text(f"{_NODES}/online") or "")
        return dict(zip(online, map(int, (text or "").split()), strict=True))
    except ValueError:
        return {}


def _net_interface(sysfs: Sysfs, name: str, addresses: tuple[str, ...]) -> Nic:
    folder = f"{_NET}/{name}"
    flags = sysfs.integer(f"{folder}/flags") or 0
    speed_mbit_s = sysfs.integer(f"{folder}/speed") or 0
    stands_on = _physical_below(sysfs, name)
    return Nic(
        name=name,
        kind="net",
        place=sysfs.place(f"{_NET}/{stands_on or name}"),
        # Tunnels and the loopback interface have no carrier to report and say "unknown".
        up=bool(flags & _IFF_UP) and sysfs.text(f"{folder}/operstate") in ("up", "unknown"),
        virtual=stands_on is None,
        loopback=bool(flags & _IFF_LOOPBACK),
        speed_gbit_s=speed_mbit_s / 1000 if speed_mbit_s > 0 else None,  # -1: the driver does not know
        addresses=addresses,
    )


def _unseen_interface(name: str, addresses: tuple[str, ...]) -> Nic:
    """Most likely a veth. It has an address, so it is taken to be up."""
    loopback = all(ipaddress.ip_address(address).is_loopback for address in addresses)
    return Nic(
        name=name, kind="net", place=DevicePlace(), up=True, virtual=True, loopback=loopback, addresses=addresses
    )


def _physical_below(sysfs: Sysfs, name: str, depth: int = 4) -> str | None:
    """The hardware an interface stands on: itself, or the first under a bond, VLAN or bridge; None without any."""
    device = sysfs.real(f"{_NET}/{name}")
    if not device.startswith("devices/virtual/"):
        return name if device.startswith("devices/") else None
    below = [entry.removeprefix("lower_") for entry in sysfs.names(f"{_NET}/{name}") if entry.startswith("lower_")]
    found = (_physical_below(sysfs, lower, depth - 1) for lower in below if depth)
    return next((physical for physical in found if physical is not None), None)


def _rdma_device(sysfs: Sysfs, name: str) -> Nic:
    """One NIC for all ports of a device; what it says is that of its best port."""
    ports = [f"{_RDMA}/{name}/ports/{port}" for port in sysfs.names(f"{_RDMA}/{name}/ports")]
    best = max(ports, key=lambda port: (_port_is_active(sysfs, port), _port_gbit_s(sysfs, port) or 0.0), default=None)
    place = sysfs.place(f"{_RDMA}/{name}")
    return Nic(
        name=name,
        kind="rdma",
        place=place,
        up=best is not None and _port_is_active(sysfs, best),
        virtual=not place.pci,
        speed_gbit_s=_port_gbit_s(sysfs, best) if best else None,
        link_layer=sysfs.text(f"{best}/link_layer") if best else None,
    )


def _port_is_active(sysfs: Sysfs, port: str) -> bool:
    return (sysfs.text(f"{port}/state") or "").endswith("ACTIVE")  # "4: ACTIVE"


def _port_gbit_s(sysfs: Sysfs, port: str) -> float | None:
    rate = _RATE.match(sysfs.text(f"{port}/rate") or "")  # "200 Gb/sec (4X HDR)"
    return float(rate[1]) if rate else None


def _drive_nbytes(sysfs: Sysfs, name: str) -> int | None:
    """All namespaces together. Under native multipathing a drive's folder holds nvme0c0n1 where /dev has nvme0n1."""
    spaces = [entry for entry in sysfs.names(f"{_NVME}/{name}") if re.fullmatch(rf"{name}(c[0-9]+)?n[0-9]+", entry)]
    sectors = [sysfs.integer(f"{_NVME}/{name}/{space}/size") for space in spaces]
    known = [count for count in sectors if count is not None]
    return sum(known) * _SECTOR_NBYTES if known else None


def _gpu_places(sysfs: Sysfs) -> list[DevicePlace]:
    """In the order of the PCI bus."""
    addresses = sorted(sysfs.names(_PCI))  # hexadecimal of fixed width
    return [sysfs.place(f"{_PCI}/{address}") for address in addresses if _is_gpu(sysfs, f"{_PCI}/{address}")]


def _is_gpu(sysfs: Sysfs, device: str) -> bool:
    pci_class = sysfs.integer(f"{device}/class")
    is_display = pci_class is not None and pci_class >> 8 in _DISPLAY_CLASSES
    return is_display and sysfs.integer(f"{device}/vendor") == _VENDOR_NVIDIA


def _folders(sysfs: Sysfs, folder: str) -> list[str]:
    """Devices of a class. /sys/class/net also holds plain files (bonding_masters)."""
    return [name for name in sysfs.names(folder) if sysfs.names(f"{folder}/{name}")]
