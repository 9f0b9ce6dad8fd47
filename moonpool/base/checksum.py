"""Checksums over any buffer, without copying it. The kind is recorded beside each value."""

from __future__ import annotations

import ctypes
from enum import IntEnum
from functools import cache
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from moonpool.base.errors import Corrupt


class ChecksumKind(IntEnum):
    NONE = 0
    CRC32C = 1


def crc32c(buffer: Any, initial: int = 0) -> int:
    """CRC-32C (Castagnoli) of a contiguous buffer; `initial` continues an earlier value."""
    if type(buffer) is bytes:
        return int(google_crc32c.extend(initial, buffer))
    # The C library takes bytes and arrays but no memoryview; an array over the same memory costs about 1 us.
    return crc32c_of_array(np.frombuffer(buffer, dtype=np.uint8), initial)


_LARGE_NBYTES = 64 * 1024  # from here on it matters that other threads can run
_CHECK_INPUT, _CHECK_VALUE = b"123456789", 0xE3069283


@cache
def _library_function() -> Any:
    """crc32c_extend of the C library that google_crc32c brings, None where it cannot be found: called by way of ctypes
    it lets other threads run, which google_crc32c itself does not.
    """
    folder = Path(google_crc32c.__file__).parent.parent / "google_crc32c.libs"
    for name in (*map(str, sorted(folder.glob("libcrc32c*.so*"))), "libcrc32c.so.1"):
        try:
            function = ctypes.CDLL(name).crc32c_extend
        except (OSError, AttributeError):
            continue
        function.argtypes, function.restype = (ctypes.c_uint32, ctypes.c_void_p, ctypes.c_size_t), ctypes.c_uint32
        if function(0, _CHECK_INPUT, len(_CHECK_INPUT)) == _CHECK_VALUE:
            return function
    return None


def runs_beside_others() -> bool:
    """Whether threads gain from taking checksums of large arrays at the same time."""
    return _library_function() is not None


def crc32c_of_array(array: NDArray[np.uint8], initial: int = 0) -> int:
    """As crc32c, of a contiguous array; other threads run while a large one is looked through, where that can be."""
    function = _library_function() if array.nbytes >= _LARGE_NBYTES else None
    if function is None:
        return int(google_crc32c.extend(initial, array))
    return int(function(initial, array.ctypes.data, array.nbytes))


def compute(kind: ChecksumKind, buffer: Any) -> int:
    return crc32c(buffer) if kind is ChecksumKind.CRC32C else 0


def verify(kind: ChecksumKind, buffer: Any, expected: int, what: str) -> None:
    """Raises Corrupt, naming `what`, when the buffer is not what was written."""
    if kind is not ChecksumKind.NONE and crc32c(buffer) != expected:
        raise Corrupt(f"checksum of {what} does not match")
