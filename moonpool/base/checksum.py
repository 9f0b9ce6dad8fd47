"""Checksums over any buffer, without copying it. The kind is recorded beside each value."""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import google_crc32c
import numpy as np

from moonpool.base.errors import Corrupt


class ChecksumKind(IntEnum):
    NONE = 0
    CRC32C = 1


def crc32c(buffer: Any, initial: int = 0) -> int:
    """CRC-32C (Castagnoli) of a contiguous buffer; `initial` continues an earlier value."""
    if type(buffer) is bytes:
        return int(google_crc32c.extend(initial, buffer))
    # The C library takes bytes and arrays but no memoryview; an array over the same memory costs about 1 us.
    return int(google_crc32c.extend(initial, np.frombuffer(buffer, dtype=np.uint8)))


def compute(kind: ChecksumKind, buffer: Any) -> int:
    return crc32c(buffer) if kind is ChecksumKind.CRC32C else 0


def verify(kind: ChecksumKind, buffer: Any, expected: int, what: str) -> None:
    """Raises Corrupt, naming `what`, when the buffer is not what was written."""
    if kind is not ChecksumKind.NONE and crc32c(buffer) != expected:
        raise Corrupt(f"checksum of {what} does not match")
