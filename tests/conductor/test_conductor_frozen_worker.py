"""A worker whose process is frozen leaves the conductor's list, and is back when it moves again."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

from watched_status import until_status

from moonpool.base.cluster import CONDUCTOR_SERVICE
from moonpool.base.rpc import AsyncClient, SilenceLimits
from moonpool.conductor.service import Conductor, ConductorConfig

SILENCE_LIMITS = SilenceLimits(ping_interval_s=0.1, silence_limit_s=1.5)


@contextlib.asynccontextmanager
async def worker(address: str, name: str) -> AsyncIterator[asyncio.subprocess.Process]:
    script = Path(__file__).parents[1] / "helpers" / "registered_worker.py"
    intervals = [str(SILENCE_LIMITS.ping_interval_s), str(SILENCE_LIMITS.silence_limit_s)]
    process = await asyncio.create_subprocess_exec(sys.executable, str(script), address, name, *intervals)
    try:
        yield process
    finally:
        process.kill()  # works on a stopped process too
        await process.wait()


async def until_workers(observer: AsyncClient, names: set[str]) -> None:
    await until_status(observer, lambda status: {one.info.name for one in status.workers} == names)


async def test_a_frozen_worker_is_forgotten_and_registers_again(tmp_path: Path) -> None:
    conductor = Conductor(ConductorConfig(address=f"unix:{tmp_path}/c.sock"), silence_limits=SILENCE_LIMITS)
    address = await conductor.start()
    observer = await AsyncClient.connect(address, CONDUCTOR_SERVICE, silence_limits=SILENCE_LIMITS)
    try:
        async with worker(address, "p0") as frozen, worker(address, "p1"):
            await until_workers(observer, {"p0", "p1"})
            frozen.send_signal(signal.SIGSTOP)
            stopped_s = time.monotonic()
            await until_workers(observer, {"p1"})
            assert time.monotonic() - stopped_s > SILENCE_LIMITS.silence_limit_s / 2  # by silence, not by the signal
            frozen.send_signal(signal.SIGCONT)
            await until_workers(observer, {"p0", "p1"})
    finally:
        observer.close()
        await conductor.close()
