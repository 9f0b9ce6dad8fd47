"""One attempt at a request with one pair of workers: reserve pages at decode, prefill into them, read the tokens.

An attempt ends after a finish reason, or raises; `failed` then names the worker that failed, and `loss` the kind of
failure. However it ends, the Decode stream is closed and the Prefill call is over or cancelled, so workers hold nothing
for it afterwards.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, NamedTuple, TypeVar, cast

from moonpool.base.clock import Deadline
from moonpool.base.errors import (
    Corrupt,
    DeadlineExceeded,
    NotFound,
    PeerLost,
    ProtocolError,
    StaleGeneration,
    Unavailable,
)
from moonpool.base.rpc import AsyncClient
from moonpool.conductor.messages import Decision, WorkerRef
from moonpool.conductor.retries import Loss
from moonpool.frontend.workers import Connections
from moonpool.worker.messages import (
    ALONE_STEPS,
    Decode,
    DecodeItem,
    Prefill,
    PrefillReply,
    RequestSpec,
    Ticket,
    TokenOut,
)

_T = TypeVar("_T")

# Errors after which another attempt, perhaps with other workers, may succeed.
LOST = (PeerLost, NotFound, Corrupt, StaleGeneration, Unavailable)
# A worker that fails a request with an error may be ending; its connection then closes within this time.
_ENDING_S = 0.3
_LATE = "the request took longer than allowed"


class TokenBatch(NamedTuple):
    """Tokens in order; `prefill` is set on the attempt's first batch, `finish_reason` on its last."""

    tokens: tuple[TokenOut, ...]
    finish_reason: str | None
    prefill: PrefillReply | None = None


class Attempt:
    def __init__(self, connections: Connections, decision: Decision, spec: RequestSpec, deadline: Deadline) -> None:
        self._connections = connections
        self.decision = decision
        self._spec = spec
        self._deadline = deadline
        self.failed: set[str] = set()
        self.loss = Loss.ABSENT
        self._is_prefilled = False
        self._num_decoded = 0  # tokens from the decode worker
        self._stages: dict[str, AsyncClient] = {}  # the other workers of a pipeline, to see which one died

    @property
    def survived(self) -> bool:
        """Whether both workers have computed the number of steps for which a suspect request runs alone."""
        return self._num_decoded >= ALONE_STEPS

    async def batches(self) -> AsyncGenerator[TokenBatch, None]:
        """Yield the tokens. The first one comes from the prefill worker, all others from the decode worker."""
        prefill = await self._connect(self.decision.prefill)
        self._stages = {stage.name: await self._connect(stage) for stage in self.decision.stages}
        decode = await self._connect(self.decision.decode)
        stream = decode.stream(Decode(spec=self._spec), timeout_s=self._deadline.remaining_s())
        async with _closing(stream) as items:
            ticket = _ticket(await self._next(decode, items))
            # Reading the stream during the prefill notices at once if the decode worker dies meanwhile.
            async with _running(self._next(decode, items)) as second:
                reply = await self._prefill(prefill, decode, ticket, second)
                self._is_prefilled = True
                yield TokenBatch((reply.first,), reply.finish_reason, reply)
                if reply.finish_reason is not None:
                    return
                item = await second
            while True:
                self._num_decoded += len(item.tokens)
                yield TokenBatch(item.tokens, item.finish_reason)
                if item.finish_reason is not None:
                    return
                item = await self._next(decode, items)

    async def _connect(self, worker: WorkerRef) -> AsyncClient:
        try:
            async with asyncio.timeout(self._deadline.remaining_s()):
                return await self._connections.worker(worker)
        except TimeoutError as error:
            raise DeadlineExceeded(_LATE) from error
        except LOST:
            self.failed.add(worker.name)
            raise

    async def _next(self, decode: AsyncClient, items: AsyncIterator[DecodeItem]) -> DecodeItem:
        try:
            return await anext(items)
        except StopAsyncIteration:
            self.failed.add(self.decision.decode.name)
            raise PeerLost(f"worker {self.decision.decode.name} ended its stream early") from None
        except DeadlineExceeded as error:
            raise DeadlineExceeded(_LATE) from error
        except LOST:
            await self._record_decode_failure(decode)
            raise

    async def _prefill(
        self, prefill: AsyncClient, decode: AsyncClient, ticket: Ticket, second: asyncio.Task[DecodeItem]
    ) -> PrefillReply:
        decision = self.decision
        call = Prefill(
            spec=self._spec,
            ticket=ticket,
            max_pool_blocks=decision.max_pool_blocks,
            stages=tuple(stage.address for stage in decision.stages),
            chunk_tokens=decision.chunk_tokens,
        )
        async with _running(prefill.call(call, timeout_s=self._deadline.remaining_s())) as prefilling:
            await asyncio.wait((prefilling, second), return_when=asyncio.FIRST_COMPLETED)
            if second.done():
                second.result()  # the second token may arrive before the reply with the first; a failure is raised
            try:
                return await prefilling
            except LOST:
                await self._record_prefill_failure(prefill, decode)
                raise

    async def _record_prefill_failure(self, prefill: AsyncClient, decode: AsyncClient) -> None:
        """Record which worker failed the prefill: it also fails if the decode worker cannot be reached, or if another
        stage of a pipeline dies."""
        await _wait_closed(prefill, decode, *self._stages.values())
        dead = [name for name, stage in self._stages.items() if stage.closed.is_set()]
        if dead:
            self.failed.update(dead)
            self.loss = Loss.DIED
        elif prefill.closed.is_set():
            self.failed.add(self.decision.prefill.name)
            self.loss = Loss.DIED
        elif decode.closed.is_set():
            self.failed.add(self.decision.decode.name)
        else:
            self.failed.add(self.decision.prefill.name)
            self.loss = Loss.REFUSED

    async def _record_decode_failure(self, decode: AsyncClient) -> None:
        """Record the failure of the decode worker. It computes nothing of a request before the prefill is done, so its
        death before that does not count as a death by this request."""
        await _wait_closed(decode)
        self.failed.add(self.decision.decode.name)
        if not decode.closed.is_set():
            self.loss = Loss.REFUSED
        elif self._is_prefilled:
            self.loss = Loss.DIED


async def _wait_closed(*clients: AsyncClient) -> None:
    """Return when one of the connections has closed, or after _ENDING_S."""
    waiting = [asyncio.create_task(client.closed.wait()) for client in clients]
    try:
        await asyncio.wait(waiting, timeout=_ENDING_S, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in waiting:
            task.cancel()


def _ticket(item: DecodeItem) -> Ticket:
    if item.ticket is None:
        raise ProtocolError("a decode worker sent tokens before its ticket")
    return item.ticket


@asynccontextmanager
async def _closing(items: AsyncIterator[_T]) -> AsyncIterator[AsyncIterator[_T]]:
    """Close a stream at the end of the block. A lost connection is no failure here: it ends the stream too."""
    try:
        yield items
    finally:
        with contextlib.suppress(PeerLost):
            await cast(AsyncGenerator[_T, None], items).aclose()


@asynccontextmanager
async def _running(work: Coroutine[Any, Any, _T]) -> AsyncIterator[asyncio.Task[_T]]:
    """Run the work as a task that ends with the block. Its failure is raised only where the task is awaited."""
    task = asyncio.create_task(work)
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.wait((task,))
        if not task.cancelled():
            task.exception()  # marks it as retrieved, so that asyncio does not log it
