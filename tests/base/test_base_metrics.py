"""Metrics of several processes on one page."""

from __future__ import annotations

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from moonpool.base.metrics import MergedCollector, MetricFamily, snapshot


def registry_with(count: int) -> CollectorRegistry:
    registry = CollectorRegistry()
    Counter("moonpool_reads", "Reads", ["tier"], registry=registry).labels("dram").inc(count)
    Gauge("moonpool_pages", "Pages", registry=registry).set(count * 2)
    Histogram("moonpool_wait_seconds", "Waits", buckets=(1, 2), registry=registry).observe(1.5)
    return registry


def test_snapshots_travel_and_merge() -> None:
    parts = []
    for index in range(2):
        wire = msgspec.msgpack.encode(snapshot(registry_with(index + 1)))
        parts.append(("worker", f"w{index}", msgspec.msgpack.decode(wire, type=list[MetricFamily])))
    page = CollectorRegistry()
    page.register(MergedCollector(parts))
    text = generate_latest(page).decode()
    assert text.count("# TYPE moonpool_reads_total counter") == 1
    assert 'moonpool_reads_total{instance="w0",role="worker",tier="dram"} 1.0' in text
    assert 'moonpool_reads_total{instance="w1",role="worker",tier="dram"} 2.0' in text
    assert 'moonpool_pages{instance="w1",role="worker"} 4.0' in text
    assert 'moonpool_wait_seconds_bucket{instance="w0",le="2.0",role="worker"} 1.0' in text
