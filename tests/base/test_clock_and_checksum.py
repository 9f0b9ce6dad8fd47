"""Deadlines on a virtual clock; checksums over any buffer."""

from __future__ import annotations

import pytest

from moonpool.base.checksum import ChecksumKind, compute, crc32c, verify
from moonpool.base.clock import Deadline, VirtualClock
from moonpool.base.errors import Corrupt


def test_deadline() -> None:
    clock = VirtualClock(100.0)
    deadline = Deadline(2.0, clock)
    clock.advance(1.5)
    assert deadline.remaining_s() == 0.5
    assert not deadline.expired()
    clock.advance(1.0)
    assert deadline.remaining_s() == 0.0
    assert deadline.expired()


def test_crc32c_of_any_buffer() -> None:
    data = b"123456789"
    assert crc32c(data) == crc32c(bytearray(data)) == crc32c(memoryview(data)) == 0xE3069283
    assert crc32c(data[4:], crc32c(data[:4])) == 0xE3069283
    assert crc32c(b"") == 0


def test_verify() -> None:
    verify(ChecksumKind.CRC32C, b"abc", compute(ChecksumKind.CRC32C, b"abc"), "piece 0")
    verify(ChecksumKind.NONE, b"abc", 12345, "piece 0")
    with pytest.raises(Corrupt, match="piece 3"):
        verify(ChecksumKind.CRC32C, b"abd", crc32c(b"abc"), "piece 3")
