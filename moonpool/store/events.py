"""The stream of changes to listeners: what is stored first, then what changes, in order, in bounded memory.

A listener that falls too far behind is dropped with Overloaded; it subscribes again and starts from a snapshot.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator

from moonpool.base.errors import Overloaded
from moonpool.store.messages import EventBatch

# Keys in one batch of a snapshot: about 0.3 MB on the wire, a few milliseconds of the master's time.
SNAPSHOT_KEYS = 8192

Keys = tuple[bytes, ...]


class _Listener:
    __slots__ = ("num_keys", "pending", "too_slow", "wake")

    def __init__(self) -> None:
        self.pending: deque[tuple[Keys, Keys]] = deque()
        self.num_keys = 0
        self.too_slow = False
        self.wake = asyncio.Event()


class ChangeFeed:
    """Fans changes out. All methods belong to the event loop's thread."""

    def __init__(self, max_pending_keys: int) -> None:
        self._max_pending_keys = max_pending_keys
        self._listeners: set[_Listener] = set()

    def __len__(self) -> int:
        return len(self._listeners)

    def publish(self, stored: Keys, removed: Keys) -> None:
        """Queues one batch for everybody."""
        for listener in self._listeners:
            listener.pending.append((stored, removed))
            listener.num_keys += len(stored) + len(removed)
            if listener.num_keys > self._max_pending_keys:
                listener.too_slow = True
                listener.pending.clear()
            listener.wake.set()

    async def subscribe(self, snapshot: Callable[[], Iterator[Keys]]) -> AsyncGenerator[EventBatch, None]:
        """The snapshot, then every batch published since it was begun. `snapshot` yields keys part by part."""
        listener = _Listener()
        self._listeners.add(listener)
        try:
            sequence = 0
            for keys in _in_batches(snapshot()):
                yield EventBatch(sequence=sequence, snapshot=sequence == 0, stored=keys)
                sequence += 1
                await asyncio.sleep(0)  # others have their turn between two parts
            async for stored, removed in self._changes(listener):
                yield EventBatch(sequence=sequence, stored=stored, removed=removed)
                sequence += 1
        finally:
            self._listeners.discard(listener)

    async def _changes(self, listener: _Listener) -> AsyncIterator[tuple[Keys, Keys]]:
        while True:
            await listener.wake.wait()
            listener.wake.clear()
            while listener.pending:
                stored, removed = listener.pending.popleft()
                listener.num_keys -= len(stored) + len(removed)
                yield stored, removed
            if listener.too_slow:
                raise Overloaded("this listener reads more slowly than the pool changes; subscribe again")


def _in_batches(parts: Iterator[Keys]) -> Iterator[Keys]:
    """Small parts together; at least one batch, which may be empty."""
    batch: list[bytes] = []
    for part in parts:
        batch.extend(part)
        if len(batch) >= SNAPSHOT_KEYS:
            yield tuple(batch)
            batch = []
    # An empty pool has a snapshot too, and one empty batch at the end of a full one does no harm.
    yield tuple(batch)
