"""What the machine looks like to bytes: its NICs, GPUs and NUMA nodes, and which NIC serves which memory."""

from __future__ import annotations

from pathlib import Path

from moonpool.base.errors import ConfigError
from moonpool.transfer.topology.addresses import interface_addresses
from moonpool.transfer.topology.devices import (
    DevicePlace,
    Gpu,
    Hardware,
    Matrix,
    Nic,
    NicChoice,
    NumaNode,
    NvmeDrive,
    Topology,
    apply_override,
)
from moonpool.transfer.topology.discover import Sysfs, discover, nvml_gpus
from moonpool.transfer.topology.matrix import build_topology

__all__ = [
    "DevicePlace",
    "Gpu",
    "Hardware",
    "Matrix",
    "Nic",
    "NicChoice",
    "NumaNode",
    "NvmeDrive",
    "Sysfs",
    "Topology",
    "apply_override",
    "build_topology",
    "discover",
    "read_topology",
]


def read_topology(override: Path | None = None) -> Topology:
    """This machine's, with what the file `override` says in place of what was found; ConfigError when it is wrong."""
    topology = build_topology(discover(Sysfs(), interface_addresses(), nvml_gpus()))
    if override is None:
        return topology
    try:
        return apply_override(topology, override.read_bytes())
    except OSError as error:
        raise ConfigError(f"the topology override {override} cannot be read: {error.strerror}") from error
