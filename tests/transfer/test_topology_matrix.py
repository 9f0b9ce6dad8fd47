"""The choice of NICs: the paper's matrix on two servers, odd machines, and a person's override."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sysfs_tree import eight_gpus_eight_nics, eight_gpus_four_nics

from moonpool.base.errors import ConfigError
from moonpool.transfer.topology import (
    DevicePlace,
    Gpu,
    Hardware,
    Nic,
    NicChoice,
    NumaNode,
    Sysfs,
    Topology,
    apply_override,
    build_topology,
    discover,
    read_topology,
)
from moonpool.transfer.topology.matrix import Distance, Level, distance, locations, rank_nics

NODES = (
    NumaNode(node=0, cpus=(0,), distances={0: 10, 1: 12, 2: 32}),
    NumaNode(node=1, cpus=(1,), distances={0: 12, 1: 10, 2: 32}),
    NumaNode(node=2, cpus=(2,), distances={0: 32, 1: 32, 2: 10}),
)
PHYSICAL = ("ens0", "ens1", "ens2", "ens3")


def net(name: str, node: int | None = 0, **fields: object) -> Nic:
    defaults: dict[str, object] = {"kind": "net", "up": True, "addresses": ("10.0.0.1",)}
    return Nic(name=name, place=DevicePlace(numa_node=node), **(defaults | fields))  # type: ignore[arg-type]


def choose(*nics: Nic, location: str = "cpu:0") -> tuple[tuple[str, ...], tuple[str, ...]]:
    choice = rank_nics(Hardware(nodes=NODES, nics=nics), "net")[location]
    return choice.preferred, choice.secondary


@pytest.fixture(scope="module")
def four_nics(tmp_path_factory: pytest.TempPathFactory) -> Topology:
    tree = eight_gpus_four_nics(tmp_path_factory.mktemp("sys"))
    addresses = dict.fromkeys((*PHYSICAL, "eno1", "lo"), ("10.0.0.1",))
    return build_topology(discover(Sysfs(tree.root), addresses))


def test_two_gpus_share_the_nic_behind_their_switch(four_nics: Topology) -> None:
    assert [four_nics.rdma[f"cuda:{gpu}"].preferred for gpu in range(8)] == [(f"mlx5_{gpu // 2}",) for gpu in range(8)]
    # Then the one of the same socket, then the other socket's.
    assert four_nics.rdma["cuda:0"].secondary == ("mlx5_1", "mlx5_2", "mlx5_3")
    assert four_nics.rdma["cuda:5"].secondary == ("mlx5_3", "mlx5_0", "mlx5_1")


def test_main_memory_uses_all_nics_of_its_socket(four_nics: Topology) -> None:
    assert four_nics.rdma["cpu:0"] == NicChoice(preferred=("mlx5_0", "mlx5_1"), secondary=("mlx5_2", "mlx5_3"))
    assert four_nics.rdma["cpu:1"] == NicChoice(preferred=("mlx5_2", "mlx5_3"), secondary=("mlx5_0", "mlx5_1"))


def test_the_management_port_comes_last(four_nics: Topology) -> None:
    assert four_nics.net["cpu:0"] == NicChoice(preferred=("ens0", "ens1"), secondary=("ens2", "ens3", "eno1"))
    assert four_nics.net["cuda:7"] == NicChoice(preferred=("ens3",), secondary=("ens2", "ens0", "ens1", "eno1"))


def test_each_gpu_has_its_own_nic_on_the_8_nic_server(tmp_path: Path) -> None:
    found = build_topology(discover(Sysfs(eight_gpus_eight_nics(tmp_path).root), {})).rdma
    assert [found[f"cuda:{gpu}"].preferred for gpu in range(8)] == [(f"mlx5_{gpu}",) for gpu in range(8)]
    # The neighbour below the same first switch, then the socket, then the other one.
    assert found["cuda:3"].secondary == ("mlx5_2", "mlx5_0", "mlx5_1", "mlx5_4", "mlx5_5", "mlx5_6", "mlx5_7")
    assert found["cpu:1"].preferred == ("mlx5_4", "mlx5_5", "mlx5_6", "mlx5_7")


def test_it_travels(four_nics: Topology) -> None:
    assert msgspec.json.decode(msgspec.json.encode(four_nics), type=Topology) == four_nics
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(four_nics), type=Topology) == four_nics


def test_distances() -> None:
    gpu = DevicePlace(pci=("pci0000:10", "0000:10:01.0", "0000:11:00.0", "0000:12:00.0", "0000:13:00.0"), numa_node=0)
    below_one_switch = DevicePlace(pci=(*gpu.pci[:3], "0000:12:01.0", "0000:14:00.0"), numa_node=0)
    below_one_bridge = DevicePlace(pci=("pci0000:10", "0000:10:02.0", "0000:20:00.0"), numa_node=0)
    assert distance(gpu, below_one_switch, NODES) == Distance(Level.SWITCH, 4)
    assert distance(gpu, below_one_bridge, NODES) == Distance(Level.ROOT)
    assert distance(gpu, DevicePlace(numa_node=0), NODES) == Distance(Level.NODE)
    assert distance(gpu, DevicePlace(numa_node=1), NODES) == Distance(Level.FAR, 12)
    assert distance(gpu, DevicePlace(numa_node=2), NODES) == Distance(Level.FAR, 32)
    assert (
        distance(gpu, DevicePlace(), NODES) == distance(DevicePlace(), DevicePlace(), NODES) == Distance(Level.FAR, 255)
    )


def test_the_nearer_of_two_far_nodes_is_preferred() -> None:
    assert choose(net("a", 2), net("b", 1)) == (("b",), ("a",))


def test_loopback_and_down_only_when_there_is_nothing_else() -> None:
    lo, down, mute = net("lo", loopback=True, virtual=True), net("eth0", up=False), net("eth1", addresses=())
    assert choose(lo, down, mute, net("eth2")) == (("eth2",), ())
    assert choose(down, mute, lo) == (("lo",), ("eth0", "eth1"))
    assert choose(down) == (("eth0",), ())
    assert choose() == ((), ())


def test_virtual_interfaces_come_last() -> None:
    assert choose(net("docker0", virtual=True), net("eth0", 1)) == (("eth0",), ("docker0",))
    assert choose(net("veth0", virtual=True), net("lo", virtual=True, loopback=True)) == (("veth0",), ())


def test_of_equals_the_faster_comes_first() -> None:
    nics = [net("a", 1, speed_gbit_s=50.0), net("b", 1, speed_gbit_s=100.0), net("c", speed_gbit_s=100.0)]
    assert choose(*nics) == (("c",), ("b", "a"))


names = st.sampled_from(["a", "b", "c", "d", "e"])
nics = st.lists(
    st.builds(
        net,
        names,
        st.none() | st.integers(0, 2),
        up=st.booleans(),
        virtual=st.booleans(),
        loopback=st.booleans(),
        speed_gbit_s=st.none() | st.sampled_from([1.0, 10.0, 100.0]),
        addresses=st.sampled_from([(), ("10.0.0.1",)]),
    ),
    unique_by=lambda nic: nic.name,
)


@given(nics=nics)
def test_every_location_has_a_choice_without_repeats(nics: list[Nic]) -> None:
    hardware = Hardware(nodes=NODES, nics=tuple(nics), gpus=(Gpu(index=0, place=DevicePlace(numa_node=1)),))
    usable = {nic.name for nic in nics if nic.up and nic.addresses and not nic.loopback}
    matrix = rank_nics(hardware, "net")
    assert matrix.keys() == locations(hardware).keys() == {"cpu:0", "cpu:1", "cpu:2", "cuda:0"}
    for choice in matrix.values():
        chosen = (*choice.preferred, *choice.secondary)
        assert sorted(chosen) == sorted(usable or {nic.name for nic in nics})
        assert bool(choice.preferred) == bool(nics)


def test_an_override_replaces_what_it_names(four_nics: Topology) -> None:
    text = json.dumps({"net": {"cuda:0": {"preferred": ["eno1"]}}})
    changed = apply_override(four_nics, text)
    assert changed.net["cuda:0"] == NicChoice(preferred=("eno1",))
    assert changed.net["cuda:1"] == four_nics.net["cuda:1"]
    assert changed.rdma == four_nics.rdma


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ({"nett": {}}, "unknown field `nett`"),
        ({"net": {"cuda:0": {"preferred": ["ens0"], "third": []}}}, "unknown field `third`"),
        ({"net": {"cuda:0": {"secondary": ["ens0"]}}}, "missing required field `preferred`"),
        ({"net": {"cuda:9": {"preferred": ["ens0"]}}}, "no memory location 'cuda:9'; known are: cpu:0, cpu:1, cuda:0"),
        ({"net": {"cuda:0": {"preferred": ["ens9"]}}}, "net.cuda:0 names the NIC 'ens9'; known are: eno1, ens0"),
        ({"net": {"cuda:0": {"preferred": ["mlx5_0"]}}}, "names the NIC 'mlx5_0'"),
        ({"rdma": {"cuda:0": {"preferred": []}}}, "prefers no NIC"),
        ({"rdma": {"cuda:0": {"preferred": ["mlx5_0"], "secondary": ["mlx5_0"]}}}, "more than once"),
        ({"net": {"cuda:0": {"preferred": "ens0"}}}, "Expected `array`"),
    ],
)
def test_a_wrong_override_is_refused_by_name(four_nics: Topology, override: object, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        apply_override(four_nics, json.dumps(override))
    assert says in str(caught.value)


def test_an_override_file(tmp_path: Path) -> None:
    path = tmp_path / "topology.json"
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_topology(path)
    path.write_text("{")
    with pytest.raises(ConfigError, match="wrong"):
        read_topology(path)
    path.write_text(json.dumps({"net": {"cpu:0": {"preferred": ["lo"]}}}))
    assert read_topology(path).net["cpu:0"].preferred == ("lo",)
