"""Memory of the caller, seen as plain bytes: anything with the buffer protocol, tensors and raw pointers; contiguous,
never copied.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

import numpy as np

from moonpool.base.errors import InvalidInput
from moonpool.transfer.memory.foreign import DeviceSpan, RawMemory, device_span, host_view

if TYPE_CHECKING:
    import typing_extensions

    class Tensor(Protocol):
        """A torch tensor, as far as we know it."""

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
_SMALL_COPY_NBYTES = 16 * 1024  # over in about 1 us, sooner than another thread could make use of the time


def as_bytes_view(buffer: Buffer, writable: bool) -> memoryview:
    """The buffer's memory as a flat memoryview of format "B"; the view borrows and keeps the buffer alive.

    InvalidInput when it is no buffer, not C-contiguous, on a GPU, or read-only although `writable` is asked for.
    """
    try:
        view = memoryview(buffer)  # type: ignore[arg-type]  # see Buffer
    except TypeError as error:
        foreign = host_view(buffer, writable)
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
    """as_bytes_view of each, in order, empty ones left out."""
    views = [as_bytes_view(buffer, writable) for buffer in buffers]
    return [view for view in views if view.nbytes]


def as_memory(buffer: Buffer, writable: bool) -> Memory:
    """Main memory as a view, GPU memory as a span; InvalidInput as as_bytes_view()."""
    span = None if isinstance(buffer, _PLAIN) else device_span(buffer)
    if span is None:
        return as_bytes_view(buffer, writable)
    if writable and span.readonly:
        raise InvalidInput("the device array is read-only and cannot be read into")
    return span


def aligned_buffer(nbytes: int, alignment: int = 4096) -> memoryview:
    """Zeroed, writable memory whose address is a multiple of `alignment`: what disks read and write without a copy.

    In huge pages where it is large enough for them (a third faster to read into). A forked child does not have it:
    on older kernels a fork in the middle of a direct read can leave the bytes in the other process.
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
    """Where in memory a non-empty view of bytes begins."""
    if view.readonly:
        address: int = np.frombuffer(view, dtype=np.uint8).__array_interface__["data"][0]
        return address
    return ctypes.addressof(ctypes.c_char.from_buffer(view))  # ten times faster, but wants to be able to write


def copy_bytes(target: memoryview, source: memoryview) -> None:
    """Copies between views of bytes of one size. Large copies let other threads run, slice assignment does not."""
    if source.nbytes <= _SMALL_COPY_NBYTES:
        target[:] = source
        return
    np.frombuffer(target, np.uint8)[...] = np.frombuffer(source, np.uint8)  # keywords and copyto() take longer


def total_nbytes(views: Sequence[memoryview]) -> int:
    if len(views) == 1:  # mostly
        return views[0].nbytes
    return sum(view.nbytes for view in views)


def cut(memories: Sequence[M], start: int, nbytes: int) -> list[M]:
    """The parts that hold bytes start .. start + nbytes of their concatenation."""
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
