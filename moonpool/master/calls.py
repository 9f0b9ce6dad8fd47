"""Which call of the "store" service is which event of the state."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from moonpool.base.errors import MoonpoolError
from moonpool.base.metrics import GetMetrics, GetReportedMetrics, ReportMetrics, process_metrics
from moonpool.base.rpc import Call, RpcPeer
from moonpool.master.idempotency_cache import IdempotencyCache
from moonpool.master.metrics import ReportedMetrics, pool_metrics
from moonpool.store import messages as m

if TYPE_CHECKING:
    from moonpool.master.service import Master

Handler = Callable[[Any, RpcPeer], Any]


def handlers(master: Master) -> dict[type[Call[Any]], Handler]:
    """Calls that change nothing are answered as they come; all others are written down first."""
    changing = {**_objects(master), **_segments(master), **_tasks(master)}
    recorded = {call: _recorded(master, handle) for call, handle in changing.items()}
    return {**_questions(master), **recorded, m.PutStart: _put_start(master)}


def _recorded(master: Master, handle: Handler) -> Handler:
    def handle_and_record(call: Any, peer: RpcPeer) -> Any:
        try:
            return handle(call, peer)
        finally:
            master.after_event()

    return handle_and_record


def _put_start(master: Master) -> Callable[[m.PutStart, RpcPeer], m.PutReply]:
    """Space that cannot be written down is taken back: its writer is not told of it, so nobody writes there."""
    state, now = master.state, master.clock.now_s

    def start_and_record(c: m.PutStart, _: RpcPeer) -> m.PutReply:
        generations: list[int] = []
        told: dict[str, Any] = {"session": c.session, "settled_up_to": c.settled_up_to}
        try:
            reply = state.put_start(c.keys, c.sizes, c.options, now(), parents=c.parents, groups=c.groups, **told)
            generations = reply.generations
            return reply
        finally:
            try:
                master.after_event()
            except MoonpoolError:
                state.put_revoke(c.keys[: len(generations)], generations, True, now())
                with contextlib.suppress(MoonpoolError):  # else whoever comes next would hear of it
                    master.after_event()
                raise

    return start_and_record


def _questions(master: Master) -> dict[type[Call[Any]], Handler]:
    state, now, board, reported = master.state, master.clock.now_s, master.board, ReportedMetrics()
    return {
        m.Exist: lambda c, _: state.exist(c.keys, now(), c.without),
        m.Segments: lambda c, _: state.segments(),
        m.Announce: lambda c, _: board.announce(c.descriptor, c.ttl_s, now()),
        m.Retract: lambda c, _: board.retract(c.name, c.incarnation),
        m.FindSegment: lambda c, _: master.find_segment(c.name),
        m.ListObjects: lambda c, _: state.list_objects(c.pattern, c.cursor, c.limit, now()),
        m.QueryTask: lambda c, _: state.task(c.task_id),
        m.ListTasks: lambda c, _: state.tasks(c.finished),
        m.Why: lambda c, _: state.why(c.key, now(), c.identity),
        m.Stats: lambda c, _: state.stats(),
        GetMetrics: lambda c, _: [*pool_metrics(state.stats(), master.journal_health()), *process_metrics()],
        ReportMetrics: lambda c, _: reported.take(c.metrics, now()),
        GetReportedMetrics: lambda c, _: reported.lately(now()),
        m.Subscribe: lambda c, _: master.subscribe(c.since),
        m.Orders: lambda c, _: master.order_streams.serve(c.node, state.orders),
    }


def _objects(master: Master) -> dict[type[Call[Any]], Handler]:
    state, now, errands = master.state, master.clock.now_s, IdempotencyCache()

    def remove(c: m.Remove, _: RpcPeer) -> list[bool]:
        return errands.once(c.errand, len(c.keys), lambda: state.remove(c.keys, c.force, now()))

    def remove_matching(c: m.RemoveMatching, _: RpcPeer) -> m.RemovedCount:
        return errands.once(c.errand, 1, lambda: state.remove_matching(c.pattern, c.force, c.cursor, now()))

    def lookup(c: m.Lookup, _: RpcPeer) -> list[m.ObjectInfo | None]:
        return state.lookup(c.keys, now(), prefix=c.prefix, lease=c.lease, session=c.session, reads=c.reads)

    return {
        m.PutEnd: lambda c, _: state.put_end(c.keys, c.generations, c.failed, now()),
        m.PutRenew: lambda c, _: state.put_renew(c.keys, c.generations, now()),
        m.PutRevoke: lambda c, _: state.put_revoke(c.keys, c.generations, c.settled, now()),
        m.Lookup: lookup,
        m.Remove: remove,
        m.RemoveMatching: remove_matching,
        m.Pin: lambda c, peer: state.pin(c.session or master.connection(peer), c.keys, now()),
        m.Unpin: lambda c, peer: state.unpin(c.session or master.connection(peer), c.keys, now()),
        m.ReportCorrupt: lambda c, _: state.report_corrupt(c.key, c.generation, c.segment, c.offset, now()),
    }


def _segments(master: Master) -> dict[type[Call[Any]], Handler]:
    state, members, now = master.state, master.state.members, master.clock.now_s

    def mount(c: m.MountSegment, peer: RpcPeer) -> m.MountReply:
        reply = state.mount(c.node, c.descriptor, now(), tier=c.tier, desk=c.desk, capacity_nbytes=c.capacity_nbytes)
        master.note_beat(peer, c.descriptor.name, c.descriptor.incarnation)
        return reply

    def heartbeat(c: m.Heartbeat, peer: RpcPeer) -> m.HeartbeatReply:
        reply = state.heartbeat(c.segment, c.incarnation, now(), c.generation_limit)
        if reply.known:
            master.note_beat(peer, c.segment, c.incarnation)
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


def _tasks(master: Master) -> dict[type[Call[Any]], Handler]:
    state, now = master.state, master.clock.now_s
    return {
        m.CopyObject: lambda c, _: state.copy(c.key, c.targets, now()),
        m.MoveObject: lambda c, _: state.move(c.key, c.source, c.target, now()),
        m.DrainSegment: lambda c, _: state.drain(c.segment, now()),
        m.CancelTask: lambda c, _: state.cancel_task(c.task_id),
    }
