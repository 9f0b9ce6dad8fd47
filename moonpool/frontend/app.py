"""The routes of the HTTP API: OpenAI's endpoints, health, metrics and decision records. /docs describes them.

GET /health says which roles are missing, and whether requests can be served without them. Requests need the conductor
and one worker of each role. The pool (master and nodes), further workers and further front ends only make requests
faster: without these the service is "degraded" and still answers 200.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from typing import Annotated, Any, cast

import msgspec
from fastapi import APIRouter, Depends, FastAPI, Query, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.types import ASGIApp

import moonpool
from moonpool.base.errors import InvalidInput, MoonpoolError, NotFound, Unavailable
from moonpool.base.run_dirs import CONDUCTOR, numbered_name
from moonpool.conductor.messages import DEFAULT_RECORDS, ExplainRequest, ExportTrace, Records, Status
from moonpool.frontend import bare_id, http_errors
from moonpool.frontend.completions import PREFIX, REF, Completions
from moonpool.frontend.gate import Gate
from moonpool.frontend.http_errors import public_text
from moonpool.frontend.metrics import Roles, metrics_page
from moonpool.frontend.replies import ErrorReply, Model, ModelList
from moonpool.frontend.request_handler import RequestHandler
from moonpool.frontend.schema import ChatBody, CompletionBody
from moonpool.frontend.workers import STATUS_TIMEOUT_S, Connections, missing_roles
from moonpool.store.messages import Segments, Tier

_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorReply} for status in (400, 401, 404, 413, 429, 500, 503)
}
_MAX_RECORDS = 10_000
_MAX_BLOCK_TOKENS = 65_536
_POOL_TIMEOUT_S = 1.0


def make_app(handler: RequestHandler, *, max_body_nbytes: int, name: str) -> ASGIApp:
    """Return the whole app. `name` is this front end's name in its metrics."""
    app = FastAPI(title="Moonpool", version=moonpool.__version__, responses=_ERRORS)
    http_errors.install(app)

    async def find_tenant(request: Request) -> None:
        request.state.tenant = handler.tenants.find(request.headers.get("authorization"))

    completions = Completions(app, handler)
    private = APIRouter(prefix=PREFIX, dependencies=[Depends(find_tenant)])
    completions.describe(private)
    _add_models(private, handler)
    _add_records(private, handler)
    app.include_router(private)
    _add_operations(app, handler, name)
    _add_bodies(app, ChatBody, CompletionBody)
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
        status, body = await _check_health(handler)
        return JSONResponse(body, status)

    @app.get("/metrics", include_in_schema=False)
    async def metrics(roles: Roles = Roles.AUTO) -> Response:
        page = await metrics_page(handler.metrics, handler.connections, handler.cluster, name=name, roles=roles)
        return Response(page, media_type=CONTENT_TYPE_LATEST)


def _add_records(router: APIRouter, handler: RequestHandler) -> None:
    @router.get("/records")
    async def list_records(
        request: Request,
        limit: Annotated[int, Query(ge=1, le=_MAX_RECORDS)] = DEFAULT_RECORDS,
        outcome: str | None = None,
        tenant: str | None = None,
    ) -> Response:
        """The newest decision records, newest last: what was decided, predicted and measured."""
        call = Records(limit=limit, outcome=outcome, tenant=_own(request, tenant))
        answers = await handler.connections.ask_conductors(call, STATUS_TIMEOUT_S)
        if all(answer is None for answer in answers):
            raise Unavailable("no conductor answers")
        found = sorted((each for answer in answers for each in answer or ()), key=lambda each: each.routed_at_s)
        return _json({"object": "list", "data": found[-limit:]})

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
        return _json({"object": "list", "data": found})


def _own(request: Request, tenant: str | None) -> str:
    own: str = request.state.tenant.name
    if tenant is not None and tenant != own:
        raise InvalidInput(f"this API key is of tenant {own!r}, which sees its own records only", param="tenant")
    return own


async def _chain(first: bytes, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    async with aclosing(cast(AsyncGenerator[bytes, None], rest)) as chunks:
        yield first
        async for chunk in chunks:
            yield chunk


def _json(body: object) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")


async def _check_health(handler: RequestHandler) -> tuple[int, dict[str, Any]]:
    """Return an HTTP status, and a body with "status", "missing" (names of roles) and, if any are missing, "reason"."""
    vital: list[str] = []
    reasons: list[str] = []
    absent: list[str] = []
    try:
        status = await handler.cluster.status()
    except MoonpoolError as error:
        vital, reasons = ["conductor"], [f"the conductor does not answer: {public_text(error)}"]
    else:
        vital = missing_roles(status.workers)
        reasons = [f"no {role} worker is registered" for role in vital]
        present = {worker.info.name for worker in status.workers} | set(status.left)
        absent = [name for name in handler.expected_workers if name not in present]
        reasons += [f"worker {name} is not registered" for name in absent]
    (pool, pool_reasons), siblings, conductors = await asyncio.gather(
        _missing_of_pool(handler.connections, handler.expected_nodes),
        _missing_siblings(handler.connections),
        _missing_conductors(handler.connections),
    )
    conductors = [] if CONDUCTOR in vital else conductors  # then none answers
    missing = [*vital, *absent, *pool, *siblings, *conductors]
    reasons += [f"{name} does not answer" for name in conductors]
    reasons += [f"front end {name} does not answer" for name in siblings]
    body: dict[str, Any] = {"status": "unavailable" if vital else "degraded" if missing else "ok", "missing": missing}
    if missing:
        body["reason"] = "; ".join(reasons + pool_reasons)
    return 503 if vital else 200, body


async def _missing_conductors(connections: Connections) -> list[str]:
    """Return the names of the conductors that do not answer, if there are several."""
    if connections.num_conductors == 1:
        return []
    answers = await connections.ask_conductors(Status(), _POOL_TIMEOUT_S)
    return [numbered_name(CONDUCTOR, number) for number, answer in enumerate(answers) if answer is None]


async def _missing_siblings(connections: Connections) -> list[str]:
    """Return the names of the front ends of this port that do not answer."""

    async def answers(name: str) -> bool:
        try:
            async with asyncio.timeout(_POOL_TIMEOUT_S):
                await connections.sibling(name)
        except (MoonpoolError, TimeoutError):
            return False
        return True

    found = await asyncio.gather(*map(answers, connections.siblings))
    return [name for name, is_there in zip(connections.siblings, found, strict=True) if not is_there]


async def _missing_of_pool(connections: Connections, expected: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the missing roles of the pool, and the reasons; two empty lists if this front end has no pool."""
    try:
        master = await connections.master()
        if master is None:
            return [], []
        segments = await master.call(Segments(), timeout_s=_POOL_TIMEOUT_S)
    except MoonpoolError as error:
        return ["master"], [f"requests run without the pool: its master does not answer: {public_text(error)}"]
    if not segments:
        return list(expected) or ["node"], ["requests run without the pool: no node has mounted memory"]
    present = {segment.node for segment in segments if segment.tier & Tier.DRAM}
    absent = [name for name in expected if name not in present]
    return absent, [f"blocks that only {name} has are computed again: it has mounted no memory" for name in absent]


def _add_bodies(app: FastAPI, *models: type[BaseModel]) -> None:
    """Add the types of bodies that completions.py refers to."""
    _, definitions = models_json_schema([(model, "validation") for model in models], ref_template=REF)
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        described = generate()
        described["components"]["schemas"].update(definitions["$defs"])
        return described

    app.openapi = openapi  # type: ignore[method-assign]
