"""Checksums over any buffer, without copying it. The kind is recorded beside each value."""

from __future__ import annotations

from enum import IntEnum
from typing import Any

from fastcrc import crc32

from moonpool.base.errors import Corrupt


class ChecksumKind(IntEnum):
    NONE = 0
    CRC32C = 1


# crc32c(buffer, initial=0): CRC-32C (Castagnoli) of a contiguous buffer; `initial` continues an earlier value. Other
# threads run while it looks through a large one. The function itself, because a call around it takes as long as it
# takes for a small buffer.
crc32c = crc32.iscsi


def compute(kind: ChecksumKind, buffer: Any) -> int:
    return crc32c(buffer) if kind is ChecksumKind.CRC32C else 0


def verify(kind: ChecksumKind, buffer: Any, expected: int, what: str) -> None:
    """Raises Corrupt, naming `what`, when the buffer is not what was written."""
    if kind is not ChecksumKind.NONE and crc32c(buffer) != expected:
        raise Corrupt(f"checksum of {what} does not match")
