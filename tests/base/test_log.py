"""Warnings that repeat: one line per key and interval, and a bounded number of keys."""

from __future__ import annotations

import logging
import math

import pytest

from moonpool.base.clock import VirtualClock
from moonpool.base.log import RateLimitedLog

LOG = logging.getLogger("moonpool.test")


def logged_at(
    log: RateLimitedLog, clock: VirtualClock, caplog: pytest.LogCaptureFixture, key: str, at_s: float
) -> bool:
    """Whether a warning with this key, at this time, reaches the log."""
    clock.advance(at_s - clock.now_s())
    before = len(caplog.records)
    log.warning("%s was refused", key, key=key)
    return len(caplog.records) > before


def test_a_key_is_logged_once_per_interval(caplog: pytest.LogCaptureFixture) -> None:
    clock = VirtualClock()
    log = RateLimitedLog(LOG, interval_s=60, max_keys=3, clock=clock)
    times_s = (0, 1, 59.9, 60, 61, 130)
    assert [logged_at(log, clock, caplog, "a", at_s) for at_s in times_s] == [True, False, False, True, False, True]
    assert [logged_at(log, clock, caplog, key, 131) for key in "bcde"] == [True, True, False, False]
    assert logged_at(log, clock, caplog, "e", 200)
    assert caplog.records[0].getMessage() == "a was refused (logged at most once per 60 s)"


def test_without_an_interval_a_key_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    clock = VirtualClock()
    log = RateLimitedLog(LOG, interval_s=math.inf, clock=clock)
    assert [logged_at(log, clock, caplog, "a", at_s) for at_s in (0, 1, 1e9)] == [True, False, False]
    assert caplog.records[0].getMessage() == "a was refused"


def test_the_log_is_bounded(caplog: pytest.LogCaptureFixture) -> None:
    log = RateLimitedLog(LOG, interval_s=math.inf)
    for number in range(1000):
        log.warning("port %d", number, key=str(number))
    assert len(caplog.records) == 64


def test_the_text_is_the_default_key(caplog: pytest.LogCaptureFixture) -> None:
    log = RateLimitedLog(LOG)
    for error in ("disk full", "disk gone"):
        log.warning("not written: %s", error)
    log.warning("not read")
    assert [record.getMessage()[:12] for record in caplog.records] == ["not written:", "not read (lo"]
