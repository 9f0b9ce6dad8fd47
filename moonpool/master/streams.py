"""Streams to other processes: changes to listeners, in bounded memory, and orders to nodes.

Batches of changes are numbered. A listener that reconnects names the last batch it has and gets the later ones, as long
as they are kept; otherwise it starts from a snapshot. A listener that falls too far behind gets Overloaded, and
subscribes again.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator

from moonpool.base.errors import Overloaded
from moonpool.master.state.changes import Changes
from moonpool.master.state.orders import OrderBook
from moonpool.store.messages import EventBatch, Order, Tier

# Keys in one batch of a snapshot: about 0.3 MB on the wire, a few milliseconds of the master's time.
SNAPSHOT_KEYS = 8192

Part = list[tuple[bytes, Tier]]
Snapshot = Callable[[], Iterator[Part]]
NodesOf = Callable[[tuple[bytes, ...]], tuple[tuple[str, int], ...]]


class _Listener:
    __slots__ = ("num_keys", "pending", "too_slow", "wake")

    def __init__(self) -> None:
        self.pending: deque[EventBatch] = deque()
        self.num_keys = 0
        self.too_slow = False
        self.wake = asyncio.Event()


class ChangeFeed:
    """Sends changes to all listeners. All methods run on the event loop's thread."""

    def __init__(self, max_pending_keys: int, max_replay_keys: int, first_sequence: int = 0) -> None:
        self._max_pending_keys = max_pending_keys
        self._max_replay_keys = max_replay_keys
        self._sequence = first_sequence  # of the last batch
        self._replay: deque[EventBatch] = deque()
        self._replay_keys = 0
        self._listeners: set[_Listener] = set()

    def __len__(self) -> int:
        return len(self._listeners)

    @property
    def sequence(self) -> int:
        """The number of the last batch."""
        return self._sequence

    def publish(self, changes: Changes) -> None:
        """Send one batch to every listener."""
        self._sequence += 1
        batch = EventBatch(self._sequence, False, *changes)
        size = _num_keys(batch)
        self._replay.append(batch)
        self._replay_keys += size
        while self._replay_keys > self._max_replay_keys:
            self._replay_keys -= _num_keys(self._replay.popleft())
        for listener in self._listeners:
            listener.pending.append(batch)
            listener.num_keys += size
            if listener.num_keys > self._max_pending_keys:
                listener.too_slow = True
                listener.pending.clear()
            listener.wake.set()

    async def subscribe(
        self, since: int | None, snapshot: Snapshot, nodes_of: NodesOf = lambda keys: ()
    ) -> AsyncGenerator[EventBatch, None]:
        """Yield all batches after `since`, or a snapshot and all batches after it. `snapshot` yields keys in parts."""
        listener = _Listener()
        missed = self._missed(since)
        self._listeners.add(listener)
        try:
            if missed is None:
                sequence, first = self._sequence, True
                for part in _in_batches(snapshot()):
                    yield _snapshot_batch(sequence, first, part, nodes_of)
                    first = False
                    await asyncio.sleep(0)  # other tasks run between two parts
            else:
                for batch in missed:
                    yield batch
            async for batch in self._changes(listener):
                yield batch
        finally:
            self._listeners.discard(listener)

    def _missed(self, since: int | None) -> list[EventBatch] | None:
        """Return the batches after `since`, None if they are not all kept."""
        oldest = self._replay[0].sequence if self._replay else self._sequence + 1
        if since is None or not oldest - 1 <= since <= self._sequence:
            return None
        return [batch for batch in self._replay if batch.sequence > since]

    async def _changes(self, listener: _Listener) -> AsyncGenerator[EventBatch, None]:
        while True:
            await listener.wake.wait()
            listener.wake.clear()
            while listener.pending:
                batch = listener.pending.popleft()
                listener.num_keys -= _num_keys(batch)
                yield batch
            if listener.too_slow:
                raise Overloaded("this listener reads more slowly than the pool changes; subscribe again")


def _num_keys(batch: EventBatch) -> int:
    return len(batch.stored) + len(batch.removed) + len(batch.moved) + len(batch.tiers)


def _snapshot_batch(sequence: int, first: bool, part: Part, nodes_of: NodesOf) -> EventBatch:
    tiers = tuple((key, tier) for key, tier in part if tier != Tier.DRAM)
    stored = tuple(key for key, _ in part)
    return EventBatch(sequence, first, stored=stored, tiers=tiers, nodes=nodes_of(stored))


def _in_batches(parts: Iterator[Part]) -> Iterator[Part]:
    """Join small parts to batches. Yield at least one batch, which may be empty."""
    batch: Part = []
    for part in parts:
        batch.extend(part)
        if len(batch) >= SNAPSHOT_KEYS:
            yield batch
            batch = []
    # An empty pool has a snapshot too, and an empty batch at the end does no harm.
    yield batch


class OrderStreams:
    """One stream of orders per node. All methods run on the event loop's thread."""

    def __init__(self) -> None:
        self._listening: dict[str, asyncio.Event] = {}

    def wake(self, nodes: Iterable[str]) -> None:
        for node in nodes:
            event = self._listening.get(node)
            if event is not None:
                event.set()

    async def serve(self, node: str, book: OrderBook) -> AsyncGenerator[list[Order], None]:
        """Yield every open order of the node, then new ones. A new stream of the same node ends the earlier one."""
        event = self._listening[node] = asyncio.Event()
        try:
            orders = book.open_orders(node)
            while self._listening.get(node) is event:
                if orders:
                    yield orders
                await event.wait()
                event.clear()
                orders = book.take_unsent(node)
        finally:
            if self._listening.get(node) is event:
                del self._listening[node]
