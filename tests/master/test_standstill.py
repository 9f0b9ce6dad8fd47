"""A master that stood still forgets nothing: what it did not hear while it could not listen is nobody's silence."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from store_pool import MIB, RoleProcess, wait_until

from moonpool.base.clock import AttendedClock, VirtualClock
from moonpool.master.service import Master, MasterConfig
from moonpool.store import Store
from moonpool.store.client import ClientConfig
from moonpool.transfer.config import TransferConfig
from moonpool.transfer.engine import TransferEngine

NUM_OBJECTS = 200
SEGMENT_TTL_S = 1.0


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def start(stack: ExitStack, role: str, **config: object) -> RoleProcess:
    process = RoleProcess(role, **config)
    stack.callback(process.close)
    return process


def test_a_master_that_was_stopped_still_knows_all_objects(tmp_path: Path, stack: ExitStack) -> None:
    """Stopped for more than twice the time after which a silent node is gone."""
    address = f"unix:{tmp_path}/m.sock"
    times = {"heartbeat_s": 0.1, "segment_ttl_s": SEGMENT_TTL_S, "tick_s": 0.01, "lease_s": 0.2}
    master = start(stack, "master", data_dir=str(tmp_path / "data"), listen=address, **times)
    start(stack, "node", name="n0", master_address=address, dram_nbytes=4 * MIB, run_dir=str(tmp_path), retry_s=0.05)
    engine = stack.enter_context(TransferEngine(TransferConfig(run_dir=str(tmp_path), tcp_host=None)))
    client = stack.enter_context(Store(address, engine=engine, config=ClientConfig(retry_s=10.0)))
    keys = [b"key-%d" % number for number in range(NUM_OBJECTS)]
    for key in keys:
        assert client.put(key, key * 100)
    os.kill(master.process.pid, signal.SIGSTOP)
    time.sleep(2.5 * SEGMENT_TTL_S)  # the fault itself: so long the master does nothing
    os.kill(master.process.pid, signal.SIGCONT)
    wait_until(lambda: client.stats().num_objects == NUM_OBJECTS)
    time.sleep(2 * times["tick_s"])  # at least one tick has had its say
    assert client.exist_many(keys) == [True] * NUM_OBJECTS
    assert client.get_many(keys) == [key * 100 for key in keys]


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
