"""Deadlines on a virtual clock; checksums over any buffer."""

from __future__ import annotations

import time
from typing import cast

import google_crc32c
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typing_extensions import Buffer
from waiting import HANG_S

from moonpool.base.checksum import ChecksumKind, compute, crc32c, verify
from moonpool.base.clock import AttendedClock, Deadline, ThreadClock, VirtualClock, late_s
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


def test_an_attended_clock_does_not_count_a_standstill() -> None:
    real = VirtualClock(1000.0)
    clock = AttendedClock(0.5, real)
    real.advance(0.4)
    assert clock.now_s() == pytest.approx(1000.4)
    real.advance(12.0)  # stopped
    assert clock.now_s() == pytest.approx(1000.9)
    assert clock.stood_still_s == pytest.approx(11.5)
    real.advance(0.2)
    assert clock.now_s() == pytest.approx(1001.1), "and then it goes on as before"


@given(st.lists(st.floats(0.0, 100.0), max_size=50), st.floats(0.001, 10.0))
def test_an_attended_clock_never_runs_back_nor_further_than_a_step(waits_s: list[float], step_s: float) -> None:
    real = VirtualClock()
    clock = AttendedClock(step_s, real)
    before_s = clock.now_s()
    for wait_s in waits_s:
        real.advance(wait_s)
        now_s = clock.now_s()
        assert before_s <= now_s + 1e-9
        assert now_s - before_s == pytest.approx(min(wait_s, step_s), abs=1e-9)
        before_s = now_s


def test_a_look_before_its_time_is_not_late() -> None:
    assert (late_s(5.0, 4.0), late_s(5.0, 5.0), late_s(5.0, 7.5)) == (0.0, 0.0, 2.5)


def test_crc32c_of_any_buffer() -> None:
    data = b"123456789"
    assert crc32c(data) == crc32c(bytearray(data)) == crc32c(memoryview(data)) == 0xE3069283
    assert crc32c(data[4:], crc32c(data[:4])) == 0xE3069283
    assert crc32c(b"") == 0


@pytest.mark.parametrize("nbytes", [0, 1, 65_535, 65_536, 1_000_001])
def test_large_arrays_are_checked_as_small_ones_are(nbytes: int) -> None:
    data = np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8)
    whole = google_crc32c.value(data.tobytes())
    assert crc32c(cast(Buffer, data)) == crc32c(data.data) == crc32c(data.tobytes()) == whole
    half = nbytes // 2
    assert crc32c(data[half:].data, crc32c(data[:half].data)) == whole
    data.flags.writeable = False
    assert crc32c(cast(Buffer, data)) == whole


def test_verify() -> None:
    verify(ChecksumKind.CRC32C, b"abc", compute(ChecksumKind.CRC32C, b"abc"), "piece 0")
    verify(ChecksumKind.NONE, b"abc", 12345, "piece 0")
    with pytest.raises(Corrupt, match="piece 3"):
        verify(ChecksumKind.CRC32C, b"abd", crc32c(b"abc"), "piece 3")


def test_a_threads_clock_stands_while_the_thread_waits() -> None:
    clock = ThreadClock()
    before_s = clock.now_s()
    time.sleep(0.3)
    assert clock.now_s() - before_s < 0.2
    since_s = time.monotonic()
    while clock.now_s() - before_s < 0.3:  # and goes on while it computes
        assert time.monotonic() < since_s + HANG_S
