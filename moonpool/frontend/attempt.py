"""One attempt at a request with one pair of workers: reserve pages at decode, prefill into them, read the tokens.

The first token does not wait for the hand-off of the KV: both streams are read until the decode worker has it.

An attempt ends after a finish reason, or raises; `failed` then names the worker that failed, and `loss` the kind of
failure. However it ends, the streams of both workers are closed, so workers hold nothing for it afterwards.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from typing import Any, NamedTuple, TypeAlias

from moonpool.base.clock import Deadline
from moonpool.base.errors import (
    Corrupt,
    DeadlineExceeded,
    NotFound,
    PeerLost,
    ProtocolError,
    StaleGeneration,
    Stalled,
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
    PrefillItem,
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
_Prompt: TypeAlias = AsyncGenerator[PrefillItem, None]


class TokenBatch(NamedTuple):
    """Tokens in order; `prefill` is set on the attempt's first batch, `finish_reason` on its last."""

    tokens: tuple[TokenOut, ...]
    finish_reason: str | None
    prefill: PrefillReply | None = None


class Attempt:
    """`handoff_s` is the time from the first token until the decode worker had the KV; None until it is known."""

    def __init__(self, connections: Connections, decision: Decision, spec: RequestSpec, deadline: Deadline) -> None:
        self._connections = connections
        self.decision = decision
        self._spec = spec
        self._deadline = deadline
        self.failed: set[str] = set()
        self.loss = Loss.ABSENT
        self.is_moved = False  # the answer has to go on at another decode worker
        self.handoff_s: float | None = None
        self._handing_over: asyncio.Task[None] | None = None  # from the first token on
        self._num_decoded = 0  # tokens from the decode worker
        self._stages: dict[str, AsyncClient] = {}  # the other workers of a pipeline, to see which one died

    @property
    def survived(self) -> bool:
        """Whether both workers have computed the number of steps for which a suspect request runs alone."""
        return self._num_decoded >= ALONE_STEPS

    async def batches(self) -> AsyncGenerator[TokenBatch, None]:
        """Yield the tokens. The first one comes from the prefill worker, as soon as it has computed it, all others from
        the decode worker; if it resumes the answer, all of them. Return without a finish reason if the answer
        `is_moved`."""
        resumes = self.decision.resumes
        prefill = await self._connect(self.decision.prefill)
        self._stages = {stage.name: await self._connect(stage) for stage in self.decision.stages}
        decode = await self._connect(self.decision.decode)
        call = Decode(spec=self._spec, resumes=resumes)
        items = decode.stream(call, timeout_s=self._deadline.remaining_s())
        prompt: _Prompt | None = None
        second: asyncio.Task[DecodeItem] | None = None
        try:
            if resumes:
                item = await self._next(decode, items)
            else:
                ticket = _ticket(await self._next(decode, items))
                # Reading the stream during the prefill notices at once if the decode worker dies meanwhile.
                second = asyncio.create_task(self._next(decode, items))
                prompt = self._start_prefill(prefill, ticket)
                # The second token may arrive before the reply with the first; only its failure ends the wait.
                reply = await until_failure(self._reply(prompt, prefill, decode), second)
                if reply.finish_reason is None:
                    self._handing_over = asyncio.create_task(self._handed_over(prompt, prefill, decode))
                yield TokenBatch((reply.first,), reply.finish_reason, reply)
                if self._handing_over is None:
                    return
                # A token of the decode worker shows that it has the KV; before that the hand-off may fail.
                item = await until_failure(_result(second), self._handing_over)
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
            await _end((second, self._handing_over), (items, prompt))

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
        except Stalled:  # it has computed nothing of this request
            self.failed.add(self.decision.decode.name)
            raise
        except LOST:
            await self._record_decode_failure(decode)
            raise

    def _start_prefill(self, prefill: AsyncClient, ticket: Ticket) -> _Prompt:
        decision = self.decision
        call = Prefill(
            spec=self._spec,
            ticket=ticket,
            max_pool_blocks=decision.max_pool_blocks,
            stages=tuple(stage.address for stage in decision.stages),
            chunk_tokens=decision.chunk_tokens,
            reused_tokens=decision.reused_tokens,
        )
        return prefill.stream(call, timeout_s=self._deadline.remaining_s())

    async def _reply(self, prompt: _Prompt, prefill: AsyncClient, decode: AsyncClient) -> PrefillReply:
        reply = (await self._next_of_prompt(prompt, prefill, decode)).reply
        if reply is None:
            raise ProtocolError("a prefill worker handed over before its first token")
        return reply

    async def _handed_over(self, prompt: _Prompt, prefill: AsyncClient, decode: AsyncClient) -> None:
        """Return when the decode worker has the KV; raise what the hand-off failed with."""
        self.handoff_s = (await self._next_of_prompt(prompt, prefill, decode)).handoff_s

    async def _next_of_prompt(self, prompt: _Prompt, prefill: AsyncClient, decode: AsyncClient) -> PrefillItem:
        try:
            return await anext(prompt)
        except StopAsyncIteration:
            self.failed.add(self.decision.prefill.name)
            raise PeerLost(f"worker {self.decision.prefill.name} ended its stream early") from None
        except Stalled:
            self.failed.add(self.decision.prefill.name)
            raise
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
        """Record the failure of the decode worker. It computes nothing of a request before it has the KV, so its death
        before that does not count as a death by this request."""
        await _wait_closed(decode)
        self.failed.add(self.decision.decode.name)
        if not decode.closed.is_set():
            self.loss = Loss.REFUSED
        elif self.decision.resumes or self._num_decoded or await self._is_handed_over():
            self.loss = Loss.DIED

    async def _is_handed_over(self) -> bool:
        """Return whether the prefill worker says, or is about to say, that the decode worker has the KV."""
        if self._handing_over is None:
            return False
        await asyncio.wait((self._handing_over,), timeout=_ENDING_S)
        return self.handoff_s is not None


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


async def _result(task: asyncio.Task[DecodeItem]) -> DecodeItem:
    return await task


async def _end(tasks: Iterable[asyncio.Task[Any] | None], streams: Iterable[AsyncGenerator[Any, None] | None]) -> None:
    """End the reading of the streams, where it goes on, and the streams. A lost connection is no failure here: it ends
    the stream too."""
    for task in tasks:
        if task is not None and not task.done():
            task.cancel()
            await asyncio.wait((task,))
        if task is not None and not task.cancelled():
            task.exception()  # marks it as retrieved, so that asyncio does not log it
    for stream in streams:
        if stream is not None:
            with contextlib.suppress(PeerLost):
                await stream.aclose()
