"""The stages of this worker in pipelines that other workers lead: RunStage, StartStage, ChunkReady and PutSpan."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from moonpool.base.errors import AlreadyExists, DeadlineExceeded, MoonpoolError, NotFound
from moonpool.base.keys import chain_keys
from moonpool.store.messages.shared_space import WrittenPieces
from moonpool.worker.kv_link.push import SpanChecksums
from moonpool.worker.kv_link.send_queue import SendQueue, Urgency
from moonpool.worker.kv_link.span_puts import SpanPuts
from moonpool.worker.messages import ChunkReady, PutSpan, RequestSpec, RunStage, StageItem, StartStage
from moonpool.worker.pipeline.stage import Stage, StageTools, settle

T = TypeVar("T")


class StageService:
    """Knows the stages that run here, those that this worker leads included."""

    def __init__(self, tools: StageTools, puts: SpanPuts, queue: SendQueue) -> None:
        self.tools = tools
        self._puts, self._queue = puts, queue
        self._stages: dict[tuple[str, int], Stage] = {}
        self.address = ""  # of this worker, once it serves

    @property
    def num_stages(self) -> int:
        return len(self._stages)

    @asynccontextmanager
    async def open(self, stage: Stage) -> AsyncIterator[None]:
        """Let calls find the stage in the block; close it at the end. AlreadyExists if there is another one."""
        key = stage.spec.request_id, stage.spec.epoch
        try:
            if key in self._stages:
                raise AlreadyExists(f"this attempt at request {stage.spec.request_id} has a stage here")
            self._stages[key] = stage
            yield
        finally:
            if self._stages.get(key) is stage:
                del self._stages[key]
            stage.close()

    def _find(self, request_id: str, epoch: int) -> Stage:
        found = self._stages.get((request_id, epoch))
        if found is None:
            raise NotFound(f"request {request_id} has no stage here")
        return found

    async def run(self, call: RunStage) -> AsyncIterator[StageItem]:
        events = asyncio.get_running_loop()
        handed: asyncio.Future[SpanChecksums] = events.create_future()

        def ended(outcome: SpanChecksums | MoonpoolError) -> None:
            events.call_soon_threadsafe(settle, handed, outcome)

        layers = range(call.first_layer, call.first_layer + call.num_layers)
        stage = Stage(
            self.tools,
            call.spec,
            call.ticket,
            layers,
            call.max_chunk_tokens,
            lambda _: stage.push.end_writes(ended),
            self.address,
        )
        async with self.open(stage):
            await stage.reserve()
            sending = asyncio.create_task(stage.send_on(call.next))
            try:
                yield StageItem(inbox=stage.inbox.place if stage.inbox is not None else None)
                pulled = await stage.pull(self.keys(call.spec)[: call.num_pool_blocks])
                yield StageItem(pulled_blocks=pulled.num_good)
                yield StageItem(checksums=await self._handed(stage, sending, handed))
                await asyncio.sleep(call.spec.timeout_s)  # the leader closes the stream when it needs the pages no more
            finally:
                sending.cancel()
                await asyncio.wait((sending,))
                if not sending.cancelled():
                    sending.exception()

    async def _handed(self, stage: Stage, sending: asyncio.Task[None], handed: asyncio.Future[SpanChecksums]) -> bytes:
        """Return the checksums of this stage's part when it is handed over and all hidden states are sent."""
        waiting: set[asyncio.Future[Any]] = {sending, handed, stage.failed}
        while len(waiting) > 1:
            done, waiting = await asyncio.wait(
                waiting, return_when=asyncio.FIRST_COMPLETED, timeout=stage.spec.timeout_s
            )
            if not done:
                raise DeadlineExceeded(f"the prompt was not computed within {stage.spec.timeout_s:g} s")
            for each in done:
                _raise_first(each)
        return handed.result().checksums.astype("<u4").tobytes()

    async def start(self, call: StartStage) -> None:
        await self._find(call.request_id, call.epoch).start(call.first_token, call.chunk_tokens)

    async def chunk_ready(self, call: ChunkReady) -> None:
        await self._find(call.request_id, call.epoch).chunk_ready(call.number)

    async def put_span(self, call: PutSpan) -> list[WrittenPieces | None]:
        stage = self._find(call.request_id, call.epoch)
        keys, pages = self.keys(stage.spec), stage.prompt.pages
        page_of = {keys[block]: pages[block] for block in call.blocks}
        owner, loop, stages = f"put:{stage.prompt.owner}", self.tools.loop, self.tools.stages

        def write() -> list[WrittenPieces | None]:
            # Held even if the stage ends meanwhile: another prompt's bytes must not be put.
            loop.call(lambda: stages.hold(owner, stage.prompt)).result()
            try:
                return self._puts.write_joined(call.session, page_of, call.spaces, stage.layers)
            finally:
                loop.post(lambda: stages.release(owner))

        return await self.on_pool_lane(write)

    def keys(self, spec: RequestSpec) -> list[bytes]:
        """Return the keys of the prompt's full blocks."""
        return chain_keys(spec.root, spec.tokens, self._puts.block_tokens)

    async def on_pool_lane(self, function: Callable[[], T]) -> T:
        """Run the function on the thread that puts to the pool, after what is queued there. It runs to its end even if
        the caller is cancelled: shielded, because what it began has to be ended."""
        events = asyncio.get_running_loop()
        outcome: asyncio.Future[T] = events.create_future()

        def task() -> None:
            try:
                result = function()
            except Exception as error:  # noqa: BLE001 - it goes to the caller
                events.call_soon_threadsafe(_settle_error, outcome, error)
            else:
                events.call_soon_threadsafe(settle, outcome, result)

        self.post_to_pool_lane(task)
        return await asyncio.shield(outcome)

    def post_to_pool_lane(self, task: Callable[[], None]) -> None:
        """Queue a function for the thread that puts to the pool. It must not raise."""
        self._queue.put(Urgency.POOL, task)


def _raise_first(future: asyncio.Future[Any]) -> None:
    """Raise the error of a future that is done; of several in a group the first one."""
    try:
        future.result()
    except BaseExceptionGroup as group:
        raise next((each for each in group.exceptions if isinstance(each, MoonpoolError)), group) from None


def _settle_error(future: asyncio.Future[T], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
        future.exception()  # retrieved here, because the caller may have stopped waiting
