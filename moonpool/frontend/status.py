"""Collects GET /v1/status: asks conductor, workers, master and the other front ends of the port, all at the same time.

One background task does so every PERIOD_S and keeps the history (history.py). A reader gets the last answers, or new
ones if they are older than MAX_AGE_S, so that what it sees is recent; readers at the same time share one collection.
So the number of open pages hardly matters to the other roles. A role that does not answer within SCRAPE_TIMEOUT_S is
shown as away.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import NamedTuple, TypeVar

import msgspec

import moonpool
from moonpool.base.errors import MoonpoolError, Unavailable
from moonpool.base.metrics import GetMetrics
from moonpool.base.rpc import AsyncClient, Call
from moonpool.conductor.messages import ConductorStatus, WorkerRef, WorkerStatus
from moonpool.frontend import history
from moonpool.frontend.health import PoolAnswer, health_of
from moonpool.frontend.history import PERIOD_S, Counters, Gauges, HistoryPoint, HistoryRing
from moonpool.frontend.metrics import SCRAPE_TIMEOUT_S
from moonpool.frontend.request_handler import RequestHandler
from moonpool.frontend.status_reply import HealthSummary, HistoryReply, PoolSummary, RequestTotals, StatusReply
from moonpool.frontend.status_rows import ByteRates, WorkerRows, node_rows, worker_row
from moonpool.store.messages import Segments, Stats, StoreStats
from moonpool.worker.messages import GetStats, WorkerStats

_MAX_ENCODED = 64
MAX_AGE_S = 0.9  # pages ask every second: one collection serves all that are open
_LOG = logging.getLogger(__name__)
_R = TypeVar("_R")
_LATE = Unavailable(f"it did not answer within {SCRAPE_TIMEOUT_S:g} s")
_NO_CONDUCTOR = ConductorStatus(workers=(), pool_blocks=0, pool_connected=False, counters={})


class _Pool(NamedTuple):
    """What the master answered. `stats` None: it does not answer, or this front end has no pool."""

    answer: PoolAnswer
    stats: StoreStats | None = None


class StatusCollector:
    """Runs from `start()` until `await close()`. `name` is that of this front end."""

    def __init__(self, handler: RequestHandler, name: str, *, has_tour: bool = False) -> None:
        self._handler = handler
        self._has_tour = has_tour
        self._name = name
        self._started_at_s = time.time()
        self._ring = HistoryRing()
        self._rates = ByteRates()
        self._rows = WorkerRows(handler.expected_workers)
        self._counters: dict[str, Counters] = {}  # by front end, the last ones
        self._last: StatusReply | None = None
        self._encoded: dict[tuple[float, str | None], bytes] = {}  # answers to readers; empty after each change
        self._collected_s = 0.0
        self._collecting: asyncio.Task[StatusReply] | None = None
        self._keeping: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._keeping = asyncio.create_task(self._keep_history(), name="status history")

    async def close(self) -> None:
        """Idempotent."""
        for task in (self._keeping, self._collecting):
            if task is not None:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task

    async def status_json(self, since_s: float, tenant: str | None) -> bytes:
        """Return the status, with the points of the history after `since_s`, as JSON; pages that have the same points
        get the same bytes."""
        last = await self._recent()
        found = self._encoded.get((since_s, tenant))
        if found is None:
            if len(self._encoded) >= _MAX_ENCODED:
                self._encoded.clear()
            history = HistoryReply(PERIOD_S, HistoryPoint.__struct_fields__, self._ring.since(since_s))
            found = msgspec.json.encode(msgspec.structs.replace(last, history=history, tenant=tenant))
            self._encoded[since_s, tenant] = found
        return found

    async def _recent(self) -> StatusReply:
        """Return the last collection if it is young enough, otherwise a new one: perhaps one that is under way."""
        if self._last is not None and time.monotonic() - self._collected_s <= MAX_AGE_S:
            return self._last
        task = self._collecting
        if task is None or task.done():
            task = self._collecting = asyncio.create_task(self._collect())
        return await asyncio.shield(task)

    async def _keep_history(self) -> None:
        while True:
            try:
                last = await self._recent()
            except MoonpoolError as error:  # roles that do not answer are not errors here
                _LOG.warning("the status could not be collected: %s", error)
            else:
                gauges = Gauges(last.num_running, last.num_waiting, sum(last.totals.refused.values()))
                self._ring.add(last.at_s, dict(self._counters), gauges)
                self._encoded.clear()
            await asyncio.sleep(PERIOD_S)

    async def _collect(self) -> StatusReply:
        handler = self._handler
        known, pool, counters = await asyncio.gather(self._ask_conductor(), self._ask_pool(), self._ask_front_ends())
        conductor = _NO_CONDUCTOR if isinstance(known, MoonpoolError) else known
        (_, health), *answers = await asyncio.gather(
            health_of(handler, known, pool.answer), *(self._ask_worker(each) for each in conductor.workers)
        )
        stats = {each.name: each for each in answers if each is not None}
        now_s = time.monotonic()
        self._rates.update(now_s, stats)
        handler.metrics.missing_roles.set(len(health["missing"]))
        rows = [worker_row(each, stats.get(each.info.name), self._rates) for each in conductor.workers]
        self._counters = counters
        self._last = StatusReply(
            at_s=time.time(),
            version=moonpool.__version__,
            model=handler.model.name,
            frontend=self._name,
            started_at_s=self._started_at_s,
            health=_summary(health, len(rows)),
            policy=conductor.policy,
            block_tokens=conductor.workers[0].info.block_tokens if conductor.workers else 0,
            ttft_slo_s=conductor.ttft_slo_s,
            tbt_slo_s=conductor.tbt_slo_s,
            num_running=conductor.num_open,
            num_waiting=conductor.num_waiting,
            totals=_totals(history.summed(counters.values()), conductor),
            workers=self._rows.update(rows, conductor.left, now_s),
            nodes=node_rows(pool.stats, pool.answer.segments, handler.expected_nodes),
            pool=_pool_summary(pool),
            predictions=conductor.predictions,
            fetch_or_compute=conductor.fetch_or_compute,
            history=HistoryReply(PERIOD_S, (), []),
            has_tour=self._has_tour,
        )
        self._collected_s = now_s
        self._encoded.clear()
        return self._last

    async def _ask_conductor(self) -> ConductorStatus | MoonpoolError:
        try:
            async with asyncio.timeout(SCRAPE_TIMEOUT_S):
                return await self._handler.cluster.status(SCRAPE_TIMEOUT_S)
        except MoonpoolError as error:
            return error
        except TimeoutError:
            return _LATE

    async def _ask_pool(self) -> _Pool:
        try:
            async with asyncio.timeout(SCRAPE_TIMEOUT_S):
                master = await self._handler.connections.master()
                if master is None:
                    return _Pool(PoolAnswer(is_configured=False))
                stats, segments = await asyncio.gather(_call(master, Stats()), _call(master, Segments()))
                return _Pool(PoolAnswer(True, segments), stats)
        except MoonpoolError as error:
            return _Pool(PoolAnswer(True, error=error))
        except TimeoutError:
            return _Pool(PoolAnswer(True, error=_LATE))

    async def _ask_front_ends(self) -> dict[str, Counters]:
        """Return the counters of this front end and of the others of its port that answer."""
        connections = self._handler.connections
        counters: dict[str, Counters] = {self._name: history.counters_of(self._handler.metrics.counted())}

        async def ask(name: str) -> None:
            with contextlib.suppress(MoonpoolError, TimeoutError):
                async with asyncio.timeout(SCRAPE_TIMEOUT_S):
                    families = await _call(await connections.sibling(name), GetMetrics())
                counters[name] = history.counters_of(families)

        await asyncio.gather(*map(ask, connections.siblings))
        return counters

    async def _ask_worker(self, worker: WorkerStatus) -> WorkerStats | None:
        info = worker.info
        try:
            async with asyncio.timeout(SCRAPE_TIMEOUT_S):
                ref = WorkerRef(info.name, info.address, info.incarnation)
                return await _call(await self._handler.connections.worker(ref), GetStats())
        except (MoonpoolError, TimeoutError):
            return None


async def _call(client: AsyncClient, call: Call[_R]) -> _R:
    return await client.call(call, timeout_s=SCRAPE_TIMEOUT_S)


def _summary(health: dict[str, object], num_workers: int) -> HealthSummary:
    """Return the health with a sentence also where nothing is missing."""
    status, missing = str(health["status"]), health["missing"]
    assert isinstance(missing, list)
    workers = "1 worker is" if num_workers == 1 else f"{num_workers} workers are"
    reason = str(health.get("reason", ""))
    sentence = f"All roles answer; {workers} up." if status == "ok" else f"{reason[:1].upper()}{reason[1:]}."
    return HealthSummary(status, sentence, missing)


def _totals(counters: Counters, conductor: ConductorStatus) -> RequestTotals:
    def count(name: str) -> int:
        return round(history.total(counters, name))

    return RequestTotals(
        by_outcome={
            name: round(value) for name, value in history.by_label(counters, history.REQUESTS).items() if value
        },
        refused=conductor.refused,
        num_replans=count(history.REPLANS),
        prompt_tokens=count(history.PROMPT),
        own_tokens=count(history.OWN),
        dram_tokens=count(history.DRAM),
        ssd_tokens=count(history.SSD),
        remote_tokens=count(history.REMOTE),
        output_tokens=count(history.OUTPUT),
    )


def _pool_summary(pool: _Pool) -> PoolSummary | None:
    if not pool.answer.is_configured:
        return None
    if pool.stats is None:
        return PoolSummary(is_up=False)
    return PoolSummary(is_up=True, num_objects=pool.stats.num_objects, counters=pool.stats.counters)
