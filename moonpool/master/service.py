"""The master's service: a server, a journal and time around the pool, whose pure PoolState decides everything.

Snapshots are written in steps between events.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from moonpool.base.clock import AttendedClock, Clock
from moonpool.base.errors import MoonpoolError
from moonpool.base.rpc import RpcServer
from moonpool.master.board import SegmentBoard
from moonpool.master.calls import LivePool, handlers
from moonpool.master.journal import Journal, JournalConfig, SnapshotWriter, epoch_now, forget
from moonpool.master.rules import PoolRules
from moonpool.master.state import EPOCH_BITS, PoolState
from moonpool.master.state.recovery import restore
from moonpool.master.state.snapshot import snapshot_records
from moonpool.master.streams import ChangeFeed
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
        self._server: RpcServer | None = None
        self._ticking: asyncio.Task[None] | None = None
        self._pool: LivePool | None = None

    @property
    def pool(self) -> LivePool:
        """The pool, for tests."""
        assert self._pool is not None, "the master was not started"
        return self._pool

    @property
    def state(self) -> PoolState:
        """The state of the pool, for tests."""
        return self.pool.state

    async def start(self) -> str:
        """Start to serve. Return the address.

        Raise ConfigError if the address or the data directory cannot be used, Corrupt if the journal is damaged.
        """
        config = JournalConfig(sync_s=self.config.journal_sync_s)
        if self.config.forget_journal:
            aside = await asyncio.to_thread(forget, Path(self.config.data_dir))
            _LOG.warning("the journal is set aside in %s", aside or "no folder: there was none")
        journal, replay = await asyncio.to_thread(Journal.open, Path(self.config.data_dir), config)
        try:
            self._pool = pool = self._restore(journal, replay)
            self._server = RpcServer(m.SERVICE, handlers(pool), name="master", incarnation=journal.epoch)
            address = await self._server.listen(self.config.listen)
        except BaseException:
            journal.close()
            raise
        gc.freeze()  # the restored objects stay, so the garbage collector need not visit them
        self._ticking = asyncio.get_running_loop().create_task(self._tick_forever(pool))
        return address

    def _restore(self, journal: Journal, replay: Iterator[bytes]) -> LivePool:
        config, epoch = self.config, journal.epoch
        state = PoolState(config, epoch, journalled=config.journal, epoch_now=epoch_now)
        if config.journal:
            state.outcomes.unsynced.num_synced = lambda: journal.num_synced
            state.outcomes.unsynced.sync_soon = journal.sync_soon
        feed = ChangeFeed(config.max_pending_event_keys, config.max_replay_event_keys, epoch << EPOCH_BITS)
        count = restore(state, replay if config.journal else iter(()), self.clock.now_s())
        refused = state.generations.counters["generations_refused"]
        if refused:
            _LOG.warning("%d entries of the journal are left out: no master can have issued their generations", refused)
        if count:
            _LOG.info("epoch %d begins with %d objects from the journal", epoch, len(state.index))
        return LivePool(state, journal, feed, self.board, self.clock, config.event_delay_s)

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
        if self._pool is not None:
            await asyncio.to_thread(self._pool.journal.close)

    # time

    async def _tick_forever(self, pool: LivePool) -> None:
        snapshot: _Snapshot | None = None
        while True:
            more = pool.state.tick(self.clock.now_s())
            with contextlib.suppress(MoonpoolError):  # the journal has logged it, and a snapshot is due
                pool.after_event()
                pool.journal.rise_to(pool.state.generations.epoch)
                if self.config.journal:
                    pool.journal.look_for_file()
                if pool.journal.has_unwritten:
                    pool.journal.retry_unwritten()
            if snapshot is None and self.config.journal and pool.journal.should_snapshot:
                snapshot = self._begin_snapshot(pool)
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

    def _begin_snapshot(self, pool: LivePool) -> _Snapshot | None:
        try:
            writer = pool.journal.begin_snapshot()
        except MoonpoolError as error:
            _LOG.warning("no snapshot now: %s", error)
            return None
        # The first step is taken here, at the moment at which the new journal begins.
        return _Snapshot(writer, snapshot_records(pool.state, self.clock.now_s()))


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
