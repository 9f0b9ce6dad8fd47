"""Answers Route late: futures and one timer around the waiting room. It is looked at after changes and at deadlines."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Hashable

from moonpool.base.clock import Clock
from moonpool.base.errors import Cancelled
from moonpool.conductor.messages import Decision, Route
from moonpool.conductor.request_queue import QueueAnswer, RequestQueue


class RequestQueueService:
    """To be used in one event loop. Close it when the server is closed."""

    def __init__(self, room: RequestQueue, clock: Clock) -> None:
        self._room = room
        self._clock = clock
        self._futures: dict[str, asyncio.Future[Decision]] = {}
        self._soon: asyncio.Handle | None = None
        self._timer: asyncio.TimerHandle | None = None

    @property
    def num_waiting(self) -> int:
        return len(self._room)

    def ask(self, call: Route, owner: Hashable) -> Decision | Awaitable[Decision]:
        """The decision, or what becomes it; cancelling that takes the request out."""
        earlier = self._futures.pop(call.request_id, None)
        if earlier is not None and not earlier.done():
            earlier.set_exception(Cancelled("the request was routed again"))
        decision = self._room.ask(call, owner, self._clock.now_s(), time.time())
        if decision is not None:
            return decision
        future = self._futures[call.request_id] = asyncio.get_running_loop().create_future()
        future.add_done_callback(_see)
        self._settle()  # another may have had to give way
        return self._wait(call.request_id, future)

    def changed(self) -> None:
        """Somebody may fit now. Changes that come together are looked at once."""
        if len(self._room) and self._soon is None:
            self._soon = asyncio.get_running_loop().call_soon(self._settle)

    def cancel(self, request_id: str) -> None:
        """Takes it out, if it waits."""
        self._room.cancel(request_id, self._clock.now_s())
        future = self._futures.pop(request_id, None)
        if future is not None:
            future.cancel()

    def owner_gone(self, owner: Hashable) -> None:
        self._room.owner_gone(owner, self._clock.now_s())

    def close(self) -> None:
        """Idempotent."""
        for handle in (self._soon, self._timer):
            if handle is not None:
                handle.cancel()
        self._soon = self._timer = None

    async def _wait(self, request_id: str, future: asyncio.Future[Decision]) -> Decision:
        try:
            return await future
        except asyncio.CancelledError:
            if self._futures.get(request_id) is future:
                self.cancel(request_id)
                self.changed()
            raise

    def _settle(self) -> None:
        self.close()
        for answer in self._room.settle(self._clock.now_s()):
            self._answer(answer)
        at_s = self._room.next_event_s()
        if at_s is not None:
            delay_s = max(0.0, at_s - self._clock.now_s())
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._settle)

    def _answer(self, answer: QueueAnswer) -> None:
        future = self._futures.pop(answer.request_id, None)
        if future is None or future.done():
            return
        if isinstance(answer.outcome, Decision):
            future.set_result(answer.outcome)
        else:
            future.set_exception(answer.outcome)


def _see(future: asyncio.Future[Decision]) -> None:
    """The call may have been cancelled before it began to wait; then nobody else looks."""
    if not future.cancelled():
        future.exception()
