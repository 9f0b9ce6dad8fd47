"""The GPUs of this process and their memory, by NVIDIA's driver (driver_api.py). No toolkit, no torch.

Nothing is loaded before the first use. It shares the GPU's primary context with torch and every other library of the
process, and leaves the thread's current context as it was.
"""

from __future__ import annotations

import bisect
import ctypes
import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import byref, c_int, c_size_t, c_ubyte, c_uint64
from functools import cache, cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moonpool.base.errors import InvalidInput, MoonpoolError, Unavailable
from moonpool.transfer.transports.cuda.driver_api import (
    DRIVER_HINT,
    INVALID_VALUE,
    IPC_HANDLE_NBYTES,
    NOT_READY,
    CudaLibrary,
    IpcHandle,
)

Addresses = NDArray[np.uint64]
_UUID_NBYTES = 16

_MEMORY_TYPE, _ORDINAL, _IPC_CAPABLE = 2, 9, 10  # pointer attributes
_TYPE_HOST, _TYPE_DEVICE = 1, 2
_HOST_PORTABLE, _STREAM_NON_BLOCKING, _EVENT_NO_TIMING, _IPC_LAZY_PEER_ACCESS = 1, 1, 2, 1

_loading = threading.Lock()


def driver() -> CudaDriver:
    """Return the driver of this process. Raise Unavailable, saying what is missing, without a driver or a GPU."""
    with _loading:
        return _driver_of(os.getpid())


@cache
def _driver_of(pid: int) -> CudaDriver:  # by pid: a forked child cannot use its parent's contexts
    return CudaDriver()


class CudaDriver(CudaLibrary):
    """Use driver(). Thread-safe."""

    def __init__(self) -> None:
        super().__init__()
        self.call("cuInit", 0)
        count = c_int()
        self.call("cuDeviceGetCount", byref(count))
        if count.value == 0:
            raise Unavailable(f"NVIDIA's driver sees no GPU; {DRIVER_HINT}, and look at CUDA_VISIBLE_DEVICES")
        self._registered: list[int] = []  # addresses, sorted
        self.devices = tuple(Device(self, index) for index in range(count.value))

    @property
    def version(self) -> str:
        """The newest version of CUDA that the driver supports."""
        found = c_int()
        self.call("cuDriverGetVersion", byref(found))
        return f"{found.value // 1000}.{found.value % 1000 // 10}"

    def device(self, index: int) -> Device:
        if not 0 <= index < len(self.devices):
            raise InvalidInput(f"there is no cuda:{index} here, {len(self.devices)} GPUs are visible")
        return self.devices[index]

    def device_by_uuid(self, uuid: bytes) -> Device:
        for device in self.devices:
            if device.uuid == uuid:
                return device
        raise Unavailable("the GPU of that memory is not visible to this process (CUDA_VISIBLE_DEVICES)")

    def device_of(self, address: int) -> Device:
        """Return the GPU whose memory this is. Raise InvalidInput when it is not memory of a GPU."""
        if self._attribute(_MEMORY_TYPE, address) != _TYPE_DEVICE:
            raise InvalidInput(f"address {address:#x} is not memory of a GPU")
        ordinal = self._attribute(_ORDINAL, address)
        assert ordinal is not None, "device memory has a device"
        return self.device(ordinal)

    def is_pinned(self, address: int) -> bool:
        """Return whether the GPU can access this main memory directly (it is pinned). Takes about 1 us."""
        return self._attribute(_MEMORY_TYPE, address) == _TYPE_HOST

    def note_registered(self, address: int, is_registered: bool) -> None:
        with _loading:
            others = [each for each in self._registered if each != address]
            self._registered = sorted([*others, address]) if is_registered else others  # readers have no lock

    def registrations_between(self, start: int, end: int) -> list[int]:
        """Return the addresses, without the bounds, at which Device.register() has begun."""
        known = self._registered
        return known[bisect.bisect_right(known, start) : bisect.bisect_left(known, end)]

    def is_exportable(self, address: int) -> bool:
        return bool(self._attribute(_IPC_CAPABLE, address))

    def is_over(self, event: int) -> bool:
        return self.call_unless(NOT_READY, "cuEventQuery", event)

    def _attribute(self, attribute: int, address: int) -> int | None:
        """Return an attribute of the memory; None when the driver does not know it: plain main memory."""
        found = c_int()
        is_known = self.call_unless(INVALID_VALUE, "cuPointerGetAttribute", byref(found), attribute, address)
        return found.value if is_known else None


class Device:
    """One GPU, by this process's numbering. Its context is made at the first use and kept: libraries share it."""

    def __init__(self, cuda: CudaDriver, index: int) -> None:
        self.index = index
        self._cuda = cuda
        handle = c_int()
        cuda.call("cuDeviceGet", byref(handle), index)
        self._handle = handle.value
        name, uuid = ctypes.create_string_buffer(256), (c_ubyte * _UUID_NBYTES)()
        cuda.call("cuDeviceGetName", name, len(name), self._handle)
        cuda.call("cuDeviceGetUuid_v2", byref(uuid), self._handle)
        self.name = name.value.decode()
        self.uuid = bytes(uuid)

    def __str__(self) -> str:
        return f"cuda:{self.index}"

    @cached_property
    def context(self) -> int:
        # Two threads may both retain it; the driver counts, and it stays until the process ends.
        return self._number("cuDevicePrimaryCtxRetain", self._handle)

    @contextmanager
    def current(self) -> Iterator[None]:
        """Driver calls inside the block go to this GPU."""
        self._cuda.call("cuCtxPushCurrent_v2", self.context)
        try:
            yield
        finally:
            self._cuda.call("cuCtxPopCurrent_v2", byref(c_uint64()))

    def allocate(self, nbytes: int) -> DeviceMemory:
        """Return zeroed memory. Raise NoSpace when the GPU has not that much left."""
        with self.current():
            made = DeviceMemory(self, self._number("cuMemAlloc_v2", nbytes), nbytes, "cuMemFree_v2")
            self._cuda.call("cuMemsetD8_v2", made.address, 0, nbytes)
            self._cuda.call("cuStreamSynchronize", 0)
        return made

    def free_nbytes(self) -> int:
        free, total = c_size_t(), c_size_t()
        with self.current():
            self._cuda.call("cuMemGetInfo_v2", byref(free), byref(total))
        return free.value

    def allocation_of(self, address: int) -> tuple[int, int]:
        """Return start and size of the allocation that holds `address`: torch's allocator hands out parts of one."""
        start, nbytes = c_uint64(), c_size_t()
        with self.current():
            self._cuda.call("cuMemGetAddressRange_v2", byref(start), byref(nbytes), address)
        return start.value, nbytes.value

    def export(self, address: int) -> bytes:
        """Return a handle of the whole allocation, for other processes of this machine. Raise Unavailable for memory
        that was allocated in a way without handles.
        """
        if not self._cuda.is_exportable(address):
            raise Unavailable(
                "this GPU memory cannot be given to other processes by CUDA IPC: it comes from a memory pool or from "
                "expandable segments; with torch, leave expandable_segments out of PYTORCH_CUDA_ALLOC_CONF"
            )
        handle = (c_ubyte * IPC_HANDLE_NBYTES)()
        with self.current():
            self._cuda.call("cuIpcGetMemHandle", byref(handle), address)
        return bytes(handle)

    def open_export(self, handle: bytes, nbytes: int) -> DeviceMemory:
        """Map an allocation of another process, until the last reference to the result is gone."""
        raw = IpcHandle.from_buffer_copy(handle)
        with self.current():
            try:
                address = self._number("cuIpcOpenMemHandle_v2", raw, _IPC_LAZY_PEER_ACCESS)
            except MoonpoolError as error:
                raise Unavailable(f"{self} memory of the other process cannot be mapped here: {error}") from error
        return DeviceMemory(self, address, nbytes, "cuIpcCloseMemHandle")

    def pinned(self, nbytes: int) -> tuple[int, memoryview]:
        """Allocate pinned main memory for the life of the process. Return its address and bytes."""
        with self.current():
            address = self._number("cuMemHostAlloc", nbytes, _HOST_PORTABLE)
        return address, memoryview((c_ubyte * nbytes).from_address(address)).cast("B")

    def register(self, address: int, nbytes: int) -> None:
        """Page-lock main memory of this process, so that every GPU copies from and to it directly. Takes 0.3 s a GiB.
        NoSpace or Unavailable when the kernel does not allow it.
        """
        with self.current():
            self._cuda.call("cuMemHostRegister_v2", address, nbytes, _HOST_PORTABLE)
        self._cuda.note_registered(address, True)

    def unregister(self, address: int) -> None:
        """End register(); no copy may be under way."""
        with self.current():
            self._cuda.call("cuMemHostUnregister", address)
        self._cuda.note_registered(address, False)

    def stream(self) -> int:
        """Return a new CUDA stream, which waits for no other stream."""
        with self.current():
            return self._number("cuStreamCreate", _STREAM_NON_BLOCKING)

    def event(self) -> int:
        with self.current():
            return self._number("cuEventCreate", _EVENT_NO_TIMING)

    # The rest is called inside current().

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Start a copy between two memories that this GPU can access directly."""
        self._cuda.call("cuMemcpyAsync", target, source, nbytes, stream)

    def copy_batch(self, targets: Addresses, sources: Addresses, sizes: Addresses, stream: int) -> None:
        """As copy(), of many at once."""
        self._cuda.copy_batch(targets, sources, sizes, stream)

    def copy_between(
        self, target: int, target_device: Device, source: int, source_device: Device, nbytes: int, stream: int
    ) -> None:
        """Start a copy between two GPUs, by NVLink or PCIe where they reach each other, else by main memory."""
        contexts = target_device.context, source_device.context
        self._cuda.call("cuMemcpyPeerAsync", target, contexts[0], source, contexts[1], nbytes, stream)

    def record(self, event: int, stream: int) -> None:
        self._cuda.call("cuEventRecord", event, stream)

    def wait_event(self, event: int) -> None:
        self._cuda.call("cuEventSynchronize", event)

    def is_over(self, event: int) -> bool:
        """Return whether all that was started before the event was recorded is done."""
        return self._cuda.is_over(event)

    def free_event(self, event: int) -> None:
        self._cuda.call("cuEventDestroy_v2", event)

    def wait_for(self, stream: int, event: int) -> None:
        """Let what is started on the stream from now on wait for the event; does not block."""
        self._cuda.call("cuStreamWaitEvent", stream, event, 0)

    def wait_stream(self, stream: int) -> None:
        self._cuda.call("cuStreamSynchronize", stream)

    def _number(self, function: str, *arguments: Any) -> int:
        """Call the function and return the number that it writes to its first argument."""
        found = c_uint64()
        self._cuda.call(function, byref(found), *arguments)
        return found.value


class DeviceMemory:
    """Memory of a GPU that goes back to the driver when the last reference to this goes, so that an address in use is
    never a wild pointer.
    """

    def __init__(self, device: Device, address: int, nbytes: int, end: str) -> None:
        self.device = device
        self.address = address
        self.nbytes = nbytes
        give_back = weakref.finalize(self, _give_back, device, end, address)
        give_back.atexit = False  # the driver takes back what a process held, and may be gone by then


def _give_back(device: Device, end: str, address: int) -> None:
    with device.current():
        device._cuda.call(end, address)
