"""The pool of a running master, and the request handlers of the "store" service, which act on it.

Each call is an event of the state. The handler changes the state, then calls after_event(), which writes the records of
the event to the journal. The master answers a call after that, so every answer survives the master's death.

Most calls may be repeated: generations (puts), incarnations (segments) and names (drains) tell a repeated call from a
new one. A Remove has none of these, so the client numbers it, and state/answers.py answers a repeated one:
otherwise a copy that arrives late, over a connection that its client has given up, could remove what was stored after
it. A PutStart is never repeated: it has another number each time it is sent, and the client names the numbers that it
has given up (PutDrop).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncGenerator, Callable
from functools import partial
from typing import Any

import msgspec

from moonpool.base.clock import Clock
from moonpool.base.descriptor import SegmentDescriptor
from moonpool.base.errors import MoonpoolError, NotSettled
from moonpool.base.metrics import (
    GetMetrics,
    GetReportedMetrics,
    MetricFamily,
    MetricSample,
    ReportMetrics,
    process_metrics,
)
from moonpool.base.rpc import Call, RpcPeer
from moonpool.base.rpc.aio_server import LateCalls
from moonpool.master.board import ReportedMetrics, SegmentBoard
from moonpool.master.journal import Journal, JournalHealth
from moonpool.master.state import PoolState
from moonpool.master.state.answers import Answer
from moonpool.master.state.residency import list_blocks
from moonpool.master.state.role_leases import RoleLeases
from moonpool.master.state.snapshot import snapshot_keys
from moonpool.master.streams import ChangeFeed, OrderStreams
from moonpool.store import messages as m

_GAUGES = {
    "puts_in_progress": "puts begun and not ended",
    "ahead_bytes": "bytes that clients hold for puts to come",
    "orders_in_progress": "copies, offloads and drops that nodes were asked for",
    "objects_away": "objects on SSDs of nodes that are away",
    "hot_objects": "objects with extra replicas for the readers of hot keys",
    "hot_bytes": "bytes of memory that these extra replicas take",
}
_SAVED = "hot_saved_bytes"  # a counter of bytes, not of events
_REMOVE, _REMOVE_REPLICAS, _REMOVE_MATCHING = 1, 2, 3  # kinds of numbered calls, in the journal


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
        if not self._publish_planned:
            self._publish_planned = True
            asyncio.get_running_loop().call_later(self._event_delay_s, self._publish)
        if self.state.orders.unsent:
            self.order_streams.wake(self.state.orders.unsent)
        if self.state.outcomes.records:
            self.journal.append(self.state.take_records())

    def _publish(self) -> None:
        self._publish_planned = False
        changes = self.state.take_changes()
        if changes is not None:
            self.feed.publish(changes)

    def subscribe(self, since: int | None) -> AsyncGenerator[m.EventBatch, None]:
        self._publish()  # pending changes belong before the snapshot
        return self.feed.subscribe(since, partial(snapshot_keys, self.state.index), self.state.index.nodes_of)

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


Handler = Callable[[Any, RpcPeer], Any]


def handlers(pool: LivePool) -> dict[type[Call[Any]], Handler]:
    """Return the handler of each call. A call that changes the state is answered after its records
    are in the journal.
    """
    changing = {**_objects(pool), **_removals(pool), **_segments(pool), **_tasks(pool)}
    recorded = {call: _recorded(pool, handle) for call, handle in changing.items()}
    return {**_questions(pool), **recorded, m.PutStart: _put_start(pool), m.GrantAhead: _grant_ahead(pool)}


def _recorded(pool: LivePool, handle: Handler) -> Handler:
    def handle_and_record(call: Any, peer: RpcPeer) -> Any:
        try:
            return handle(call, peer)
        finally:
            pool.after_event()

    return handle_and_record


def _put_start(pool: LivePool) -> Callable[[m.PutStart, RpcPeer], m.PutReply]:
    """Return the handler of PutStart. If the journal cannot be written, the granted space is freed: the client has not
    learned of it, so no process writes there.
    """
    state, now = pool.state, pool.clock.now_s

    def start_and_record(c: m.PutStart, _: RpcPeer) -> m.PutReply:
        generations: list[int] = []
        caller = {"session": c.session, "settled_up_to": c.settled_up_to, "number": c.number}
        try:
            reply = state.put_start(c.keys, c.sizes, c.options, now(), parents=c.parents, groups=c.groups, **caller)
            generations = reply.generations
            return reply
        finally:
            _record_grants(pool, c.keys[: len(generations)], generations)

    return start_and_record


def _grant_ahead(pool: LivePool) -> Callable[[m.GrantAhead, RpcPeer], m.PutReply]:
    """Return the handler of GrantAhead. If the journal cannot be written, the space is freed as by _put_start()."""
    state, now = pool.state, pool.clock.now_s

    def grant_and_record(c: m.GrantAhead, _: RpcPeer) -> m.PutReply:
        generations: list[int] = []
        try:
            reply = state.grant_ahead(c, now())
            generations = reply.generations
            return reply
        finally:
            _record_grants(pool, [m.ahead_key(each) for each in generations], generations)

    return grant_and_record


def _record_grants(pool: LivePool, keys: list[bytes], generations: list[int]) -> None:
    """Call after_event() after space was granted; free the space again if that fails."""
    try:
        pool.after_event()
    except MoonpoolError:
        pool.state.put_revoke(keys, generations, True, pool.clock.now_s())
        with contextlib.suppress(MoonpoolError):  # otherwise the next call would raise it
            pool.after_event()
        raise


def _questions(pool: LivePool) -> dict[type[Call[Any]], Handler]:
    state, now, board, reported = pool.state, pool.clock.now_s, pool.board, ReportedMetrics()
    return {
        m.Exist: lambda c, _: state.exist(c.keys, now(), c.without),
        m.Locate: lambda c, _: state.locate(c.keys, now()),
        m.Segments: lambda c, _: state.segments(),
        m.Announce: lambda c, _: board.announce(c.descriptor, c.ttl_s, now()),
        m.Retract: lambda c, _: board.retract(c.name, c.incarnation),
        m.FindSegment: lambda c, _: pool.find_segment(c.name),
        m.ListObjects: lambda c, _: state.list_objects(c.pattern, c.cursor, c.limit, now()),
        m.ListBlocks: lambda c, _: list_blocks(state.index, c.cursor, c.limit, now()),
        m.QueryTask: lambda c, _: state.task(c.task_id, now()),
        m.ListTasks: lambda c, _: state.tasks(now(), c.finished),
        m.Why: lambda c, _: state.why(c.key, now(), c.identity),
        m.Stats: lambda c, _: _stats(pool),
        GetMetrics: lambda c, _: [*pool_metrics(state.stats(), pool.journal.health()), *process_metrics()],
        ReportMetrics: lambda c, _: reported.report(c.metrics, now()),
        GetReportedMetrics: lambda c, _: reported.recent(now()),
        m.Subscribe: lambda c, _: pool.subscribe(c.since),
        m.Orders: lambda c, _: pool.order_streams.serve(c.node, state.orders),
    }


def _stats(pool: LivePool) -> m.StoreStats:
    """Return the state's counts, the calls that came too late, and why a restarted master may know less."""
    stats = pool.state.stats()
    counters = {**stats.counters, "late_calls": LateCalls.total}
    return msgspec.structs.replace(stats, counters=counters, journal_error=pool.journal.health().error)


def _objects(pool: LivePool) -> dict[type[Call[Any]], Handler]:
    state, now = pool.state, pool.clock.now_s

    def put_end(c: m.PutEnd, _: RpcPeer) -> dict[int, m.Refusal]:
        state.check_can_end(c.keys, c.generations, now())
        return state.put_end(c.keys, c.generations, c.failed, now())

    def lookup(c: m.Lookup, _: RpcPeer) -> list[m.ObjectInfo | None]:
        return state.lookup(c.keys, now(), prefix=c.prefix, lease=c.lease, session=c.session, reads=c.reads)

    return {
        m.PutEnd: put_end,
        m.PutAt: lambda c, _: state.put_at(c, now()),
        m.PutDrop: lambda c, _: state.put_drop(c.number, c.keys, now()),
        m.PutRenew: lambda c, _: state.put_renew(c.keys, c.generations, now()),
        m.PutRevoke: lambda c, _: state.put_revoke(c.keys, c.generations, c.settled, now()),
        m.Lookup: lookup,
        m.Promote: lambda c, _: state.promotions.ask(c.keys, now()),
        m.RenewLeases: lambda c, _: state.renew_leases(c.keys, c.generations, now(), c.num_replicas),
        m.Pin: lambda c, peer: state.pin(c.session or pool.connection(peer), c.keys, now()),
        m.Unpin: lambda c, peer: state.unpin(c.session or pool.connection(peer), c.keys, now()),
        m.ReportCorrupt: lambda c, _: state.report_corrupt(c.key, c.generation, c.segment, c.offset, now()),
    }


def _removals(pool: LivePool) -> dict[type[Call[Any]], Handler]:
    """Return the handlers of the numbered calls."""
    state, now = pool.state, pool.clock.now_s

    def remove(c: m.Remove, _: RpcPeer) -> list[bool]:
        def remove_all() -> Answer:
            return Answer([*map(int, state.remove(c.keys, c.force, now()))], state.voids.last_number)

        answer = state.answers.once(c.idempotency_key, _REMOVE, remove_all)
        state.check_settled(c.keys, now(), answer.number)
        return [*map(bool, answer.values)]

    def remove_replicas(c: m.RemoveReplicas, _: RpcPeer) -> list[bool]:
        def remove_all() -> Answer:
            return Answer([*map(int, state.remove_replicas(c.keys, c.segments, now()))], state.voids.last_number)

        return [*map(bool, state.answers.once(c.idempotency_key, _REMOVE_REPLICAS, remove_all).values)]

    def remove_matching(c: m.RemoveMatching, _: RpcPeer) -> m.RemovedCount:
        def remove_step() -> Answer:
            done = state.remove_matching(c.pattern, c.force, c.cursor, now(), c.prefix)
            cursor = [] if done.cursor is None else [done.cursor]
            return Answer([done.num_removed, done.num_kept, *cursor], state.voids.last_number)

        answer = state.answers.once(c.idempotency_key, _REMOVE_MATCHING, remove_step)
        if not state.voids.settled_up_to(answer.number, now()):
            raise NotSettled("a reader may still find an object that was removed; ask again")
        num_removed, num_kept, *cursor = answer.values
        return m.RemovedCount(num_removed, num_kept, cursor[0] if cursor else None)

    return {m.Remove: remove, m.RemoveReplicas: remove_replicas, m.RemoveMatching: remove_matching}


def _segments(pool: LivePool) -> dict[type[Call[Any]], Handler]:
    state, members, now = pool.state, pool.state.members, pool.clock.now_s

    def mount(c: m.MountSegment, peer: RpcPeer) -> m.MountReply:
        reply = state.mount(
            c.node,
            c.descriptor,
            now(),
            tier=c.tier,
            registry_address=c.registry_address,
            capacity_nbytes=c.capacity_nbytes,
        )
        pool.remember_node(peer, c.descriptor.name, c.descriptor.incarnation)
        return reply

    def heartbeat(c: m.Heartbeat, peer: RpcPeer) -> m.HeartbeatReply:
        reply = state.heartbeat(c.segment, c.incarnation, now(), c.generation_limit)
        if reply.known:
            pool.remember_node(peer, c.segment, c.incarnation)
        return reply

    return {
        m.MountSegment: mount,
        m.UnmountSegment: lambda c, _: state.unmount(c.segment, c.incarnation, now()),
        m.Heartbeat: heartbeat,
        m.Recount: lambda c, _: members.recount(c.segment, c.incarnation, c.spans, c.sessions, now()),
        m.FenceAhead: lambda c, _: members.fence_ahead(c.segment, c.incarnation, c.spans),
        m.SessionsGone: lambda c, _: state.sessions_gone(c.sessions, now()),
        m.Inventory: lambda c, _: members.inventory(
            c.segment, c.incarnation, c.items, c.last, now(), is_damaged=c.damaged_nbytes > 0
        ),
        m.Relocated: lambda c, _: members.relocated(c.segment, c.incarnation, c.items),
        m.OrdersDone: lambda c, _: state.orders_done(c.results, now()),
    }


def _tasks(pool: LivePool) -> dict[type[Call[Any]], Handler]:
    state, now = pool.state, pool.clock.now_s
    leases = RoleLeases(state.generations)
    return {
        m.AcquireLease: lambda c, _: leases.acquire(c.name, c.holder, c.ttl_s, now()),
        m.CopyObject: lambda c, _: state.copy(c.key, c.targets, now(), c.missing_only),
        m.MoveObject: lambda c, _: state.move(c.key, c.source, c.target, now()),
        m.DrainSegment: lambda c, _: state.drain(c.segment, now()),
        m.CancelTask: lambda c, _: state.cancel_task(c.task_id, now()),
    }


def pool_metrics(stats: m.StoreStats, journal: JournalHealth) -> list[MetricFamily]:
    """Return gauges per segment (and so per tier) and for the pool, and one counter of events by kind."""
    segments = [
        (each, {"segment": each.name, "node": each.node, "tier": (each.tier.name or "").lower()})
        for each in stats.segments
    ]
    events = {name: value for name, value in stats.counters.items() if name not in (*_GAUGES, _SAVED)}
    families = [_gauge(f"moonpool_pool_{name}", text, [({}, stats.counters[name])]) for name, text in _GAUGES.items()]
    return [
        *families,
        _gauge("moonpool_journal_durable", "0: a restart may forget something", [({}, int(journal.durable))]),
        _gauge("moonpool_journal_bytes", "to be replayed at a restart", [({}, journal.journal_nbytes)]),
        _gauge("moonpool_journal_unsynced_bytes", "not yet on disk", [({}, journal.unsynced_nbytes)]),
        _gauge("moonpool_pool_objects", "objects that can be read", [({}, stats.num_objects)]),
        _gauge(
            "moonpool_pool_segment_objects",
            "replicas on a segment",
            [(label, each.num_objects) for each, label in segments],
        ),
        _gauge(
            "moonpool_pool_capacity_bytes",
            "size of a segment",
            [(label, each.capacity_nbytes) for each, label in segments],
        ),
        _gauge(
            "moonpool_pool_used_bytes",
            "bytes of a segment in use",
            [(label, each.used_nbytes) for each, label in segments],
        ),
        MetricFamily(
            f"moonpool_pool_{_SAVED}",
            "about how much readers took from extra replicas of hot keys instead of the first ones",
            "counter",
            [MetricSample(f"moonpool_pool_{_SAVED}_total", {}, stats.counters[_SAVED])],
        ),
        MetricFamily(
            "moonpool_pool_events",
            "what happened to objects and look-ups, by kind",
            "counter",
            [MetricSample("moonpool_pool_events_total", {"event": name}, value) for name, value in events.items()],
        ),
    ]


def _gauge(name: str, documentation: str, values: list[tuple[dict[str, str], int]]) -> MetricFamily:
    return MetricFamily(name, documentation, "gauge", [MetricSample(name, label, value) for label, value in values])
