"""All errors in OpenAI's format: {"error": {"message", "type", "param", "code"}} and an HTTP status."""

from __future__ import annotations

import logging
import math
import re

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from moonpool.base.errors import InvalidInput, MoonpoolError, Overloaded
from moonpool.frontend.fields import complaint
from moonpool.frontend.replies import ErrorDetail, ErrorReply

_LOG = logging.getLogger(__name__)
_MAX_MESSAGE_CHARS = 2000
# Codes of HTTP errors that are not in the error tree.
_CODES = {
    400: InvalidInput.code,
    403: "forbidden",
    404: "not_found",
    405: "method_not_allowed",
    408: "too_slow",
    413: "too_large",
    431: "too_large",
    503: "unavailable",
}


# Addresses of other processes and paths on this machine, as they occur in messages about failures.
_INTERNALS = re.compile(r"(?:\b(?:unix|tcp|shm):|(?<![\w/:.])/)[^\s,;'\")]+")


def public_text(error: MoonpoolError) -> str:
    """Return the message for clients: without addresses and paths if the failure is on the server's side."""
    return _INTERNALS.sub("(internal address)", str(error)) if error.http_status >= 500 else str(error)


def error_reply(error: MoonpoolError) -> ErrorReply:
    param = error.param if isinstance(error, InvalidInput) else None
    return _reply(error.http_status, public_text(error), param, error.code)


def error_json(error: MoonpoolError) -> bytes:
    return error_reply(error).model_dump_json().encode()


def reply_json(status: int, message: str, code: str | None = None) -> bytes:
    """Return the body of an error that the app does not send itself."""
    return _reply(status, message, None, code or _CODES.get(status)).model_dump_json().encode()


def error_response(error: MoonpoolError) -> Response:
    headers = {}
    if isinstance(error, Overloaded):
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
    return _response(error.http_status, error_reply(error), headers)


def response_for(request: Request, error: Exception) -> tuple[Response, bool]:
    """Return the answer to a request that failed with `error`, and whether the failure is a bug."""
    if isinstance(error, MoonpoolError):
        if error.http_status >= 500:
            _LOG.warning("%s %s failed: %s: %s", request.method, request.url.path, error.code, error)
        request.state.outcome = error.code
        return error_response(error), False
    if isinstance(error, HTTPException):
        code = _CODES.get(error.status_code)
        reply = _reply(error.status_code, str(error.detail), None, code)
        return _response(error.status_code, reply, dict(error.headers or {})), False
    # The text of an unexpected exception may contain anything, so only the log gets it.
    return _response(500, _reply(500, f"a bug in the front end: {type(error).__name__}", None, "internal")), True


def install(app: FastAPI) -> None:
    """Install handlers, so that the app sends errors in this format only."""

    @app.exception_handler(RequestValidationError)
    async def on_invalid_query(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        message, param = complaint(first, first["loc"][1:])
        request.state.outcome = InvalidInput.code
        return _response(400, _reply(400, message, param, InvalidInput.code))

    @app.exception_handler(MoonpoolError)
    @app.exception_handler(HTTPException)
    @app.exception_handler(Exception)
    async def on_error(request: Request, error: Exception) -> Response:
        return response_for(request, error)[0]


def _reply(status: int, message: str, param: str | None, code: str | None) -> ErrorReply:
    kind = "rate_limit_exceeded" if status == 429 else "invalid_request_error" if status < 500 else "server_error"
    return ErrorReply(error=ErrorDetail(message=message[:_MAX_MESSAGE_CHARS], type=kind, param=param, code=code))


def _response(status: int, reply: ErrorReply, headers: dict[str, str] | None = None) -> Response:
    return Response(reply.model_dump_json(), status, headers, media_type="application/json")
