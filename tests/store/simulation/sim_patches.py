"""Puts the simulated world under the production code: clocks, sockets, threads, disks and the transfer engine.

The modules keep their code; only the names by which they reach the outside (`time`, `socket`, `threading`, `os`,
TransferEngine...) lead to the world of the seed that runs.
"""

from __future__ import annotations

import gc
import logging
from asyncio.events import _set_running_loop
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import moonpool.base.clock
import moonpool.base.rpc.aio_client
import moonpool.base.rpc.aio_server
import moonpool.base.rpc.blocking
import moonpool.base.rpc.breaker
import moonpool.base.rpc.intake
import moonpool.base.rpc.reconnect
import moonpool.base.rpc.silence
import moonpool.base.side_thread
import moonpool.master.service
import moonpool.master.state.ahead
import moonpool.master.state.answers
import moonpool.master.state.changes
import moonpool.master.state.orders
import moonpool.master.state.segments
import moonpool.master.state.snapshot
import moonpool.node.copying
import moonpool.node.mount
import moonpool.node.offloading
import moonpool.node.orders
import moonpool.node.service
import moonpool.node.session_registry
import moonpool.node.ssd.folder
import moonpool.node.ssd.log
import moonpool.node.ssd.recovery
import moonpool.node.ssd_tier
import moonpool.store.client.ahead
import moonpool.store.client.batch_read
import moonpool.store.client.directory
import moonpool.store.client.master_client
import moonpool.store.client.remembered
import moonpool.store.client.session_client
import moonpool.store.client.small_batch
import moonpool.store.client.small_read
import moonpool.store.client.view_ledger
import moonpool.store.store
import moonpool.transfer.disk.disk
import moonpool.transfer.disk.handle
import moonpool.transfer.transports.mapped
from moonpool.base.errors import DeadlineExceeded, PeerLost
from moonpool.base.frames import FrameDecoder, FrameKind
from moonpool.base.header_columns import PlainHeaders
from moonpool.base.rpc import RpcPeer
from moonpool.store.client.master_client import MasterClient
from moonpool.store.messages import SESSIONS_ALONE, PutDrop

from .sim_disk import SimFcntl
from .sim_history import NEVER_S, SPARE_S
from .sim_loop import SimEvent, SimLock, SimPool, SimQueue
from .sim_memory import SimEngine, SimFolder
from .sim_net import SimSocketModule

_SNAPSHOT_SLOTS = 4  # in one step: so that a small table is written in many


class Here:
    """The world of the seed that runs."""

    world: Any = None


def _world() -> Any:
    return Here.world


class _Thread:
    def __init__(self, target: Callable[[], None], name: str = "", daemon: bool = True) -> None:
        self._target, self._name = target, name
        self._sim: Any = None

    def start(self) -> None:
        scheduler = _world().scheduler
        self._sim = scheduler.start_thread(scheduler.current, self._target, self._name)

    def is_alive(self) -> bool:
        return not self._sim.is_over

    def join(self, timeout: float | None = None) -> None:
        scheduler = _world().scheduler
        until_s = scheduler.now_s + (timeout or 0.0)
        while not self._sim.is_over and scheduler.now_s < until_s:
            scheduler.sleep(0.01)


def _call_from_thread(self: Any, call: Any, *, timeout_s: float) -> Any:
    """ReconnectingClient's, for simulated threads."""
    client = self.client
    if client is None:
        raise PeerLost("the master is not connected")
    scheduler = _world().scheduler
    process = scheduler.current
    done, outcome = SimEvent(scheduler), []

    async def ask() -> None:
        try:
            outcome.append(await client.call(call, timeout_s=timeout_s))
        except Exception as error:  # noqa: BLE001 - raised by the thread that waits
            outcome.append(error)
        done.set()

    scheduler.call_at(scheduler.now_s, process, lambda: process.loop.create_task(ask()))
    if not done.wait(timeout_s + 1.0):
        raise DeadlineExceeded("the master was not asked in time")
    if isinstance(outcome[0], Exception):
        raise outcome[0]
    return outcome[0]


def _time() -> Any:
    return SimpleNamespace(
        monotonic=lambda: _world().scheduler.now_s,
        time=lambda: _world().scheduler.now_s,
        time_ns=lambda: _world().incarnation(),
        sleep=lambda seconds: _world().scheduler.sleep(seconds),
        clock_gettime=lambda clock: _world().scheduler.now_s,
        CLOCK_BOOTTIME=None,
    )


def _threading() -> Any:
    return SimpleNamespace(
        Lock=lambda: SimLock(_world().scheduler),
        Event=lambda: SimEvent(_world().scheduler),
        Thread=_Thread,
    )


def _with_pauses(original: Any) -> Any:
    """The same, with a moment before it and one behind in which others run."""

    def paused(*args: Any) -> Any:
        world = _world()
        if not world.scheduler.may_block:
            return original(*args)
        world.pause()
        result = original(*args)
        world.pause()
        return result

    return paused


def _open_for_writing(original: Any) -> Any:
    def open_for_writing(self: Any, placement: Any, session: int) -> Any:
        _world().before_write()
        return original(self, placement, session)

    return open_for_writing


def _record(original: Any) -> Any:
    def record(self: Any, key: bytes, fate: Any, now_s: float) -> None:
        original(self, key, fate, now_s)
        _world().history.note_fate(key, fate)

    return record


def _quarantine(original: Any) -> Any:
    def quarantine(self: Any, key: bytes, generation: int, segment: str, offset: int, now_s: float) -> bool:
        world, at = _world(), self._segments.get(segment)
        if world.history.lost_times_s and at is not None and at.recount_above not in (None, SESSIONS_ALONE):
            world.history.may_be_overwritten(key)  # by whom the node has not told yet
        found: bool = original(self, key, generation, segment, offset, now_s)
        world.note("quarantine", key, generation, segment, offset, found)
        if found and not world.history.may_be_damaged(key, world.scheduler.now_s):
            world.violated(f"a replica of {key!r} on {segment} is damaged, and nobody has done it")
        return found

    return quarantine


def _once(original: Any) -> Any:
    def once(self: Any, number: int, kind: int, act: Callable[[], Any]) -> Any:
        def act_and_note() -> Any:
            world = _world()
            if number and not world.history.is_carried_out_once(number):
                world.violated(f"call {number} was carried out twice")
            return act()

        return original(self, number, kind, act_and_note)

    return once


def _on_data(original: Any) -> Any:
    """Note until when the callers in it wait at least, if the busy event loop has found it waiting."""

    def data_received(self: Any, data: bytes) -> None:
        scheduler = _world().scheduler
        if scheduler.found_s is not None:
            is_first = self.__dict__.get("found_s") != scheduler.found_s  # what comes second may be new
            self.found_s = scheduler.found_s
            since_s, until_s = (self.found_s if is_first else scheduler.now_s), self.__dict__.setdefault("until_s", {})
            for frame in FrameDecoder().feed(data):
                if frame.kind is FrameKind.CALL and frame.wait_ms:
                    until_s[frame.call_id] = since_s + frame.wait_ms / 1000
        original(self, data)

    return data_received


def _on_call(original: Any) -> Any:
    def on_call(self: Any, call_id: int, body: bytes) -> None:
        world = _world()
        late_s = world.scheduler.now_s - self.__dict__.get("until_s", {}).pop(call_id, NEVER_S)
        if late_s > 0.0:
            world.violated(f"a call was begun {late_s:.3f} s after its caller had given up")
        original(self, call_id, body)
        process = world.scheduler.current
        if world.call_s and process is world.master.process:
            process.busy_until_s = world.scheduler.now_s + world.call_s

    return on_call


def _send_first_owed(original: Any) -> Any:
    def send_first_owed(self: Any) -> None:
        world, call = _world(), self._owed[0]
        master = world.master.process
        original(self)
        if isinstance(call, PutDrop) and master is world.master.process and world.master.is_alive:
            puts, space = world.state.puts, world.state.space
            kept = [put for put in puts.pending.values() if put.terms.number == call.number]
            kept += [put for put in space.of_puts.values() if put.number == call.number]
            if kept:
                world.violated(
                    f"PutStart {call.number} was given up, the master was told, and keeps {len(kept)} spaces"
                )

    return send_first_owed


def _end(original: Any) -> Any:
    def end(self: Any, segment: Any) -> None:
        original(self, segment)
        _world().note_expelled()

    return end


class _Passing:
    """A module of which some names lead elsewhere."""

    def __init__(self, get: Callable[[], Any]) -> None:
        self._get = get

    def __getattr__(self, name: str) -> Any:
        return getattr(self._get(), name)


async def _unconnected(path: str) -> str:
    """The path, for SimLoop.create_unix_connection()."""
    return path


def _patches() -> list[tuple[Any, str, Any]]:
    time, threading = _time(), _threading()
    disks = _Passing(lambda: _world().disks)
    nothing: Callable[..., None] = lambda *args, **kwargs: None  # noqa: E731
    secrets = SimpleNamespace(randbelow=lambda limit: _world().scheduler.rng.randrange(limit))
    return [
        *[
            (module, "time", time)
            for module in (
                moonpool.base.clock,
                moonpool.base.rpc.blocking,
                moonpool.base.rpc.breaker,
                moonpool.base.rpc.silence,
                moonpool.node.mount,
                moonpool.node.orders,
            )
        ],
        *[(module, "time", time) for module in (moonpool.base.rpc.aio_server, moonpool.base.rpc.intake)],
        (moonpool.base.rpc.aio_server, "bind_private", lambda path: path),
        (moonpool.base.rpc.aio_client, "_connect_unix", _unconnected),
        (moonpool.base.rpc.blocking, "socket", SimSocketModule(lambda: _world().network)),
        *[
            (module, "threading", threading)
            for module in (
                moonpool.base.rpc.blocking,
                moonpool.base.rpc.breaker,
                moonpool.base.side_thread,
                moonpool.store.client.session_client,
                moonpool.store.client.master_client,
                moonpool.store.client.directory,
                moonpool.store.client.ahead,
                moonpool.store.client.remembered,
                moonpool.store.client.view_ledger,
            )
        ],
        (moonpool.base.side_thread, "_thread", SimpleNamespace(start_new_thread=lambda act, args: act(*args))),
        (moonpool.store.client.view_ledger, "SimpleQueue", lambda: SimQueue(_world().scheduler)),
        (moonpool.store.client.view_ledger, "SPARE_S", SPARE_S),
        *[
            (module, "secrets", secrets)
            for module in (
                moonpool.store.client.directory,
                moonpool.store.client.session_client,
                moonpool.store.store,
            )
        ],
        (moonpool.store.client.directory, "host_id", lambda: _world().scheduler.current.host),
        *[
            (module, "check_header", _with_pauses(module.check_header))
            for module in (moonpool.store.client.batch_read, moonpool.store.client.small_read)
        ],
        # Batches are small here; the headers of the smallest are checked together, too.
        (moonpool.store.client.small_batch, "_LEAST_OBJECTS", 1),
        (PlainHeaders, "read", _with_pauses(PlainHeaders.read)),
        *[
            (moonpool.node.ssd.log.SsdLog, name, _with_pauses(getattr(moonpool.node.ssd.log.SsdLog, name)))
            for name in ("append_many", "sync", "remove")
        ],
        (RpcPeer, "data_received", _on_data(RpcPeer.data_received)),
        (RpcPeer, "_on_call", _on_call(RpcPeer._on_call)),
        (moonpool.base.rpc.aio_server, "_MAX_READS", 1),  # each turn of an event loop is noted
        (MasterClient, "_send_first_owed", _send_first_owed(MasterClient._send_first_owed)),
        (moonpool.master.service, "Journal", SimpleNamespace(open=lambda *args: _world().open_journal())),
        (moonpool.master.service, "gc", SimpleNamespace(freeze=nothing)),
        (moonpool.master.state.snapshot, "STEP_SLOTS", _SNAPSHOT_SLOTS),
        (moonpool.master.state.ahead, "MAX_PART", 1 / 3),  # of few granules, else clients would hold one or two
        (moonpool.node.ssd_tier, "_COMPACT_EVERY_S", 2.0),
        (
            moonpool.store.client.session_client.SessionClient,
            "open_for_writing",
            _open_for_writing(moonpool.store.client.session_client.SessionClient.open_for_writing),
        ),
        (
            moonpool.master.state.changes.RemovalLog,
            "record",
            _record(moonpool.master.state.changes.RemovalLog.record),
        ),
        (
            moonpool.master.state.answers.Answers,
            "once",
            _once(moonpool.master.state.answers.Answers.once),
        ),
        (
            moonpool.master.state.orders.Copies,
            "quarantine",
            _quarantine(moonpool.master.state.orders.Copies.quarantine),
        ),
        (moonpool.master.state.segments.SegmentTable, "end", _end(moonpool.master.state.segments.SegmentTable.end)),
        (SimPool, "scheduler", staticmethod(lambda: _world().scheduler)),
        *[(module, "ThreadPoolExecutor", SimPool) for module in (moonpool.node.orders, moonpool.node.offloading)],
        *[(moonpool.base.rpc.aio_server, name, nothing) for name in ("add_own_socket", "remove_own_socket")],
        (moonpool.node.session_registry, "os", SimpleNamespace(path=_Paths, makedirs=nothing)),
        (moonpool.node.service, "TransferEngine", lambda config: SimEngine(_world(), _world().scheduler.current)),
        (moonpool.node.service, "check_numa_node", nothing),
        (moonpool.node.service, "warn_if_open", nothing),
        (
            moonpool.node.ssd_tier,
            "FolderSegment",
            SimpleNamespace(
                open=lambda name, path, incarnation: SimFolder(name, f"{path}/", _world().disks, incarnation)
            ),
        ),
        (moonpool.base.rpc.reconnect.ReconnectingClient, "call_from_thread", _call_from_thread),
        *[
            (module, "os", disks)
            for module in (
                moonpool.node.ssd.folder,
                moonpool.node.ssd.recovery,
                moonpool.transfer.disk.disk,
                moonpool.transfer.disk.handle,
            )
        ],
        (moonpool.node.ssd.folder, "fcntl", SimFcntl(lambda: _world().disks)),
        *[
            (module, "copy_bytes", lambda target, source: _world().watch.copy(target, source))
            for module in (moonpool.transfer.transports.mapped, moonpool.node.copying)
        ],
    ]


class _Paths:
    @staticmethod
    def dirname(path: str) -> str:
        return path.rpartition("/")[0]


class _Bugs(logging.Handler):
    """Errors that production code only logs are bugs all the same."""

    def emit(self, record: logging.LogRecord) -> None:
        world = _world()
        if world is not None and not world.scheduler.is_over:
            error = record.exc_info[1] if record.exc_info else None
            world.scheduler.fail(error or AssertionError(record.getMessage()))


@contextmanager
def simulated() -> Iterator[None]:
    """Inside, the store's modules live in Here.world. Not nested, and not beside anything that uses the store."""
    patches = _patches()
    before = [(where, name, where.__dict__.get(name)) for where, name, _ in patches]
    logger, bugs = logging.getLogger("moonpool"), _Bugs(logging.ERROR)
    level, propagate, collects = logger.level, logger.propagate, gc.isenabled()
    for where, name, value in patches:
        setattr(where, name, value)
    logger.addHandler(bugs)
    logger.setLevel(logging.ERROR)
    logger.propagate = False
    gc.disable()  # when cycles are collected must not depend on what ran before
    try:
        yield
    finally:
        for where, name, value in before:
            setattr(where, name, value)
        logger.removeHandler(bugs)
        logger.setLevel(level)
        logger.propagate = propagate
        if collects:
            gc.enable()
        _set_running_loop(None)
