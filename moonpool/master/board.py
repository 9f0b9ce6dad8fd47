"""What other processes announce at the master: segments of any transfer engine, and metrics of nodes. Pure.

An announcement expires unless its owner renews it, so that those of dead processes are forgotten.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from moonpool.base.descriptor import SegmentDescriptor
from moonpool.base.errors import InvalidInput, Overloaded
from moonpool.base.metrics import REPORT_EVERY_S, RoleMetrics
from moonpool.transfer.directory import check_newer

MAX_ANNOUNCEMENTS = 100_000
MAX_TTL_S = 3600.0
_MAX_REPORTS, _MAX_SAMPLES = 4096, 1000
_REPORTING_ROLE = "node"
_NAME = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]{0,199}", re.ASCII)
_KINDS = ("gauge", "counter", "histogram")
_FORGET_AFTER_S = 3 * REPORT_EVERY_S


class _Announcement(NamedTuple):
    descriptor: SegmentDescriptor
    until_s: float


class SegmentBoard:
    """Announced segments. An expired one is never returned; the caller passes the time."""

    def __init__(self, max_announcements: int = MAX_ANNOUNCEMENTS) -> None:
        self._max_announcements = max_announcements
        self._known: dict[str, _Announcement] = {}

    def __len__(self) -> int:
        return len(self._known)

    def announce(self, descriptor: SegmentDescriptor, ttl_s: float, now_s: float) -> None:
        """Announce or renew a segment, or replace an earlier incarnation. Raise AlreadyExists if a newer one is
        announced.
        """
        if not 0.0 < ttl_s <= MAX_TTL_S:
            raise InvalidInput(f"an announcement lasts up to {MAX_TTL_S:g} s, not {ttl_s:g} s")
        check_newer(self.find(descriptor.name, now_s), descriptor)
        if descriptor.name not in self._known and len(self._known) >= self._max_announcements:
            self.expire(now_s)
            if len(self._known) >= self._max_announcements:
                raise Overloaded(f"{len(self._known)} segments are announced here already")
        self._known[descriptor.name] = _Announcement(descriptor, now_s + ttl_s)

    def retract(self, name: str, incarnation: int) -> None:
        """Remove the announcement. Do nothing if another incarnation, or none, is announced."""
        known = self._known.get(name)
        if known is not None and known.descriptor.incarnation == incarnation:
            del self._known[name]

    def find(self, name: str, now_s: float) -> SegmentDescriptor | None:
        known = self._known.get(name)
        return known.descriptor if known is not None and now_s < known.until_s else None

    def expire(self, now_s: float) -> None:
        """Remove the expired announcements."""
        for name in [name for name, known in self._known.items() if now_s >= known.until_s]:
            del self._known[name]


class ReportedMetrics:
    """The latest report of each node, forgotten if no other follows. Bounded."""

    def __init__(self) -> None:
        self._reports: dict[tuple[str, str], tuple[RoleMetrics, float]] = {}

    def report(self, report: RoleMetrics, now_s: float) -> None:
        """Store a report. Raise InvalidInput if it is not a valid report of a node, Overloaded if too many nodes
        report.
        """
        _check_report(report)
        self._forget_old(now_s)
        key = (report.role, report.name)
        if key not in self._reports and len(self._reports) >= _MAX_REPORTS:
            raise Overloaded(f"{_MAX_REPORTS} roles report their metrics already")
        self._reports[key] = (report, now_s)

    def recent(self, now_s: float) -> list[RoleMetrics]:
        self._forget_old(now_s)
        return [report for _, (report, _) in sorted(self._reports.items())]

    def _forget_old(self, now_s: float) -> None:
        oldest_s = now_s - _FORGET_AFTER_S
        self._reports = {key: each for key, each in self._reports.items() if each[1] >= oldest_s}


def _check_report(report: RoleMetrics) -> None:
    """Raise InvalidInput if Prometheus would refuse the report: it rejects the whole page for one invalid line."""
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
