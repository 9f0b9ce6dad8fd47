"""KV memory beside the GPU that it is copied to and from."""

from __future__ import annotations

import pytest

from moonpool.transfer.topology import DevicePlace, Gpu, Hardware, NumaNode
from moonpool.worker.build import gpu_numa_node


def hardware(*gpus: tuple[str | None, int | None]) -> Hardware:
    nodes = tuple(NumaNode(node=node, cpus=()) for node in (0, 1))
    made = [Gpu(index=i, place=DevicePlace(numa_node=node), uuid=uuid) for i, (uuid, node) in enumerate(gpus)]
    return Hardware(nodes=nodes, gpus=tuple(made))


@pytest.mark.parametrize(
    ("machine", "node"),
    [
        (hardware(("GPU-a", 0), ("GPU-b", 1)), 1),
        (hardware(("GPU-a", 0), ("GPU-b", None)), None),
        (hardware((None, 0), (None, 1)), None),  # no NVML: which of the two it is cannot be told
        (hardware((None, 1), (None, 1)), 1),
        (hardware(), None),
    ],
)
def test_the_node_of_the_gpu_in_use(machine: Hardware, node: int | None) -> None:
    assert gpu_numa_node(machine, "b") == node
