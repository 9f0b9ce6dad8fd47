"""What a worker measures: samples for the conductor, times and counts for /metrics."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from moonpool.base.cluster import DecodeSample, PrefillSample, PullSample
from moonpool.base.metrics import TIME_BUCKETS_S
from moonpool.worker.kv_link.pull_job import PullJob, PullResult
from moonpool.worker.messages import WorkerStats

# Failures that are on the page before they happen, so that Prometheus sees the first one as an increase.
_USUAL_FAILURES = ("unavailable", "peer_lost", "deadline_exceeded", "corrupt", "no_space", "outbox_full")
_MAX_SAMPLES = 64  # of each kind
_MAX_ARRIVED = 4096  # requests of one report: more than come between two of them
_GAUGES = {
    "num_pages": "KV pages in all",
    "free_pages": "KV pages that no request uses",
    "cached_pages": "free pages whose block can be reused",
    "reserved_pages": "pages kept for hand-offs under way",
    "num_waiting": "requests that wait",
    "num_running": "requests in the running batch",
}
_COUNTERS = {
    "pool_read_nbytes": ("pool_read_bytes", "bytes read from the pool"),
    "pool_written_nbytes": ("pool_written_bytes", "bytes written to the pool"),
    "handoff_nbytes": ("handoff_bytes", "bytes handed to decode workers"),
    "failed_requests": ("failed_requests", "requests that ended with an error of their own"),
    "resumed_answers": ("resumed_answers", "answers that came back after a preemption, or from another worker"),
    "recomputed_tokens": ("recomputed_tokens", "tokens of resumed answers whose KV was computed again"),
}


class WorkerTimes:
    """How long the parts of requests take at this worker. Thread-safe."""

    def __init__(self) -> None:
        self.queue = _histogram("queue", "from a request's arrival until it is computed, or has pages to decode in")
        self.prefill = _histogram("prefill", "computing a prompt, waits for the pool included")
        self.pull = _histogram("pull", "pulling a request's blocks from the pool")
        self.handoff = _histogram("handoff", "from the first token until the decode worker has all of the KV")
        self.decode_step = _histogram(
            "decode_step", "one step of the batch, each sequence one token, with what the host does before it"
        )

    def register(self, registry: CollectorRegistry) -> None:
        for each in (self.queue, self.prefill, self.pull, self.handoff, self.decode_step):
            registry.register(each)


def _histogram(name: str, text: str) -> Histogram:
    return Histogram(f"moonpool_worker_{name}_seconds", text, buckets=TIME_BUCKETS_S, registry=None)


class WorkerCollector(Collector):
    def __init__(self, stats: Callable[[], WorkerStats]) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        for name, text in _GAUGES.items():
            yield GaugeMetricFamily(f"moonpool_worker_{name}", text, value=getattr(stats, name))
        for attribute, (name, text) in _COUNTERS.items():
            yield CounterMetricFamily(f"moonpool_worker_{name}", text, value=getattr(stats, attribute))
        failures = CounterMetricFamily(
            "moonpool_worker_kv_failures", "pulls, puts and hand-offs that failed", labels=["code"]
        )
        for code, count in {**dict.fromkeys(_USUAL_FAILURES, 0), **stats.pull_failures}.items():
            failures.add_metric([code], count)
        yield failures


@dataclass(slots=True)
class Samples:
    """What the next report tells the conductor, and counts since the start. Bounded: samples that no report takes are
    replaced by newer ones.
    """

    prefills: deque[PrefillSample] = field(default_factory=lambda: deque(maxlen=_MAX_SAMPLES))
    decodes: deque[DecodeSample] = field(default_factory=lambda: deque(maxlen=_MAX_SAMPLES))
    pulls: deque[PullSample] = field(default_factory=lambda: deque(maxlen=_MAX_SAMPLES))
    arrived: deque[str] = field(default_factory=lambda: deque(maxlen=_MAX_ARRIVED))  # requests to decode, by their ids
    pull_failures: Counter[str] = field(default_factory=Counter)
    handoff_nbytes: int = 0
    times: WorkerTimes = field(default_factory=WorkerTimes)
    failed_requests: int = 0  # that ended with an error of their own
    resumed_answers: int = 0  # that came back after a preemption, or from another worker
    recomputed_tokens: int = 0  # of these answers: tokens whose KV was computed again
    last_pull_s: float | None = None

    def add_pull(self, result: PullResult, now_s: float) -> None:
        """Count a pull that is over."""
        if result.failure is not None:
            self.pull_failures[result.failure.code] += 1
        if result.nbytes:
            self.times.pull.observe(result.seconds)
            sample = PullSample(result.nbytes, result.seconds, result.ssd_nbytes, result.node, result.is_near)
            self.add_pull_sample(sample, now_s)

    def add_late_pull(self, job: PullJob, piece_nbytes: int, waited_s: float, now_s: float) -> None:
        """Count a pull that was left behind. The bytes so far tell how slow the pool is; if there are none, one piece
        takes longer than the wait."""
        moved = max(job.moved_nbytes, piece_nbytes)
        self.add_pull_sample(PullSample(moved, waited_s, min(moved, job.moved_ssd_nbytes)), now_s)

    def add_pull_sample(self, sample: PullSample, now_s: float) -> None:
        self.pulls.append(sample)
        self.last_pull_s = now_s
