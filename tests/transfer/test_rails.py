"""The matrix applied to tcp: which addresses are listened on, and which serve which memory first."""

from __future__ import annotations

from pathlib import Path

import pytest
from sysfs_tree import SysfsTree, eight_gpus_eight_nics, eight_gpus_four_nics

from moonpool.base.errors import ConfigError
from moonpool.transfer.topology import Sysfs, Topology, apply_override, build_topology, discover, read_topology
from moonpool.transfer.topology.matrix import Rail, find_rails, split_rails


def topology_of(tree: SysfsTree, addresses: dict[str, tuple[str, ...]]) -> Topology:
    return build_topology(discover(Sysfs(tree.root), addresses))


def addresses(count: int) -> dict[str, tuple[str, ...]]:
    return {f"ens{n}": (f"fd00::{n}", f"10.0.{n}.1") for n in range(count)} | {
        "eno1": ("192.168.0.9",),
        "lo": ("127.0.0.1",),
    }


def test_four_nics_are_four_rails_and_the_management_port_is_none(tmp_path: Path) -> None:
    topology = topology_of(eight_gpus_four_nics(tmp_path), addresses(4))
    rails = find_rails(topology)
    assert sorted(rails) == [Rail(f"ens{n}", f"10.0.{n}.1") for n in range(4)]
    near, far = split_rails(topology, rails, "cuda:5")
    assert [rail.nic for rail in near] == ["ens2"]
    assert sorted(rail.nic for rail in far) == ["ens0", "ens1", "ens3"]
    near, far = split_rails(topology, rails, "cpu:1")
    assert sorted(rail.nic for rail in near) == ["ens2", "ens3"]
    assert sorted(rail.nic for rail in far) == ["ens0", "ens1"]


def test_each_gpu_prefers_its_own_rail(tmp_path: Path) -> None:
    topology = topology_of(eight_gpus_eight_nics(tmp_path), addresses(8))
    rails = find_rails(topology)
    assert len(rails) == 8
    for gpu in range(8):
        assert [rail.nic for rail in split_rails(topology, rails, f"cuda:{gpu}")[0]] == [f"ens{gpu}"]


@pytest.mark.parametrize("location", ["cpu", "ssd:/mnt/x", "cuda:99"])
def test_memory_of_unknown_place_uses_all(tmp_path: Path, location: str) -> None:
    topology = topology_of(eight_gpus_four_nics(tmp_path), addresses(4))
    rails = find_rails(topology)
    assert split_rails(topology, rails, location) == (list(rails), [])


def test_an_interface_without_an_address_is_no_rail(tmp_path: Path) -> None:
    known = addresses(4)
    del known["ens2"]
    topology = topology_of(eight_gpus_four_nics(tmp_path), known)
    rails = find_rails(topology)
    assert sorted(rail.nic for rail in rails) == ["ens0", "ens1", "ens3"]
    assert "ens2" not in [rail.nic for rail in split_rails(topology, rails, "cuda:4")[0]]


def test_the_override_decides(tmp_path: Path) -> None:
    topology = topology_of(eight_gpus_four_nics(tmp_path), addresses(4))
    topology = apply_override(topology, b'{"net": {"cpu:0": {"preferred": ["eno1"]}}}')
    rails = find_rails(topology)
    assert Rail("eno1", "192.168.0.9") in rails
    assert [rail.nic for rail in split_rails(topology, rails, "cpu:0")[0]] == ["eno1"]


def test_memory_of_any_node_follows_the_nodes_where_they_agree(tmp_path: Path) -> None:
    topology = topology_of(eight_gpus_four_nics(tmp_path), addresses(4))
    rails = find_rails(topology)
    assert split_rails(topology, rails, "cpu") == (list(rails), [])
    choice = b'{"preferred": ["ens1"], "secondary": ["ens0"]}'
    topology = apply_override(topology, b'{"net": {"cpu:0": %b, "cpu:1": %b}}' % (choice, choice))
    near, far = split_rails(topology, rails, "cpu")
    assert [rail.nic for rail in near] == ["ens1"]
    assert [rail.nic for rail in far] == ["ens0"], "no others than those named"


def test_an_address_of_no_known_nic_stands_in(tmp_path: Path) -> None:
    topology = topology_of(eight_gpus_four_nics(tmp_path), addresses(4))
    stranger, known = Rail("", "192.0.2.1"), Rail("ens0", "10.0.0.1")
    assert split_rails(topology, [stranger, known], "cuda:0") == ([known], [stranger])
    assert split_rails(topology, [stranger], "cuda:0") == ([stranger], [])


def test_loopback_when_there_is_nothing_else(tmp_path: Path) -> None:
    tree = SysfsTree(tmp_path)
    tree.online_nodes("0")
    tree.numa_node(0, "0-1", "10")
    tree.loopback()
    assert find_rails(topology_of(tree, {"lo": ("127.0.0.1", "::1")})) == (Rail("lo", "127.0.0.1"),)
    with pytest.raises(ConfigError, match="address"):
        find_rails(topology_of(tree, {}))


def test_this_machine_has_one() -> None:
    assert find_rails(read_topology())
