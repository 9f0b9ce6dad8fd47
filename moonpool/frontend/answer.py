"""From the events of a request's choices to its HTTP answer, whole or streamed, in the format of its endpoint.

A choice's event is formatted and written to the socket by the task that runs the choice: no queue lies between them.
The work ends when its client disconnects.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, Protocol, TypeVar

from pydantic import BaseModel
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from moonpool.base.errors import Cancelled, Internal, MoonpoolError
from moonpool.frontend.choice import ChoiceEvent
from moonpool.frontend.http_errors import error_reply
from moonpool.frontend.request_handler import ClientRequest
from moonpool.frontend.until_failure import until_failure
from moonpool.worker.messages import TokenOut

_LOG = logging.getLogger(__name__)
_T = TypeVar("_T")
_DONE = b"data: [DONE]\n\n"


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
        """Return the chunks that come before any text."""
        ...

    def chunk(self, event: ChoiceEvent) -> BaseModel | None:
        """Return the event as a chunk; None if there is nothing to show yet."""
        ...

    def closing(self) -> Sequence[BaseModel]:
        """Return the chunks that come after everything else."""
        ...

    def whole(self, results: Sequence[ChoiceResult]) -> BaseModel: ...


async def answer(request: Request, client_request: ClientRequest, form: AnswerFormat, *, stream: bool) -> Response:
    """Return the answer. A failure before the first token is raised, here or by the stream before it has sent
    anything, so that it gets its own HTTP status; a later failure is an event in the stream."""
    if stream:
        return EventStream(client_request, form)
    results = [ChoiceResult(index) for index in range(client_request.num_choices)]

    async def collect(event: ChoiceEvent) -> None:
        result = results[event.index]
        result.text += event.text
        result.tokens += event.tokens
        result.finish_reason = event.finish_reason or result.finish_reason

    await while_connected(request.receive, client_request.run(collect))
    return Response(form.whole(results).model_dump_json(exclude_unset=True), media_type="application/json")


class EventStream(Response):
    """Runs the request and sends its events as they come, as server-sent events."""

    def __init__(self, client_request: ClientRequest, form: AnswerFormat) -> None:
        self._client_request = client_request
        self._form = form
        self._started = False
        self._sending = asyncio.Lock()  # several choices send; the headers must be complete before any body
        super().__init__(media_type="text/event-stream", headers={"cache-control": "no-cache"})
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_connected(receive, self._send_all(scope, send))
        except Cancelled as error:
            if not self._started:
                raise
            scope["state"]["outcome"] = error.code  # the client is gone, so the answer just ends

    async def _send_all(self, scope: Scope, send: Send) -> None:
        async def emit(event: ChoiceEvent) -> None:
            async with self._sending:
                body = b"" if self._started else await self._start(send)
                chunk = self._form.chunk(event)
                if chunk is not None:
                    body += sse(chunk)
                if body:
                    await send({"type": "http.response.body", "body": body, "more_body": True})

        try:
            await self._client_request.run(emit)
        except Exception as error:
            if not self._started:
                raise
            failure = error if isinstance(error, MoonpoolError) else Internal("a bug in the front end")
            _LOG.warning("%s failed in the middle of its stream", self._client_request.request_id, exc_info=error)
            scope["state"]["outcome"] = failure.code
            last = sse(error_reply(failure))
        else:
            last = b"".join(map(sse, self._form.closing())) + _DONE
        await send({"type": "http.response.body", "body": last, "more_body": False})

    async def _start(self, send: Send) -> bytes:
        """Send the headers; return the opening chunks."""
        self._started = True
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        return b"".join(map(sse, self._form.opening()))


def sse(reply: BaseModel) -> bytes:
    """Return the reply as one server-sent event. JSON escapes line breaks, so the event is one line."""
    return b"data: " + reply.model_dump_json(exclude_unset=True).encode() + b"\n\n"


async def read_body(request: Request) -> bytes:
    """Return the whole body; raise Cancelled if the client disconnects first. The request does not keep the bytes."""
    try:
        return b"".join([chunk async for chunk in request.stream()])
    except ClientDisconnect:
        raise Cancelled("the client went away") from None


async def while_connected(receive: Receive, work: Coroutine[Any, Any, _T]) -> _T:
    """Return the result of the work. If the client disconnects first, cancel the work and raise Cancelled.

    The request's body must have been read: from then on, `receive` returns only when the client is gone.
    """
    leaving = asyncio.create_task(_disconnected(receive))
    try:
        return await until_failure(work, leaving)
    finally:
        leaving.cancel()


async def _disconnected(receive: Receive) -> NoReturn:
    while (await receive())["type"] != "http.disconnect":
        pass
    raise Cancelled("the client went away")
