"""Decision records over HTTP: listed, explained, and as a trace that can be replayed. A tenant sees its own only."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Annotated, cast

import msgspec
from fastapi import APIRouter, Query, Request
from fastapi.responses import Response, StreamingResponse

from moonpool.base.errors import InvalidInput, NotFound
from moonpool.conductor.messages import ExplainRequest, ExportTrace, Records
from moonpool.frontend.record_ids import bare_id
from moonpool.frontend.request_handler import RequestHandler

MAX_RECORDS = 10_000
MAX_BLOCK_TOKENS = 65_536


def add_records(router: APIRouter, desk: RequestHandler) -> None:
    @router.get("/records")
    async def list_records(
        request: Request,
        limit: Annotated[int, Query(ge=1, le=MAX_RECORDS)] = 100,
        outcome: str | None = None,
        tenant: str | None = None,
    ) -> Response:
        """The newest decision records, newest last: what was decided, predicted and measured."""
        call = Records(limit=limit, outcome=outcome, tenant=_own(request, tenant))
        conductor = await desk.connections.conductor()
        found = await conductor.call(call)
        return _json({"object": "list", "data": found})

    @router.get("/records/trace")
    async def export_trace(
        request: Request,
        tenant: str | None = None,
        block_tokens: Annotated[int | None, Query(ge=1, le=MAX_BLOCK_TOKENS)] = None,
    ) -> Response:
        """The same as lines of Mooncake's trace format, oldest first: lengths, times and shared prefixes, no text."""
        conductor = await desk.connections.conductor()
        lines = conductor.stream(ExportTrace(tenant=_own(request, tenant), trace_block_tokens=block_tokens))
        first = await anext(lines, b"")  # what is wrong with the call comes before the answer begins
        return StreamingResponse(_chain(first, lines), media_type="application/jsonl")

    @router.get("/records/{request_id}")
    async def explain_record(request: Request, request_id: str) -> Response:
        """What became of a request, by the id in its answer or its x-request-id header, with an explanation."""
        conductor = await desk.connections.conductor()
        found = await conductor.call(ExplainRequest(request_id=bare_id(request_id), tenant=_own(request, None)))
        if not found:
            raise NotFound(f"there is no record of request {request_id!r}: unknown, or too long ago")
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
