"""What reports say when the engine's thread shares its news at any times: each conductor knows the pages and the
requests of the last time, whichever reports came before."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from moonpool.base.cluster import PrefillSample, ReportedRequest, ReportWorker
from moonpool.engine.blocks import PageManager
from moonpool.engine.scheduler import Scheduler, SchedulerConfig
from moonpool.worker.metrics import Samples
from moonpool.worker.reporter import ReportCollector, ReportSource

NUM_PAGES = 6
LIMITS = SchedulerConfig(max_batch_tokens=64, max_num_seqs=2, max_seq_tokens=24)


class Conductor:
    """What a conductor knows by the reports of one registration after the other."""

    def __init__(self, source: ReportSource) -> None:
        self._collector = ReportCollector("w", 1, source)
        self.sequence = 0
        self.cached: set[bytes] = set()
        self.free_pages = 0
        self.prefills: list[PrefillSample] = []
        self.requests: dict[str, ReportedRequest] = {}

    def register(self) -> None:
        self.sequence, self.cached, self.requests = 0, set(), {}
        self._take(self._collector.first_report())

    def report(self) -> None:
        self._take(self._collector.report(self.sequence + 1))

    def _take(self, report: ReportWorker) -> None:
        assert report.sequence == self.sequence + 1
        self.sequence = report.sequence
        assert not set(report.cached) & set(report.dropped)
        self.cached = (self.cached | set(report.cached)) - set(report.dropped)
        self.free_pages = report.load.free_pages
        self.prefills += report.prefills
        for name in report.gone:
            del self.requests[name]
        assert all(self.requests.get(one.request_id) != one for one in report.requests), "only what has changed"
        self.requests |= {one.request_id: one for one in report.requests}


class Reports(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pages, self.samples = PageManager(NUM_PAGES, 4), Samples()
        self.present: dict[str, ReportedRequest] = {}
        self.shared_requests: dict[str, ReportedRequest] = {}
        self.source = ReportSource(
            Scheduler(LIMITS, self.pages), self.samples, lambda: (), lambda: self.present.values(), lambda: 0
        )
        self.conductors = [Conductor(self.source), Conductor(self.source)]
        self.shared: set[bytes] = set()  # by the engine's thread, when it shared last
        self.free_pages, self.num_samples, self.num_shared = NUM_PAGES, 0, 0
        for each in self.conductors:
            self._register(each)

    def _has_shared(self) -> None:
        self.shared, self.free_pages = set(self.pages.published_keys()), self.pages.num_available
        self.num_shared, self.shared_requests = self.num_samples, dict(self.present)

    def _register(self, conductor: Conductor) -> None:
        conductor.register()
        self._has_shared()

    # the engine's thread

    @rule(number=st.integers(0, 9), keeps=st.booleans())
    def compute(self, number: int, keeps: bool) -> None:
        """Publish a block, which may evict another one."""
        if self.pages.num_available:
            page = self.pages.allocate(1)
            self.pages.publish(page, [bytes([number]) * 32])
            if not keeps or self.pages.num_available < 2:
                self.pages.free(page)
        self.samples.prefills.append(PrefillSample(self.num_samples, 0, 1.0))
        self.num_samples += 1

    @rule(number=st.integers(0, 4), uncomputed=st.integers(0, 2))
    def request_changes(self, number: int, uncomputed: int) -> None:
        self.present[str(number)] = ReportedRequest(str(number), uncomputed, 0, 8)

    @rule(number=st.integers(0, 4))
    def request_ends(self, number: int) -> None:
        self.present.pop(str(number), None)

    @rule()
    def share(self) -> None:
        self.source.share()
        self._has_shared()

    # the event loop

    @rule(which=st.integers(0, 1))
    def report(self, which: int) -> None:
        conductor = self.conductors[which]
        conductor.report()
        assert (conductor.cached, conductor.free_pages) == (self.shared, self.free_pages)
        assert conductor.requests == self.shared_requests

    @rule(which=st.integers(0, 1))
    def register_again(self, which: int) -> None:
        self._register(self.conductors[which])
        assert self.conductors[which].cached == self.shared

    @invariant()
    def samples_come_once_and_in_order(self) -> None:
        for each in self.conductors:
            numbers = [sample.num_tokens for sample in each.prefills]
            assert numbers == list(range(len(numbers)))
            assert len(numbers) <= self.num_shared


TestReports = Reports.TestCase
TestReports.settings = settings(stateful_step_count=30)
