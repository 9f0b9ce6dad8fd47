"""One choice as its client sees it: tokens from a Generation, text from a TextAssembler; and several at once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from moonpool.base.errors import FatalRequest
from moonpool.frontend.attempt import TokenBatch
from moonpool.frontend.generation import ChoiceRunner
from moonpool.frontend.metrics import FrontendMetrics
from moonpool.frontend.text import TextAssembler, TextDelta
from moonpool.worker.messages import PrefillReply, TokenOut

_MAX_WAITING_EVENTS = 256


@dataclass(frozen=True, slots=True)
class ChoiceEvent:
    """New tokens and the text that they made visible; text may lag behind while it could be a stop string."""

    index: int
    text: str
    tokens: tuple[TokenOut, ...]
    finish_reason: str | None
    prefill: PrefillReply | None  # of the attempt that gave the first token, with that token only


class Choice:
    """Runs one choice. `after` is a choice of the same prompt whose prefill this one waits for, to reuse its KV."""

    def __init__(
        self,
        index: int,
        generation: ChoiceRunner,
        assembler: TextAssembler,
        metrics: FrontendMetrics,
        after: Choice | None = None,
    ) -> None:
        self.index = index
        self._generation = generation
        self._assembler = assembler
        self._metrics = metrics
        self._after = after
        self._prefilled = asyncio.Event()

    async def events(self) -> AsyncGenerator[ChoiceEvent, None]:
        """Ends with an event that has a finish reason, or raises what ChoiceRunner.events raises."""
        if self._after is not None:
            await self._after._prefilled.wait()
        last_s: float | None = None
        try:
            async with aclosing(self._generation.events()) as batches:
                async for batch in batches:
                    event = self._assemble(batch)
                    now_s = time.monotonic()
                    self._observe(event, None if last_s is None else now_s - last_s)
                    last_s = now_s
                    if event.finish_reason is not None:
                        self._generation.stop()
                    yield event
                    if event.finish_reason is not None:
                        break
        except FatalRequest:
            self._metrics.fatal_requests.inc()
            raise

    def _assemble(self, batch: TokenBatch) -> ChoiceEvent:
        """Tokens behind a stop string are dropped: the client never asked for them."""
        text, count = "", 0
        piece = TextDelta("", None)
        for count, out in enumerate(batch.tokens, start=1):
            is_last = count == len(batch.tokens)
            piece = self._assembler.push(out.token, batch.finish_reason if is_last else None)
            text += piece.text
            if piece.finish_reason is not None:
                break
        if not batch.tokens and batch.finish_reason is not None:
            piece = self._assembler.finish(batch.finish_reason)
            text = piece.text
        prefill = None if self._prefilled.is_set() else batch.prefill
        return ChoiceEvent(self.index, text, batch.tokens[:count], piece.finish_reason, prefill)

    def _observe(self, event: ChoiceEvent, since_last_s: float | None) -> None:
        self._metrics.output_tokens.inc(len(event.tokens))
        if event.prefill is not None:
            self._prefilled.set()
            self._metrics.count_prefill(self._generation.num_prompt_tokens, event.prefill, self._generation.ttft_s)
        if event.finish_reason is not None:
            self._metrics.replans.inc(self._generation.num_attempts - 1)
        if since_last_s is not None and event.tokens:
            self._metrics.tbt.observe(since_last_s / len(event.tokens))


async def run_together(choices: Sequence[Choice]) -> AsyncGenerator[ChoiceEvent, None]:
    """Events of all choices as they come. The first failure ends all; closing this closes all."""
    queue: asyncio.Queue[ChoiceEvent | Exception | None] = asyncio.Queue(_MAX_WAITING_EVENTS)
    tasks = [asyncio.create_task(_pump(choice, queue)) for choice in choices]
    num_running = len(tasks)
    try:
        while num_running:
            item = await queue.get()
            if item is None:
                num_running -= 1
            elif isinstance(item, Exception):
                raise item
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def _pump(choice: Choice, queue: asyncio.Queue[ChoiceEvent | Exception | None]) -> None:
    """Everything of one choice into the queue, its end (None) or its failure included."""
    try:
        async with aclosing(choice.events()) as events:
            async for event in events:
                await queue.put(event)
    except Exception as error:  # noqa: BLE001 - it is raised where the queue is read
        await queue.put(error)
    else:
        await queue.put(None)
