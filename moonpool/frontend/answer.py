"""From an order's events to its answer, whole or as a stream, in a format that the endpoint chooses."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Protocol

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from moonpool.base.errors import Internal, MoonpoolError
from moonpool.frontend.choice import ChoiceEvent
from moonpool.frontend.http_errors import error_reply
from moonpool.frontend.request_handler import ClientRequest
from moonpool.frontend.stream import DONE, EventStream, sse, while_connected
from moonpool.worker.messages import TokenOut

_LOG = logging.getLogger(__name__)


@dataclass
class ChoiceResult:
    """All of one choice."""

    index: int
    text: str = ""
    finish_reason: str = "length"
    tokens: list[TokenOut] = field(default_factory=list)


class AnswerFormat(Protocol):
    """How one endpoint writes its answers."""

    def opening(self) -> Sequence[BaseModel]:
        """Chunks that come before any text."""
        ...

    def chunk(self, event: ChoiceEvent) -> BaseModel | None:
        """None when there is nothing to show yet."""
        ...

    def closing(self) -> Sequence[BaseModel]:
        """Chunks that come after everything else."""
        ...

    def whole(self, results: Sequence[ChoiceResult]) -> BaseModel: ...


async def answer(request: Request, order: ClientRequest, form: AnswerFormat, *, stream: bool) -> Response:
    """A failure before the first token is raised, and so gets its own status; a later one is told in the stream."""
    if not stream:
        results = await while_connected(request.receive, _collect(order))
        body = form.whole(results).model_dump_json(exclude_unset=True)
        return Response(body, media_type="application/json")
    chunks = _chunks(request, order, form)
    try:
        first = await while_connected(request.receive, _next(chunks))
    except BaseException:
        await chunks.aclose()
        raise
    return EventStream(first, chunks)


async def _collect(order: ClientRequest) -> list[ChoiceResult]:
    results = [ChoiceResult(index) for index in range(order.num_choices)]
    async with aclosing(order.events()) as events:
        async for event in events:
            result = results[event.index]
            result.text += event.text
            result.tokens += event.tokens
            result.finish_reason = event.finish_reason or result.finish_reason
    return results


async def _chunks(request: Request, order: ClientRequest, form: AnswerFormat) -> AsyncGenerator[bytes, None]:
    started = False
    try:
        async with aclosing(order.events()) as events:
            async for event in events:
                if not started:
                    started = True
                    yield b"".join(map(sse, form.opening()))
                chunk = form.chunk(event)
                if chunk is not None:
                    yield sse(chunk)
    except Exception as error:
        if not started:
            raise
        failure = error if isinstance(error, MoonpoolError) else Internal("a bug in the front end")
        _LOG.warning("%s failed in the middle of its stream", order.request_id, exc_info=error)
        request.state.outcome = failure.code
        yield sse(error_reply(failure))
    else:
        yield b"".join(map(sse, form.closing())) + DONE


async def _next(chunks: AsyncGenerator[bytes, None]) -> bytes:
    return await anext(chunks)
