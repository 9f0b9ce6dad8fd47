"""The conductor as a service: sockets, futures and timers around state.py and request_queue.py.

Its state lives as long as its process: after a restart, workers register again and the pool's events are read again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry

from moonpool.base.clock import Clock, SystemClock
from moonpool.base.cluster import (
    CONDUCTOR_SERVICE,
    REQUEST_LIMITS,
    CountOthers,
    RegisterWorker,
    ReportAnswer,
    ReportWorker,
    RetiredWorkers,
    WorkerInfo,
    WorkerLeft,
)
from moonpool.base.errors import Cancelled, Unavailable, Unreachable
from moonpool.base.metrics import GetMetrics, MetricFamily, process_metrics, snapshot
from moonpool.base.rpc import Call, RpcPeer, RpcServer, SilenceLimits
from moonpool.conductor.elastic import REBALANCE_S
from moonpool.conductor.lost_workers import LostWorkers
from moonpool.conductor.messages import (
    BeforeDecode,
    ClaimSharedMetrics,
    ConductorStatus,
    Decision,
    DrainWorker,
    ExplainRequest,
    ExportTrace,
    PrefillEnded,
    RecordRows,
    Records,
    RequestEnded,
    Route,
    SetRole,
    Status,
)
from moonpool.conductor.metrics import ConductorCollector
from moonpool.conductor.placement.policy import PolicyConfig
from moonpool.conductor.placement.prefix_index import MAX_POOL_BLOCKS, PrefixIndex
from moonpool.conductor.pool_feed import PoolFeed
from moonpool.conductor.record_keeper import RecordKeeper
from moonpool.conductor.registration import LOOK_S, Registration
from moonpool.conductor.report_pace import ReportPace
from moonpool.conductor.request_queue import QueueAnswer, RequestQueue
from moonpool.conductor.role_lease import RoleLease
from moonpool.conductor.state import ConductorState

_LOG = logging.getLogger(__name__)
_SHARED_METRICS_S = 150.0  # more than two of Prometheus' usual intervals
# Requests that wait are looked at this long after a report: a look costs as much as a route, and a thousand workers
# send ten reports in this time. After the end of a request or of its prefill the look is immediate.
_LOOK_AFTER_REPORT_S = 0.02


@dataclass(frozen=True, slots=True)
class ConductorConfig:
    address: str = "tcp:127.0.0.1:0"  # address to listen on; port 0: any free port
    store_address: str | None = None  # address of the pool's master; default: no pool
    name: str = "conductor"  # name in logs and metrics
    num_records: int = 10_000  # decision records that are kept, for `moonpool why`
    max_pool_blocks: int = MAX_POOL_BLOCKS  # most pool blocks in the prefix index
    policy: PolicyConfig = field(default_factory=PolicyConfig)


class _MetricsClaim(NamedTuple):
    """Which front end, of which group, shows the shared roles, and when it last renewed its claim."""

    peer: RpcPeer
    group: str
    claimed_s: float


class Conductor:
    """Serves from `await start()` until `await close()`."""

    def __init__(self, config: ConductorConfig, *, silence_limits: SilenceLimits | None = None) -> None:
        self.config = config
        self.registry = CollectorRegistry()
        self._clock = SystemClock()
        self._state = ConductorState(
            config.policy, PrefixIndex(max_pool_blocks=config.max_pool_blocks), config.num_records
        )
        self._lease = RoleLease(f"{config.name}-{time.time_ns()}", self._clock)
        self._feed = self._make_feed(config.store_address) if config.store_address else None
        self._tasks: list[asyncio.Task[None]] = []
        promote = self._feed.promote if self._feed is not None else None
        queue = RequestQueue(self._state, config.policy, promote)
        self._queue = RequestQueueService(queue, self._clock)
        self._keeper = RecordKeeper(self._state, self._feed)
        self._front_ends: set[RpcPeer] = set()
        self._lost = LostWorkers()
        self._pace = ReportPace()
        self._late: frozenset[str] = frozenset()  # workers that the log names last
        self._shared_metrics: _MetricsClaim | None = None
        self._server = self._make_server(silence_limits or REQUEST_LIMITS)
        self.registry.register(ConductorCollector(self._state, queue, self._clock, lambda: self.pool_connected))

    def _make_feed(self, master: str) -> PoolFeed:
        self._state.roles.lease = self._lease.number
        state, duties = self._state, [self._lease.keep]
        return PoolFeed(master, state.index, state.set_pool_nodes, name=self.config.name, duties=duties)

    @property
    def state(self) -> ConductorState:
        """What it knows and decides with, to look at."""
        return self._state

    @property
    def pool_connected(self) -> bool:
        return self._feed is not None and self._feed.connected

    async def start(self) -> str:
        """Listen, and begin to follow the pool. Return the address with the real port. Raise ConfigError when the
        address is in use."""
        address = await self._server.listen(self.config.address)
        if self._feed is not None:
            self._tasks.append(asyncio.create_task(self._feed.run(), name="pool feed"))
        self._tasks.append(asyncio.create_task(self._keep_balance(), name="roles"))
        self._tasks.append(asyncio.create_task(self._keep_looking(), name="late workers"))
        return address

    async def _keep_looking(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            self._state.look()
            self._say_late()

    def _say_late(self) -> None:
        """Log which workers have become late, and which are no longer; the queue may place a request now."""
        before, self._late = self._late, self._state.late
        if before == self._late:
            return
        for name in sorted(self._late - before):
            _LOG.warning("worker %s is late: its engine or its reports do not go on; requests go to others", name)
        for name in sorted(before - self._late):
            _LOG.warning("worker %s is no longer late, or gone", name)
        self._queue.changed()

    async def _keep_balance(self) -> None:
        while True:
            await asyncio.sleep(REBALANCE_S)
            self._state.roles.rebalance(self._state.workers, self._clock.now_s())

    async def close(self) -> None:
        """Idempotent."""
        self._queue.close()
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._server.close()

    def _make_server(self, silence_limits: SilenceLimits) -> RpcServer:
        handlers: dict[type[Call[Any]], Callable[[Any, RpcPeer], Any]] = {
            RegisterWorker: self._register,
            ReportWorker: self._report,
            Route: self._route,
            PrefillEnded: self._prefill_ended,
            BeforeDecode: self._before_decode,
            RequestEnded: self._request_ended,
            Status: self._status,
            SetRole: self._set_role,
            DrainWorker: self._drain_worker,
            WorkerLeft: self._worker_left,
            RetiredWorkers: self._retired_workers,
            CountOthers: lambda call, peer: self._state.roles.count_others(call, self._state.workers),
            Records: self._keeper.find,
            RecordRows: self._keeper.rows,
            ExplainRequest: self._keeper.explain,
            ExportTrace: self._keeper.export,
            GetMetrics: self._metrics,
            ClaimSharedMetrics: self._claim_shared_metrics,
        }
        return RpcServer(
            CONDUCTOR_SERVICE,
            handlers,
            name=self.config.name,
            incarnation=time.time_ns(),
            silence_limits=silence_limits,
        )

    # handlers

    def _register(self, call: RegisterWorker, peer: RpcPeer) -> None:
        if call.info.leaves:
            self._register_leaver(call.info, peer)
            return
        worker = self._state.register(call.info)
        self._state.roles.worker_came(call.info)
        self._lost.came(call.info.name)
        peer.on_close(lambda: self._worker_lost(worker, peer))
        self._queue.changed()

    def _register_leaver(self, info: WorkerInfo, peer: RpcPeer) -> None:
        """Send no requests to that worker any more."""
        for worker in [each for each in self._state.workers if each.info.name == info.name]:
            self._unregister(worker)
        roles = self._state.roles
        roles.worker_leaves(info)
        peer.on_close(lambda: roles.leaver_gone(info))

    def _worker_lost(self, worker: Registration, peer: RpcPeer) -> None:
        if worker in self._state.workers:  # otherwise it has registered again
            self._lost.lost(worker.info, self._clock.now_s(), was_silent=peer.was_silent)
            self._state.roles.worker_lost(worker.info)
            self._unregister(worker)

    def _unregister(self, worker: Registration) -> None:
        self._state.unregister(worker, self._clock.now_s())
        self._queue.changed()

    def _report(self, call: ReportWorker, peer: RpcPeer) -> ReportAnswer:
        began_s = time.thread_time()
        assigned = self._state.report(call, self._clock.now_s())
        self._say_late()
        self._queue.changed(_LOOK_AFTER_REPORT_S)
        self._pace.handled(time.thread_time() - began_s)
        self._state.report_interval_s = self._pace.interval_s(len(self._state.workers))
        return ReportAnswer(interval_s=self._state.report_interval_s, assigned=assigned)

    def _set_role(self, call: SetRole, peer: RpcPeer) -> None:
        self._state.roles.assign(call.worker, call.role, self._state.workers)

    def _drain_worker(self, call: DrainWorker, peer: RpcPeer) -> None:
        self._state.roles.drain(call.worker, self._state.workers, force=call.force)

    def _worker_left(self, call: WorkerLeft, peer: RpcPeer) -> None:
        self._state.roles.worker_left(call, self._state.workers)

    def _retired_workers(self, call: RetiredWorkers, peer: RpcPeer) -> None:
        roles = self._state.roles
        is_first, roles.retired[peer] = peer not in roles.retired, call.names
        if is_first:
            peer.on_close(lambda: roles.launcher_gone(peer))

    def _route(self, call: Route, peer: RpcPeer) -> Decision | Awaitable[Decision]:
        if peer not in self._front_ends:
            self._front_ends.add(peer)
            peer.on_close(lambda: self._front_end_gone(peer))
        try:
            return self._queue.submit(call, peer)
        except Unavailable as error:
            present = {worker.info.role for worker in self._state.workers}
            role = self._lost.silent_role(present, self._clock.now_s())
            if role is None:
                raise
            raise Unreachable(f"{error}: the machines of all {role} workers have stopped answering") from error

    def _front_end_gone(self, peer: RpcPeer) -> None:
        self._front_ends.discard(peer)
        self._queue.owner_gone(peer)
        self._state.owner_gone(peer, self._clock.now_s())
        self._queue.changed()

    def _prefill_ended(self, call: PrefillEnded, peer: RpcPeer) -> None:
        self._state.prefill_ended(call.request_id, self._clock.now_s())
        self._queue.changed()

    def _before_decode(self, call: BeforeDecode, peer: RpcPeer) -> None:
        try:
            self._state.before_decode(call.request_id, self._clock.now_s())
        finally:
            self._prefill_ended(PrefillEnded(request_id=call.request_id), peer)

    def _request_ended(self, call: RequestEnded, peer: RpcPeer) -> None:
        self._queue.cancel(call.request_id)
        self._state.request_ended(call, self._clock.now_s())
        self._queue.changed()

    def _status(self, call: Status, peer: RpcPeer) -> ConductorStatus:
        return ConductorStatus(
            workers=self._state.status(),
            pool_blocks=self._state.index.pool_blocks,
            pool_connected=self.pool_connected,
            counters=dict(self._state.counters),
            policy=self._state.policy,
            num_waiting=self._queue.num_waiting,
            predictions=self._state.predictions(),
            fetch_or_compute=self._state.fetch_or_compute(),
            leaving=tuple(self._state.roles.leaving.values()),
            left=tuple(sorted(self._state.roles.all_left())),
            refused={cause.value: count for cause, count in self._state.refused.items()},
            num_open=self._state.num_open,
            ttft_slo_s=self.config.policy.ttft_slo_s,
            tbt_slo_s=self.config.policy.tbt_slo_s,
        )

    def _metrics(self, call: GetMetrics, peer: RpcPeer) -> list[MetricFamily]:
        return [*snapshot(self.registry), *process_metrics()]

    def _claim_shared_metrics(self, call: ClaimSharedMetrics, peer: RpcPeer) -> bool:
        """A claim is renewed each time the page is read; another front end gets it if it was not renewed for a
        while."""
        now_s, claim = self._clock.now_s(), self._shared_metrics
        is_free = claim is None or claim.peer.closed or now_s - claim.claimed_s > _SHARED_METRICS_S
        is_own = claim is not None and (claim.peer is peer or (call.group != "" and call.group == claim.group))
        if is_free or is_own:
            self._shared_metrics = _MetricsClaim(peer, call.group, now_s)
        return is_free or is_own


class RequestQueueService:
    """Answers Route calls that have to wait: a future per request, one timer for deadlines, and a look at the queue
    after every change. For one event loop; the server closes it."""

    def __init__(self, queue: RequestQueue, clock: Clock) -> None:
        self._queue = queue
        self._clock = clock
        self._futures: dict[str, asyncio.Future[Decision]] = {}
        self._scheduled: asyncio.Handle | None = None
        self._look_s = 0.0  # when
        self._timer: asyncio.TimerHandle | None = None

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    def submit(self, call: Route, owner: Hashable) -> Decision | Awaitable[Decision]:
        """Return the decision, or an awaitable of it if the request has to wait. Cancelling the awaitable removes the
        request from the queue."""
        earlier = self._futures.pop(call.request_id, None)
        if earlier is not None and not earlier.done():
            earlier.set_exception(Cancelled("the request was routed again"))
        decision = self._queue.submit(call, owner, self._clock.now_s(), time.time())
        if decision is not None:
            return decision
        future = self._futures[call.request_id] = asyncio.get_running_loop().create_future()
        future.add_done_callback(_retrieve)
        self._dispatch()  # the queue may have refused another request in its favour
        return self._wait(call.request_id, future)

    def changed(self, within_s: float = 0.0) -> None:
        """Look at the queue after that time, because a request may fit then. Changes meanwhile share one look; those
        within one turn of the loop do with 0."""
        look_s = self._clock.now_s() + within_s
        if not len(self._queue) or (self._scheduled is not None and self._look_s <= look_s):
            return
        if self._scheduled is not None:
            self._scheduled.cancel()
        loop, self._look_s = asyncio.get_running_loop(), look_s
        self._scheduled = loop.call_later(within_s, self._dispatch) if within_s else loop.call_soon(self._dispatch)

    def cancel(self, request_id: str) -> None:
        """Remove a request, if it waits."""
        self._queue.cancel(request_id, self._clock.now_s())
        future = self._futures.pop(request_id, None)
        if future is not None:
            future.cancel()

    def owner_gone(self, owner: Hashable) -> None:
        self._queue.owner_gone(owner, self._clock.now_s())

    def close(self) -> None:
        """Idempotent."""
        for handle in (self._scheduled, self._timer):
            if handle is not None:
                handle.cancel()
        self._scheduled = self._timer = None

    async def _wait(self, request_id: str, future: asyncio.Future[Decision]) -> Decision:
        try:
            return await future
        except asyncio.CancelledError:
            if self._futures.get(request_id) is future:
                self.cancel(request_id)
                self.changed()
            raise

    def _dispatch(self) -> None:
        self.close()
        for answer in self._queue.dispatch(self._clock.now_s()):
            self._answer(answer)
        at_s = self._queue.next_event_s(self._clock.now_s())
        if at_s is not None:
            delay_s = max(0.0, at_s - self._clock.now_s())
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._dispatch)

    def _answer(self, answer: QueueAnswer) -> None:
        future = self._futures.pop(answer.request_id, None)
        if future is None or future.done():
            return
        if isinstance(answer.outcome, Decision):
            future.set_result(answer.outcome)
        else:
            future.set_exception(answer.outcome)


def _retrieve(future: asyncio.Future[Decision]) -> None:
    """Retrieve the exception, so that asyncio does not log it: a call that was cancelled before it began to wait never
    awaits its future."""
    if not future.cancelled():
        future.exception()
