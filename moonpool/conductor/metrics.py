"""The conductor's state as metrics, read when asked for; nothing is counted twice."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from moonpool.conductor.admission.forms import Cause
from moonpool.conductor.request_queue import RequestQueue
from moonpool.conductor.state import ConductorState


class ConductorCollector(Collector):
    def __init__(self, state: ConductorState, room: RequestQueue, pool_connected: Callable[[], bool]) -> None:
        self._state = state
        self._room = room
        self._pool_connected = pool_connected

    def collect(self) -> Iterator[Metric]:
        state = self._state
        events = CounterMetricFamily("moonpool_conductor_events", "What happened, by kind", labels=["event"])
        for event, count in sorted(state.counters.items()):
            events.add_metric([event], count)
        yield events
        workers = GaugeMetricFamily("moonpool_conductor_assigned", "Requests sent to a worker", labels=["worker"])
        for worker in state.status():
            workers.add_metric([worker.info.name], worker.assigned)
        yield workers
        yield from self._gauges()
        yield from self._admission()
        yield from self._prediction_errors()

    def _gauges(self) -> Iterator[Metric]:
        index = self._state.index
        yield GaugeMetricFamily("moonpool_conductor_open_requests", "Requests on their way", self._state.num_open)
        yield GaugeMetricFamily("moonpool_conductor_pool_blocks", "Blocks believed in the pool", index.pool_blocks)
        yield GaugeMetricFamily("moonpool_conductor_pool_connected", "1 if in touch", float(self._pool_connected()))
        yield GaugeMetricFamily("moonpool_conductor_index_left_out", "Keys beyond the bounds", index.left_out)
        yield GaugeMetricFamily("moonpool_conductor_pull_flows", "Pulls under way", self._state.traffic.num_flows)
        yield GaugeMetricFamily("moonpool_conductor_pull_bytes", "Bytes of those", self._state.traffic.nbytes)

    def _admission(self) -> Iterator[Metric]:
        refused = CounterMetricFamily("moonpool_conductor_refused", "Requests refused, by cause", labels=["cause"])
        for cause in Cause:
            refused.add_metric([cause.value], self._state.refused[cause])
        yield refused
        wasted = self._state.counters["wasted_prefills"]
        yield CounterMetricFamily("moonpool_conductor_wasted_prefills", "Refused after their prefill", wasted)
        yield GaugeMetricFamily("moonpool_conductor_waiting", "Requests that wait for their turn", len(self._room))
        waited = "How long requests waited for their turn"
        yield self._room.wait_times.family("moonpool_conductor_queue_seconds", waited)

    def _prediction_errors(self) -> Iterator[Metric]:
        """Relative: predicted / measured - 1."""
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
