"""Waits for what the conductor says of itself, asked over the wire."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from waiting import HANG_S

from moonpool.base.rpc import AsyncClient
from moonpool.conductor.messages import ConductorStatus, Status


async def until_status(client: AsyncClient, holds: Callable[[ConductorStatus], bool]) -> ConductorStatus:
    async with asyncio.timeout(HANG_S):
        while not holds(status := await client.call(Status())):  # noqa: ASYNC110 - asked over the wire
            await asyncio.sleep(0.005)
    return status
