"""A process that is nothing but a worker's connection to the conductor, renewed whenever it is lost.

python registered_worker.py CONDUCTOR_ADDRESS NAME PING_INTERVAL_S SILENCE_LIMIT_S
"""

from __future__ import annotations

import asyncio
import sys

from worker_info import info

from moonpool.base.cluster import CONDUCTOR_SERVICE, RegisterWorker, WorkerRole
from moonpool.base.rpc import AsyncClient, SilenceLimits


async def stay_registered(address: str, name: str, silence_limits: SilenceLimits) -> None:
    while True:
        client = await AsyncClient.connect(address, CONDUCTOR_SERVICE, name=name, silence_limits=silence_limits)
        await client.call(RegisterWorker(info(name, role=WorkerRole.PREFILL)))
        await client.closed.wait()


if __name__ == "__main__":
    asyncio.run(stay_registered(sys.argv[1], sys.argv[2], SilenceLimits(float(sys.argv[3]), float(sys.argv[4]))))
