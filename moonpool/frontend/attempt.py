"""One attempt at a request with one pair of workers: reserve pages at decode, prefill into them, read the tokens.

An attempt ends after a finish reason, or raises; `failed` then names the worker that failed, and `loss` the kind of
failure. However it ends, the Decode stream is closed and the Prefill call is over or cancelled, so workers hold nothing
for it afterwards.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from typing import NamedTuple

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
from moonpool.frontend.until_failure import until_failure
from moonpool.frontend.workers import Connections
from moonpool.worker.messages import (
    ALONE_STEPS,
    MOVED,
    Decode,
    DecodeItem,
    Prefill,
    PrefillReply,
    RequestSpec,
    Ticket,
    TokenOut,
)

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
        self.is_moved = False  # the answer has to go on at another decode worker
        self._is_prefilled = False
        self._num_decoded = 0  # tokens from the decode worker
        self._stages: dict[str, AsyncClient] = {}  # the other workers of a pipeline, to see which one died

    @property
    def survived(self) -> bool:
        """Whether both workers have computed the number of steps for which a suspect request runs alone."""
        return self._num_decoded >= ALONE_STEPS

    async def batches(self) -> AsyncGenerator[TokenBatch, None]:
        """Yield the tokens. The first one comes from the prefill worker, all others from the decode worker; if it
        resumes the answer, all of them. Return without a finish reason if the answer `is_moved`."""
        resumes = self.decision.resumes
        prefill = await self._connect(self.decision.prefill)
        self._stages = {stage.name: await self._connect(stage) for stage in self.decision.stages}
        decode = await self._connect(self.decision.decode)
        call = Decode(spec=self._spec, resumes=resumes)
        items = decode.stream(call, timeout_s=self._deadline.remaining_s())
        second: asyncio.Task[DecodeItem] | None = None
        try:
            if resumes:
                self._is_prefilled = True
                item = await self._next(decode, items)
            else:
                ticket = _ticket(await self._next(decode, items))
                # Reading the stream during the prefill notices at once if the decode worker dies meanwhile.
                second = asyncio.create_task(self._next(decode, items))
                reply = await self._prefill(prefill, decode, ticket, second)
                self._is_prefilled = True
                yield TokenBatch((reply.first,), reply.finish_reason, reply)
                if reply.finish_reason is not None:
                    return
                item = await second
            while True:
                if item.finish_reason == MOVED:
                    self.is_moved = True
                    return
                self._num_decoded += len(item.tokens)
                yield TokenBatch(item.tokens, item.finish_reason)
                if item.finish_reason is not None:
                    return
                item = await self._next(decode, items)
        finally:
            await _end(second, items)

    async def _connect(self, worker: WorkerRef) -> AsyncClient:
        try:
            connected = self._connections.connected_worker(worker)
            if connected is not None:
                return connected
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
        try:
            # The second token may arrive before the reply with the first; only its failure ends the call.
            return await until_failure(prefill.call(call, timeout_s=self._deadline.remaining_s()), second)
        except LOST:
            if not self.failed:  # otherwise the decode worker's stream failed, and that is recorded
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


async def _end(second: asyncio.Task[DecodeItem] | None, items: AsyncGenerator[DecodeItem, None]) -> None:
    """End the reading of the stream's second item, if it goes on, and the stream. A lost connection is no failure here:
    it ends the stream too."""
    if second is not None and not second.done():
        second.cancel()
        await asyncio.wait((second,))
    if second is not None and not second.cancelled():
        second.exception()  # marks it as retrieved, so that asyncio does not log it
    with contextlib.suppress(PeerLost):
        await items.aclose()
