"""Metrics of several processes on one page."""

from __future__ import annotations

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from moonpool.base.metrics import TIME_BUCKETS_S, MergedCollector, RoleMetrics, TimeHistogram, process_metrics, snapshot


def registry_with(count: int) -> CollectorRegistry:
    registry = CollectorRegistry()
    Counter("moonpool_reads", "Reads", ["tier"], registry=registry).labels("dram").inc(count)
    Gauge("moonpool_pages", "Pages", registry=registry).set(count * 2)
    Histogram("moonpool_wait_seconds", "Waits", buckets=(1, 2), registry=registry).observe(1.5)
    return registry


def test_snapshots_travel_and_merge() -> None:
    parts = []
    for index in range(2):
        wire = msgspec.msgpack.encode(RoleMetrics("worker", f"w{index}", snapshot(registry_with(index + 1))))
        parts.append(msgspec.msgpack.decode(wire, type=RoleMetrics))
    page = CollectorRegistry()
    page.register(MergedCollector(parts))
    text = generate_latest(page).decode()
    assert text.count("# TYPE moonpool_reads_total counter") == 1
    assert 'moonpool_reads_total{moonpool_name="w0",moonpool_role="worker",tier="dram"} 1.0' in text
    assert 'moonpool_reads_total{moonpool_name="w1",moonpool_role="worker",tier="dram"} 2.0' in text
    assert 'moonpool_pages{moonpool_name="w1",moonpool_role="worker"} 4.0' in text
    assert 'moonpool_wait_seconds_bucket{le="2.0",moonpool_name="w0",moonpool_role="worker"} 1.0' in text


def test_times_are_counted_as_prometheus_does() -> None:
    ours, registry = TimeHistogram(), CollectorRegistry()
    theirs = Histogram("moonpool_wait_seconds", "Waits", buckets=TIME_BUCKETS_S, registry=registry)
    for seconds in (0.0, 0.001, 0.0011, 7.0, 300.0, 1e9):
        ours.observe(seconds)
        theirs.observe(seconds)
    (expected,) = registry.collect()
    assert {(s.name, *s.labels.items(), s.value) for s in ours.family("moonpool_wait_seconds", "Waits").samples} == {
        (s.name, *s.labels.items(), s.value) for s in expected.samples
    }


def test_figures_of_this_process() -> None:
    names = {sample.name for family in process_metrics() for sample in family.samples}
    assert {"process_cpu_seconds_total", "process_resident_memory_bytes", "process_open_fds"} <= names
