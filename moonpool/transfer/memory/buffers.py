"""Memory of the caller, seen as plain bytes: anything with the buffer protocol, tensors, raw pointers and GPU memory.

The memory must be contiguous. Nothing is copied, and everything returned here keeps the owner of its memory alive.

No library is imported to recognize its memory: a tensor is an object with data_ptr(), nbytes, is_contiguous() and
device (so bfloat16 and the 8-bit floats work, which numpy has no name for). Other objects state their address by
`__array_interface__`, DLPack or `__cuda_array_interface__`.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

import numpy as np

from moonpool.base.errors import InvalidInput
from moonpool.transfer.memory.location import parse_location


@dataclass(frozen=True)
class RawMemory:
    """A pointer to `nbytes` writable bytes, in main memory or, by `location`, on a GPU. It is not checked: the bytes
    must stay there as long as `owner`, or the caller, keeps them.
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
    """Contiguous memory of a GPU. Slicing gives a DeviceSpan, as with a memoryview."""

    address: int
    nbytes: int
    readonly: bool = False
    owner: object | None = None

    def __getitem__(self, part: slice) -> DeviceSpan:
        start, stop, step = part.indices(self.nbytes)
        assert step == 1, "only contiguous parts"
        return DeviceSpan(self.address + start, max(0, stop - start), self.readonly, self.owner)


if TYPE_CHECKING:
    import typing_extensions

    class Tensor(Protocol):
        """The part of a torch tensor that is used here."""

        def data_ptr(self) -> int: ...
        def is_contiguous(self) -> bool: ...

    class DeviceArray(Protocol):
        """GPU memory; only the cuda transport takes it."""

        @property
        def __cuda_array_interface__(self) -> dict[str, Any]: ...

    # numpy declares its buffers to type checkers from Python 3.12 on only.
    Buffer: TypeAlias = typing_extensions.Buffer | np.ndarray[Any, Any] | RawMemory | DeviceSpan | Tensor | DeviceArray
else:
    Buffer = object

Memory: TypeAlias = memoryview | DeviceSpan  # a DeviceSpan is for transports that reach GPUs; others refuse it
M = TypeVar("M", bound=Memory)
_PLAIN = (memoryview, bytearray, bytes, np.ndarray)
_EMPTY = bytearray()
_HUGE_PAGE_NBYTES = 2 * 1024 * 1024
_SMALL_COPY_NBYTES = 16 * 1024  # takes about 1 us, too short for another thread to use the time
_DLPACK_CPU = 1


def as_bytes_view(buffer: Buffer, writable: bool) -> memoryview:
    """Return the buffer's memory as a flat memoryview of format "B"; the view keeps the buffer alive.

    InvalidInput when it is no buffer, not C-contiguous, on a GPU, or read-only although `writable` is asked for.
    """
    try:
        view = memoryview(buffer)  # type: ignore[arg-type]  # see Buffer
    except TypeError as error:
        foreign = _host_view(buffer, writable)
        if foreign is not None:
            return foreign
        raise InvalidInput(f"{type(buffer).__name__} does not offer its memory (buffer protocol)") from error
    if not view.c_contiguous:
        raise InvalidInput("the buffer is not C-contiguous")
    if writable and view.readonly:
        raise InvalidInput("the buffer is read-only and cannot be read into")
    if view.format == "B" and view.ndim == 1:
        return view
    if view.nbytes == 0:
        return memoryview(_EMPTY)
    # memoryview.cast() refuses some element formats (half floats, records); an array over the bytes takes all.
    return np.frombuffer(view, dtype=np.uint8).data


def as_bytes_views(buffers: Sequence[Buffer], writable: bool) -> list[memoryview]:
    """Return as_bytes_view() of each buffer that is not empty, in order."""
    views = [as_bytes_view(buffer, writable) for buffer in buffers]
    return [view for view in views if view.nbytes]


def as_memory(buffer: Buffer, writable: bool) -> Memory:
    """Return main memory as a view, GPU memory as a span; InvalidInput as as_bytes_view()."""
    span = None if isinstance(buffer, _PLAIN) else device_span(buffer)
    if span is None:
        return as_bytes_view(buffer, writable)
    if writable and span.readonly:
        raise InvalidInput("the device array is read-only and cannot be read into")
    return span


def device_span(memory: Any) -> DeviceSpan | None:
    """Return GPU memory as a span; None when the memory is not on a GPU. InvalidInput when it is not contiguous."""
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


def aligned_buffer(nbytes: int, alignment: int = 4096) -> memoryview:
    """Return zeroed, writable memory whose address is a multiple of `alignment`: disks read and write it directly.

    Memory that is large enough is in huge pages (a third faster to read into). A forked child does not have it: on
    older kernels a fork in the middle of a direct read can leave the bytes in the other process.
    """
    if nbytes < 0 or alignment <= 0 or alignment & (alignment - 1):
        raise InvalidInput(f"no buffer of {nbytes} bytes can be aligned to {alignment}; it takes a power of two")
    if nbytes == 0:
        return memoryview(_EMPTY)
    if nbytes >= _HUGE_PAGE_NBYTES // 2:
        alignment = max(alignment, _HUGE_PAGE_NBYTES)
    # Mappings begin on a page; huge pages are whole.
    mapped_nbytes = -(-nbytes // alignment) * alignment + max(0, alignment - mmap.PAGESIZE)
    mapping = mmap.mmap(-1, mapped_nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapping.madvise(mmap.MADV_DONTFORK)
    if alignment >= _HUGE_PAGE_NBYTES:
        with contextlib.suppress(OSError):  # a kernel without huge pages
            mapping.madvise(mmap.MADV_HUGEPAGE)
    whole = memoryview(mapping)
    start = -address_of(whole) % alignment
    return whole[start : start + nbytes]


def address_of(view: memoryview) -> int:
    """Return the address of the first byte of a view that is not empty."""
    if view.readonly:
        address: int = np.frombuffer(view, dtype=np.uint8).__array_interface__["data"][0]
        return address
    return ctypes.addressof(ctypes.c_char.from_buffer(view))  # ten times faster, but only for writable memory


def copy_bytes(target: memoryview, source: memoryview) -> None:
    """Copy between views of bytes of one size. Large copies let other threads run, slice assignment does not."""
    if source.nbytes <= _SMALL_COPY_NBYTES:
        target[:] = source
        return
    np.frombuffer(target, np.uint8)[...] = np.frombuffer(source, np.uint8)  # keywords and copyto() take longer


def total_nbytes(memories: Sequence[Memory]) -> int:
    if len(memories) == 1:  # mostly
        return memories[0].nbytes
    return sum(memory.nbytes for memory in memories)


def cut(memories: Sequence[M], start: int, nbytes: int) -> list[M]:
    """Return the parts that hold bytes start .. start + nbytes of the memories' concatenation."""
    parts: list[M] = []
    at = 0
    for memory in memories:
        low, high = max(start - at, 0), min(start + nbytes - at, memory.nbytes)
        if low < high:
            parts.append(memory[low:high])  # type: ignore[arg-type]  # a part is of the same kind
        at += memory.nbytes
        if at >= start + nbytes:
            break
    return parts


# -- memory without the buffer protocol --------------------------------------------------------------------------


class _ArrayInterface:
    """An address in the form that numpy takes for an array. The array keeps this object alive, and so the owner."""

    def __init__(self, address: int, nbytes: int, owner: object) -> None:
        self.owner = owner
        self.__array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3}


def _host_view(memory: Any, writable: bool) -> memoryview | None:
    """Return the bytes of main memory that is no buffer; None when the object has no memory that is known here.
    InvalidInput when it cannot be used: on a GPU, not contiguous, read-only although `writable` is asked for.
    """
    if isinstance(memory, RawMemory):
        if parse_location(memory.location).kind != "cpu":
            raise _on_device(memory.location)
        return _view_at(memory.address, memory.nbytes, memory)
    if _is_tensor(memory):
        _check_tensor(memory)
        if memory.device.type != "cpu":
            raise _on_device(str(memory.device))
        return _view_at(memory.data_ptr(), memory.nbytes, memory)
    if _cuda_interface(memory) is not None:
        raise _on_device("a GPU")
    array = _as_array(memory)
    return None if array is None else _array_view(array, writable)


def _view_at(address: int, nbytes: int, owner: object) -> memoryview:
    if nbytes == 0:
        return memoryview(_EMPTY)
    return np.asarray(_ArrayInterface(address, nbytes, owner)).data


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
    return array.reshape(-1).view(np.uint8).data if array.nbytes else memoryview(_EMPTY)


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
    return InvalidInput(f"this memory lies on {where}; this transport takes main memory only (copy it to the CPU)")
