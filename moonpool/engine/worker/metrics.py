"""A worker's counters in Prometheus' words, read from its stats when somebody asks."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from moonpool.engine.messages import WorkerStats

_GAUGES = {
    "num_pages": "KV pages in all",
    "free_pages": "KV pages that nobody refers to",
    "cached_pages": "free pages whose block can be reused",
    "reserved_pages": "pages kept for hand-offs under way",
    "num_waiting": "requests that wait",
    "num_running": "requests in the running batch",
}
_COUNTERS = {
    "pool_read_nbytes": "bytes read from the pool",
    "pool_written_nbytes": "bytes written to the pool",
    "handoff_nbytes": "bytes handed to decode workers",
}


class WorkerCollector(Collector):
    def __init__(self, stats: Callable[[], WorkerStats]) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        for name, text in _GAUGES.items():
            yield GaugeMetricFamily(f"moonpool_worker_{name}", text, value=getattr(stats, name))
        for name, text in _COUNTERS.items():
            yield CounterMetricFamily(f"moonpool_worker_{name}", text, value=getattr(stats, name))
        failures = CounterMetricFamily(
            "moonpool_worker_kv_failures", "pulls, puts and hand-offs that failed", labels=["code"]
        )
        for code, count in stats.pull_failures.items():
            failures.add_metric([code], count)
        yield failures
