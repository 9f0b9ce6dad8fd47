"""POST /v1/tour/...: what the Tour view of the live page may do. There are no such routes without `serve --tour`.

A call needs the token that the start of the service prints. It must come from this page or from a program: a page of
another site is refused by its Origin, and a foreign name whose DNS entry points here is refused by the Host (DNS
rebinding). The launcher carries the calls out (launch/tour.py).
"""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.responses import Response
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from moonpool.base.cluster import LAUNCHER_SERVICE
from moonpool.base.errors import Unauthorized
from moonpool.base.rpc import AsyncClient, Call
from moonpool.base.run_dirs import LAUNCHER, read_tour_token, socket_address
from moonpool.frontend.replies import json_response
from moonpool.frontend.tour_messages import FillPool, KillWorker

TOKEN_HEADER = "x-moonpool-tour"
_CONNECT_S = 5.0
_CALL_S = 60.0
_R = TypeVar("_R")


@dataclass(frozen=True)
class TourAccess:
    """`token` is what callers must know, `host` the name at which the front end listens."""

    token: str = field(repr=False)
    host: str

    def check(self, headers: Mapping[str, str]) -> None:
        """Raise HTTPException 403 if the headers are of another site's page, Unauthorized if they lack the token."""
        host = headers.get("host", "")
        if not self._is_own(host):
            raise HTTPException(
                403, f"the tour is not at {host!r}: open the address that the start of the service prints"
            )
        origin = headers.get("origin")
        is_own_page = origin in (None, f"http://{host}", f"https://{host}")
        if not is_own_page or headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
            raise HTTPException(403, f"a page of {origin or 'another site'} may not use the tour")
        if not hmac.compare_digest(headers.get(TOKEN_HEADER, "").encode(), self.token.encode()):
            raise Unauthorized("the tour needs the token that the start of the service prints")

    def _is_own(self, host: str) -> bool:
        """Return whether the Host header is a plain address, which no DNS decides about, or this service's own name."""
        name = host.rpartition("]")[0].removeprefix("[") if host.startswith("[") else host.partition(":")[0]
        if name.lower() in ("localhost", self.host.lower()):
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True


class KillBody(BaseModel):
    worker: str


def add_tour(app: FastAPI, run_dir: Path, host: str) -> None:
    """Add the routes, for the launcher of `run_dir`; `host` is where this front end listens. Raise ConfigError if the
    launcher has no tour."""
    access = TourAccess(read_tour_token(run_dir), host)
    launcher = socket_address(run_dir, LAUNCHER)

    async def check(request: Request) -> None:
        access.check(request.headers)

    router = APIRouter(prefix="/v1/tour", dependencies=[Depends(check)])

    @router.get("")
    async def check_token() -> Response:
        """Status 200 if the token is right."""
        return json_response({"object": "tour"})

    @router.post("/kill")
    async def kill_worker(body: KillBody) -> Response:
        """Kill a worker of this service; it is started again."""
        await _ask(launcher, KillWorker(worker=body.worker))
        return json_response({"worker": body.worker})

    @router.post("/fill")
    async def fill_pool() -> Response:
        """Write objects into the pool until others are evicted, then remove them."""
        done = await _ask(launcher, FillPool())
        return json_response(done)

    app.include_router(router)


async def _ask(address: str, call: Call[_R]) -> _R:
    client = await AsyncClient.connect(address, LAUNCHER_SERVICE, name="frontend", timeout_s=_CONNECT_S)
    with closing(client):
        return await client.call(call, timeout_s=_CALL_S)
