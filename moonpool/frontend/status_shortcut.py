"""Answers the reads of GET /v1/status that open pages make every second, without FastAPI's routing and validation.

Only the plain case is answered here: a key that may read, no parameter or `since` as a decimal number. Everything else,
errors included, goes on to the app, whose route answers the same and describes itself in /docs.
"""

from __future__ import annotations

import re

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from moonpool.base.errors import Unauthorized
from moonpool.frontend.status import StatusCollector
from moonpool.frontend.tenants import Tenants

STATUS_PATH = "/v1/status"
_PLAIN_QUERY = re.compile(rb"(?:since=(\d{1,12}(?:\.\d{1,9})?))?")


class StatusShortcut:
    """In front of `app`."""

    def __init__(self, app: ASGIApp, collector: StatusCollector, tenants: Tenants) -> None:
        self._app = app
        self._collector = collector
        self._tenants = tenants

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = None
        if scope["type"] == "http" and scope["path"] == STATUS_PATH and scope["method"] == "GET":
            body = await self._status(scope)
        if body is None:
            await self._app(scope, receive, send)
            return
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _status(self, scope: Scope) -> bytes | None:
        """Return the answer; None if the app has to find it."""
        query = _PLAIN_QUERY.fullmatch(scope["query_string"])
        if query is None:
            return None
        try:
            reader = self._tenants.find_reader(Headers(scope=scope).get("authorization"))
        except Unauthorized:
            return None
        return await self._collector.status_json(float(query[1] or 0), reader.tenant)
