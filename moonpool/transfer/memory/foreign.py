"""Memory that does not speak the buffer protocol: raw pointers, torch tensors, arrays of other libraries, GPU memory.

Nothing is imported to know it: a tensor is whatever has data_ptr(), nbytes, is_contiguous() and device (so bfloat16 and
the 8-bit floats work, which numpy has no name for); others say where they lie by `__array_interface__`, DLPack or
`__cuda_array_interface__`. Whatever is handed out keeps its owner alive.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from moonpool.base.errors import InvalidInput
from moonpool.transfer.memory.location import parse_location

_DLPACK_CPU = 1


@dataclass(frozen=True)
class RawMemory:
    """A pointer, taken at its word: `nbytes` writable bytes from `address` on must stay there as long as `owner`, or
    the caller, keeps them. In main memory or, by `location`, on a GPU.
    """

    address: int
    nbytes: int
    location: str = "cpu"
    owner: object | None = None

    def __post_init__(self) -> None:
        if self.address <= 0 or self.nbytes <= 0:
            raise InvalidInput(f"{self.nbytes} bytes at address {self.address:#x} are no memory")
        if parse_location(self.location).kind == "ssd":
            raise InvalidInput(f"a pointer leads to memory, not to {self.location}")


@dataclass(frozen=True)
class DeviceSpan:
    """Contiguous memory of a GPU. Can be cut like a memoryview."""

    address: int
    nbytes: int
    readonly: bool = False
    owner: object | None = None

    def __getitem__(self, part: slice) -> DeviceSpan:
        start, stop, step = part.indices(self.nbytes)
        assert step == 1, "only contiguous parts"
        return DeviceSpan(self.address + start, max(0, stop - start), self.readonly, self.owner)


class _Exposed:
    """What numpy takes for an array; it holds on to it, and so to the owner."""

    def __init__(self, address: int, nbytes: int, owner: object) -> None:
        self.owner = owner
        self.__array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3}


def host_view(memory: Any, writable: bool) -> memoryview | None:
    """The bytes of main memory that is no buffer; None when this is no memory at all. InvalidInput when it cannot be
    used: on a GPU, not contiguous, read-only although `writable` is asked for.
    """
    if isinstance(memory, RawMemory):
        if parse_location(memory.location).kind != "cpu":
            raise _on_device(memory.location)
        return _expose(memory.address, memory.nbytes, memory)
    if _is_tensor(memory):
        _check_tensor(memory)
        if memory.device.type != "cpu":
            raise _on_device(str(memory.device))
        return _expose(memory.data_ptr(), memory.nbytes, memory)
    if _cuda_interface(memory) is not None:
        raise _on_device("a GPU")
    array = _as_array(memory)
    return None if array is None else _array_view(array, writable)


def device_span(memory: Any) -> DeviceSpan | None:
    """GPU memory as a span; None when it lies elsewhere. InvalidInput when it is not contiguous."""
    if isinstance(memory, DeviceSpan):
        return memory
    if isinstance(memory, RawMemory):
        on_device = parse_location(memory.location).kind == "cuda"
        return DeviceSpan(memory.address, memory.nbytes, owner=memory) if on_device else None
    if _is_tensor(memory):
        if memory.device.type != "cuda":
            return None
        _check_tensor(memory)
        return DeviceSpan(memory.data_ptr(), memory.nbytes, owner=memory)
    interface = _cuda_interface(memory)
    return None if interface is None else _interface_span(interface, memory)


def _expose(address: int, nbytes: int, owner: object) -> memoryview:
    if nbytes == 0:
        return memoryview(bytearray())
    return np.asarray(_Exposed(address, nbytes, owner)).data


def _is_tensor(memory: Any) -> bool:
    return hasattr(memory, "data_ptr") and hasattr(memory, "is_contiguous") and hasattr(memory, "device")


def _check_tensor(tensor: Any) -> None:
    if tensor.device.type not in ("cpu", "cuda"):
        raise InvalidInput(f"a tensor on {tensor.device} has no memory that could be reached")
    if not tensor.is_contiguous():
        raise InvalidInput("the tensor is not contiguous; use .contiguous()")
    if tensor.is_conj() or tensor.is_neg():
        raise InvalidInput("the tensor's bytes are not its values; use .resolve_conj() and .resolve_neg()")


def _as_array(memory: Any) -> np.ndarray[Any, Any] | None:
    if hasattr(memory, "__array_interface__"):
        return np.asarray(memory)
    if not hasattr(memory, "__dlpack__"):
        return None
    if memory.__dlpack_device__()[0] != _DLPACK_CPU:
        raise _on_device("another device")
    try:
        return np.from_dlpack(memory)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise InvalidInput(f"{type(memory).__name__} does not offer its memory: {error}") from error


def _array_view(array: np.ndarray[Any, Any], writable: bool) -> memoryview:
    if not array.flags.c_contiguous:
        raise InvalidInput("the buffer is not C-contiguous")
    if writable and not array.flags.writeable:
        raise InvalidInput("the buffer is read-only and cannot be read into")
    return array.reshape(-1).view(np.uint8).data if array.nbytes else memoryview(bytearray())


def _cuda_interface(memory: Any) -> dict[str, Any] | None:
    found: dict[str, Any] | None = getattr(memory, "__cuda_array_interface__", None)
    return found


def _interface_span(interface: dict[str, Any], owner: object) -> DeviceSpan:
    itemsize, shape = np.dtype(interface["typestr"]).itemsize, tuple(interface["shape"])
    expected = tuple(itemsize * math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
    if interface.get("strides") not in (None, expected):
        raise InvalidInput("the device array is not C-contiguous")
    address, readonly = interface["data"]
    return DeviceSpan(address or 0, itemsize * math.prod(shape), bool(readonly), owner)


def _on_device(where: str) -> InvalidInput:
    return InvalidInput(f"this memory lies on {where}; here it takes main memory (a copy on the CPU)")
