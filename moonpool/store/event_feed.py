"""The pool's changes as an iterator for a blocking program, replayed across broken connections and master restarts.

One thread keeps the connection alive while the program is busy with a batch. After a break the feed asks for what came
after the last batch; where the master has it no more, a batch with `snapshot` set begins anew.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import AsyncGenerator, Iterator

from moonpool.base.backoff import Backoff
from moonpool.base.clock import Deadline
from moonpool.base.errors import MoonpoolError, Overloaded, Unavailable
from moonpool.base.rpc import AsyncClient
from moonpool.store.client.master_client import FIRST_PAUSE_S, LONGEST_PAUSE_S
from moonpool.store.messages import SERVICE, EventBatch, Subscribe

_JOIN_TIMEOUT_S = 5.0


class EventFeed:
    """Iterate over it, from one thread; close it from any. PeerLost when the master is away for more than `retry_s`;
    the next call tries again.
    """

    def __init__(self, address: str, *, since: int | None, name: str, retry_s: float) -> None:
        self._follower = _Follower(address, since, name, retry_s)
        self._batches = self._follower.batches()
        self._pending: concurrent.futures.Future[EventBatch] | None = None
        self._closed = False
        self._lock = threading.Lock()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="store-events", daemon=True)
        self._thread.start()

    @property
    def since(self) -> int | None:
        """What another feed is given to go on behind the last batch; None: it takes a snapshot."""
        return self._follower.since

    def __iter__(self) -> Iterator[EventBatch]:
        return self

    def __next__(self) -> EventBatch:
        """Waits for the next batch; the end comes with close()."""
        batch = self.next_batch(None)
        if batch is None:
            raise StopIteration
        return batch

    def next_batch(self, timeout_s: float | None) -> EventBatch | None:
        """None when there was none in time, or the feed is closed."""
        with self._lock:
            if self._closed:
                return None
            if self._pending is None:
                self._pending = asyncio.run_coroutine_threadsafe(self._next(), self._loop)
            pending = self._pending
        try:
            batch = pending.result(timeout_s)
        except concurrent.futures.CancelledError:
            return None
        except TimeoutError:
            return None  # it may come yet; the next call waits on
        except BaseException:
            self._pending = None if pending.done() else pending
            raise
        self._pending = None
        return batch

    def close(self) -> None:
        """Idempotent. Whoever waits for a batch gets the end."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            if self._pending is not None:
                self._pending.cancel()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_JOIN_TIMEOUT_S)

    def __enter__(self) -> EventFeed:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def _next(self) -> EventBatch:
        try:
            return await anext(self._batches)
        except MoonpoolError:
            self._batches = self._follower.batches()  # whoever asks again means it
            raise

    def _run(self) -> None:
        self._loop.run_forever()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, MoonpoolError):
                self._loop.run_until_complete(task)
        self._loop.run_until_complete(self._batches.aclose())
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()


class _Follower:
    """`since` is where to go on: nothing while a snapshot may still have parts to come, which share one sequence."""

    def __init__(self, address: str, since: int | None, name: str, retry_s: float) -> None:
        self.since = since
        self._address, self._name, self._retry_s = address, name, retry_s
        self._snapshot: int | None = None
        self._backoff = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S, immediate=True)
        self._patience: Deadline | None = None  # runs from a break until there is a connection again

    async def batches(self) -> AsyncGenerator[EventBatch, None]:
        while True:
            try:
                async with contextlib.aclosing(self._connection()) as connection:
                    async for batch in connection:
                        yield batch
            except (Unavailable, Overloaded):
                self._patience = self._patience or Deadline(self._retry_s)
                if self._patience.expired():
                    self._patience = None
                    raise
            await asyncio.sleep(self._backoff.next_s())

    async def _connection(self) -> AsyncGenerator[EventBatch, None]:
        client = await AsyncClient.connect(self._address, SERVICE, name=self._name)
        self._patience = None
        try:
            async with contextlib.aclosing(client.stream(Subscribe(self.since))) as batches:  # type: ignore[type-var]
                async for batch in batches:
                    self._note(batch)
                    yield batch
        finally:
            client.close()

    def _note(self, batch: EventBatch) -> None:
        self._backoff.reset()
        if batch.snapshot:
            self._snapshot = batch.sequence
        self.since = None if batch.sequence == self._snapshot else batch.sequence
