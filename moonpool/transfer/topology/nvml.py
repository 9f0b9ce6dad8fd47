"""What NVIDIA's management library knows of the GPUs this process may use. Optional: needs `pynvml`."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any


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
