"""The pool's changes as an iterator for a blocking program, across broken connections and restarts of the master.

One thread keeps the connection alive while the program works on a batch. After a break the feed asks for the changes
since the last batch. If the master no longer has them, the next batch has `snapshot` set and starts from nothing.
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
    """Iterate over it from one thread; close it from any. Raises PeerLost when the master is away for over `retry_s`;
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
        """The argument for another feed that goes on after the last batch; None: that feed takes a snapshot."""
        return self._follower.since

    def __iter__(self) -> Iterator[EventBatch]:
        return self

    def __next__(self) -> EventBatch:
        """Wait for the next batch. Raise StopIteration after close()."""
        batch = self.next_batch(None)
        if batch is None:
            raise StopIteration
        return batch

    def next_batch(self, timeout_s: float | None) -> EventBatch | None:
        """Wait for the next batch. Return None when none came in time, or the feed is closed."""
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
            return None  # the next call goes on waiting for it
        except BaseException:
            self._pending = None if pending.done() else pending
            raise
        self._pending = None
        return batch

    def close(self) -> None:
        """Idempotent. A waiting next_batch() returns None."""
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
            self._batches = self._follower.batches()  # the next call tries again
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
    """`since` is None while parts of a snapshot may be missing: all parts of one have the same sequence."""

    def __init__(self, address: str, since: int | None, name: str, retry_s: float) -> None:
        self.since = since
        self._address, self._name, self._retry_s = address, name, retry_s
        self._snapshot: int | None = None
        self._backoff = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S, immediate=True)
        self._retry_deadline: Deadline | None = None  # runs from a break until there is a connection again

    async def batches(self) -> AsyncGenerator[EventBatch, None]:
        while True:
            try:
                async with contextlib.aclosing(self._connection()) as connection:
                    async for batch in connection:
                        yield batch
            except (Unavailable, Overloaded):
                self._retry_deadline = self._retry_deadline or Deadline(self._retry_s)
                if self._retry_deadline.expired():
                    self._retry_deadline = None
                    raise
            await asyncio.sleep(self._backoff.next_s())

    async def _connection(self) -> AsyncGenerator[EventBatch, None]:
        client = await AsyncClient.connect(self._address, SERVICE, name=self._name)
        self._retry_deadline = None
        try:
            async with contextlib.aclosing(client.stream(Subscribe(self.since))) as batches:
                async for batch in batches:
                    self._record(batch)
                    yield batch
        finally:
            client.close()

    def _record(self, batch: EventBatch) -> None:
        self._backoff.reset()
        if batch.snapshot:
            self._snapshot = batch.sequence
        self.since = None if batch.sequence == self._snapshot else batch.sequence
