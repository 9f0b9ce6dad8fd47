"""Metrics of several processes on one page."""

from __future__ import annotations

import math

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from moonpool.base.metrics import TIME_BUCKETS_S, RoleMetrics, TimeHistogram, metrics_text, process_metrics, snapshot


def registry_with(count: int) -> CollectorRegistry:
    registry = CollectorRegistry()
    Counter("moonpool_reads", "Reads", ["tier"], registry=registry).labels("dram").inc(count)
    Gauge("moonpool_pages", "Pages", registry=registry).set(count * 2)
    Histogram("moonpool_wait_seconds", "Waits", buckets=(1, 2), registry=registry).observe(1.5)
    return registry


def parsed(text: str) -> dict[str, tuple[str, str, list[tuple[str, dict[str, str], float]]]]:
    return {
        family.name: (family.type, family.documentation, [(s.name, dict(s.labels), s.value) for s in family.samples])
        for family in text_string_to_metric_families(text)
    }


def test_snapshots_travel_and_merge() -> None:
    parts = []
    for index in range(2):
        wire = msgspec.msgpack.encode(RoleMetrics("worker", f"w{index}", snapshot(registry_with(index + 1))))
        parts.append(msgspec.msgpack.decode(wire, type=RoleMetrics))
    text = metrics_text(parts).decode()
    assert text.count("# TYPE moonpool_reads_total counter") == 1
    one, other = ({"moonpool_role": "worker", "moonpool_name": name} for name in ("w0", "w1"))
    found = parsed(text)
    assert found["moonpool_reads"][2] == [
        ("moonpool_reads_total", {"tier": "dram", **one}, 1.0),
        ("moonpool_reads_total", {"tier": "dram", **other}, 2.0),
    ]
    assert ("moonpool_pages", other, 4.0) in found["moonpool_pages"][2]
    assert ("moonpool_wait_seconds_bucket", {"le": "2.0", **one}, 1.0) in found["moonpool_wait_seconds"][2]


def test_the_text_says_what_prometheus_own_writer_says() -> None:
    registry = CollectorRegistry()
    odd = Gauge("moonpool_odd", 'a "quoted" \\ text\nof two lines', ["name"], registry=registry)
    for number, name in enumerate(('"', "\\", "\n", "\\n", "ü", "", "a,b}=")):
        odd.labels(name).set(number)
    for number, value in enumerate((math.inf, -math.inf, 1e300, 5e-324, 0.1, 2.0**70)):
        odd.labels(f"value {number}").set(value)
    Counter("moonpool_things", "Things", registry=registry).inc(3)
    Histogram("moonpool_wait_seconds", "Waits", ["kind"], registry=registry).labels("a").observe(0.3)
    expected = parsed(generate_latest(registry).decode())
    process = {"moonpool_role": "a", "moonpool_name": "b"}
    found = parsed(metrics_text([RoleMetrics("a", "b", snapshot(registry))]).decode())
    assert found == {
        name: (kind, text, [(sample, {**labels, **process}, value) for sample, labels, value in samples])
        for name, (kind, text, samples) in expected.items()
    }
    odd.labels("nan").set(math.nan)
    assert b'{moonpool_name="b",moonpool_role="a",name="nan"} NaN\n' in metrics_text(
        [RoleMetrics("a", "b", snapshot(registry))]
    )


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
