"""Columns by slot: memory that is there from the start and costs nothing until it is touched.

A growing array is copied now and then, which at ten million objects is felt as a pause. These are anonymous mappings
of their final size, of which the kernel gives out one page at a time. `cells` reads and writes single values fast,
`array` is the same memory for numpy.
"""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np
from numpy.typing import NDArray

_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # Python 3.11 and 3.12 do not name it
_FLAGS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE


class Column:
    """`length` values of one type ("B", "H", "I", "Q" or "d" as in struct), all zero at first."""

    __slots__ = ("array", "cells")

    def __init__(self, code: str, length: int) -> None:
        dtype = np.dtype(code)
        memory = mmap.mmap(-1, length * dtype.itemsize, flags=_FLAGS)
        self.cells: memoryview[Any] = memoryview(memory).cast("B").cast(code)  # type: ignore[call-overload]
        self.array: NDArray[Any] = np.frombuffer(memory, dtype=dtype)
