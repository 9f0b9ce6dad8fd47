"""The only reader of /sys. Its root is a parameter, so a test hands it a tree of its own.

The kernel answers some reads with an error (the speed of an interface that is down) and leaves some files out; both
are None here, never an exception.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from moonpool.transfer.topology.devices import DevicePlace

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
