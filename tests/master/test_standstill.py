"""A master that stood still forgets nothing: what it did not hear while it could not listen is nobody's silence."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from store_pool import LocalPool, ProcessPool

from moonpool.base.clock import AttendedClock, VirtualClock
from moonpool.master.service import Master, MasterConfig
from moonpool.store import Store

KEYS = [b"key-%d" % number for number in range(200)]
SEGMENT_TTL_S = 4.0


def put_all(client: Store) -> None:
    for key in KEYS:
        assert client.put(key, key * 100)


def assert_all_there(client: Store) -> None:
    assert client.stats().num_objects == len(KEYS)
    assert client.exist_many(KEYS) == [True] * len(KEYS)
    assert client.get_many(KEYS) == [key * 100 for key in KEYS]


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[LocalPool]:
    """Its master notices when it was not scheduled. Its node is silent for as long as the test wants."""
    pool = LocalPool(tmp_path, 4 * 1024 * 1024, as_seen=lambda clock: AttendedClock(0.25, clock), segment_ttl_s=10.0)
    yield pool
    pool.close()


def test_a_master_that_stood_still_for_hours_still_knows_all_objects(pool: LocalPool) -> None:
    client = pool.client()
    put_all(client)
    before_s = pool.master.clock.now_s()
    pool.advance(7200.0)
    assert pool.master.clock.now_s() <= before_s + 0.25
    assert_all_there(client)


@pytest.mark.soak
def test_a_master_that_was_stopped_still_knows_all_objects(tmp_path: Path) -> None:
    """A process, stopped for more than twice the time after which a silent node is gone. Noise: a node that the host
    holds up for that time, 4 s, is gone, too.
    """
    with ExitStack() as stack:
        pool = ProcessPool(tmp_path, stack)
        master = pool.start_master(segment_ttl_s=SEGMENT_TTL_S)
        pool.start_node()
        client = pool.client()
        put_all(client)
        os.kill(master.process.pid, signal.SIGSTOP)
        time.sleep(2.5 * SEGMENT_TTL_S)  # the fault itself: so long the master does nothing
        os.kill(master.process.pid, signal.SIGCONT)
        time.sleep(1.0)  # many ticks have had their say
        assert_all_there(client)


async def test_a_late_tick_takes_no_segment_and_no_announcement(tmp_path: Path) -> None:
    """The master's own clock, on a virtual one: hours in one step cost no promise its time."""
    real = VirtualClock(50.0)
    clock = AttendedClock(0.25, real)
    config = MasterConfig(data_dir=str(tmp_path), listen=f"unix:{tmp_path}/m.sock", segment_ttl_s=10.0)
    master = Master(config, clock)
    assert isinstance(Master(config).clock, AttendedClock), "the clock that a master takes by itself"
    await master.start()
    try:
        before_s = clock.now_s()
        real.advance(7200.0)
        assert clock.now_s() <= before_s + 0.25
    finally:
        await master.close()
