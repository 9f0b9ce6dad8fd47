"""Metrics that nodes report to the master: the newest of each, forgotten when no other follows, and bounded."""

from __future__ import annotations

import pytest

from moonpool.base.errors import InvalidInput, Overloaded
from moonpool.base.metrics import REPORT_EVERY_S, MetricFamily, MetricSample, RoleMetrics
from moonpool.master import board
from moonpool.master.board import ReportedMetrics


def report(name: str, value: float = 0.0, num_samples: int = 1) -> RoleMetrics:
    samples = [MetricSample("moonpool_x", {"n": str(n)}, value) for n in range(num_samples)]
    return RoleMetrics("node", name, [MetricFamily("moonpool_x", "x", "gauge", samples)])


def test_the_newest_of_each() -> None:
    reported = ReportedMetrics()
    for name, value in (("b", 1.0), ("a", 2.0), ("b", 3.0)):
        reported.report(report(name, value), now_s=0.0)
    assert reported.recent(0.0) == [report("a", 2.0), report("b", 3.0)]


def test_a_node_that_reports_no_more_is_forgotten() -> None:
    reported = ReportedMetrics()
    reported.report(report("a"), now_s=0.0)
    reported.report(report("b"), now_s=2 * REPORT_EVERY_S)
    assert reported.recent(3 * REPORT_EVERY_S) == [report("a"), report("b")]
    assert reported.recent(4 * REPORT_EVERY_S) == [report("b")]


def test_reports_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(board, "_MAX_REPORTS", 2)
    reported = ReportedMetrics()
    with pytest.raises(InvalidInput):
        reported.report(report("large", num_samples=1001), now_s=0.0)
    for name in ("a", "b", "a"):
        reported.report(report(name), now_s=0.0)
    with pytest.raises(Overloaded):
        reported.report(report("c"), now_s=0.0)


@pytest.mark.parametrize(
    "wrong",
    [
        RoleMetrics("master", "m", []),
        RoleMetrics("node", "n", [MetricFamily("two words", "x", "gauge", [])]),
        RoleMetrics("node", "n", [MetricFamily("x", "x", "nonsense", [])]),
        RoleMetrics("node", "n", [MetricFamily("x", "x", "gauge", [MetricSample("x{", {}, 1.0)])]),
        RoleMetrics("node", "n", [MetricFamily("x", "x", "gauge", [MetricSample("x", {'a"b': "c"}, 1.0)])]),
    ],
)
def test_what_would_spoil_the_page_is_refused(wrong: RoleMetrics) -> None:
    reported = ReportedMetrics()
    with pytest.raises(InvalidInput):
        reported.report(wrong, now_s=0.0)
    assert reported.recent(0.0) == []
