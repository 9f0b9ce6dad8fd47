"""The last stage of a pipeline, which leads the others: opens them, says where the prompt begins, samples the first
token, commits the hand-off.

The prompt begins behind its longest prefix of which all stages have pulled their layers. If a stage cannot be opened,
or is lost while it pulls, the prompt is computed here alone. If one fails later, the attempt fails, and the front end
tries again: only new pages of the decode worker are safe from what the lost stage may still write.

Once the request is handed over, the blocks go to the pool: every stage writes its layers of them, and this one owns
their headers and ends the puts.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch

from moonpool.base.clock import Clock, Deadline
from moonpool.base.cluster import REQUEST_LIMITS, WORKER_SERVICE
from moonpool.base.errors import DeadlineExceeded, MoonpoolError, ProtocolError, Unavailable
from moonpool.base.rpc import AsyncClient
from moonpool.engine.sampler import SampledToken, SampleRow, sample
from moonpool.engine.scheduler import Scheduler
from moonpool.engine.sequence import FinishReason
from moonpool.engine.sequence import Sequence as RequestSequence
from moonpool.engine.stages import common_prefix_blocks, layer_spans, widened_chunk_tokens
from moonpool.store.client.put_session import PutSession
from moonpool.store.messages.shared_space import SharedSpace, WrittenPieces
from moonpool.worker.kv_link.pull_job import PullResult
from moonpool.worker.kv_link.push import SpanChecksums
from moonpool.worker.kv_link.span_puts import SpanPuts
from moonpool.worker.messages import (
    Prefill,
    PrefillItem,
    PrefillReply,
    PutSpan,
    RunStage,
    StageInbox,
    StageItem,
    StartStage,
    TokenOut,
)
from moonpool.worker.metrics import Samples
from moonpool.worker.pipeline.service import StageService
from moonpool.worker.pipeline.stage import Stage, settle
from moonpool.worker.prefill import count_pool_blocks, token_out

_T = TypeVar("_T")
_LOG = logging.getLogger(__name__)
_OPEN_TIMEOUT_S = 5.0  # to reach another stage and to get its pages
_PULL_TIMEOUT_S = 60.0  # of another stage, which gives its pull up sooner
_PUT_TIMEOUT_S = 60.0


@dataclass(slots=True)
class _OtherStage:
    """A stage at another worker."""

    client: AsyncClient
    items: AsyncIterator[StageItem]
    layers: range


@dataclass(slots=True, kw_only=True)
class _Run:
    """One prompt on its way through the pipeline. Its first `prefix_blocks` blocks come from the pool."""

    call: Prefill
    sequence: RequestSequence
    stage: Stage
    sampled: asyncio.Future[tuple[SampledToken, FinishReason | None]]
    others: list[_OtherStage] = field(default_factory=list)  # the one before the last first
    arrived_s: float
    opened_s: float = 0.0
    pull_s: float = 0.0
    pulled: PullResult = field(default_factory=lambda: PullResult(0, 0, 0.0))  # by this stage
    prefix_blocks: int = 0


class PipelineLeader:
    """`alone` computes a prompt on this worker alone; `make_sequence` makes the sequence of a prompt."""

    def __init__(
        self,
        service: StageService,
        puts: SpanPuts,
        scheduler: Scheduler,
        samples: Samples,
        clock: Clock,
        alone: Callable[[Prefill], AsyncGenerator[PrefillItem, None]],
        make_sequence: Callable[[Prefill], RequestSequence],
    ) -> None:
        self._service, self._puts, self._scheduler = service, puts, scheduler
        self._samples, self._clock = samples, clock
        self._alone, self._make_sequence = alone, make_sequence
        self._putting: set[asyncio.Task[None]] = set()
        self.num_prompts = 0  # computed by pipelines that this worker led

    @property
    def num_putting(self) -> int:
        return len(self._putting)

    async def close(self) -> None:
        """Give up what is still on its way to the pool. Idempotent."""
        tasks = list(self._putting)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def prefill(self, call: Prefill) -> AsyncGenerator[PrefillItem, None]:
        async with AsyncExitStack() as own:
            run: _Run | None = None
            try:
                run = await own.enter_async_context(self._opened(call))
            except MoonpoolError as error:
                _LOG.info("%s is computed by one worker: %s", call.spec.request_id, error)
            items = self._alone(call) if run is None else self._computed(run)
            async with aclosing(items):
                async for item in items:
                    if run is not None and item.handoff_s is not None:
                        self._put_later(run, own.pop_all())
                    yield item

    @asynccontextmanager
    async def _opened(self, call: Prefill) -> AsyncIterator[_Run]:
        """Open all stages and let them pull the prefix. Raise what keeps one from it; nothing is handed over then."""
        spans = layer_spans(self._service.tools.num_layers, len(call.stages) + 1)
        sequence = self._make_sequence(call)
        self._scheduler.check_fits(sequence)
        sampled: asyncio.Future[tuple[SampledToken, FinishReason | None]] = asyncio.get_running_loop().create_future()
        stage = Stage(
            self._service.tools,
            call.spec,
            call.ticket,
            spans[-1],
            self._chunk_tokens(call, 0),
            lambda logits: self._sample(sequence, logits, sampled),
            self._service.address,
        )
        run = _Run(call=call, sequence=sequence, stage=stage, sampled=sampled, arrived_s=self._clock.now_s())
        async with AsyncExitStack() as own:
            await own.enter_async_context(self._service.open(stage))
            await stage.reserve()
            inbox = stage.inbox
            assert inbox is not None, "a leader is not the first stage"
            place = inbox.place
            num_blocks = await count_pool_blocks(self._service.tools.prefix.puller, sequence, call.max_pool_blocks)
            for address, layers in zip(reversed(call.stages), reversed(spans[:-1]), strict=True):
                place = await self._open_other(own, run, address, layers, place, num_blocks)
            await self._pull(run, num_blocks)
            yield run

    async def _open_other(
        self, own: AsyncExitStack, run: _Run, address: str, layers: range, place: StageInbox, num_blocks: int
    ) -> StageInbox:
        """Open a stage that sends hidden states to `place`, and add it to the run. Return its inbox, or `place` if it
        is the first stage. It goes on to pull its layers of the first `num_blocks` blocks."""
        client = await AsyncClient.connect(
            address,
            WORKER_SERVICE,
            name=self._service.tools.name,
            timeout_s=_OPEN_TIMEOUT_S,
            silence_limits=REQUEST_LIMITS,
        )
        own.callback(client.close)
        order = RunStage(
            spec=run.call.spec,
            ticket=run.call.ticket,
            first_layer=layers.start,
            num_layers=len(layers),
            max_chunk_tokens=self._chunk_tokens(run.call, 0),
            next=place,
            num_pool_blocks=num_blocks,
        )
        items = await own.enter_async_context(aclosing(client.stream(order)))
        run.others.append(_OtherStage(client, items, layers))
        first = await _next(items, _OPEN_TIMEOUT_S)
        return first.inbox or place

    async def _pull(self, run: _Run, num_blocks: int) -> None:
        """Pull this stage's layers while the others pull theirs, and decide behind which block the prompt begins."""
        run.opened_s = self._clock.now_s()
        own = asyncio.ensure_future(run.stage.pull(run.sequence.keys[:num_blocks]))
        others = asyncio.gather(*(_pulled_blocks(other) for other in run.others))
        try:
            found = await _first_failure(others, own)
            run.pulled = await own
        finally:
            own.cancel()
            others.cancel()
        run.pull_s = self._clock.now_s() - run.opened_s if num_blocks else 0.0
        num_tokens, block_tokens = len(run.call.spec.tokens), self._puts.block_tokens
        run.prefix_blocks = common_prefix_blocks([run.pulled.num_good, *found], num_tokens, block_tokens)

    async def _start(self, run: _Run) -> None:
        """Start all stages, the last one first: none must get hidden states before it has started. Raise Unavailable if
        one is lost."""
        first_token = run.prefix_blocks * self._puts.block_tokens
        chunk_tokens, spec = self._chunk_tokens(run.call, first_token), run.call.spec
        await run.stage.start(first_token, chunk_tokens)
        order = StartStage(
            request_id=spec.request_id, epoch=spec.epoch, first_token=first_token, chunk_tokens=chunk_tokens
        )
        for other in run.others:
            try:
                await other.client.call(order, timeout_s=spec.timeout_s)
            except MoonpoolError as error:
                raise _lost(other, error) from error

    def _chunk_tokens(self, call: Prefill, first_token: int) -> int:
        """Return the size of the chunks behind `first_token`. The conductor chose one for what the pool had then."""
        num_tokens = len(call.spec.tokens) - first_token
        return widened_chunk_tokens(call.chunk_tokens, num_tokens, self._scheduler.config.max_batch_tokens)

    def _sample(
        self,
        sequence: RequestSequence,
        logits: torch.Tensor,
        sampled: asyncio.Future[tuple[SampledToken, FinishReason | None]],
    ) -> None:
        """Sample the first token, on the engine's thread."""
        barred = self._scheduler.barred_tokens(sequence)
        row = SampleRow(sequence.params, sequence.tokens, sequence.num_prompt_tokens, barred)
        (found,) = sample(logits, [row])
        if isinstance(found, SampledToken):
            outcome = found, self._scheduler.end_reason(sequence, found.token)
            sampled.get_loop().call_soon_threadsafe(settle, sampled, outcome)
        else:
            sampled.get_loop().call_soon_threadsafe(settle, sampled, found)

    async def _computed(self, run: _Run) -> AsyncGenerator[PrefillItem, None]:
        """Yield the reply when the first token is sampled, and how long the hand-off took. Raise Unavailable if a stage
        fails."""
        deadline = Deadline(run.call.spec.timeout_s)
        spans: list[asyncio.Future[SpanChecksums]] = []
        try:
            async with _within(deadline):
                await self._start(run)
                spans += [asyncio.ensure_future(self._handed(run, other)) for other in run.others]
                sampled, reason = await _first_failure(run.sampled, run.stage.failed, *spans)
            first, began_s = token_out(sampled), self._clock.now_s()
            ended = None if reason == "handoff" else reason
            self.num_prompts += 1
            yield PrefillItem(reply=self._reply(run, first, ended))
            if ended is None:
                async with _within(deadline):
                    others = await _first_failure(asyncio.gather(*spans), run.stage.failed)
                    await self._commit(run, first, others)
                handoff_s = self._clock.now_s() - began_s
                self._samples.times.handoff.observe(handoff_s)
                yield PrefillItem(handoff_s=handoff_s)
        finally:
            for span in spans:
                span.cancel()

    def _reply(self, run: _Run, first: TokenOut, ended: str | None) -> PrefillReply:
        compute_s, block_tokens = self._clock.now_s() - run.opened_s, self._puts.block_tokens
        self._samples.times.prefill.observe(compute_s)
        num_blocks, pulled = run.prefix_blocks, run.pulled
        return PrefillReply(
            first=first,
            finish_reason=ended,
            local_tokens=0,
            pool_tokens=num_blocks * block_tokens,
            pool_nbytes=num_blocks * self._service.tools.prefix.puller.page_nbytes,
            queue_s=run.opened_s - run.arrived_s,
            compute_s=compute_s,
            ssd_tokens=min(num_blocks, pulled.num_ssd) * block_tokens,
            remote_tokens=min(num_blocks, pulled.num_remote) * block_tokens,
            pull_s=run.pull_s,
        )

    async def _handed(self, run: _Run, other: _OtherStage) -> SpanChecksums:
        """Return the checksums of another stage's part, once it is written."""
        try:
            item = await anext(other.items)
        except (MoonpoolError, StopAsyncIteration) as error:
            raise _lost(other, error) from error
        if item.checksums is None:
            raise ProtocolError("a stage ended without its checksums")
        found = np.frombuffer(item.checksums, dtype="<u4").reshape(-1, len(other.layers))
        return SpanChecksums(other.layers, found)

    async def _commit(self, run: _Run, first: TokenOut, others: Sequence[SpanChecksums]) -> None:
        events = asyncio.get_running_loop()
        committed: asyncio.Future[None] = events.create_future()

        def on_done(error: MoonpoolError | None) -> None:
            events.call_soon_threadsafe(settle, committed, error)

        run.stage.push.commit(first, len(run.call.spec.tokens), on_done, others)
        await committed
        self._samples.handoff_nbytes += run.stage.push.sent_nbytes

    # the pool

    def _put_later(self, run: _Run, own: AsyncExitStack) -> None:
        """Put the blocks in the background, then end the stages."""

        async def put() -> None:
            async with own:
                await self._put(run)

        task = asyncio.create_task(put(), name="pipeline puts")
        self._putting.add(task)
        task.add_done_callback(self._putting.discard)

    async def _put(self, run: _Run) -> None:
        keys = run.sequence.keys[: len(run.call.spec.tokens) // self._puts.block_tokens]
        begun = await self._service.on_pool_lane(lambda: self._puts.begin(keys)) if keys else None
        if begun is None:
            return
        shared, puts = begun
        complete: list[PutSession] = []
        try:
            complete = await self._write(run, shared.session, puts)
        except MoonpoolError as error:
            _LOG.info("the blocks of %s were not put: %s", run.call.spec.request_id, error)
        finally:
            # Also when this is cancelled: no other stage has written what it did not answer for.
            self._service.post_to_pool_lane(lambda: self._puts.end(shared, complete))

    async def _write(self, run: _Run, session: int, puts: dict[int, PutSession]) -> list[PutSession]:
        """Let every stage write its layers; return the blocks of which all is written."""
        if not puts:
            return []
        spec, pages = run.call.spec, run.stage.prompt.pages
        order = PutSpan(
            request_id=spec.request_id,
            epoch=spec.epoch,
            session=session,
            blocks=list(puts),
            spaces=[SharedSpace(each.generation, each.replicas) for each in puts.values()],
        )
        page_of = {each: pages[block] for block, each in puts.items()}
        own = self._service.on_pool_lane(lambda: self._puts.write(page_of, run.stage.layers))
        answers = [other.client.call(order, timeout_s=_PUT_TIMEOUT_S) for other in run.others]
        failed, written = await asyncio.gather(own, asyncio.gather(*answers))
        for other, pieces in zip(run.others, written, strict=True):
            failed |= _merge(list(puts.values()), other.layers, pieces)
        return [each for each in puts.values() if each not in failed]


def _merge(puts: Sequence[PutSession], layers: range, written: Sequence[WrittenPieces | None]) -> set[PutSession]:
    """Record what another stage has written. Return the puts of which it could not write its part."""
    failed = set()
    for put, pieces in zip(puts, written, strict=True):
        if pieces is not None:
            put.add_written(layers, pieces.checksums, pieces.failed)
        if pieces is None or not put.num_replicas:
            failed.add(put)
    return failed


def _lost(other: _OtherStage, error: Exception) -> Unavailable:
    return Unavailable(f"layers {other.layers.start} to {other.layers.stop - 1} were lost: {error}")


async def _pulled_blocks(other: _OtherStage) -> int:
    item = await _next(other.items, _PULL_TIMEOUT_S)
    if item.pulled_blocks is None:
        raise ProtocolError("a stage did not say what it has pulled")
    return item.pulled_blocks


async def _next(items: AsyncIterator[StageItem], timeout_s: float) -> StageItem:
    try:
        async with asyncio.timeout(timeout_s):
            return await anext(items)
    except TimeoutError as error:
        raise DeadlineExceeded("another stage did not answer") from error
    except StopAsyncIteration as error:
        raise ProtocolError("another stage ended before it began") from error


@asynccontextmanager
async def _within(deadline: Deadline) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(deadline.remaining_s()):
            yield
    except TimeoutError as error:
        raise DeadlineExceeded("the prompt was not computed and handed over in time") from error


async def _first_failure(wanted: asyncio.Future[_T], *others: asyncio.Future[Any]) -> _T:
    """Return the result of `wanted`; raise the first failure of any of them meanwhile."""
    waiting: set[asyncio.Future[Any]] = {wanted, *others}
    while not wanted.done():
        done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for each in done:
            each.result()
    return wanted.result()
