"""The two endpoints that answer prompts. POSTs to them do not pass through FastAPI.

FastAPI describes the endpoints (/docs) and answers their other methods. For a POST its routing, dependencies and
middlewares take time (benchmarks/frontend.py) and do nothing that these endpoints use: they read their bodies
themselves, and http_errors.py makes an answer of every error.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias, TypeVar

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import BaseModel
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from moonpool.frontend.answer import AnswerFormat, answer, read_body
from moonpool.frontend.answer_formats import ChatFormat, CompletionFormat, TokenText
from moonpool.frontend.http_errors import response_for
from moonpool.frontend.prompts import CHAT, COMPLETION, Endpoint
from moonpool.frontend.replies import ChatCompletion, Completion, Reply
from moonpool.frontend.request_handler import ClientRequest, RequestHandler
from moonpool.frontend.schema import ChatBody, CompletionBody, SamplingBody
from moonpool.frontend.tracing import Tracing

_B = TypeVar("_B", bound=SamplingBody)
MakeFormat: TypeAlias = Callable[[ClientRequest, _B, TokenText], AnswerFormat]

PREFIX = "/v1"
CHAT_PATH, COMPLETION_PATH = "/chat/completions", "/completions"
REF = "#/components/schemas/{model}"


class Completions:
    """Answers POSTs of the two endpoints; `app` answers all other requests."""

    def __init__(self, app: ASGIApp, handler: RequestHandler, tracing: Tracing | None = None) -> None:
        self._app = app
        self._handler = handler
        self._tracing = tracing
        self._endpoints: dict[str, Callable[[Request], Awaitable[Response]]] = {
            PREFIX + CHAT_PATH: self.create_chat_completion,
            PREFIX + COMPLETION_PATH: self.create_completion,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_post = scope["type"] == "http" and scope["method"] == "POST"
        endpoint = self._endpoints.get(scope["path"]) if is_post else None
        if endpoint is None:
            await self._app(scope, receive, send)
            return
        if self._tracing is None:
            await self._answer(endpoint, scope, receive, send)
            return
        trace = scope["state"]["trace"] = self._tracing.begin(scope)
        try:
            await self._answer(endpoint, scope, receive, self._tracing.sending(trace, send))
        finally:
            state = scope["state"]
            self._tracing.end(trace, state["request_id"], state.get("outcome", "cancelled"))

    async def _answer(
        self, endpoint: Callable[[Request], Awaitable[Response]], scope: Scope, receive: Receive, send: Send
    ) -> None:
        started = False

        async def send_noted(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        request = Request(scope, receive)
        try:
            response = await endpoint(request)
            await response(scope, receive, send_noted)
        except Exception as error:
            if started:
                raise
            response, is_bug = response_for(request, error)
            await response(scope, receive, send)
            if is_bug:
                raise

    async def create_chat_completion(self, request: Request) -> Response:
        """An answer to a conversation, whole or as server-sent events."""
        return await self._create(request, CHAT, ChatFormat)

    async def create_completion(self, request: Request) -> Response:
        """Text that continues each prompt, whole or as server-sent events."""
        return await self._create(request, COMPLETION, CompletionFormat)

    async def _create(self, request: Request, endpoint: Endpoint[_B], make_format: MakeFormat[_B]) -> Response:
        tenant = self._handler.tenants.find(request.headers.get("authorization"))
        raw = await read_body(request.receive)
        client_request, body = await self._handler.prepare_request(
            request.state.request_id, tenant, endpoint, raw, request.scope["state"].get("trace")
        )
        form = make_format(client_request, body, self._handler.model.codec.token_text)
        return await answer(request, client_request, form, stream=bool(body.stream))

    def describe(self, router: APIRouter) -> None:
        """Add the endpoints to the router of PREFIX."""
        router.add_api_route(
            CHAT_PATH,
            self.create_chat_completion,
            methods=["POST"],
            responses=_answer_type(ChatCompletion),
            openapi_extra=_request_body(ChatBody),
        )
        router.add_api_route(
            COMPLETION_PATH,
            self.create_completion,
            methods=["POST"],
            responses=_answer_type(Completion),
            openapi_extra=_request_body(CompletionBody),
        )


def _answer_type(reply: type[Reply]) -> dict[int | str, dict[str, Any]]:
    """Return a route's `responses` that refer to the type of its answer."""
    return {200: {"content": {"application/json": {"schema": {"$ref": REF.format(model=reply.__name__)}}}}}


def _request_body(model: type[BaseModel]) -> dict[str, Any]:
    """Return a route's `openapi_extra` that refers to the type of its body.

    The endpoints read their bodies themselves (prompts.py), so FastAPI does not know these types.
    """
    schema = {"$ref": REF.format(model=model.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
