"""The outermost layer of the app: gives every request an id, limits its body, and counts its outcome."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Awaitable

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from moonpool.frontend.metrics import COUNTED_PATHS, FrontendMetrics

_LOG = logging.getLogger(__name__)
_NUM_LARGE_BODIES = 8  # largest bodies that may be held at the same time
_LEAST_HELD_NBYTES = 64 * 1024 * 1024
_MAX_LENGTH_DIGITS = 19  # of a Content-Length; the parser refuses longer ones


class Gate:
    """Sets `request.state.request_id` and counts `request.state.outcome`, which handlers may set."""

    def __init__(self, app: ASGIApp, metrics: FrontendMetrics, max_body_nbytes: int) -> None:
        self._app = app
        self._metrics = metrics
        self._max_body_nbytes = max_body_nbytes
        self._max_held_nbytes = max(_NUM_LARGE_BODIES * max_body_nbytes, _LEAST_HELD_NBYTES)
        self._held_nbytes = 0  # of bodies whose requests have not been answered yet

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        state = scope.setdefault("state", {})
        state["request_id"] = secrets.token_hex(12)
        answered = False
        body = _BodyMeter(self)

        async def send_with_id(message: Message) -> None:
            nonlocal answered
            if message["type"] == "http.response.start":
                body.release()
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", state["request_id"].encode())]
                state.setdefault("outcome", "done" if message["status"] < 400 else f"http_{message['status']}")
            await send(message)
            answered = message["type"] == "http.response.body" and not message.get("more_body", False)

        work = self._app(scope, body.bounded(scope, receive), send_with_id)
        try:
            await (self._counted(scope["path"], state, work) if scope["path"] in COUNTED_PATHS else work)
        except Exception:
            if not answered:
                raise
            # Starlette raises the exception again after it has answered 500; uvicorn would then close the connection.
            _LOG.exception("request %s ended with a bug in the front end", state["request_id"])
        finally:
            body.release()

    async def _counted(self, path: str, state: dict[str, str], work: Awaitable[None]) -> None:
        began_s = time.perf_counter()
        self._metrics.running.inc()
        try:
            await work
        finally:
            self._metrics.running.dec()
            self._metrics.count_request(path, state.get("outcome", "cancelled"), time.perf_counter() - began_s)

    def hold(self, nbytes: int) -> None:
        """Count bytes of a body that is held in memory. Raise HTTPException 503 if bodies take too much memory."""
        if self._held_nbytes + nbytes > self._max_held_nbytes:
            raise HTTPException(503, "too many large requests at a time; try again later", {"retry-after": "1"})
        self._held_nbytes += nbytes

    def release(self, nbytes: int) -> None:
        self._held_nbytes -= nbytes

    @property
    def max_body_nbytes(self) -> int:
        return self._max_body_nbytes


class _BodyMeter:
    """Counts and limits one request's body while it arrives, whatever its Content-Length says."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._received_nbytes = 0
        self._held_nbytes = 0

    def bounded(self, scope: Scope, receive: Receive) -> Receive:
        length = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
        limit = self._gate.max_body_nbytes
        is_too_large = length.isdigit() and int(length[:_MAX_LENGTH_DIGITS]) > limit

        async def receive_bounded() -> Message:
            if is_too_large:
                raise _too_large(limit)
            message = await receive()
            nbytes = len(message.get("body", b""))
            self._received_nbytes += nbytes
            if self._received_nbytes > limit:
                raise _too_large(limit)
            self._gate.hold(nbytes)
            self._held_nbytes += nbytes
            return message

        return receive_bounded

    def release(self) -> None:
        """Release the bytes of the body, which is no longer held. Idempotent."""
        self._gate.release(self._held_nbytes)
        self._held_nbytes = 0


def _too_large(limit_nbytes: int) -> HTTPException:
    return HTTPException(413, f"the body is larger than {limit_nbytes} bytes, which is more than the model can read")
