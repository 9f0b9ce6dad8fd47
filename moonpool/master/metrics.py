"""The pool's figures in the form that all roles use for their metrics."""

from __future__ import annotations

import re

from moonpool.base.errors import InvalidInput, Overloaded
from moonpool.base.metrics import REPORT_EVERY_S, MetricFamily, MetricSample, RoleMetrics
from moonpool.master.journal import JournalHealth
from moonpool.store.messages import StoreStats

_MAX_REPORTS, _MAX_SAMPLES = 4096, 1000
_REPORTING_ROLE = "node"
_NAME = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]{0,199}", re.ASCII)
_KINDS = ("gauge", "counter", "histogram")
_FORGET_AFTER_S = 3 * REPORT_EVERY_S
_GAUGES = {
    "puts_in_progress": "puts begun and not ended",
    "orders_in_progress": "copies, offloads and drops that nodes were asked for",
    "objects_away": "objects on SSDs of nodes that are away",
}


def pool_metrics(stats: StoreStats, journal: JournalHealth | None) -> list[MetricFamily]:
    """Gauges per segment (and so per tier) and for the pool, and one counter of events by kind."""
    segments = [
        (each, {"segment": each.name, "node": each.node, "tier": (each.tier.name or "").lower()})
        for each in stats.segments
    ]
    events = {name: value for name, value in stats.counters.items() if name not in _GAUGES}
    families = [_gauge(f"moonpool_pool_{name}", text, [({}, stats.counters[name])]) for name, text in _GAUGES.items()]
    if journal is not None:
        families += [
            _gauge("moonpool_journal_durable", "0: a restart may forget something", [({}, int(journal.durable))]),
            _gauge("moonpool_journal_bytes", "to be replayed at a restart", [({}, journal.journal_nbytes)]),
            _gauge("moonpool_journal_unsynced_bytes", "not yet on disk", [({}, journal.unsynced_nbytes)]),
        ]
    return [
        *families,
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
            "moonpool_pool_events",
            "what happened to objects and look-ups, by kind",
            "counter",
            [MetricSample("moonpool_pool_events_total", {"event": name}, value) for name, value in events.items()],
        ),
    ]


class ReportedMetrics:
    """The newest report of each role that reports by itself; forgotten when no other follows. Bounded."""

    def __init__(self) -> None:
        self._reports: dict[tuple[str, str], tuple[RoleMetrics, float]] = {}

    def take(self, report: RoleMetrics, now_s: float) -> None:
        """InvalidInput when it is no report of a node, Overloaded when more nodes report than there can be."""
        _check_report(report)
        self._forget_old(now_s)
        key = (report.role, report.name)
        if key not in self._reports and len(self._reports) >= _MAX_REPORTS:
            raise Overloaded(f"{_MAX_REPORTS} roles report their metrics already")
        self._reports[key] = (report, now_s)

    def lately(self, now_s: float) -> list[RoleMetrics]:
        self._forget_old(now_s)
        return [report for _, (report, _) in sorted(self._reports.items())]

    def _forget_old(self, now_s: float) -> None:
        oldest_s = now_s - _FORGET_AFTER_S
        self._reports = {key: each for key, each in self._reports.items() if each[1] >= oldest_s}


def _check_report(report: RoleMetrics) -> None:
    """One wrong name would spoil the whole page: Prometheus refuses a page with a line that it cannot read."""
    if report.role != _REPORTING_ROLE:
        raise InvalidInput(f"only a {_REPORTING_ROLE} reports its metrics", param="metrics")
    samples = [sample for family in report.families for sample in family.samples]
    if len(samples) > _MAX_SAMPLES:
        raise InvalidInput(f"a report has at most {_MAX_SAMPLES} samples", param="metrics")
    names = {name for sample in samples for name in (sample.name, *sample.labels)}
    wrong = [name for name in names | {each.name for each in report.families} if not _NAME.fullmatch(name)]
    wrong += [each.kind for each in report.families if each.kind not in _KINDS]
    if wrong:
        raise InvalidInput(f"{wrong[0][:80]!r} cannot be in a report of metrics", param="metrics")


def _gauge(name: str, documentation: str, values: list[tuple[dict[str, str], int]]) -> MetricFamily:
    return MetricFamily(name, documentation, "gauge", [MetricSample(name, label, value) for label, value in values])
