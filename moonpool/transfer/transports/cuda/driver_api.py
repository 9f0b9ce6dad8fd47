"""The C interface of NVIDIA's driver (libcuda.so.1): its functions by name, and our errors for its codes.

The one place where the driver's codes become our errors. Nothing is loaded before a `CudaLibrary` is made.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_ubyte, c_uint, c_uint64, c_void_p
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from moonpool.base.errors import InvalidInput, MoonpoolError, NoSpace, Unavailable

_Array = NDArray[np.uint64]
IPC_HANDLE_NBYTES = 64
_LIBRARY = "libcuda.so.1"
DRIVER_HINT = "install NVIDIA's driver, or start the container with --gpus all"

INVALID_VALUE = 1
_OUT_OF_MEMORY = 2
_NOT_INITIALIZED = 3
_NO_DEVICE = 100
_WRONG = frozenset({INVALID_VALUE, 101})  # an argument, a device's number
_BROKEN = frozenset({700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 720})  # a kernel crashed: the context is lost
_MISMATCH = frozenset({803, 804})
NOT_READY = 600  # an event whose work is under way
_IN_STREAM_ORDER = 1  # when a copy reads its source


class IpcHandle(ctypes.Structure):  # by value: an array would be passed as a pointer
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
    "cuIpcOpenMemHandle_v2": (_Out, IpcHandle, c_uint),
    "cuIpcCloseMemHandle": (c_uint64,),
}
# Many copies with one call, the newest form first: CUDA 13 has it without, CUDA 12.8 with the place of a failure.
_BATCH_ARGUMENTS = (_Out, _Out, _Out, c_size_t, _Out, _Out, c_size_t)
_BATCH_COPIES: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("cuMemcpyBatchAsync_v2", (*_BATCH_ARGUMENTS, c_uint64)),
    ("cuMemcpyBatchAsync", (*_BATCH_ARGUMENTS, _Out, c_uint64)),
)


class CudaLibrary:
    """The loaded library. Unavailable, saying what is missing, when there is none or it is too old. Thread-safe."""

    def __init__(self) -> None:
        try:
            library = ctypes.CDLL(_LIBRARY)
        except OSError as error:
            raise Unavailable(f"there is no NVIDIA driver here ({error}); {DRIVER_HINT}") from error
        self._functions = {name: _bind(library, name, types) for name, types in _FUNCTIONS.items()}
        self._batch_copy = next((each for each in _BATCH_COPIES if hasattr(library, each[0])), None)
        if self._batch_copy is not None:
            self._functions[self._batch_copy[0]] = _bind(library, *self._batch_copy)

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function of the driver; its error becomes ours (cuda_error)."""
        result = self._functions[name](*arguments)
        if result:
            self._fail(name, result)

    def call_unless(self, code: int, name: str, *arguments: Any) -> bool:
        """As call(), except that `code` is no error. Return whether the call succeeded without it."""
        result = self._functions[name](*arguments)
        if result not in (0, code):
            self._fail(name, result)
        return bool(result == 0)

    def copy_batch(self, targets: _Array, sources: _Array, sizes: _Array, stream: int) -> None:
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

    def _fail(self, name: str, result: int) -> NoReturn:
        raise cuda_error(
            name, result, f"{self._text('cuGetErrorName', result)}, {self._text('cuGetErrorString', result)}"
        )

    def _text(self, function: str, result: int) -> str:
        text = c_char_p()
        self._functions[function](result, byref(text))
        return (text.value or b"unknown").decode()


def cuda_error(function: str, result: int, text: str) -> MoonpoolError:
    """Return our error for a code of the driver."""
    says = f"CUDA: {text} ({function}, code {result})"
    if result == _OUT_OF_MEMORY:
        return NoSpace(f"{says}; the GPU has not that much memory left")
    if result in _WRONG:
        return InvalidInput(says)
    if result == _NOT_INITIALIZED:
        return Unavailable(f"{says}; a process that was forked after CUDA was used cannot use it: start a new process")
    if result == _NO_DEVICE:
        return Unavailable(f"{says}; {DRIVER_HINT}, and look at CUDA_VISIBLE_DEVICES")
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
