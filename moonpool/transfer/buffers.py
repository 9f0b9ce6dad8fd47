"""Memory of the caller, seen as plain bytes: anything with the buffer protocol, contiguous, never copied."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from moonpool.base.errors import InvalidInput

if TYPE_CHECKING:
    import typing_extensions

    # numpy declares its buffers to type checkers from Python 3.12 on only.
    Buffer: TypeAlias = typing_extensions.Buffer | np.ndarray[Any, Any]
else:
    Buffer = object

_EMPTY = bytearray()


def as_bytes_view(buffer: Buffer, writable: bool) -> memoryview:
    """The buffer's memory as a flat memoryview of format "B"; the view borrows and keeps the buffer alive.

    InvalidInput when it is no buffer, not C-contiguous, or read-only although `writable` is asked for.
    """
    try:
        view = memoryview(buffer)  # type: ignore[arg-type]  # see Buffer
    except TypeError as error:
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


def total_nbytes(views: Sequence[memoryview]) -> int:
    return sum(view.nbytes for view in views)


def cut(views: Sequence[memoryview], start: int, nbytes: int) -> list[memoryview]:
    """The parts of the views that hold bytes start .. start + nbytes of their concatenation."""
    parts: list[memoryview] = []
    at = 0
    for view in views:
        low, high = max(start - at, 0), min(start + nbytes - at, view.nbytes)
        if low < high:
            parts.append(view[low:high])
        at += view.nbytes
        if at >= start + nbytes:
            break
    return parts
