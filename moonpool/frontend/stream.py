"""Bodies that arrive and answers that flow: server-sent events, and work that ends when its client has gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from pydantic import BaseModel
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from moonpool.base.errors import Cancelled

_T = TypeVar("_T")
DONE = b"data: [DONE]\n\n"


def sse(reply: BaseModel) -> bytes:
    """One event. JSON escapes line breaks, so the event is one line."""
    return b"data: " + reply.model_dump_json(exclude_unset=True).encode() + b"\n\n"


async def read_body(request: Request) -> bytes:
    """Return the whole body; Cancelled when the client goes away first. The request does not keep the bytes."""
    try:
        return b"".join([chunk async for chunk in request.stream()])
    except ClientDisconnect:
        raise Cancelled("the client went away") from None


async def while_connected(receive: Receive, work: Coroutine[Any, Any, _T]) -> _T:
    """The result of the work. When the client goes away first, the work is cancelled and Cancelled raised.

    The request's body must have been read: from then on, `receive` answers only when the client is gone.
    """
    working, leaving = asyncio.create_task(work), asyncio.create_task(_gone(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise Cancelled("the client went away")
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.wait((working, leaving))


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Sends `first`, then the rest as it is made. Owns `rest`: closes it at the end and when the client goes away."""

    def __init__(self, first: bytes, rest: AsyncGenerator[bytes, None]) -> None:
        self._first = first
        self._rest = rest
        super().__init__(media_type="text/event-stream", headers={"cache-control": "no-cache"})
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._rest):
            try:
                await while_connected(receive, self._send_all(send))
            except Cancelled as error:  # there is nobody to tell
                scope["state"]["outcome"] = error.code

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self._first, "more_body": True})
        async for chunk in self._rest:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
