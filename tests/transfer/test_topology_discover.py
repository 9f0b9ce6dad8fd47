"""Reading machines: hand-written ones, broken ones and this one."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from sysfs_tree import DOWN, SysfsTree, eight_gpus_eight_nics, eight_gpus_four_nics

from moonpool.transfer.topology import Hardware, Sysfs, build_topology, discover, read_topology
from moonpool.transfer.topology.addresses import interface_addresses
from moonpool.transfer.topology.discover import NvmlGpu, natural_key, nvml_gpus, parse_cpulist, sysfs_pci_address


def read(tree: SysfsTree, **addresses: tuple[str, ...]) -> Hardware:
    return discover(Sysfs(tree.root), addresses)


def nic(hardware: Hardware, name: str):  # type: ignore[no-untyped-def]
    return next(nic for nic in hardware.nics if nic.name == name)


@pytest.fixture
def tree(tmp_path: Path) -> SysfsTree:
    return SysfsTree(tmp_path)


def test_an_8_gpu_4_nic_server(tmp_path: Path) -> None:
    found = read(eight_gpus_four_nics(tmp_path), ens0=("10.0.0.1",))
    assert [(node.node, len(node.cpus)) for node in found.nodes] == [(0, 64), (1, 64)]
    assert found.nodes[0].distances == {0: 10, 1: 21}
    assert found.nodes[0].memory_nbytes == 1 << 30
    assert [gpu.place.numa_node for gpu in found.gpus] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert found.gpus[0].place.pci == ("pci0000:10", "0000:10:01.0", "0000:11:00.0", "0000:12:00.0", "0000:13:00.0")
    assert found.gpus[0].place.pci_address == "0000:13:00.0"
    mlx = nic(found, "mlx5_3")
    assert (mlx.kind, mlx.speed_gbit_s, mlx.link_layer, mlx.up, mlx.virtual) == ("rdma", 200, "InfiniBand", True, False)
    ens = nic(found, "ens0")
    assert (ens.kind, ens.speed_gbit_s, ens.addresses, ens.place) == (
        "net",
        200,
        ("10.0.0.1",),
        nic(found, "mlx5_0").place,
    )
    assert nic(found, "lo").loopback
    drive = found.drives[2]
    assert (drive.name, drive.model, drive.state, drive.nbytes) == ("nvme2", "Fast Drive 9", "live", 512_000)
    assert drive.place.numa_node == 1


def test_an_8_gpu_8_nic_server(tmp_path: Path) -> None:
    found = read(eight_gpus_eight_nics(tmp_path))
    assert len(found.gpus) == 8
    assert len([nic for nic in found.nics if nic.kind == "rdma"]) == 8
    assert len({len(gpu.place.pci) for gpu in found.gpus}) == 1


def test_this_machine() -> None:
    topology = read_topology()
    assert topology.hardware.nodes
    assert nic(topology.hardware, "lo").addresses[:1] == ("127.0.0.1",)
    assert all(choice.preferred for choice in topology.net.values())


def test_interfaces_that_sysfs_does_not_show_are_used(tree: SysfsTree) -> None:
    """A container with the machine's /sys: its own interfaces are known by their addresses alone."""
    tree.net("eth0", tree.pci("pci0000:00", "0000:00:03.0", numa_node=0))
    tree.loopback()
    found = build_topology(read(tree, lo=("127.0.0.1",), veth7=("10.1.1.2",), other=("127.0.0.5", "::1")))
    veth, other = nic(found.hardware, "veth7"), nic(found.hardware, "other")
    assert (veth.up, veth.virtual, veth.loopback, veth.addresses) == (True, True, False, ("10.1.1.2",))
    assert other.loopback
    assert found.net["cpu:0"].preferred == ("veth7",)


def test_an_empty_tree_is_a_machine_of_one_node(tree: SysfsTree) -> None:
    found = build_topology(read(tree))
    assert [node.node for node in found.hardware.nodes] == [0]
    assert (found.net["cpu:0"].preferred, found.hardware.gpus) == ((), ())


def test_an_unknown_numa_node_is_the_only_one_or_none(tree: SysfsTree) -> None:
    tree.net("eth0", tree.pci("pci0000:00", "0000:00:03.0", numa_node=-1))
    tree.online_nodes("0")
    tree.numa_node(0, "0-1", "10")
    assert nic(read(tree), "eth0").place.numa_node == 0
    tree.online_nodes("0-1")
    tree.numa_node(0, "0-1", "10 20")
    tree.numa_node(1, "2-3", "20 10")
    assert nic(read(tree), "eth0").place.numa_node is None


@pytest.mark.parametrize("speed", ["-1", "", "fast"])
def test_a_speed_that_nobody_knows(tree: SysfsTree, speed: str) -> None:
    tree.net("eth0", tree.pci("pci0000:00", "0000:00:03.0", numa_node=0), speed=speed)
    assert nic(read(tree), "eth0").speed_gbit_s is None


def test_files_that_cannot_be_read(tree: SysfsTree) -> None:
    device = tree.pci("pci0000:00", "0000:00:03.0", numa_node=0)
    tree.net("eth0", device)
    tree.rdma("mlx5_0", device)
    tree.numa_node(0, "what", "10 x")
    for path in ("class/net/eth0/speed", "class/net/eth0/operstate", "class/infiniband/mlx5_0/ports/1/state"):
        (tree.root / path).unlink()
        (tree.root / path).mkdir()  # reading a folder fails for root too
    (tree.root / device / "numa_node").unlink()
    (tree.root / "class/infiniband/mlx5_0/ports/1/rate").unlink()
    found = read(tree)
    assert (nic(found, "eth0").speed_gbit_s, nic(found, "eth0").up) == (None, False)
    assert (nic(found, "mlx5_0").up, nic(found, "mlx5_0").speed_gbit_s) == (False, None)
    assert found.nodes[0].cpus == ()
    assert found.nodes[0].distances == {}


def test_what_hangs_on_a_pci_device_sits_there(tree: SysfsTree) -> None:
    tree.pci("platform/70000000.pci/pci0000:00", "0000:00:03.0", numa_node=0)
    tree.net("eth0", "devices/platform/70000000.pci/pci0000:00/0000:00:03.0/virtio2")
    found = nic(read(tree), "eth0")
    assert (found.place.pci, found.virtual) == (("pci0000:00", "0000:00:03.0"), False)


def test_a_bond_and_a_bridge_stand_on_their_hardware(tree: SysfsTree) -> None:
    tree.net("eth0", tree.pci("pci0000:00", "0000:00:03.0", numa_node=0))
    tree.virtual_net("bond0", lower="eth0")
    tree.virtual_net("vlan7", lower="bond0")
    tree.virtual_net("veth1")
    tree.virtual_net("docker0", lower="veth1")
    tree.write("class/net", bonding_masters="bond0")
    found = read(tree)
    assert {nic.name: nic.virtual for nic in found.nics} == {
        "bond0": False,
        "docker0": True,
        "eth0": False,
        "veth1": True,
        "vlan7": False,
    }
    assert nic(found, "vlan7").place == nic(found, "eth0").place


def test_interfaces_that_stand_on_each_other_end(tree: SysfsTree) -> None:
    tree.virtual_net("a", lower="b")
    tree.virtual_net("b", lower="a")
    assert nic(read(tree), "a").virtual


def test_a_down_interface_and_a_device_of_two_ports(tree: SysfsTree) -> None:
    device = tree.pci("pci0000:00", "0000:00:03.0", numa_node=0)
    tree.net("eth0", device, flags=DOWN, operstate="down")
    tree.net("eth1", device, flags=DOWN, operstate="unknown")
    tree.rdma("mlx5_0", device, state="1: DOWN", rate="400 Gb/sec (4X NDR)")
    tree.rdma("mlx5_0", device, port=2, rate="2.5 Gb/sec (1X SDR)")
    found = read(tree)
    assert not nic(found, "eth0").up
    assert not nic(found, "eth1").up
    assert (nic(found, "mlx5_0").up, nic(found, "mlx5_0").speed_gbit_s) == (True, 2.5)


def test_software_rdma_is_virtual(tree: SysfsTree) -> None:
    tree.rdma("rxe0", "devices/virtual")
    assert nic(read(tree), "rxe0").virtual


def test_other_cards_are_no_gpus_and_order_is_the_bus(tree: SysfsTree) -> None:
    tree.gpu("pci0000:00", "0000:1a:00.0")
    tree.gpu("pci0000:00", "0000:09:00.0", pci_class="0x030000")
    tree.gpu("pci0000:00", "0000:1a:00.1", pci_class="0x040300")  # a GPU's sound
    tree.gpu("pci0000:00", "0000:0b:00.0", pci_class="0x030000", vendor="0x1a03")  # a server's own screen
    assert [gpu.place.pci_address for gpu in read(tree).gpus] == ["0000:09:00.0", "0000:1a:00.0"]


def test_nvml_has_the_last_word_on_gpus(tree: SysfsTree) -> None:
    tree.gpu("pci0000:00", "0000:09:00.0", numa_node=0)
    tree.gpu("pci0000:00", "0000:1a:00.0", numa_node=0)
    said = [NvmlGpu(0, "0000:1a:00.0", "GPU-a", "H"), NvmlGpu(1, "0000:ff:00.0", "GPU-b", "H")]
    found = discover(Sysfs(tree.root), {}, said).gpus
    assert [(gpu.index, gpu.uuid, gpu.place.pci_address) for gpu in found] == [
        (0, "GPU-a", "0000:1a:00.0"),
        (1, "GPU-b", None),
    ]
    assert sysfs_pci_address("00000000:1A:00.0") == "0000:1a:00.0"
    assert sysfs_pci_address("00010000:1A:00.0") == "10000:1a:00.0"


def test_nvml_is_optional() -> None:
    gpus = nvml_gpus()
    assert gpus is None or all(gpu.uuid for gpu in gpus)


def test_memory_without_cpus_is_a_node_and_nothing_is_none(tree: SysfsTree) -> None:
    tree.online_nodes("0,2-3")
    tree.numa_node(0, "0-3", "10 40 80")
    tree.numa_node(2, "", "40 10 80")
    tree.numa_node(3, "", "80 80 10", memory_kb=0)
    found = read(tree).nodes
    assert [node.node for node in found] == [0, 2]
    assert found[0].distances == {0: 10, 2: 40, 3: 80}


def test_parsing() -> None:
    assert parse_cpulist("0-2,8\n") == (0, 1, 2, 8)
    assert parse_cpulist("") == ()
    with pytest.raises(ValueError):
        parse_cpulist("a-b")
    assert sorted(["eth10", "eth2", "eth2np1", "a"], key=natural_key) == ["a", "eth2", "eth2np1", "eth10"]


def test_the_kernel_tells_addresses_that_can_be_bound() -> None:
    found = interface_addresses()
    assert "127.0.0.1" in found["lo"]
    for address in (address for addresses in found.values() for address in addresses):
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as sock:
            sock.bind((address, 0))
