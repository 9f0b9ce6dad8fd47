"""The pool's figures in the form that all roles use for their metrics."""

from __future__ import annotations

from moonpool.base.metrics import MetricFamily, MetricSample
from moonpool.store.journal import JournalHealth
from moonpool.store.messages import StoreStats

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


def _gauge(name: str, documentation: str, values: list[tuple[dict[str, str], int]]) -> MetricFamily:
    return MetricFamily(name, documentation, "gauge", [MetricSample(name, label, value) for label, value in values])
