"""NVIDIA's driver (libcuda.so.1) by ctypes: as much of it as moves bytes. No toolkit, no torch.

The one place where the driver's codes become our errors. Nothing is loaded before the first use. It shares the GPU's
primary context with torch and every other library of the process, and leaves the thread's current context as it was.
"""

from __future__ import annotations

import bisect
import ctypes
import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_ubyte, c_uint, c_uint64, c_void_p
from functools import cache, cached_property
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from moonpool.base.errors import InvalidInput, MoonpoolError, NoSpace, Unavailable

Addresses = NDArray[np.uint64]
IPC_HANDLE_NBYTES = 64
_UUID_NBYTES = 16
_LIBRARY = "libcuda.so.1"
_HINT = "install NVIDIA's driver, or start the container with --gpus all"

_INVALID_VALUE = 1
_OUT_OF_MEMORY = 2
_NOT_INITIALIZED = 3
_NO_DEVICE = 100
_WRONG = frozenset({_INVALID_VALUE, 101})  # an argument, a device's number
_BROKEN = frozenset({700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 720})  # a kernel crashed: the context is lost
_MISMATCH = frozenset({803, 804})

_MEMORY_TYPE, _ORDINAL, _IPC_CAPABLE = 2, 9, 10  # pointer attributes
_TYPE_HOST, _TYPE_DEVICE = 1, 2
_HOST_PORTABLE, _STREAM_NON_BLOCKING, _EVENT_NO_TIMING, _IPC_LAZY_PEER_ACCESS = 1, 1, 2, 1
_NOT_READY = 600  # an event whose work is under way
_IN_STREAM_ORDER = 1  # when a copy reads its source

_loading = threading.Lock()


class _IpcHandle(ctypes.Structure):  # by value: an array would be passed as a pointer
    _fields_ = (("bytes", c_ubyte * IPC_HANDLE_NBYTES),)


class _CopyAttributes(ctypes.Structure):
    """CUmemcpyAttributes: when sources are read, two hints for managed memory (type and id), flags."""

    _fields_ = (("order", c_int), ("source_hint", c_int * 2), ("target_hint", c_int * 2), ("flags", c_uint))


_Out = c_void_p  # where the driver puts an answer
_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "cuInit": (c_uint,),
    "cuGetErrorName": (c_int, POINTER(c_char_p)),
    "cuGetErrorString": (c_int, POINTER(c_char_p)),
    "cuDriverGetVersion": (_Out,),
    "cuDeviceGetCount": (_Out,),
    "cuDeviceGet": (_Out, c_int),
    "cuDeviceGetName": (c_char_p, c_int, c_int),
    "cuDeviceGetUuid_v2": (_Out, c_int),
    "cuDevicePrimaryCtxRetain": (_Out, c_int),
    "cuCtxPushCurrent_v2": (c_uint64,),
    "cuCtxPopCurrent_v2": (_Out,),
    "cuMemAlloc_v2": (_Out, c_size_t),
    "cuMemFree_v2": (c_uint64,),
    "cuMemGetInfo_v2": (_Out, _Out),
    "cuMemGetAddressRange_v2": (_Out, _Out, c_uint64),
    "cuMemHostAlloc": (_Out, c_size_t, c_uint),
    "cuMemHostRegister_v2": (c_uint64, c_size_t, c_uint),
    "cuMemHostUnregister": (c_uint64,),
    "cuMemsetD8_v2": (c_uint64, c_ubyte, c_size_t),
    "cuMemcpy": (c_uint64, c_uint64, c_size_t),
    "cuMemcpyAsync": (c_uint64, c_uint64, c_size_t, c_uint64),
    "cuMemcpyPeerAsync": (c_uint64, c_uint64, c_uint64, c_uint64, c_size_t, c_uint64),
    "cuPointerGetAttribute": (_Out, c_int, c_uint64),
    "cuStreamCreate": (_Out, c_uint),
    "cuStreamSynchronize": (c_uint64,),
    "cuStreamWaitEvent": (c_uint64, c_uint64, c_uint),
    "cuEventCreate": (_Out, c_uint),
    "cuEventRecord": (c_uint64, c_uint64),
    "cuEventSynchronize": (c_uint64,),
    "cuEventQuery": (c_uint64,),
    "cuEventDestroy_v2": (c_uint64,),
    "cuIpcGetMemHandle": (_Out, c_uint64),
    "cuIpcOpenMemHandle_v2": (_Out, _IpcHandle, c_uint),
    "cuIpcCloseMemHandle": (c_uint64,),
}
# Many copies with one call, the newest form first: CUDA 13 has it without, CUDA 12.8 with the place of a failure.
_BATCH_ARGUMENTS = (_Out, _Out, _Out, c_size_t, _Out, _Out, c_size_t)
_BATCH_COPIES: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("cuMemcpyBatchAsync_v2", (*_BATCH_ARGUMENTS, c_uint64)),
    ("cuMemcpyBatchAsync", (*_BATCH_ARGUMENTS, _Out, c_uint64)),
)


def driver() -> CudaDriver:
    """This process's; Unavailable, saying what is missing, when there is no driver or no GPU."""
    with _loading:
        return _driver_of(os.getpid())


@cache
def _driver_of(pid: int) -> CudaDriver:  # a forked child has none of its parent's contexts and must be told so
    return CudaDriver()


class CudaDriver:
    """Use driver(). Thread-safe."""

    def __init__(self) -> None:
        try:
            self._library = ctypes.CDLL(_LIBRARY)
        except OSError as error:
            raise Unavailable(f"there is no NVIDIA driver here ({error}); {_HINT}") from error
        self._functions = {name: _bind(self._library, name, types) for name, types in _FUNCTIONS.items()}
        self._batch_copy = next((each for each in _BATCH_COPIES if hasattr(self._library, each[0])), None)
        if self._batch_copy is not None:
            self._functions[self._batch_copy[0]] = _bind(self._library, *self._batch_copy)
        self.call("cuInit", 0)
        count = c_int()
        self.call("cuDeviceGetCount", byref(count))
        if count.value == 0:
            raise Unavailable(f"NVIDIA's driver sees no GPU; {_HINT}, and look at CUDA_VISIBLE_DEVICES")
        self._registered: list[int] = []  # addresses, sorted
        self.devices = tuple(Device(self, index) for index in range(count.value))

    def call(self, name: str, *arguments: Any) -> None:
        result = self._functions[name](*arguments)
        if result:
            self._fail(name, result)

    @property
    def version(self) -> str:
        """The newest CUDA it speaks."""
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
        """The GPU whose memory this is; InvalidInput when it is none's."""
        if self._attribute(_MEMORY_TYPE, address) != _TYPE_DEVICE:
            raise InvalidInput(f"address {address:#x} is not memory of a GPU")
        ordinal = self._attribute(_ORDINAL, address)
        assert ordinal is not None, "device memory has a device"
        return self.device(ordinal)

    def is_pinned(self, address: int) -> bool:
        """Return whether the GPU can access this main memory directly (it is pinned). Takes about 1 us."""
        return self._attribute(_MEMORY_TYPE, address) == _TYPE_HOST

    def copy_batch(self, targets: Addresses, sources: Addresses, sizes: Addresses, stream: int) -> None:
        """Start a copy for each position of the arrays, in no promised order among them; inside Device.current()."""
        if self._batch_copy is None or len(targets) == 1:
            for target, source, nbytes in zip(targets.tolist(), sources.tolist(), sizes.tolist(), strict=True):
                self.call("cuMemcpyAsync", target, source, nbytes, stream)
            return
        arrays = [np.ascontiguousarray(each, np.uint64) for each in (targets, sources, sizes)]
        attributes, first = _CopyAttributes(order=_IN_STREAM_ORDER), c_size_t(0)
        name, types = self._batch_copy
        failed_at = (byref(c_size_t()),) if len(types) == len(_BATCH_ARGUMENTS) + 2 else ()
        pointers = (each.ctypes.data for each in arrays)
        self.call(name, *pointers, len(targets), byref(attributes), byref(first), 1, *failed_at, stream)

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
        result = self._functions["cuEventQuery"](event)
        if result not in (0, _NOT_READY):
            self._fail("cuEventQuery", result)
        return bool(result == 0)

    def _attribute(self, attribute: int, address: int) -> int | None:
        """None for memory that the driver does not know: plain main memory."""
        found = c_int()
        result = self._functions["cuPointerGetAttribute"](byref(found), attribute, address)
        if result == _INVALID_VALUE:
            return None
        if result:
            self._fail("cuPointerGetAttribute", result)
        return found.value

    def _fail(self, name: str, result: int) -> NoReturn:
        raise cuda_error(
            name, result, f"{self._text('cuGetErrorName', result)}, {self._text('cuGetErrorString', result)}"
        )

    def _text(self, function: str, result: int) -> str:
        text = c_char_p()
        self._functions[function](result, byref(text))
        return (text.value or b"unknown").decode()


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
        """Zeroed memory; NoSpace when the GPU has not that much left."""
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
        """Start and size of the allocation that `address` lies in: allocators like torch's hand out parts of one."""
        start, nbytes = c_uint64(), c_size_t()
        with self.current():
            self._cuda.call("cuMemGetAddressRange_v2", byref(start), byref(nbytes), address)
        return start.value, nbytes.value

    def export(self, address: int) -> bytes:
        """A handle of the whole allocation, for other processes of this machine. Unavailable for memory made in a way
        that has none.
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
        """Another process's allocation, mapped here until the last reference goes."""
        raw = _IpcHandle.from_buffer_copy(handle)
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
        """Starts a copy between two GPUs, by NVLink or PCIe where they reach each other, else by main memory."""
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
        """What the driver answers in its first argument."""
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


def cuda_error(function: str, result: int, text: str) -> MoonpoolError:
    """Ours for a code of the driver's."""
    says = f"CUDA: {text} ({function}, code {result})"
    if result == _OUT_OF_MEMORY:
        return NoSpace(f"{says}; the GPU has not that much memory left")
    if result in _WRONG:
        return InvalidInput(says)
    if result == _NOT_INITIALIZED:
        return Unavailable(f"{says}; a process that was forked after CUDA was used cannot use it: start a new process")
    if result == _NO_DEVICE:
        return Unavailable(f"{says}; {_HINT}, and look at CUDA_VISIBLE_DEVICES")
    if result in _BROKEN:
        return Unavailable(f"{says}; the GPU's context is lost, this process must be restarted")
    if result in _MISMATCH:
        return Unavailable(f"{says}; the driver's library and its kernel module are of different versions")
    return Unavailable(says)


def _bind(library: ctypes.CDLL, name: str, types: tuple[Any, ...]) -> Any:
    try:
        function = getattr(library, name)
    except AttributeError as error:
        raise Unavailable(f"NVIDIA's driver is too old, it has no {name}; CUDA 11.4 or newer is needed") from error
    function.argtypes, function.restype = types, c_int
    return function
