"""Reports of a simulated worker to the conductor: load, cached blocks and measured times, as a real worker sends.

A worker that can have both roles has a scheduler for each and one reporter, because a real one has one engine. With
several conductors reports name the requests, too, and follow every change within the interval. A single conductor has
sent them all itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from moonpool.base.cluster import (
    DecodeSample,
    PrefillSample,
    PullSample,
    ReportedRequest,
    ReportWorker,
    WorkerLoad,
)
from moonpool.conductor.state import ConductorState
from moonpool.engine.jumping import JumpingScheduler
from moonpool.engine.request_report import RequestChanges, reported_sequences
from moonpool.master.state.changes import Changes
from moonpool.sim.world.clock import SimClock
from moonpool.sim.world.pool import BlockRuns
from moonpool.sim.world.sequence import block_keys

INCARNATION = 1


class SimReporter:
    """Sends at most one report per `every_s` seconds: real workers do not report after each step either. `on_reported`
    is called after a report to several conductors."""

    def __init__(
        self,
        clock: SimClock,
        name: str,
        incarnation: int,
        schedulers: Sequence[JumpingScheduler],
        conductors: Sequence[ConductorState],
        every_s: float,
        runs: BlockRuns,
        on_reported: Callable[[], None],
    ) -> None:
        self._incarnation, self._runs, self._clock = incarnation, runs, clock
        self._name, self._schedulers, self._conductors, self._every_s = name, schedulers, conductors, every_s
        self._on_reported = on_reported
        self._requests = RequestChanges() if len(conductors) > 1 else None
        self._is_due = False  # a report will be sent without a step
        self._pages = schedulers[0].pages
        self._sequence = 0
        self.next_s = 0.0  # when the next report may be sent
        self._events: dict[bytes, bool] | None = None  # changes of the node's own pool, if it has one: key -> stored
        self.prefills: list[PrefillSample] = []
        self.decodes: list[DecodeSample] = []
        self.pulls: list[PullSample] = []
        self.arrived: list[str] = []  # requests to decode
        self.unreserved_pages: Callable[[], int] = lambda: 0  # that requests to decode wait to reserve
        self.answers: Callable[[], Iterable[ReportedRequest]] = lambda: ()  # that decode here, or will

    def after_step(self, now_s: float) -> None:
        if now_s >= self.next_s:
            self.report(now_s)
        else:
            self.request_came()

    def request_came(self) -> None:
        """Report as soon as the interval allows, if other conductors have to learn of a request."""
        if self._requests is not None and not self._is_due:
            self._is_due = True
            self._clock.call_at(max(self._clock.now_s, self.next_s), self._report_due)

    def stop(self) -> None:
        """Send no more reports: the worker has crashed."""
        self._is_due, self._requests = False, None

    def _report_due(self) -> None:
        if self._is_due:
            self.report(self._clock.now_s)

    def start_over(self, now_s: float) -> None:
        """Send the first report after a new registration: with all cached blocks."""
        self._pages.drain_events()
        self._sequence = 0
        if self._requests is not None:
            self._requests.start_over()
        self.report(now_s, dict.fromkeys(self._pages.published_keys(), True))

    def report(self, now_s: float, events: dict[bytes, bool] | None = None) -> None:
        """Send a report now. `events` are the blocks that came (True) or went; by default since the last report."""
        self.next_s, self._is_due = now_s + self._every_s, False
        self._sequence += 1
        events = self._drain_events() if events is None else events
        requests, gone = ((), ()) if self._requests is None else self._requests.take(self._present())
        call = ReportWorker(
            name=self._name,
            incarnation=self._incarnation,
            sequence=self._sequence,
            load=self._load(),
            cached=tuple([key for key, added in events.items() if added]),
            dropped=tuple([key for key, added in events.items() if not added]),
            prefills=tuple(self.prefills),
            decodes=tuple(self.decodes),
            pulls=tuple(self.pulls),
            arrived=tuple(self.arrived),
            requests=requests,
            gone=gone,
        )
        self.prefills, self.decodes, self.pulls, self.arrived = [], [], [], []
        for conductor in self._conductors:
            conductor.report(call, now_s)
        if self._requests is not None:
            self._on_reported()

    def _present(self) -> dict[str, ReportedRequest]:
        sequences = [one for each in self._schedulers for one in each.queues.sequences.values() if one.prefill_only]
        return reported_sequences(sequences) | {one.request_id: one for one in self.answers()}

    def _load(self) -> WorkerLoad:
        loads = [each.queues.load(self._pages.num_available) for each in self._schedulers]
        return WorkerLoad(
            num_waiting=sum([load.num_waiting for load in loads]),
            num_running=sum([load.num_running for load in loads]),
            waiting_tokens=sum([load.waiting_tokens for load in loads]),
            running_tokens=sum([load.running_tokens for load in loads]),
            free_pages=self._pages.num_available,
            waiting_pages=sum([load.waiting_pages for load in loads]) + self.unreserved_pages(),
        )

    def own_pool_changed(self, changes: Changes) -> None:
        """Record changes of the node's own pool. They are reported in place of the worker's pages."""
        events = {} if self._events is None else self._events
        for keys, is_there in ((changes.stored, True), (changes.removed, False)):
            events.update(dict.fromkeys(block_keys(self._runs.blocks_of_all(keys)), is_there))
        self._events = events

    def _drain_events(self) -> dict[bytes, bool]:
        events = self._pages.drain_events()
        if self._events is not None:
            events, self._events = self._events, {}
        return events
