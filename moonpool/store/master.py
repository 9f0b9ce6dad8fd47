"""The master's shell: sockets, time and the epoch file around the pure PoolState, which decides everything."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moonpool.base.clock import Clock, SystemClock
from moonpool.base.errors import ConfigError
from moonpool.base.metrics import GetMetrics
from moonpool.base.rpc import Call, Peer, RpcServer
from moonpool.store import messages as m
from moonpool.store.board import SegmentBoard
from moonpool.store.events import ChangeFeed
from moonpool.store.metrics import pool_metrics
from moonpool.store.rules import PoolRules
from moonpool.store.state import EPOCH_BITS, PoolState
from moonpool.transfer.descriptor import SegmentDescriptor

EPOCH_FILE = "epoch"


@dataclass(frozen=True, kw_only=True)
class MasterConfig(PoolRules):
    """The pool's rules, and how the master serves them. Two masters must not share a `data_dir`."""

    data_dir: str  # where the epoch is kept between lives
    listen: str = "tcp:127.0.0.1:7700"  # unix:/path or tcp:host:port
    tick_s: float = 0.05  # how often time is looked at
    event_delay_s: float = 0.005  # changes are gathered this long before listeners hear of them
    max_pending_event_keys: int = 1_000_000  # a listener this far behind is dropped


class Master:
    """`await start()`, then it serves until `await close()`. `wait()` ends when it does, with the error if any."""

    def __init__(self, config: MasterConfig, clock: Clock | None = None) -> None:
        self.config = config
        self._clock = clock or SystemClock()
        self._connections = itertools.count(1)
        self._connection_of: dict[Peer, int] = {}
        self._feed = ChangeFeed(config.max_pending_event_keys)
        self._board = SegmentBoard()
        self._publish_planned = False
        self._server: RpcServer | None = None
        self._ticking: asyncio.Task[None] | None = None
        self._state: PoolState | None = None

    @property
    def state(self) -> PoolState:
        """The state it serves; for tests and for reading."""
        assert self._state is not None, "the master was not started"
        return self._state

    async def start(self) -> str:
        """The address it serves at. ConfigError when that or the data directory cannot be used."""
        epoch = next_epoch(Path(self.config.data_dir))
        self._state = PoolState(self.config, epoch)
        self._server = RpcServer(m.SERVICE, self._handlers(), name="master", incarnation=epoch)
        address = await self._server.listen(self.config.listen)
        self._ticking = asyncio.get_running_loop().create_task(self._tick_forever())
        return address

    async def wait(self) -> None:
        """Returns after close(); raises what ended the master otherwise."""
        assert self._ticking is not None, "the master was not started"
        await asyncio.wait([self._ticking])
        if not self._ticking.cancelled():
            self._ticking.result()

    async def close(self) -> None:
        """Idempotent. Ends all connections."""
        if self._ticking is not None:
            self._ticking.cancel()
            await asyncio.wait([self._ticking])
        if self._server is not None:
            await self._server.close()

    async def _tick_forever(self) -> None:
        while True:
            more = self.state.tick(self._clock.now_s())
            self._publish_soon()
            await asyncio.sleep(0 if more else self.config.tick_s)

    # changes to listeners

    def _publish_soon(self) -> None:
        if not self._publish_planned:
            self._publish_planned = True
            asyncio.get_running_loop().call_later(self.config.event_delay_s, self._publish)

    def _publish(self) -> None:
        self._publish_planned = False
        changes = self.state.take_changes()
        if changes is not None:
            self._feed.publish(*changes)

    def _subscribe(self, call: m.Subscribe, peer: Peer) -> AsyncGenerator[m.EventBatch, None]:
        return self._feed.subscribe(self.state.snapshot)

    # calls

    def _handlers(self) -> dict[type[Call[Any]], Callable[[Any, Peer], Any]]:
        state, now = self.state, self._clock.now_s
        reads: dict[type[Call[Any]], Callable[[Any, Peer], Any]] = {
            m.Lookup: lambda c, _: state.lookup(c.keys, c.prefix, now()),
            m.Exist: lambda c, _: state.exist(c.keys, now()),
            m.Heartbeat: lambda c, _: state.heartbeat(c.segment, c.incarnation, now()),
            m.Segments: lambda c, _: state.segments(),
            m.Announce: lambda c, _: self._board.announce(c.descriptor, c.ttl_s, now()),
            m.Retract: lambda c, _: self._board.retract(c.name, c.incarnation),
            m.FindSegment: lambda c, _: self._find_segment(c.name),
            m.Pin: lambda c, peer: state.pin(self._connection(peer), c.keys, now()),
            m.Unpin: lambda c, peer: state.unpin(self._connection(peer), c.keys, now()),
            m.Why: lambda c, _: state.why(c.key, now()),
            m.Stats: lambda c, _: state.stats(),
            GetMetrics: lambda c, _: pool_metrics(state.stats()),
            m.Subscribe: self._subscribe,
        }
        changes: dict[type[Call[Any]], Callable[[Any], Any]] = {
            m.MountSegment: lambda c: state.mount(c.node, c.descriptor, now()),
            m.UnmountSegment: lambda c: state.unmount(c.segment, c.incarnation),
            m.PutStart: lambda c: state.put_start(c.items, now()),
            m.PutEnd: lambda c: state.put_end(c.items, now()),
            m.PutRevoke: lambda c: state.put_revoke(c.items, c.settled, now()),
            m.Remove: lambda c: state.remove(c.keys, c.force, now()),
            m.ReportCorrupt: lambda c: state.report_corrupt(c.key, c.generation, c.segment, now()),
        }
        return {**reads, **{call: self._and_publish(handler) for call, handler in changes.items()}}

    def _find_segment(self, name: str) -> SegmentDescriptor | None:
        announced = self._board.find(name, self._clock.now_s())
        return announced or next((each for each in self.state.segments() if each.name == name), None)

    def _and_publish(self, handler: Callable[[Any], Any]) -> Callable[[Any, Peer], Any]:
        def handle(call: Any, _: Peer) -> Any:
            answer = handler(call)
            self._publish_soon()
            return answer

        return handle

    def _connection(self, peer: Peer) -> int:
        """The number the state knows this connection by; its pins end with it."""
        number = self._connection_of.get(peer)
        if number is None:
            number = self._connection_of[peer] = next(self._connections)
            peer.on_close(lambda: self._on_close(peer))
        return number

    def _on_close(self, peer: Peer) -> None:
        self.state.connection_closed(self._connection_of.pop(peer), self._clock.now_s())


def next_epoch(data_dir: Path) -> int:
    """One more than in the last life, and on disk before anybody hears of it."""
    path = data_dir / EPOCH_FILE
    try:
        data_dir.mkdir(parents=True, exist_ok=True)
        last = int(path.read_text()) if path.exists() else 0
        if not 0 <= last < 2**EPOCH_BITS - 1:
            raise ValueError(f"{last} is out of range")
        fresh = path.with_suffix(".new")
        with open(fresh, "w") as file:
            file.write(f"{last + 1}\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(fresh, path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot keep the master's epoch in {path}: {error}", param="data_dir") from error
    return last + 1
