"""The routes of the HTTP API: OpenAI's endpoints, health, metrics, status and records. /docs describes them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import aclosing
from typing import Annotated, Any, cast

from fastapi import APIRouter, Depends, FastAPI, Query, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.types import ASGIApp

import moonpool
from moonpool.base.errors import InvalidInput, NotFound, Unavailable
from moonpool.base.metrics import CONTENT_TYPE
from moonpool.conductor.messages import DEFAULT_RECORDS, ExplainRequest, ExportTrace, RecordRows, Records
from moonpool.frontend import bare_id, http_errors
from moonpool.frontend.blocks import add_blocks
from moonpool.frontend.completions import PREFIX, REF, Completions
from moonpool.frontend.gate import Gate
from moonpool.frontend.health import check_health
from moonpool.frontend.metrics import Roles, metrics_page
from moonpool.frontend.pages import add_pages
from moonpool.frontend.replies import ErrorReply, Model, ModelList, json_response, reply_schemas
from moonpool.frontend.request_handler import RequestHandler
from moonpool.frontend.schema import ChatBody, CompletionBody
from moonpool.frontend.status import StatusCollector
from moonpool.frontend.status_reply import status_schema
from moonpool.frontend.status_shortcut import StatusShortcut
from moonpool.frontend.tenants import Reader
from moonpool.frontend.tracing import Tracing
from moonpool.frontend.workers import STATUS_TIMEOUT_S

_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorReply} for status in (400, 401, 404, 413, 429, 500, 503)
}
_MAX_RECORDS = 10_000
_MAX_BLOCK_TOKENS = 65_536


def make_app(
    handler: RequestHandler,
    collector: StatusCollector,
    *,
    max_body_nbytes: int,
    name: str,
    add_more: Callable[[FastAPI], None] | None = None,
    tracing: Tracing | None = None,
) -> ASGIApp:
    """Return the whole app. `name` is this front end's name in its metrics; `add_more` may add routes; `tracing` makes
    a trace of each completion."""
    app = FastAPI(title="Moonpool", version=moonpool.__version__, responses=_ERRORS)
    http_errors.install(app)

    async def find_tenant(request: Request) -> None:
        request.state.tenant = handler.tenants.find(request.headers.get("authorization"))

    async def find_reader(request: Request) -> None:
        request.state.reader = handler.tenants.find_reader(request.headers.get("authorization"))

    completions = Completions(StatusShortcut(app, collector, handler.tenants), handler, tracing)
    private = APIRouter(prefix=PREFIX, dependencies=[Depends(find_tenant)])
    completions.describe(private)
    _add_models(private, handler)
    app.include_router(private)
    readable = APIRouter(prefix=PREFIX, dependencies=[Depends(find_reader)])
    types = _add_status(readable, collector)
    _add_records(readable, handler)
    add_blocks(readable, handler)
    app.include_router(readable)
    _add_operations(app, handler, name)
    add_pages(app)
    if add_more is not None:
        add_more(app)
    _add_types(app, {**types, **reply_schemas(REF)}, ChatBody, CompletionBody)
    # Around the whole app, not as a middleware: FastAPI answers bugs (500) outside of its middlewares.
    return Gate(completions, handler.metrics, max_body_nbytes)


def _add_models(router: APIRouter, handler: RequestHandler) -> None:
    served = handler.model
    model = Model(id=served.name, created=served.created, max_model_len=served.max_model_len)

    @router.get("/models")
    async def list_models() -> ModelList:
        return ModelList(data=[model])

    @router.get("/models/{name:path}")
    async def retrieve_model(name: str) -> Model:
        served.check_name(name)
        return model


def _add_operations(app: FastAPI, handler: RequestHandler, name: str) -> None:
    @app.get("/health")
    async def health() -> JSONResponse:
        """Status 200 if a request could be served now, otherwise 503; the body lists the roles that are missing."""
        status, body = await check_health(handler)
        return JSONResponse(body, status)

    @app.get("/metrics", include_in_schema=False)
    async def metrics(roles: Roles = Roles.AUTO) -> Response:
        page = await metrics_page(
            handler.metrics,
            handler.connections,
            handler.cluster,
            name=name,
            model_name=handler.model.name,
            roles=roles,
        )
        return Response(page, media_type=CONTENT_TYPE)


def _add_status(router: APIRouter, collector: StatusCollector) -> dict[str, object]:
    """Return the types that the description of the answer refers to."""
    schema, types = status_schema(REF)
    described: dict[int | str, dict[str, Any]] = {200: {"content": {"application/json": {"schema": schema}}}}

    @router.get("/status", responses=described)
    async def status(request: Request, since: Annotated[float, Query(ge=0)] = 0.0) -> Response:
        """What the service does now, and its last 15 minutes every 2 s: only points after `since` (seconds since 1970).
        Figures are sums over all tenants, without names or text of requests."""
        reader: Reader = request.state.reader
        return Response(await collector.status_json(since, reader.tenant), media_type="application/json")

    return types


def _add_records(router: APIRouter, handler: RequestHandler) -> None:
    @router.get("/records")
    async def list_records(
        request: Request,
        limit: Annotated[int, Query(ge=1, le=_MAX_RECORDS)] = DEFAULT_RECORDS,
        outcome: str | None = None,
        tenant: str | None = None,
    ) -> Response:
        """The newest decision records, newest last: what was decided, predicted and measured."""
        wanted = Records(limit=limit, outcome=outcome, tenant=_own(request, tenant))
        answers = await handler.connections.ask_conductors(RecordRows(wanted=wanted), STATUS_TIMEOUT_S)
        if all(answer is None for answer in answers):
            raise Unavailable("no conductor answers")
        found = sorted((each for answer in answers for each in answer or ()), key=lambda each: each.routed_at_s)
        rows = b",".join([each.json for each in found[-limit:]])
        return Response(b'{"object":"list","data":[%b]}' % rows, media_type="application/json")

    @router.get("/records/trace")
    async def export_trace(
        request: Request,
        tenant: str | None = None,
        block_tokens: Annotated[int | None, Query(ge=1, le=_MAX_BLOCK_TOKENS)] = None,
    ) -> Response:
        """The same as lines of Mooncake's trace format, oldest first: lengths, times and shared prefixes, no text."""
        conductor = await handler.connections.conductor()
        lines = conductor.stream(ExportTrace(tenant=_own(request, tenant), trace_block_tokens=block_tokens))
        first = await anext(lines, b"")  # a refused call raises here, before the answer begins
        return StreamingResponse(_chain(first, lines), media_type="application/jsonl")

    @router.get("/records/{request_id}")
    async def explain_record(request: Request, request_id: str) -> Response:
        """What happened to a request, and why. The id is the one in its answer or its x-request-id header."""
        call = ExplainRequest(request_id=bare_id(request_id), tenant=_own(request, None))
        answers = await handler.connections.ask_conductors(call, STATUS_TIMEOUT_S)
        found = [each for answer in answers for each in answer or ()]
        if not found and None in answers:
            raise Unavailable(f"a conductor does not answer, and no other one has a record of request {request_id!r}")
        if not found:
            raise NotFound(f"there is no record of request {request_id!r}: it is unknown, or too old")
        return json_response({"object": "list", "data": found})


def _own(request: Request, tenant: str | None) -> str | None:
    """Return the tenant whose records are wanted and may be read; None: those of all tenants."""
    reader: Reader = request.state.reader
    if reader.tenant is None:
        return tenant
    if tenant is not None and tenant != reader.tenant:
        raise InvalidInput(
            f"this API key is of tenant {reader.tenant!r}, which sees its own records only", param="tenant"
        )
    return reader.tenant


async def _chain(first: bytes, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    async with aclosing(cast(AsyncGenerator[bytes, None], rest)) as chunks:
        yield first
        async for chunk in chunks:
            yield chunk


def _add_types(app: FastAPI, types: Mapping[str, object], *models: type[BaseModel]) -> None:
    """Add types to the description: `types`, and those of bodies that completions.py refers to."""
    _, definitions = models_json_schema([(model, "validation") for model in models], ref_template=REF)
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        described = generate()
        described["components"]["schemas"] |= {**definitions["$defs"], **types}
        return described

    app.openapi = openapi  # type: ignore[method-assign]
