"""The pool of a running master: the pure state with its journal, its listeners and the connections of its callers.

The handlers change the state, then call after_event(), which writes the records of the event to the journal. The master
answers a call after that, so every answer survives the master's death.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator
from functools import partial

from moonpool.base.clock import Clock
from moonpool.base.descriptor import SegmentDescriptor
from moonpool.base.rpc import RpcPeer
from moonpool.master.board import SegmentBoard
from moonpool.master.journal import Journal
from moonpool.master.state import PoolState
from moonpool.master.state.snapshot import snapshot_keys
from moonpool.master.streams import ChangeFeed, OrderStreams
from moonpool.store.messages import EventBatch


class LivePool:
    """All methods run on the event loop's thread. Borrows the journal."""

    def __init__(
        self,
        state: PoolState,
        journal: Journal,
        feed: ChangeFeed,
        board: SegmentBoard,
        clock: Clock,
        event_delay_s: float,
    ) -> None:
        self.state = state
        self.journal = journal
        self.feed = feed
        self.board = board
        self.clock = clock
        self.order_streams = OrderStreams()
        self._event_delay_s = event_delay_s
        self._publish_planned = False
        self._connections = itertools.count(1)
        self._connection_of: dict[RpcPeer, int] = {}
        self._segments_of: dict[RpcPeer, set[tuple[str, int]]] = {}

    def after_event(self) -> None:
        """Write the event's records to the journal, before the call is answered; wake listeners and nodes.

        Raise NoSpace or Unavailable if the journal cannot be written: the event has happened, but a restart may lose
        it.
        """
        records = self.state.take_records()
        if not self._publish_planned:
            self._publish_planned = True
            asyncio.get_running_loop().call_later(self._event_delay_s, self._publish)
        if self.state.orders.unsent:
            self.order_streams.wake(self.state.orders.unsent)
        if records:
            self.journal.append(records)

    def _publish(self) -> None:
        self._publish_planned = False
        changes = self.state.take_changes()
        if changes is not None:
            self.feed.publish(changes)

    def subscribe(self, since: int | None) -> AsyncGenerator[EventBatch, None]:
        self._publish()  # pending changes belong before the snapshot
        return self.feed.subscribe(since, partial(snapshot_keys, self.state.index))

    def find_segment(self, name: str) -> SegmentDescriptor | None:
        announced = self.board.find(name, self.clock.now_s())
        known = (each.descriptor for each in self.state.segments())
        return announced or next((each for each in known if each.name == name), None)

    def connection(self, peer: RpcPeer) -> int:
        """Return the connection's number in the state. Its pins end with the connection."""
        number = self._connection_of.get(peer)
        if number is None:
            number = self._connection_of[peer] = next(self._connections)
            peer.on_close(lambda: self._on_close(peer))
        return number

    def remember_node(self, peer: RpcPeer, segment: str, incarnation: int) -> None:
        """Remember the connection of a segment's node, so that its end is noticed at once."""
        if peer not in self._segments_of:
            self._segments_of[peer] = set()
            peer.on_close(lambda: self._on_node_gone(peer))
        self._segments_of[peer].add((segment, incarnation))

    def _on_close(self, peer: RpcPeer) -> None:
        self.state.connection_closed(self._connection_of.pop(peer), self.clock.now_s())

    def _on_node_gone(self, peer: RpcPeer) -> None:
        for segment, incarnation in self._segments_of.pop(peer):
            self.state.members.disconnected(segment, incarnation, self.clock.now_s())
