"""The master's service: sockets, time, the journal and listeners around the pure PoolState, which decides everything.

The records of an event are in the journal before the event is answered, so every answer survives the master's death.
Snapshots are written in steps between events.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import logging
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass
from pathlib import Path

from moonpool.base.clock import AttendedClock, Clock
from moonpool.base.descriptor import SegmentDescriptor
from moonpool.base.errors import MoonpoolError
from moonpool.base.rpc import RpcPeer, RpcServer
from moonpool.master.board import SegmentBoard
from moonpool.master.calls import handlers
from moonpool.master.journal import Journal, JournalConfig, JournalHealth, SnapshotWriter, forget
from moonpool.master.rules import PoolRules
from moonpool.master.state import EPOCH_BITS, PoolState
from moonpool.master.streams import ChangeFeed, OrderStreams
from moonpool.store import messages as m

_LOG = logging.getLogger(__name__)
_BUSY_S = 100e-6  # more than an idle event loop needs for one turn
_CALLERS_SHARE = 2.0
_LATE_TICK_S = 0.2  # a tick later than this means that the process was stopped


@dataclass(frozen=True, kw_only=True)
class MasterConfig(PoolRules):
    """The pool's rules and the master's own options. Two masters must not share a `data_dir`."""

    data_dir: str  # folder for the journal and the epoch, which a restarted master reads back
    listen: str = "tcp:127.0.0.1:7700"  # unix:/path or tcp:host:port
    journal: bool = True  # write a journal; without one, a restarted master does not know which objects the pool holds
    forget_journal: bool = False  # at start, move an unreadable journal aside and begin with an empty one
    # seconds between journal syncs: a power failure loses at most this much; 0 syncs before each reply
    journal_sync_s: float = JournalConfig.sync_s
    tick_s: float = 0.05  # seconds between checks for expired leases, puts and nodes
    # seconds during which changes are collected before they are sent to subscribers in one message
    event_delay_s: float = 0.005
    max_pending_event_keys: int = 1_000_000  # disconnect a subscriber that is this many changed keys behind
    max_replay_event_keys: int = 1_000_000  # changed keys that are kept for subscribers that reconnect


class Master:
    """`await start()`, then it serves until `await close()`. `wait()` returns when serving ends,
    and raises its error.
    """

    def __init__(self, config: MasterConfig, clock: Clock | None = None) -> None:
        self.config = config
        # Time in which this process was stopped does not count for nodes, leases and puts.
        self.clock: Clock = clock or AttendedClock(config.tick_s + _LATE_TICK_S)
        self.board = SegmentBoard()
        self.order_streams = OrderStreams()
        self._connections = itertools.count(1)
        self._connection_of: dict[RpcPeer, int] = {}
        self._segments_of: dict[RpcPeer, set[tuple[str, int]]] = {}
        self._publish_planned = False
        self._server: RpcServer | None = None
        self._ticking: asyncio.Task[None] | None = None
        self._state: PoolState | None = None
        self._journal: Journal | None = None
        self._feed: ChangeFeed | None = None

    @property
    def state(self) -> PoolState:
        """The state, for handlers and tests."""
        assert self._state is not None, "the master was not started"
        return self._state

    def journal_health(self) -> JournalHealth | None:
        """Return the journal's health, None before the start."""
        return None if self._journal is None else self._journal.health()

    async def start(self) -> str:
        """Start to serve. Return the address.

        Raise ConfigError if the address or the data directory cannot be used, Corrupt if the journal is damaged.
        """
        config = JournalConfig(sync_s=self.config.journal_sync_s)
        if self.config.forget_journal:
            aside = await asyncio.to_thread(forget, Path(self.config.data_dir))
            _LOG.warning("the journal is set aside in %s", aside or "no folder: there was none")
        journal, replay = await asyncio.to_thread(Journal.open, Path(self.config.data_dir), config)
        self._journal = journal
        try:
            self._restore(journal.epoch, replay)
            self._server = RpcServer(m.SERVICE, handlers(self), name="master", incarnation=journal.epoch)
            address = await self._server.listen(self.config.listen)
        except BaseException:
            journal.close()
            raise
        gc.freeze()  # the restored objects stay, so the garbage collector need not visit them
        self._ticking = asyncio.get_running_loop().create_task(self._tick_forever())
        return address

    def _restore(self, epoch: int, replay: Iterator[bytes]) -> None:
        self._state = PoolState(self.config, epoch, journalled=self.config.journal)
        self._feed = ChangeFeed(
            self.config.max_pending_event_keys, self.config.max_replay_event_keys, epoch << EPOCH_BITS
        )
        count = self._state.restore(replay if self.config.journal else iter(()), self.clock.now_s())
        if count:
            _LOG.info("epoch %d begins with %d objects from the journal", epoch, len(self._state.index))

    async def wait(self) -> None:
        """Return after close(). Raise the error if one ended the master."""
        assert self._ticking is not None, "the master was not started"
        await asyncio.wait([self._ticking])
        if not self._ticking.cancelled():
            self._ticking.result()

    async def close(self) -> None:
        """Stop serving and close all connections. Idempotent."""
        if self._ticking is not None:
            self._ticking.cancel()
            await asyncio.wait([self._ticking])
        if self._server is not None:
            await self._server.close()
        if self._journal is not None:
            await asyncio.to_thread(self._journal.close)

    # time

    async def _tick_forever(self) -> None:
        snapshot: _Snapshot | None = None
        while True:
            more = self.state.tick(self.clock.now_s())
            with contextlib.suppress(MoonpoolError):  # the journal has logged it, and a snapshot is due
                self.after_event()
                self._retry_journal()
            assert self._journal is not None
            if snapshot is None and self.config.journal and self._journal.should_snapshot:
                snapshot = self._begin_snapshot(self._journal)
            if snapshot is not None:
                began_s = self.clock.now_s()
                if not snapshot.step():
                    snapshot = None
                await self._yield_to_callers(self.clock.now_s() - began_s)
            else:
                await asyncio.sleep(0 if more else self.config.tick_s)

    async def _yield_to_callers(self, used_s: float) -> None:
        """A snapshot takes a third of the time while there are callers, otherwise all of it."""
        before_s = self.clock.now_s()
        await asyncio.sleep(0)
        if self.clock.now_s() - before_s > _BUSY_S:
            await asyncio.sleep(_CALLERS_SHARE * used_s)

    def _begin_snapshot(self, journal: Journal) -> _Snapshot | None:
        try:
            writer = journal.begin_snapshot()
        except MoonpoolError as error:
            _LOG.warning("no snapshot now: %s", error)
            return None
        # The first step is taken here, at the moment at which the new journal begins.
        return _Snapshot(writer, self.state.snapshot_records(self.clock.now_s()))

    # after every event

    def after_event(self) -> None:
        """Write the event's records to the journal, before the call is answered; wake listeners and nodes.

        Raise NoSpace or Unavailable if the journal cannot be written: the event has happened, but a restart may lose
        it.
        """
        records = self.state.take_records()
        if not self._publish_planned:
            self._publish_planned = True
            asyncio.get_running_loop().call_later(self.config.event_delay_s, self._publish)
        if self.state.orders.has_unsent:
            self.order_streams.wake(self.state.orders.nodes_with_unsent())
        if records:
            assert self._journal is not None
            self._journal.append(records)

    def _retry_journal(self) -> None:
        assert self._journal is not None
        if self._journal.has_unwritten:
            self._journal.retry_unwritten()

    def _publish(self) -> None:
        self._publish_planned = False
        changes = self.state.take_changes()
        if changes is not None:
            assert self._feed is not None
            self._feed.publish(changes)

    # for the handlers

    def subscribe(self, since: int | None) -> AsyncGenerator[m.EventBatch, None]:
        assert self._feed is not None
        self._publish()  # pending changes belong before the snapshot
        return self._feed.subscribe(since, self.state.snapshot)

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


class _Snapshot:
    """A snapshot that is being written, one bounded step at a time."""

    def __init__(self, writer: SnapshotWriter, steps: Iterator[list[bytes]]) -> None:
        self._writer = writer
        self._steps = steps
        self._queue = next(steps)

    def step(self) -> bool:
        """Do one step. Return False if the snapshot has ended, with success or not; the journal logs which."""
        try:
            while self._queue and self._writer.ready:
                self._writer.add(self._queue.pop(0))
            if not self._queue:
                self._queue = next(self._steps)
            return True
        except StopIteration:
            self._writer.finish_soon()
        except MoonpoolError as error:
            _LOG.warning("the snapshot was aborted: %s", error)
        return False
