"""Reports this worker's cached blocks, load and samples to each conductor, and registers again after a lost connection.

Reports are numbered from 1 after each registration; the first one lists all cached blocks and requests. They follow
each other at the worker's interval, or at that of the conductor's last answer if it is longer. They come from the event
loop: the engine's thread is asked for what is new before each, and if that takes longer than a heartbeat, the report
goes out without it. A report says for how long the engine's task has been under way.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import TypeVar

import msgspec

from moonpool.base.backoff import Backoff
from moonpool.base.clock import Deadline
from moonpool.base.cluster import (
    CONDUCTOR_SERVICE,
    REQUEST_LIMITS,
    AssignedRole,
    CountOthers,
    RegisterWorker,
    ReportedRequest,
    ReportWorker,
    WorkerInfo,
    WorkerLoad,
    WorkerRole,
)
from moonpool.base.errors import MoonpoolError
from moonpool.base.rpc import AsyncClient, Call
from moonpool.base.rpc.reconnect import ReconnectingClient
from moonpool.engine.request_report import RequestChanges, reported_sequences
from moonpool.engine.scheduler import Scheduler
from moonpool.worker.loop import EngineLoop, retrieve
from moonpool.worker.metrics import Samples
from moonpool.worker.watchdog import LOOK_S

T = TypeVar("T")
_LOG = logging.getLogger(__name__)
_RECONNECT_S = 0.2
# A report without news is sent this often.
_HEARTBEAT_S = 1.0
_TELL_TIMEOUT_S = 1.0
MAX_INTERVAL_S = 10.0  # between two reports, whatever the conductor asks for
_MAX_EVENTS = 65_536  # that wait for a conductor


class ReportSource:
    """Gives every change of the pages and every sample to all collectors. On the engine's thread; collectors hold
    `lock` where they take on the event loop what was given to them.

    `staged` returns the prompts that this worker still computes for pipelines, `awaited` the requests that will decode
    here when their prompts are computed, `unreserved_pages` the pages that requests need which wait to reserve them."""

    def __init__(
        self,
        scheduler: Scheduler,
        samples: Samples,
        staged: Callable[[], Iterable[ReportedRequest]],
        awaited: Callable[[], Iterable[ReportedRequest]],
        unreserved_pages: Callable[[], int],
    ) -> None:
        self.scheduler = scheduler
        self._samples, self._unreserved_pages = samples, unreserved_pages
        self._staged, self._awaited = staged, awaited
        self.collectors: list[ReportCollector] = []
        self.lock = threading.Lock()
        self.shared_load = WorkerLoad()  # when share() ran last
        self.shared_requests: Mapping[str, ReportedRequest] = {}  # then, too

    def load(self) -> WorkerLoad:
        """Return the worker's load: its queues, its stages, and the requests that wait to reserve pages."""
        load = self.scheduler.queues.load(self.scheduler.pages.num_available)
        return msgspec.structs.replace(
            load,
            waiting_tokens=load.waiting_tokens + sum(each.uncomputed_tokens for each in self._staged()),
            waiting_pages=load.waiting_pages + self._unreserved_pages(),
        )

    def requests(self) -> dict[str, ReportedRequest]:
        """Return all requests of this worker, by id."""
        others = {each.request_id: each for each in (*self._staged(), *self._awaited())}
        return reported_sequences(self.scheduler.queues.sequences.values()) | others

    def share(self) -> None:
        """Hand out what is new."""
        events, taken = self.scheduler.pages.drain_events(), self._samples
        prefills, decodes, pulls = _drain(taken.prefills), _drain(taken.decodes), _drain(taken.pulls)
        arrived, load, requests = _drain(taken.arrived), self.load(), self.requests()
        with self.lock:
            self.shared_load, self.shared_requests = load, requests
            for each in self.collectors:
                each.add(events)
                each.samples.prefills.extend(prefills)
                each.samples.decodes.extend(decodes)
                each.samples.pulls.extend(pulls)
                each.samples.arrived.extend(arrived)


class ReportCollector:
    """Collects the changes for the next report to one conductor."""

    def __init__(self, name: str, incarnation: int, source: ReportSource) -> None:
        self._name, self._incarnation = name, incarnation
        self._source = source
        self._pages = source.scheduler.pages
        self.samples = Samples()  # that this conductor has not got yet
        self._events: dict[bytes, bool] = {}
        self._events_lost = 0
        self._is_behind = False  # too many events wait: a full list is shorter
        self._requests = RequestChanges()
        source.collectors.append(self)

    def add(self, events: Mapping[bytes, bool]) -> None:
        """Keep these events for the next report. With the source's lock."""
        self._events.update(events)
        if len(self._events) > _MAX_EVENTS:
            self._events, self._is_behind = {}, True

    def first_report(self) -> ReportWorker:
        """Return report number 1: all cached blocks and requests. On the engine's thread."""
        self._source.share()
        cached = tuple(self._pages.published_keys())
        with self._source.lock:
            self._events_lost, self._is_behind = self._pages.num_events_lost, False
            self._events = {}
            self._requests.start_over()
            return self._report(1, cached, ())

    def report(self, sequence: int) -> ReportWorker:
        """Return the changes that were shared since the last report. On the event loop."""
        with self._source.lock:
            events, self._events = self._events, {}
            cached = tuple(key for key, added in events.items() if added)
            dropped = tuple(key for key, added in events.items() if not added)
            return self._report(sequence, cached, dropped)

    def _report(self, sequence: int, cached: tuple[bytes, ...], dropped: tuple[bytes, ...]) -> ReportWorker:
        requests, gone = self._requests.take(self._source.shared_requests)
        return ReportWorker(
            name=self._name,
            incarnation=self._incarnation,
            sequence=sequence,
            load=self._source.shared_load,
            cached=cached,
            dropped=dropped,
            prefills=_drain(self.samples.prefills),
            decodes=_drain(self.samples.decodes),
            pulls=_drain(self.samples.pulls),
            arrived=_drain(self.samples.arrived),
            requests=requests,
            gone=gone,
        )

    def must_start_over(self) -> bool:
        """Return whether events were lost, so that a full list is needed."""
        return self._is_behind or self._pages.num_events_lost != self._events_lost


def _drain(samples: deque[T]) -> tuple[T, ...]:
    taken = tuple(samples)
    samples.clear()
    return taken


class WorkerReporter:
    """`collect` makes report number `sequence`; `info` tells who the worker is now, and `on_assigned` gets the role
    that the conductor wants it to take. A change of `is_overdue`, whether the engine should have gone on by now, is
    reported at once."""

    def __init__(
        self,
        address: str,
        info: Callable[[], WorkerInfo],
        collect: Callable[[int], Awaitable[ReportWorker]],
        must_start_over: Callable[[], bool],
        interval_s: float,
        on_assigned: Callable[[AssignedRole], None],
        is_overdue: Callable[[], bool],
    ) -> None:
        self._address, self._info, self._collect = address, info, collect
        self._must_start_over, self._on_assigned, self._is_overdue = must_start_over, on_assigned, is_overdue
        self._interval_s = interval_s
        self.registered = asyncio.Event()
        self.leaves = asyncio.Event()  # the conductor knows

    async def run(self) -> None:
        """Stay registered until cancelled."""
        conductor = ReconnectingClient(
            self._address,
            CONDUCTOR_SERVICE,
            [self._report],
            name=self._info().name,
            incarnation=self._info().incarnation,
            backoff=Backoff(_RECONNECT_S, _RECONNECT_S),
            on_lost=self._on_lost,
            silence_limits=REQUEST_LIMITS,
        )
        with contextlib.closing(conductor):
            await conductor.run()

    def _on_lost(self, error: MoonpoolError, was_connected: bool) -> None:
        if self.registered.is_set():
            _LOG.warning("lost the conductor: %s", error)
        self.registered.clear()

    async def _report(self, client: AsyncClient) -> None:
        """Register and send reports. Return when a new registration is needed: events were dropped, so all keys have to
        be listed, or the role has changed."""
        info = self._info()
        await client.call(RegisterWorker(info=info))
        if info.leaves:  # the connection alone says that this worker is still there
            self.registered.set()
            self.leaves.set()
            await client.closed.wait()
            return
        sequence, sent_s, interval_s = 1, 0.0, self._interval_s
        load: WorkerLoad | None = None
        was_overdue = False
        while sequence == 1 or not (self._must_start_over() or self._info() != info):
            report = await self._collect(sequence)
            is_due = time.monotonic() >= sent_s + _HEARTBEAT_S
            if _has_news(report) or report.load != load or report.is_overdue != was_overdue or is_due:
                sent_s = time.monotonic()
                answer = await client.call(report)
                if answer.assigned is not None:
                    self._on_assigned(answer.assigned)
                interval_s = max(self._interval_s, min(answer.interval_s, MAX_INTERVAL_S))
                sequence, load, was_overdue = sequence + 1, report.load, report.is_overdue
                self.registered.set()
            await self._pause(was_overdue, interval_s)
        self.registered.clear()

    async def _pause(self, was_overdue: bool, interval_s: float) -> None:
        deadline = Deadline(interval_s)
        # The watchdog's thread changes it.
        while self._is_overdue() == was_overdue and not deadline.expired():  # noqa: ASYNC110
            await asyncio.sleep(min(LOOK_S, deadline.remaining_s()))


def make_reporters(
    addresses: Sequence[str],
    info: Callable[[], WorkerInfo],
    source: ReportSource,
    loop: EngineLoop,
    interval_s: float,
    on_assigned: Callable[[AssignedRole], None],
) -> list[WorkerReporter]:
    """Return a reporter for each conductor."""
    refresh = _Refresh(loop, source)

    def make(address: str) -> WorkerReporter:
        collector = ReportCollector(info().name, info().incarnation, source)

        async def collect(sequence: int) -> ReportWorker:
            if sequence == 1:
                report = await asyncio.wrap_future(loop.call(collector.first_report))
            else:
                await refresh(_HEARTBEAT_S)
                report = collector.report(sequence)
            watched = loop.progress.watched
            if watched is None:
                return report
            return msgspec.structs.replace(report, step_s=watched.seconds, step_due_s=watched.due_s)

        return WorkerReporter(
            address,
            info,
            collect,
            collector.must_start_over,
            interval_s,
            on_assigned,
            lambda: loop.progress.is_overdue,
        )

    return [make(address) for address in addresses]


def longest_silence_s(interval_s: float) -> float:
    """Return within how many seconds a report follows the one before: a report without news may be just not due yet
    when the engine's thread keeps the next one waiting."""
    return 2 * _HEARTBEAT_S + interval_s


class _Refresh:
    """Lets the engine's thread share what is new, for all reporters together."""

    def __init__(self, loop: EngineLoop, source: ReportSource) -> None:
        self._loop, self._source = loop, source
        self._sharing: asyncio.Future[None] | None = None

    async def __call__(self, timeout_s: float) -> None:
        """Return when it has, or when the time is over. Raise Cancelled if the thread has ended."""
        if self._sharing is None:
            self._sharing = asyncio.wrap_future(self._loop.call(self._source.share))
            self._sharing.add_done_callback(retrieve)
        sharing = self._sharing
        if (await asyncio.wait((sharing,), timeout=timeout_s))[0]:
            if self._sharing is sharing:
                self._sharing = None
            sharing.result()


async def any_registered(reporters: Sequence[WorkerReporter]) -> None:
    """Return when one of the conductors knows the worker."""
    waiting = [asyncio.create_task(each.registered.wait()) for each in reporters]
    try:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in waiting:
            task.cancel()


async def leave_all(reporters: Sequence[WorkerReporter], timeout_s: float) -> None:
    """Return when all conductors that can be reached know that this worker leaves, or when the time is over."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            for each in reporters:
                await each.leaves.wait()


async def tell_all(addresses: Sequence[str], call: Call[None]) -> None:
    """Send the call to all conductors. Those that do not answer are left out."""
    await asyncio.gather(*(_tell(address, call) for address in addresses))


async def has_others(addresses: Sequence[str], name: str, role: WorkerRole) -> bool:
    """Return whether the first conductor that answers knows other workers of that role that stay."""
    for address in addresses:
        number = await _tell(address, CountOthers(name=name, role=role))
        if number is not None:
            return number > 0
    return False


async def _tell(address: str, call: Call[T]) -> T | None:
    """Return the conductor's answer; None if there is none."""
    try:
        client = await AsyncClient.connect(
            address, CONDUCTOR_SERVICE, name="worker", timeout_s=_TELL_TIMEOUT_S, silence_limits=REQUEST_LIMITS
        )
        with contextlib.closing(client):
            return await client.call(call, timeout_s=_TELL_TIMEOUT_S)
    except MoonpoolError as error:
        _LOG.info("%s did not get %s: %s", address, type(call).__name__, error)
        return None


def _has_news(report: ReportWorker) -> bool:
    changes = (report.cached, report.dropped, report.prefills, report.decodes, report.pulls, report.arrived)
    return report.sequence == 1 or any((*changes, report.requests, report.gone))
