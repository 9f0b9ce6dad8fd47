"""The last 15 minutes of the service, as rates and quantiles every 2 s. Pure; of constant size.

A front end counts since its start. `HistoryRing` is given these counters, of all front ends of its port, again and
again, and keeps what changed from one time to the next. A front end that appears or disappears meanwhile makes no jump;
one that was restarted counts from 0.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from itertools import pairwise

import msgspec

from moonpool.base.metrics import MetricFamily

PERIOD_S = 2.0
NUM_POINTS = 450
_QUANTILE_POINTS = 30  # times are quantiles over this many periods, because requests may be rare
# What is counted, by the name of its samples; the label, if any, is part of the counter's name.
_COUNTED = {
    "moonpool_requests_total": "outcome",
    "moonpool_prompt_tokens_total": "",
    "moonpool_output_tokens_total": "",
    "moonpool_cached_tokens_total": "source",
    "moonpool_pulled_tokens_total": "tier",
    "moonpool_replans_total": "",
    "moonpool_ttft_seconds_bucket": "le",
    "moonpool_tbt_seconds_bucket": "le",
}
REQUESTS, PROMPT, OUTPUT, OWN, DRAM, SSD, REMOTE, REPLANS, TTFT, TBT = (
    "moonpool_requests_total",
    "moonpool_prompt_tokens_total",
    "moonpool_output_tokens_total",
    "moonpool_cached_tokens_total/local",
    "moonpool_pulled_tokens_total/dram",
    "moonpool_pulled_tokens_total/ssd",
    "moonpool_pulled_tokens_total/remote",
    "moonpool_replans_total",
    "moonpool_ttft_seconds_bucket",
    "moonpool_tbt_seconds_bucket",
)
Counters = Mapping[str, float]
"""Counts since the start of one front end, by name, or NAME/LABEL."""


class HistoryPoint(msgspec.Struct, frozen=True, array_like=True):
    """The `PERIOD_S` before `at_s` (wall clock). Rates are per second. None: nothing was measured."""

    at_s: float
    requests_s: float
    output_tokens_s: float
    computed_tokens_s: float  # prompt tokens, by where their KV came from
    own_tokens_s: float  # the worker's own pages
    dram_tokens_s: float  # the pool's memory on the worker's machine
    ssd_tokens_s: float
    remote_tokens_s: float  # the pool's memory on other machines
    ttft_p50_s: float | None
    ttft_p99_s: float | None
    tbt_p50_s: float | None
    tbt_p99_s: float | None
    num_running: int
    num_waiting: int
    refused_s: float


class Gauges(msgspec.Struct, frozen=True):
    """What is true at one moment; `refused` counts since the conductor started."""

    num_running: int = 0
    num_waiting: int = 0
    refused: int = 0


class _Sample(msgspec.Struct, frozen=True):
    at_s: float
    counters: Mapping[str, Counters]  # by front end
    gauges: Gauges


def counters_of(families: Iterable[MetricFamily]) -> dict[str, float]:
    """Return the counters in the metrics of a front end."""
    counters: dict[str, float] = {}
    for family in families:
        for sample in family.samples:
            label = _COUNTED.get(sample.name)
            if label is not None:
                name = f"{sample.name}/{sample.labels[label]}" if label else sample.name
                counters[name] = counters.get(name, 0.0) + sample.value
    return counters


def total(counters: Counters, name: str) -> float:
    """Return the counter, or the sum over its labels."""
    own = counters.get(name)
    return sum(by_label(counters, name).values()) if own is None else own


def by_label(counters: Counters, name: str) -> dict[str, float]:
    prefix = f"{name}/"
    return {each.removeprefix(prefix): value for each, value in counters.items() if each.startswith(prefix)}


def summed(parts: Iterable[Counters]) -> dict[str, float]:
    counters: dict[str, float] = {}
    for part in parts:
        for name, value in part.items():
            counters[name] = counters.get(name, 0.0) + value
    return counters


def quantile(counters: Counters, histogram: str, part: float) -> float | None:
    """Return the value that a `part` of the observations are at most, interpolated within its bucket, as Prometheus'
    histogram_quantile does; the highest bound if it is beyond all of them. None without observations."""
    buckets = sorted((float(bound), count) for bound, count in by_label(counters, histogram).items())
    if not buckets or buckets[-1][1] <= 0:
        return None
    rank = part * buckets[-1][1]
    for (low_s, below), (high_s, count) in pairwise([(0.0, 0.0), *buckets]):
        if count >= rank and count > below:
            return low_s if high_s == float("inf") else low_s + (high_s - low_s) * (rank - below) / (count - below)
    return buckets[-1][0]


class HistoryRing:
    def __init__(self) -> None:
        self._points: deque[HistoryPoint] = deque(maxlen=NUM_POINTS)
        self._samples: deque[_Sample] = deque(maxlen=_QUANTILE_POINTS + 1)

    def add(self, at_s: float, counters: Mapping[str, Counters], gauges: Gauges) -> None:
        """Add the counters of each front end at a time (wall clock). A time that is not later than the last is
        ignored: the clock was set back."""
        last = self._samples[-1] if self._samples else None
        if last is not None and at_s <= last.at_s:
            return
        self._samples.append(_Sample(at_s, counters, gauges))
        if last is not None:
            self._points.append(self._point(last, self._samples[-1]))

    def since(self, at_s: float = 0.0) -> list[HistoryPoint]:
        """Return the points after a time, oldest first."""
        return [point for point in self._points if point.at_s > at_s]

    def _point(self, last: _Sample, new: _Sample) -> HistoryPoint:
        passed_s = new.at_s - last.at_s
        changed, lately = _changes(last, new), _changes(self._samples[0], new)

        def rate(name: str) -> float:
            return round(total(changed, name) / passed_s, 3)

        def time_s(name: str, part: float) -> float | None:
            found_s = quantile(lately, name, part)
            return None if found_s is None else round(found_s, 6)

        own, dram, ssd, remote = (rate(name) for name in (OWN, DRAM, SSD, REMOTE))
        return HistoryPoint(
            at_s=round(new.at_s, 3),
            requests_s=rate(REQUESTS),
            output_tokens_s=rate(OUTPUT),
            computed_tokens_s=round(max(0.0, rate(PROMPT) - own - dram - ssd - remote), 3),
            own_tokens_s=own,
            dram_tokens_s=dram,
            ssd_tokens_s=ssd,
            remote_tokens_s=remote,
            ttft_p50_s=time_s(TTFT, 0.5),
            ttft_p99_s=time_s(TTFT, 0.99),
            tbt_p50_s=time_s(TBT, 0.5),
            tbt_p99_s=time_s(TBT, 0.99),
            num_running=new.gauges.num_running,
            num_waiting=new.gauges.num_waiting,
            refused_s=round(max(0, new.gauges.refused - last.gauges.refused) / passed_s, 3),
        )


def _changes(last: _Sample, new: _Sample) -> dict[str, float]:
    """Return what was counted between two samples, by the front ends that are in both."""
    changed: dict[str, float] = {}
    for front_end, counters in new.counters.items():
        before = last.counters.get(front_end)
        if before is None:
            continue
        restarted = total(counters, PROMPT) < total(before, PROMPT)
        for name, value in counters.items():
            begin = 0.0 if restarted else before.get(name, 0.0)
            changed[name] = changed.get(name, 0.0) + max(0.0, value - begin)
    return changed
