"""The outermost layer of the app: gives every request an id, bounds its body, and counts how it ended."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Awaitable

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from moonpool.server.metrics import FrontendMetrics

_LOG = logging.getLogger(__name__)
COUNTED_PATHS = ("/v1/chat/completions", "/v1/completions")


class Gate:
    """Handlers find the id in `request.state.request_id` and may say in `request.state.outcome` how it ended."""

    def __init__(self, app: ASGIApp, metrics: FrontendMetrics, max_body_nbytes: int) -> None:
        self._app = app
        self._metrics = metrics
        self._max_body_nbytes = max_body_nbytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        state = scope.setdefault("state", {})
        state["request_id"] = secrets.token_hex(12)
        answered = False

        async def send_with_id(message: Message) -> None:
            nonlocal answered
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = state["request_id"]
                state.setdefault("outcome", "done" if message["status"] < 400 else f"http_{message['status']}")
            await send(message)
            answered = message["type"] == "http.response.body" and not message.get("more_body", False)

        work = self._app(scope, self._bounded(scope, receive), send_with_id)
        try:
            await (self._counted(scope["path"], state, work) if scope["path"] in COUNTED_PATHS else work)
        except Exception:
            if not answered:
                raise
            # Starlette raises a bug again after it has answered 500; uvicorn would then close the connection.
            _LOG.exception("request %s ended with a bug in the front end", state["request_id"])

    async def _counted(self, path: str, state: dict[str, str], work: Awaitable[None]) -> None:
        with self._metrics.running.track_inprogress(), self._metrics.request_time.labels(path).time():
            try:
                await work
            finally:
                self._metrics.requests.labels(path, state.get("outcome", "cancelled")).inc()

    def _bounded(self, scope: Scope, receive: Receive) -> Receive:
        length = Headers(scope=scope).get("content-length", "0")
        left = self._max_body_nbytes
        too_large = HTTPException(413, f"the body is larger than {self._max_body_nbytes} bytes")

        async def bounded() -> Message:
            nonlocal left
            if length.isdigit() and int(length) > self._max_body_nbytes:
                raise too_large
            message = await receive()
            left -= len(message.get("body", b""))
            if left < 0:
                raise too_large
            return message

        return bounded
