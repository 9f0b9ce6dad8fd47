"""Finds the parts of this machine: NUMA nodes, NICs, NVMe drives from /sys, GPUs from /sys and NVIDIA's library.

Sysfs is the only reader of /sys; its root is a parameter, so that tests can pass a tree. Nothing is written. What
cannot be read (the speed of an interface that is down, a file that a kernel does not have) is left out or None, never
an error. nvml_gpus() needs `pynvml` and returns nothing without it.
"""

from __future__ import annotations

import importlib
import ipaddress
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from moonpool.transfer.topology.devices import DevicePlace, Gpu, Hardware, Nic, NumaNode, NvmeDrive


@dataclass(frozen=True, slots=True)
class NvmlGpu:
    index: int
    pci_address: str  # as sysfs writes it
    uuid: str
    name: str


def nvml_gpus() -> list[NvmlGpu] | None:
    """None without pynvml or without a driver it can talk to."""
    try:
        nvml: Any = importlib.import_module("pynvml")  # by name: there are no types to check against
    except ImportError:
        return None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return None
    try:
        return [_gpu(nvml, index) for index in range(nvml.nvmlDeviceGetCount())]
    except nvml.NVMLError:
        return None
    finally:
        nvml.nvmlShutdown()


def sysfs_pci_address(bus_id: str) -> str:
    """NVML's "00000000:1A:00.0" as sysfs writes it: "0000:1a:00.0"."""
    domain, _, rest = bus_id.lower().partition(":")
    return f"{int(domain, 16):04x}:{rest}"


def _gpu(nvml: Any, index: int) -> NvmlGpu:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    address = sysfs_pci_address(_text(nvml.nvmlDeviceGetPciInfo(handle).busId))
    return NvmlGpu(index, address, _text(nvml.nvmlDeviceGetUUID(handle)), _text(nvml.nvmlDeviceGetName(handle)))


def _text(value: str | bytes) -> str:
    """Older versions answer in bytes."""
    return value.decode() if isinstance(value, bytes) else value


_PCI_STEP = re.compile(r"pci[0-9a-f]{4,}:[0-9a-f]{2}|[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")


class Sysfs:
    def __init__(self, root: Path = Path("/sys")) -> None:
        self._root = root.resolve()

    def text(self, path: str) -> str | None:
        try:
            return (self._root / path).read_text(errors="replace").strip()
        except OSError:
            return None

    def integer(self, path: str) -> int | None:
        """Decimal, or hexadecimal with 0x in front."""
        try:
            return int(self.text(path) or "", 0)
        except ValueError:
            return None

    def names(self, path: str) -> list[str]:
        """What a folder holds, eth2 before eth10; empty when there is no such folder."""
        try:
            return sorted(os.listdir(self._root / path), key=natural_key)
        except OSError:
            return []

    def real(self, path: str) -> str:
        """The path with its links followed, relative to the root."""
        return os.path.relpath((self._root / path).resolve(), self._root)

    def place(self, path: str) -> DevicePlace:
        """Where the device sits that `path` leads to. What hangs on a PCI device (virtio, USB) sits there too."""
        steps = self.real(path).split("/")
        positions = [number for number, step in enumerate(steps) if _PCI_STEP.fullmatch(step)]
        if not positions:
            return DevicePlace(numa_node=self._numa_node(path))
        device = "/".join(steps[: positions[-1] + 1])
        return DevicePlace(pci=tuple(steps[number] for number in positions), numa_node=self._numa_node(device))

    def _numa_node(self, device: str) -> int | None:
        node = self.integer(f"{device}/numa_node")
        return node if node is not None and node >= 0 else None  # the kernel says -1 when it does not know


def natural_key(name: str) -> list[tuple[int, str]]:
    """Sorts the numbers inside names as numbers."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"([0-9]+)", name)]


def parse_cpulist(text: str) -> tuple[int, ...]:
    """The kernel's "0-3,8" as numbers. ValueError when it is something else."""
    found: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found.extend(range(int(first), int(last or first) + 1))
    return tuple(found)


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
