"""Writes the parts of /sys that Moonpool reads, links included, for machines we do not have."""

from __future__ import annotations

import os
from pathlib import Path

UP, DOWN = 0x1003, 0x1002


class SysfsTree:
    def __init__(self, root: Path) -> None:
        self.root = root

    def write(self, path: str, **files: object) -> str:
        folder = self.root / path
        folder.mkdir(parents=True, exist_ok=True)
        for name, value in files.items():
            (folder / name).write_text(f"{value}\n")
        return path

    def link(self, path: str, target: str) -> None:
        """Relative, as the kernel's are."""
        place = self.root / path
        place.parent.mkdir(parents=True, exist_ok=True)
        if not place.is_symlink():
            place.symlink_to(os.path.relpath(self.root / target, place.parent.resolve()))

    def numa_node(self, node: int, cpulist: str, distance: str, memory_kb: int = 1 << 20) -> None:
        meminfo = f"Node {node} MemTotal:       {memory_kb} kB"
        self.write(f"devices/system/node/node{node}", cpulist=cpulist, distance=distance, meminfo=meminfo)

    def online_nodes(self, text: str) -> None:
        self.write("devices/system/node", online=text)

    def pci(self, *chain: str, numa_node: object, pci_class: str = "0x060400", vendor: str = "0x8086") -> str:
        """A device below the bridges of `chain`, whose first part is the host bridge."""
        path = "devices/" + "/".join(chain)
        self.write(path, numa_node=numa_node, vendor=vendor, **{"class": pci_class})
        self.link(f"bus/pci/devices/{chain[-1]}", path)
        return path

    def gpu(self, *chain: str, numa_node: object = -1, pci_class: str = "0x030200", vendor: str = "0x10de") -> None:
        self.pci(*chain, numa_node=numa_node, pci_class=pci_class, vendor=vendor)

    def net(self, name: str, device: str, *, flags: int = UP, operstate: str = "up", speed: object = 10_000) -> None:
        folder = self.write(f"{device}/net/{name}", flags=hex(flags), operstate=operstate, speed=speed)
        self.link(f"{folder}/device", device)
        self.link(f"class/net/{name}", folder)

    def virtual_net(self, name: str, *, lower: str | None = None, flags: int = UP, operstate: str = "up") -> None:
        folder = self.write(f"devices/virtual/net/{name}", flags=hex(flags), operstate=operstate)
        if lower is not None:
            self.link(f"{folder}/lower_{lower}", f"class/net/{lower}")
        self.link(f"class/net/{name}", folder)

    def loopback(self) -> None:
        self.virtual_net("lo", flags=0x9, operstate="unknown")

    def rdma(
        self, name: str, device: str, *, state: str = "4: ACTIVE", rate: str = "200 Gb/sec (4X HDR)", port: int = 1
    ) -> None:
        folder = f"{device}/infiniband/{name}"
        self.write(f"{folder}/ports/{port}", state=state, rate=rate, link_layer="InfiniBand")
        if port == 1:
            self.link(f"class/infiniband/{name}", folder)

    def nvme(self, name: str, device: str, *, sectors: int = 1000) -> None:
        folder = self.write(f"{device}/nvme/{name}", model="Fast Drive 9   ", state="live")
        self.write(f"{folder}/{name}n1", size=sectors)
        self.link(f"class/nvme/{name}", folder)


def _two_sockets(tree: SysfsTree) -> None:
    tree.online_nodes("0-1")
    tree.numa_node(0, "0-31,64-95", "10 21")
    tree.numa_node(1, "32-63,96-127", "21 10")
    tree.loopback()


def _switch(tree: SysfsTree, number: int) -> tuple[tuple[str, ...], int]:
    """The chain down to a PCIe switch's upstream port, behind a host bridge of its own; four switches per server."""
    numa_node, bus = number // 2, 0x10 + 0x20 * number
    host, root_port, upstream = f"pci0000:{bus:02x}", f"0000:{bus:02x}:01.0", f"0000:{bus + 1:02x}:00.0"
    tree.pci(host, root_port, numa_node=numa_node)
    tree.pci(host, root_port, upstream, numa_node=numa_node)
    return (host, root_port, upstream), numa_node


def _slot(tree: SysfsTree, above: tuple[str, ...], numa_node: int, slot: int) -> tuple[str, ...]:
    """The chain to an endpoint behind downstream port `slot` of the switch."""
    bus = int(above[-1].split(":")[1], 16)
    downstream, endpoint = f"0000:{bus + 1:02x}:{slot:02x}.0", f"0000:{bus + 2 + slot:02x}:00.0"
    tree.pci(*above, downstream, numa_node=numa_node)
    return (*above, downstream, endpoint)


def eight_gpus_four_nics(root: Path) -> SysfsTree:
    """Two sockets, four PCIe switches, each with two GPUs, one 200 Gbit/s RDMA NIC and one NVMe drive; a management
    port of 1 Gbit/s on socket 0.
    """
    tree = SysfsTree(root)
    _two_sockets(tree)
    for number in range(4):
        switch, numa_node = _switch(tree, number)
        tree.gpu(*_slot(tree, switch, numa_node, 0), numa_node=numa_node)
        tree.gpu(*_slot(tree, switch, numa_node, 1), numa_node=numa_node)
        nic = tree.pci(*_slot(tree, switch, numa_node, 2), numa_node=numa_node, pci_class="0x020700", vendor="0x15b3")
        tree.rdma(f"mlx5_{number}", nic)
        tree.net(f"ens{number}", nic, speed=200_000)
        drive = tree.pci(*_slot(tree, switch, numa_node, 3), numa_node=numa_node, pci_class="0x010802")
        tree.nvme(f"nvme{number}", drive)
    management = tree.pci("pci0000:00", "0000:00:1f.6", numa_node=0, pci_class="0x020000")
    tree.net("eno1", management, speed=1000)
    return tree


def eight_gpus_eight_nics(root: Path) -> SysfsTree:
    """Two sockets; each GPU shares a second-stage switch with one 400 Gbit/s NIC, two of those sit below one first
    stage switch, as in machines built for NIC-per-GPU traffic.
    """
    tree = SysfsTree(root)
    _two_sockets(tree)
    for number in range(8):
        first, numa_node = _switch(tree, number // 2)
        bus = int(first[-1].split(":")[1], 16) + 0x08 * (number % 2)
        downstream, second = f"{first[-1][:-4]}{number % 2:02x}.1", f"0000:{bus + 1:02x}:00.0"
        tree.pci(*first, downstream, numa_node=numa_node)
        tree.pci(*first, downstream, second, numa_node=numa_node)
        switch = (*first, downstream, second)
        tree.gpu(*_slot(tree, switch, numa_node, 0), numa_node=numa_node)
        nic = tree.pci(*_slot(tree, switch, numa_node, 1), numa_node=numa_node, pci_class="0x020700", vendor="0x15b3")
        tree.rdma(f"mlx5_{number}", nic, rate="400 Gb/sec (4X NDR)")
        tree.net(f"ens{number}", nic, speed=400_000)
    return tree
