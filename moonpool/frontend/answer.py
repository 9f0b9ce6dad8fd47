"""From the events of a request's choices to its HTTP answer, whole or streamed, in the format of its endpoint.

A choice's event is formatted and written to the socket by the task that runs the choice: no queue lies between them.
The work ends when its client disconnects.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from moonpool.base.errors import Cancelled, Internal, MoonpoolError
from moonpool.frontend.choice import ChoiceEvent
from moonpool.frontend.http_errors import error_json
from moonpool.frontend.protocol import WATCH_CLIENT
from moonpool.frontend.replies import Reply, json_response
from moonpool.frontend.request_handler import ClientRequest
from moonpool.frontend.until_failure import until_failure
from moonpool.worker.messages import TokenOut

_LOG = logging.getLogger(__name__)
_T = TypeVar("_T")
_ENCODER = msgspec.json.Encoder()
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

    def opening(self) -> Sequence[Reply]:
        """Return the chunks that come before any text."""
        ...

    def chunk(self, event: ChoiceEvent) -> Reply | None:
        """Return the event as a chunk; None if there is nothing to show yet."""
        ...

    def closing(self) -> Sequence[Reply]:
        """Return the chunks that come after everything else."""
        ...

    def whole(self, results: Sequence[ChoiceResult]) -> Reply: ...


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

    await while_connected(request.scope, client_request.run(collect))
    return json_response(form.whole(results))


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
            await while_connected(scope, self._send_all(scope, send))
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
            last = _event(error_json(failure))
        else:
            last = b"".join(map(sse, self._form.closing())) + _DONE
        await send({"type": "http.response.body", "body": last, "more_body": False})

    async def _start(self, send: Send) -> bytes:
        """Send the headers; return the opening chunks."""
        self._started = True
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        return b"".join(map(sse, self._form.opening()))


def sse(reply: Reply) -> bytes:
    """Return the reply as one server-sent event. JSON escapes line breaks, so the event is one line."""
    return _event(_ENCODER.encode(reply))


def _event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"


async def read_body(receive: Receive) -> bytes:
    """Return the whole body; raise Cancelled if the client disconnects first."""
    chunks: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Cancelled("the client went away")
        chunks.append(message.get("body", b""))
        if not message.get("more_body", False):
            return chunks[0] if len(chunks) == 1 else b"".join(chunks)


async def while_connected(scope: Scope, work: Coroutine[Any, Any, _T]) -> _T:
    """Return the result of the work. If the client disconnects first, cancel the work and raise Cancelled.

    The request's body must have been read.
    """
    with scope["extensions"][WATCH_CLIENT]() as gone:
        return await until_failure(work, gone)
