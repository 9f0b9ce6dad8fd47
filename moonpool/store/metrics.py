"""The pool's figures in the form that all roles use for their metrics."""

from __future__ import annotations

from moonpool.base.metrics import MetricFamily, MetricSample
from moonpool.store.messages import StoreStats


def pool_metrics(stats: StoreStats) -> list[MetricFamily]:
    """Gauges per segment and for the pool, and one counter of events by kind."""
    segments = [(each, {"segment": each.name, "node": each.node}) for each in stats.segments]
    num_puts = stats.counters["puts_in_progress"]
    events = {name: value for name, value in stats.counters.items() if name != "puts_in_progress"}
    return [
        _gauge("moonpool_pool_objects", "objects that can be read", [({}, stats.num_objects)]),
        _gauge("moonpool_pool_puts_in_progress", "puts begun and not ended", [({}, num_puts)]),
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


def _gauge(name: str, documentation: str, values: list[tuple[dict[str, str], int]]) -> MetricFamily:
    return MetricFamily(name, documentation, "gauge", [MetricSample(name, label, value) for label, value in values])
