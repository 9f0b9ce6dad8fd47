"""Every failure as OpenAI's clients expect it: {"error": {"message", "type", "param", "code"}} and a fitting status."""

from __future__ import annotations

import logging
import math

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from moonpool.base.errors import InvalidInput, MoonpoolError, Overloaded
from moonpool.server.replies import ErrorDetail, ErrorReply

_LOG = logging.getLogger(__name__)
_MAX_MESSAGE_CHARS = 2000


def error_reply(error: MoonpoolError) -> ErrorReply:
    param = error.param if isinstance(error, InvalidInput) else None
    return _reply(error.http_status, str(error), param, error.code)


def error_response(error: MoonpoolError) -> Response:
    headers = {}
    if isinstance(error, Overloaded):
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
    return _response(error.http_status, error_reply(error), headers)


def install(app: FastAPI) -> None:
    """Makes these the only errors that leave the app."""

    @app.exception_handler(MoonpoolError)
    async def on_moonpool_error(request: Request, error: MoonpoolError) -> Response:
        if error.http_status >= 500:
            _LOG.warning("%s %s failed: %s: %s", request.method, request.url.path, error.code, error)
        request.state.outcome = error.code
        return error_response(error)

    @app.exception_handler(RequestValidationError)
    async def on_invalid_body(request: Request, error: RequestValidationError) -> Response:
        message, param = _first_complaint(error)
        request.state.outcome = InvalidInput.code
        return _response(400, _reply(400, message, param, InvalidInput.code))

    @app.exception_handler(HTTPException)
    async def on_http_error(request: Request, error: HTTPException) -> Response:
        code = {404: "not_found", 405: "method_not_allowed", 413: "too_large"}.get(error.status_code)
        return _response(error.status_code, _reply(error.status_code, str(error.detail), None, code))

    @app.exception_handler(Exception)
    async def on_bug(request: Request, error: Exception) -> Response:
        # The text of a foreign exception may hold anything, so it goes to the log only.
        return _response(500, _reply(500, f"a bug in the front end: {type(error).__name__}", None, "internal"))


def _first_complaint(error: RequestValidationError) -> tuple[str, str | None]:
    """(message, param) of the first thing that is wrong; the input itself is not repeated."""
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        return f"the body is not valid JSON: {first.get('ctx', {}).get('error', first['msg'])}", None
    context_param = first.get("ctx", {}).get("param")
    param = context_param or ".".join(str(part) for part in first["loc"][1:]) or None
    return (f"{param}: {first['msg']}" if param else str(first["msg"])), param


def _reply(status: int, message: str, param: str | None, code: str | None) -> ErrorReply:
    kind = "rate_limit_exceeded" if status == 429 else "invalid_request_error" if status < 500 else "server_error"
    return ErrorReply(error=ErrorDetail(message=message[:_MAX_MESSAGE_CHARS], type=kind, param=param, code=code))


def _response(status: int, reply: ErrorReply, headers: dict[str, str] | None = None) -> Response:
    return Response(reply.model_dump_json(), status, headers, media_type="application/json")
