"""Metrics that can travel. Each process counts in its own registry; the front end asks every role for a snapshot and
shows all of them on one page, told apart by the labels `moonpool_role` and `moonpool_name`. (`instance` and `job` are
Prometheus' own: it sets them for the page that it reads.)

Names follow Prometheus' rules: base units (`_seconds`, `_bytes`), `_total` behind counters. Every role's snapshot has
the figures of its process too: CPU seconds, memory and open files, under the names that Prometheus' clients use; and
the calls that came too late.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable
from functools import cache, lru_cache
from itertools import accumulate

import msgspec
from prometheus_client import CollectorRegistry, ProcessCollector, disable_created_metrics
from prometheus_client.metrics_core import HistogramMetricFamily, Metric

from moonpool.base.rpc import Call
from moonpool.base.rpc.aio_server import LateCalls

ROLE_LABEL, NAME_LABEL = "moonpool_role", "moonpool_name"
# For times that range from a look-up in memory to a long answer.
TIME_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"  # of metrics_text
_MAX_LABEL_TEXTS = 16_384
REPORT_EVERY_S = 5.0  # by roles that report their metrics instead of being asked

disable_created_metrics()  # type: ignore[no-untyped-call]  # a second series per counter, which no board uses


class MetricSample(msgspec.Struct, frozen=True, array_like=True):
    name: str
    labels: dict[str, str]
    value: float


class MetricFamily(msgspec.Struct, frozen=True, array_like=True):
    name: str
    documentation: str
    kind: str
    samples: list[MetricSample]


class RoleMetrics(msgspec.Struct, frozen=True, array_like=True):
    """The snapshot of one process."""

    role: str
    name: str
    families: list[MetricFamily]


class GetMetrics(Call[list[MetricFamily]]):
    """Every role answers this with a snapshot of its registry."""


class ReportMetrics(Call[None]):
    """A node tells the master its figures, every REPORT_EVERY_S: only the master is reachable from every machine."""

    metrics: RoleMetrics


class GetReportedMetrics(Call[list[RoleMetrics]]):
    """The master answers this with what was reported lately."""


def snapshot(registry: CollectorRegistry) -> list[MetricFamily]:
    """Return everything the registry holds now, as plain data."""
    return as_families(registry.collect())


def as_families(metrics: Iterable[Metric]) -> list[MetricFamily]:
    return [
        MetricFamily(
            family.name,
            family.documentation,
            family.type,
            [MetricSample(s.name, dict(s.labels), float(s.value)) for s in family.samples],
        )
        for family in metrics
    ]


def process_metrics() -> list[MetricFamily]:
    """Return CPU seconds, memory and open files of this process, and how many calls came too late to it."""
    sample = MetricSample("moonpool_rpc_late_calls_total", {}, LateCalls.total)
    text = "calls that were not begun because their callers no longer waited"
    return [*snapshot(_process_registry()), MetricFamily("moonpool_rpc_late_calls", text, "counter", [sample])]


@cache
def _process_registry() -> CollectorRegistry:
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    return registry


class TimeHistogram:
    """Counts times by TIME_BUCKETS_S, for pure cores that must not own a registry."""

    def __init__(self) -> None:
        self._counts = [0] * (len(TIME_BUCKETS_S) + 1)
        self._sum_s = 0.0

    def observe(self, seconds: float) -> None:
        self._counts[bisect_left(TIME_BUCKETS_S, seconds)] += 1
        self._sum_s += seconds

    def family(self, name: str, documentation: str) -> HistogramMetricFamily:
        """Return it in Prometheus' form: each bucket counts all that is at most its bound."""
        bounds = [*(str(float(each)) for each in TIME_BUCKETS_S), "+Inf"]
        buckets = list(zip(bounds, accumulate(self._counts), strict=True))
        return HistogramMetricFamily(name, documentation, buckets=buckets, sum_value=self._sum_s)


def metrics_text(parts: Iterable[RoleMetrics]) -> bytes:
    """Return the metrics of several processes in Prometheus' text format (CONTENT_TYPE). Families of one name become
    one; the labels ROLE_LABEL and NAME_LABEL tell their samples apart.

    Written here because the front end does it between requests: prometheus_client's writer takes five times as long.
    """
    lines: dict[str, list[str]] = {}
    for part in parts:
        for family in part.families:
            found = lines.get(family.name)
            if found is None:
                found = lines[family.name] = _head(family)
            for sample in family.samples:
                labels = _label_text(tuple(sample.labels.items()), part.role, part.name)
                found.append(f"{sample.name}{{{labels}}} {_number_text(sample.value)}\n")
    return "".join(line for found in lines.values() for line in found).encode()


def _head(family: MetricFamily) -> list[str]:
    name = f"{family.name}_total" if family.kind == "counter" else family.name
    text = family.documentation.replace("\\", r"\\").replace("\n", r"\n")
    return [f"# HELP {name} {text}\n", f"# TYPE {name} {family.kind}\n"]


@lru_cache(maxsize=_MAX_LABEL_TEXTS)
def _label_text(labels: tuple[tuple[str, str], ...], role: str, name: str) -> str:
    """Return the labels of a sample and those of its process. Cached: the next page has the same labels."""
    joined = {**dict(labels), ROLE_LABEL: role, NAME_LABEL: name}
    return ",".join([f'{label}="{_escaped(text)}"' for label, text in sorted(joined.items())])


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def _number_text(value: float) -> str:
    if math.isfinite(value):
        return repr(float(value))
    return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"
