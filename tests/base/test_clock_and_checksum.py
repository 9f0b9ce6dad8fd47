"""Deadlines on a virtual clock; checksums over any buffer."""

from __future__ import annotations

from pathlib import Path

import google_crc32c
import numpy as np
import pytest

from moonpool.base.checksum import ChecksumKind, compute, crc32c, crc32c_of_array, runs_beside_others, verify
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


@pytest.mark.parametrize("nbytes", [0, 1, 65_535, 65_536, 1_000_001])
def test_large_arrays_are_checked_as_small_ones_are(nbytes: int) -> None:
    data = np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8)
    whole = google_crc32c.value(data.tobytes())
    assert crc32c_of_array(data) == crc32c(data.data) == crc32c(data.tobytes()) == whole
    half = nbytes // 2
    assert crc32c_of_array(data[half:], crc32c_of_array(data[:half])) == whole
    data.flags.writeable = False
    assert crc32c_of_array(data) == whole


def test_the_library_is_found_where_wheels_bring_it() -> None:
    folder = Path(google_crc32c.__file__).parent.parent / "google_crc32c.libs"
    assert runs_beside_others() or not folder.is_dir()


def test_verify() -> None:
    verify(ChecksumKind.CRC32C, b"abc", compute(ChecksumKind.CRC32C, b"abc"), "piece 0")
    verify(ChecksumKind.NONE, b"abc", 12345, "piece 0")
    with pytest.raises(Corrupt, match="piece 3"):
        verify(ChecksumKind.CRC32C, b"abd", crc32c(b"abc"), "piece 3")
