"""The HTTP face: OpenAI's endpoints, health, metrics and decision records. /docs describes them."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.types import ASGIApp

import moonpool
from moonpool.frontend import http_errors
from moonpool.frontend.answer import answer, read_body
from moonpool.frontend.chat_format import ChatFormat
from moonpool.frontend.completion_format import CompletionFormat
from moonpool.frontend.gate import Gate
from moonpool.frontend.health import check_health
from moonpool.frontend.metrics import Roles, metrics_page
from moonpool.frontend.openapi import add_bodies, request_body
from moonpool.frontend.prompts import CHAT, COMPLETION
from moonpool.frontend.record_pages import add_records
from moonpool.frontend.replies import ChatCompletion, Completion, ErrorReply, Model, ModelList
from moonpool.frontend.request_handler import RequestHandler
from moonpool.frontend.schema import ChatBody, CompletionBody

_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorReply} for status in (400, 401, 404, 413, 429, 500, 503)
}


def make_app(desk: RequestHandler, *, max_body_nbytes: int, name: str = "frontend") -> ASGIApp:
    """`name` tells this front end from others in its metrics."""
    app = FastAPI(title="Moonpool", version=moonpool.__version__, responses=_ERRORS)
    http_errors.install(app)

    async def find_tenant(request: Request) -> None:
        request.state.tenant = desk.tenants.find(request.headers.get("authorization"))

    private = APIRouter(prefix="/v1", dependencies=[Depends(find_tenant)])
    _add_completions(private, desk)
    _add_models(private, desk)
    add_records(private, desk)
    app.include_router(private)
    _add_operations(app, desk, name)
    add_bodies(app, ChatBody, CompletionBody)
    # Around the whole app and not as its middleware, which answers to bugs would not pass through.
    return Gate(app, desk.metrics, max_body_nbytes)


def _add_completions(router: APIRouter, desk: RequestHandler) -> None:
    @router.post("/chat/completions", response_model=ChatCompletion, openapi_extra=request_body(ChatBody))
    async def create_chat_completion(request: Request) -> Response:
        """An answer to a conversation, whole or as server-sent events."""
        raw = await read_body(request)
        order, body = await desk.prepare_request(request.state.request_id, request.state.tenant, CHAT, raw)
        form = ChatFormat(order, body, desk.model.codec.token_text)
        return await answer(request, order, form, stream=bool(body.stream))

    @router.post("/completions", response_model=Completion, openapi_extra=request_body(CompletionBody))
    async def create_completion(request: Request) -> Response:
        """Text that continues each prompt, whole or as server-sent events."""
        raw = await read_body(request)
        order, body = await desk.prepare_request(request.state.request_id, request.state.tenant, COMPLETION, raw)
        form = CompletionFormat(order, body, desk.model.codec.token_text)
        return await answer(request, order, form, stream=bool(body.stream))


def _add_models(router: APIRouter, desk: RequestHandler) -> None:
    served = desk.model
    model = Model(id=served.name, created=served.created, max_model_len=served.max_model_len)

    @router.get("/models")
    async def list_models() -> ModelList:
        return ModelList(data=[model])

    @router.get("/models/{name:path}")
    async def retrieve_model(name: str) -> Model:
        served.check_name(name)
        return model


def _add_operations(app: FastAPI, desk: RequestHandler, name: str) -> None:
    @app.get("/health")
    async def health() -> JSONResponse:
        """200 when a request could be served now, otherwise 503; either way with the roles that are missing."""
        status, body = await check_health(desk)
        return JSONResponse(body, status)

    @app.get("/metrics", include_in_schema=False)
    async def metrics(roles: Roles = Roles.AUTO) -> Response:
        page = await metrics_page(desk.metrics, desk.connections, desk.cluster, name=name, roles=roles)
        return Response(page, media_type=CONTENT_TYPE_LATEST)
