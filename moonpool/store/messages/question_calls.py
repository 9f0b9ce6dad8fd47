"""Questions about the pool, and the stream of its changes."""

from __future__ import annotations

from moonpool.base.ranges import Whole
from moonpool.base.rpc import Call, StreamCall
from moonpool.store.messages.values import EventBatch, StoreStats


class Why(Call[str]):
    """In words: what became of a key. With an `identity`: for a reader of that one."""

    key: bytes
    identity: bytes = b""


class Stats(Call[StoreStats]):
    pass


class Subscribe(StreamCall[EventBatch]):
    """Everything after batch `since` when the master still has it, else a snapshot and then the changes.

    A listener that reads too slowly is refused with Overloaded; it asks again.
    """

    since: Whole | None = None
