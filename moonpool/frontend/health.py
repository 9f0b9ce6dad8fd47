"""What GET /health answers: which roles are missing, and whether requests can be served without them.

Requests need the conductor and one worker of each role. The pool (master and nodes), further workers and further front
ends only make requests faster: without these the service is "degraded" and still answers 200.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, NamedTuple

from moonpool.base.errors import MoonpoolError
from moonpool.base.run_dirs import CONDUCTOR, numbered_name
from moonpool.conductor.messages import ConductorStatus, Status
from moonpool.frontend.http_errors import public_text
from moonpool.frontend.request_handler import RequestHandler
from moonpool.frontend.workers import Connections, missing_roles
from moonpool.store.messages import SegmentInfo, Segments, Tier

_POOL_TIMEOUT_S = 1.0


class PoolAnswer(NamedTuple):
    """What the master answered; `error` says why it did not. A front end without a pool has neither."""

    is_configured: bool
    segments: Sequence[SegmentInfo] = ()
    error: MoonpoolError | None = None


async def check_health(handler: RequestHandler) -> tuple[int, dict[str, Any]]:
    """Return an HTTP status, and a body with "status", "missing" (names of roles) and, if any are missing, "reason"."""
    conductor, pool = await asyncio.gather(_ask_conductor(handler), _ask_pool(handler.connections))
    return await health_of(handler, conductor, pool)


async def health_of(
    handler: RequestHandler, conductor: ConductorStatus | MoonpoolError, pool: PoolAnswer
) -> tuple[int, dict[str, Any]]:
    """Return what check_health() does, from what conductor (or why it did not answer) and master have just answered."""
    vital: list[str] = []
    reasons: list[str] = []
    absent: list[str] = []
    if isinstance(conductor, MoonpoolError):
        vital, reasons = ["conductor"], [f"the conductor does not answer: {public_text(conductor)}"]
    else:
        vital = missing_roles(conductor.workers)
        reasons = [f"no {role} worker is registered" for role in vital]
        present = {info.name for info in (*(one.info for one in conductor.workers), *conductor.leaving)}
        present |= set(conductor.left)
        absent = [name for name in handler.expected_workers if name not in present]
        reasons += [f"worker {name} is not registered" for name in absent]
    absent_of_pool, pool_reasons = _missing_of_pool(pool, handler.expected_nodes)
    siblings, conductors = await asyncio.gather(
        _missing_siblings(handler.connections), _missing_conductors(handler.connections)
    )
    conductors = [] if CONDUCTOR in vital else conductors  # then none answers
    missing = [*vital, *absent, *absent_of_pool, *siblings, *conductors]
    reasons += [f"{name} does not answer" for name in conductors]
    reasons += [f"front end {name} does not answer" for name in siblings]
    body: dict[str, Any] = {"status": "unavailable" if vital else "degraded" if missing else "ok", "missing": missing}
    if missing:
        body["reason"] = "; ".join(reasons + pool_reasons)
    return 503 if vital else 200, body


async def _ask_conductor(handler: RequestHandler) -> ConductorStatus | MoonpoolError:
    try:
        return await handler.cluster.status()
    except MoonpoolError as error:
        return error


async def _ask_pool(connections: Connections) -> PoolAnswer:
    try:
        master = await connections.master()
        if master is None:
            return PoolAnswer(is_configured=False)
        segments = await master.call(Segments(), timeout_s=_POOL_TIMEOUT_S)
        return PoolAnswer(True, segments)
    except MoonpoolError as error:
        return PoolAnswer(True, error=error)


async def _missing_conductors(connections: Connections) -> list[str]:
    """Return the names of the conductors that do not answer, if there are several."""
    if connections.num_conductors == 1:
        return []
    answers = await connections.ask_conductors(Status(), _POOL_TIMEOUT_S)
    return [numbered_name(CONDUCTOR, number) for number, answer in enumerate(answers) if answer is None]


async def _missing_siblings(connections: Connections) -> list[str]:
    """Return the names of the front ends of this port that do not answer."""

    async def answers(name: str) -> bool:
        try:
            async with asyncio.timeout(_POOL_TIMEOUT_S):
                await connections.sibling(name)
        except (MoonpoolError, TimeoutError):
            return False
        return True

    found = await asyncio.gather(*map(answers, connections.siblings))
    return [name for name, is_there in zip(connections.siblings, found, strict=True) if not is_there]


def _missing_of_pool(pool: PoolAnswer, expected: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the missing roles of the pool, and the reasons; two empty lists if this front end has no pool."""
    if not pool.is_configured:
        return [], []
    if pool.error is not None:
        return ["master"], [f"requests run without the pool: its master does not answer: {public_text(pool.error)}"]
    if not pool.segments:
        return list(expected) or ["node"], ["requests run without the pool: no node has mounted memory"]
    present = {segment.node for segment in pool.segments if segment.tier & Tier.DRAM}
    absent = [name for name in expected if name not in present]
    return absent, [f"blocks that only {name} has are computed again: it has mounted no memory" for name in absent]
