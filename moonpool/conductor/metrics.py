"""The conductor's metrics, read from its state when they are scraped."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from moonpool.base.clock import Clock
from moonpool.conductor.admission.forms import Cause
from moonpool.conductor.request_queue import RequestQueue
from moonpool.conductor.state import ConductorState

# Events that are on the page before they happen, so that Prometheus sees the first one as an increase.
_USUAL_EVENTS = (
    "routed", "queued", "resumed", "ended", "abandoned", "overloaded", "unavailable", "registered", "unregistered",
    "refused_identity", "report_gaps", "late", "lost_late",
)  # fmt: skip


class ConductorCollector(Collector):
    def __init__(
        self, state: ConductorState, queue: RequestQueue, clock: Clock, pool_connected: Callable[[], bool]
    ) -> None:
        self._state, self._queue, self._clock = state, queue, clock
        self._pool_connected = pool_connected

    def collect(self) -> Iterator[Metric]:
        state = self._state
        events = CounterMetricFamily("moonpool_conductor_events", "Events by kind", labels=["event"])
        for event, count in sorted({**dict.fromkeys(_USUAL_EVENTS, 0), **state.counters}.items()):
            events.add_metric([event], count)
        yield events
        workers = GaugeMetricFamily("moonpool_conductor_assigned", "Requests sent to a worker", labels=["worker"])
        for worker in state.status():
            workers.add_metric([worker.info.name], worker.assigned)
        yield workers
        moved = "Changes of a worker's role by the elastic rule"
        yield CounterMetricFamily("moonpool_conductor_role_changes", moved, state.roles.num_moved)
        yield from self._scaling()
        yield from self._gauges()
        yield from self._admission()
        yield from self._prediction_errors()

    def _scaling(self) -> Iterator[Metric]:
        """For autoscalers: each role's load and how many workers it wants."""
        texts = {
            "workers": "Workers of a role",
            "wanted_workers": "Workers of a role that would meet its target with some room",
            "pressure": "Load of a role relative to its target; 1: the target is just met",
            "slack_seconds": "Target of a role less what is predicted; below 0: requests are late",
        }
        families = [
            GaugeMetricFamily(f"moonpool_conductor_{name}", text, labels=["worker_role"])
            for name, text in texts.items()
        ]
        for role, scaling in self._state.roles.scaling(self._state.workers, self._clock.now_s()).items():
            for family, value in zip(families, scaling, strict=True):
                if value is not None:
                    family.add_metric([role.value], value)
        yield from families

    def _gauges(self) -> Iterator[Metric]:
        index, traffic = self._state.index, self._state.traffic
        gauges = {
            "open_requests": ("Requests sent and not ended", self._state.num_open),
            "pool_blocks": ("Blocks in the pool, by the prefix index", index.pool_blocks),
            "pool_connected": ("1 if connected to the master", float(self._pool_connected())),
            "index_left_out": ("Blocks left out of the prefix index", index.left_out),
            "pull_flows": ("Pulls predicted to be under way", traffic.num_flows),
            "pull_bytes": ("Bytes of these pulls", traffic.nbytes),
        }
        for name, (text, value) in gauges.items():
            yield GaugeMetricFamily(f"moonpool_conductor_{name}", text, value)

    def _admission(self) -> Iterator[Metric]:
        refused = CounterMetricFamily("moonpool_conductor_refused", "Requests refused, by cause", labels=["cause"])
        for cause in Cause:
            refused.add_metric([cause.value], self._state.refused[cause])
        yield refused
        wasted = self._state.counters["wasted_prefills"]
        yield CounterMetricFamily("moonpool_conductor_wasted_prefills", "Requests refused after their prefill", wasted)
        yield GaugeMetricFamily("moonpool_conductor_waiting", "Requests in the queue", len(self._queue))
        waited = "How long requests waited in the queue"
        yield self._queue.wait_times.family("moonpool_conductor_queue_seconds", waited)

    def _prediction_errors(self) -> Iterator[Metric]:
        """An error is predicted / measured - 1."""
        sizes = GaugeMetricFamily(
            "moonpool_conductor_prediction_error", "Size of the relative error", labels=["model", "quantile"]
        )
        biases = GaugeMetricFamily("moonpool_conductor_prediction_bias", "Mean relative error", labels=["model"])
        counts = CounterMetricFamily("moonpool_conductor_predictions", "Predictions measured", labels=["model"])
        for one in self._state.predictions():
            sizes.add_metric([one.model, "0.5"], one.p50)
            sizes.add_metric([one.model, "0.9"], one.p90)
            biases.add_metric([one.model], one.bias)
            counts.add_metric([one.model], one.count)
        yield from (sizes, biases, counts)
