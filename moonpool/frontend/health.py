"""What GET /health says: which roles are missing, and whether requests can be served without them.

Requests need the conductor and one worker of each role. The pool (master and node) and further workers only make them
faster: without these the service is "degraded" and still answers 200.
"""

from __future__ import annotations

from typing import Any

from moonpool.base.errors import MoonpoolError
from moonpool.frontend.http_errors import public_text
from moonpool.frontend.request_handler import RequestHandler
from moonpool.frontend.workers import Connections, missing_roles
from moonpool.store.messages import Segments

_POOL_TIMEOUT_S = 1.0


async def check_health(desk: RequestHandler) -> tuple[int, dict[str, Any]]:
    """Return an HTTP status, and a body with "status", "missing" (names of roles) and, if any are missing, "reason"."""
    vital: list[str] = []
    reasons: list[str] = []
    absent: list[str] = []
    try:
        workers = (await desk.cluster.status()).workers
    except MoonpoolError as error:
        vital, reasons = ["conductor"], [f"the conductor does not answer: {public_text(error)}"]
    else:
        vital = missing_roles(workers)
        reasons = [f"no {role} worker is registered" for role in vital]
        present = {worker.info.name for worker in workers}
        absent = [name for name in desk.expected_workers if name not in present]
        reasons += [f"worker {name} is not registered" for name in absent]
    pool, pool_reasons = await _missing_of_pool(desk.connections)
    missing = [*vital, *absent, *pool]
    body: dict[str, Any] = {"status": "unavailable" if vital else "degraded" if missing else "ok", "missing": missing}
    if missing:
        body["reason"] = "; ".join(reasons + pool_reasons)
    return 503 if vital else 200, body


async def _missing_of_pool(connections: Connections) -> tuple[list[str], list[str]]:
    """Return which roles of the pool are missing and the same in words; nothing if this front end knows of no pool."""
    try:
        master = await connections.master()
        if master is None:
            return [], []
        segments = await master.call(Segments(), timeout_s=_POOL_TIMEOUT_S)
    except MoonpoolError as error:
        return ["master"], [f"requests run without the pool: its master does not answer: {public_text(error)}"]
    if not segments:
        return ["node"], ["requests run without the pool: no node has mounted memory"]
    return [], []
