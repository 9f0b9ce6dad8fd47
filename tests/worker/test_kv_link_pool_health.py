"""A pool that hangs is asked once per rest; one that fails at once may be asked again at once."""

from __future__ import annotations

from moonpool.base.clock import VirtualClock
from moonpool.base.errors import Corrupt, DeadlineExceeded, PeerLost
from moonpool.worker.kv_link.pool import PoolHealth


def test_only_a_missed_deadline_makes_it_rest() -> None:
    clock = VirtualClock()
    health = PoolHealth(5.0, clock)
    for error in (None, PeerLost("gone"), Corrupt("bits")):
        health.record_error(error)
        assert not health.is_resting
    health.record_error(DeadlineExceeded("silence"))
    assert health.is_resting
    health.record_error(PeerLost("gone"))
    clock.advance(4.9)
    assert health.is_resting
    clock.advance(0.2)
    assert not health.is_resting
