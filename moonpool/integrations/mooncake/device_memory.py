"""GPU memory that the caller registered with a store. The pool's objects are read and written in main memory, so values
in GPU memory are copied through it: before a put, and after a get.

Puts and gets by pointer take GPU memory; calls on ranges and on tensors at an address take main memory only.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Sequence

from moonpool.base.clock import Deadline
from moonpool.base.errors import InvalidInput
from moonpool.integrations.mooncake.engine_memory import gpu_of
from moonpool.integrations.mooncake.registered_memory import RegisteredMemory
from moonpool.transfer.transports.cuda.copy import Placed, mover_of
from moonpool.transfer.transports.cuda.driver import Device, driver

_COPY_TIMEOUT_S = 30.0


class RegisteredDeviceMemory:
    """Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sizes: dict[int, int] = {}  # by start; few: one per cache of an engine

    @property
    def is_empty(self) -> bool:
        return not self._sizes

    def register(self, address: int, nbytes: int) -> bool:
        """Return False when it is no GPU memory. InvalidInput when only a part of it is, or overlaps what is
        registered.
        """
        device = gpu_of(address)
        if device is None or nbytes <= 0:
            return False
        last = gpu_of(address + nbytes - 1)
        if last is None or last.index != device.index:
            raise InvalidInput(f"{nbytes} bytes at {address:#x} are not all memory of one GPU")
        with self._lock:
            for start, size in self._sizes.items():
                if start < address + nbytes and address < start + size:
                    raise InvalidInput(f"{nbytes} bytes at {address:#x} overlap registered memory")
            self._sizes = self._sizes | {address: nbytes}
        return True

    def unregister(self, address: int) -> bool:
        """Return False when no registered GPU memory begins there."""
        with self._lock:
            left = dict(self._sizes)
            found = left.pop(address, None) is not None
            self._sizes = left
        return found

    def holds(self, address: int, nbytes: int) -> bool:
        """Return whether the bytes are inside one registered range."""
        if nbytes < 0:
            return False
        return any(start <= address and address + nbytes <= start + size for start, size in self._sizes.items())

    def clear(self) -> None:
        with self._lock:
            self._sizes = {}


class MemoryStage:
    """Main memory in place of the GPU memory in one call; other memory is used as it is."""

    def __init__(self, main: RegisteredMemory, device: RegisteredDeviceMemory) -> None:
        self._main = main
        self._device = device
        self._placed: list[list[Placed]] = []  # by call of views()

    def views(self, addresses: Sequence[int], sizes: Sequence[int]) -> list[memoryview]:
        """Return the memory of one key. InvalidInput for memory that is not registered."""
        placed: list[Placed] = []
        self._placed.append(placed)
        found: list[memoryview] = []
        for address, nbytes in zip(addresses, sizes, strict=True):
            if self._device.holds(address, nbytes):
                view = memoryview(bytearray(nbytes))
                placed.append((address, view))
            else:
                view = self._main.view(address, nbytes)
            found.append(view)
        return found

    def fill(self) -> None:
        """Copy the GPU's bytes to the stage: before a put."""
        for device, placed in _by_device(self._placed):
            mover_of(device).read(placed, Deadline(_COPY_TIMEOUT_S))

    def write_back(self, results: Sequence[int]) -> None:
        """Copy to the GPU what was read: after a get. `results` are those of the keys, in the order of views()."""
        read = [placed for placed, result in zip(self._placed, results, strict=False) if result >= 0]
        for device, placed in _by_device(read):
            mover_of(device).write(placed, Deadline(_COPY_TIMEOUT_S))


def _by_device(groups: Sequence[Sequence[Placed]]) -> list[tuple[Device, list[Placed]]]:
    devices: dict[int, Device] = {}
    found: defaultdict[int, list[Placed]] = defaultdict(list)
    for group in groups:
        for address, view in group:
            device = driver().device_of(address)
            devices[device.index] = device
            found[device.index].append((address, view))
    return [(devices[index], placed) for index, placed in found.items()]
