"""Answers that leave this worker: each goes on at another decode worker, with its KV from the pool.

An answer decodes on while its full blocks go to the pool; most are there already, because decoding puts each of them.
When the pool has them all, the answer stops here, between two steps, and its stream ends with MOVED. The front end then
asks the conductor for another decode worker, which pulls the blocks and computes what is left: less than a block and
the newest token. As long as the pool does not have the blocks, or there is no other decode worker, the answer goes on
here, to its end if need be.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from moonpool.base.backoff import backoff_s
from moonpool.engine.scheduler import Scheduler
from moonpool.engine.sequence import full_blocks
from moonpool.worker.decode import DecodeRole, Stream
from moonpool.worker.kv_link.pull import Puller
from moonpool.worker.kv_link.send_queue import SendQueue, Urgency
from moonpool.worker.loop import EngineLoop
from moonpool.worker.messages import MOVED, DecodeItem

T = TypeVar("T")
_LOG = logging.getLogger(__name__)
_LOOK_EVERY_S = 0.1  # for answers that have come since, and for other workers
_RETRY_S, _MAX_RETRY_S = 0.02, 1.0


class AnswerMover:
    """`has_others` tells whether there is another decode worker."""

    def __init__(
        self,
        decode: DecodeRole,
        scheduler: Scheduler,
        queue: SendQueue,
        puller: Puller,
        loop: EngineLoop,
        has_others: Callable[[], Awaitable[bool]],
    ) -> None:
        self._decode, self._scheduler, self._queue = decode, scheduler, queue
        self._puller, self._loop, self._has_others = puller, loop, has_others
        self._running: asyncio.Task[None] | None = None
        self._ends: set[asyncio.Task[None]] = set()  # of answers that have stopped here

    def start(self) -> None:
        """Move all answers that are here and that still come, until stop(). Idempotent."""
        if self._running is None or self._running.done():
            self._running = asyncio.create_task(self._run(), name="move answers")
            self._running.add_done_callback(_retrieve)

    def stop(self) -> None:
        """Let the answers that have not stopped go on here. Idempotent."""
        if self._running is not None:
            self._running.cancel()
            self._running = None

    async def _run(self) -> None:
        seen: set[str] = set()
        async with asyncio.TaskGroup() as group:
            while True:
                names = set(await self._on_engine(lambda: list(self._decode.streams)))
                if names and await self._has_others():
                    for name in names - seen:
                        group.create_task(self._move(name))
                    seen = names
                await asyncio.sleep(_LOOK_EVERY_S)

    async def _move(self, name: str) -> None:
        num_tries = 0
        while (stream := self._decode.streams.get(name)) is not None:
            keys = await self._on_engine(lambda: self._put(name))
            if keys is not None and await self._are_stored(keys):
                end = asyncio.create_task(self._end(name, stream))
                self._ends.add(end)
                end.add_done_callback(self._ends.discard)
                end.add_done_callback(_retrieve)
                await asyncio.shield(end)  # an answer that has stopped must not lose its MOVED
                return
            await asyncio.sleep(backoff_s(num_tries, _RETRY_S, _MAX_RETRY_S))
            num_tries += 1

    def _put(self, name: str) -> list[bytes] | None:
        """Put the answer's full blocks; the pool skips those that it has. Return the keys of those that must be there;
        None if its KV has not arrived yet, or if it has ended. On the engine's thread."""
        sequence = self._scheduler.get(name)
        if sequence is None:
            return None
        self._decode.completed(full_blocks(sequence, range(sequence.num_sealed_blocks)))
        return sequence.keys[: sequence.num_reusable_blocks]

    async def _are_stored(self, keys: list[bytes]) -> bool:
        await self._puts_done()
        return not keys or await asyncio.to_thread(self._puller.count_stored, keys) == len(keys)

    async def _end(self, name: str, stream: Stream) -> None:
        if await self._on_engine(lambda: self._scheduler.cancel(name)):
            await self._puts_done()  # a block may have become full since
            _LOG.info("%s goes on elsewhere", name)
            stream.send(DecodeItem(finish_reason=MOVED))

    async def _puts_done(self) -> None:
        """Return when all that was to be put until now has been."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()

        def say_done() -> None:
            loop.call_soon_threadsafe(_settle, done)

        self._queue.put(Urgency.POOL, say_done)
        await done

    async def _on_engine(self, function: Callable[[], T]) -> T:
        return await asyncio.wrap_future(self._loop.call(function))


def _retrieve(task: asyncio.Task[None]) -> None:
    """Retrieve the error of a task: the engine has ended, and all streams with it."""
    if not task.cancelled() and (error := task.exception()) is not None:
        _LOG.debug("answers no longer move", exc_info=error)


def _settle(done: asyncio.Future[None]) -> None:
    if not done.done():
        done.set_result(None)
