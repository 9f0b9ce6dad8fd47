"""The ring of the last 15 minutes, and the rows of workers and nodes: pure, so under a clock of the test's own."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Histogram

from moonpool.base.metrics import snapshot
from moonpool.frontend.history import (
    NUM_POINTS,
    PERIOD_S,
    Counters,
    Gauges,
    HistoryPoint,
    HistoryRing,
    counters_of,
    quantile,
)
from moonpool.frontend.metrics import FrontendMetrics
from moonpool.frontend.status_reply import WorkerRow
from moonpool.frontend.status_rows import FORGET_S, THIS_MACHINE, ByteRates, WorkerRows, machine_of
from moonpool.worker.messages import PrefillReply, TokenOut, WorkerStats


def counted(metrics: FrontendMetrics) -> Counters:
    return counters_of(metrics.families())


def prefill(metrics: FrontendMetrics, num_tokens: int, ttft_s: float = 0.02, **tokens: int) -> None:
    fields: dict[str, Any] = {"local_tokens": 0, "pool_tokens": 0, **tokens}
    reply = PrefillReply(first=TokenOut(1), finish_reason=None, pool_nbytes=0, queue_s=0.0, compute_s=0.0, **fields)
    metrics.count_prefill(num_tokens, reply, ttft_s)


def test_prompt_tokens_are_divided_by_where_their_kv_came_from() -> None:
    metrics, ring = FrontendMetrics(), HistoryRing()
    ring.add(100.0, {"a": counted(metrics)}, Gauges())
    prefill(metrics, 1000, local_tokens=200, pool_tokens=600, ssd_tokens=100, remote_tokens=300)
    metrics.output_tokens.inc(50)
    metrics.requests.labels("/v1/completions", "done").inc(4)
    ring.add(102.0, {"a": counted(metrics)}, Gauges(num_running=3, num_waiting=2, refused=6))
    (point,) = ring.since()
    assert point.computed_tokens_s == 100
    assert (point.own_tokens_s, point.dram_tokens_s, point.ssd_tokens_s, point.remote_tokens_s) == (100, 100, 50, 150)
    assert (point.requests_s, point.output_tokens_s, point.refused_s) == (2, 25, 3)
    assert (point.num_running, point.num_waiting) == (3, 2)
    assert point.ttft_p50_s == pytest.approx(0.0175), "the middle of the bucket from 10 to 25 ms"
    assert point.tbt_p50_s is None, "nothing was measured"


def test_the_ring_keeps_fifteen_minutes_and_no_more() -> None:
    ring = HistoryRing()
    for number in range(2 * NUM_POINTS):
        ring.add(number * PERIOD_S, {}, Gauges())
    points = ring.since()
    assert len(points) == NUM_POINTS
    assert points[-1].at_s - points[0].at_s == pytest.approx(15 * 60 - PERIOD_S)
    assert [each.at_s for each in ring.since(points[-3].at_s)] == [points[-2].at_s, points[-1].at_s]


def test_front_ends_that_come_go_or_restart_make_no_jump() -> None:
    ring = HistoryRing()
    old, new = {"moonpool_prompt_tokens_total": 1000.0}, {"moonpool_prompt_tokens_total": 5000.0}
    ring.add(0.0, {"a": old}, Gauges())
    ring.add(2.0, {"a": old, "b": new}, Gauges())  # b is there for the first time
    ring.add(4.0, {"b": {"moonpool_prompt_tokens_total": 5040.0}}, Gauges())  # a is away
    ring.add(6.0, {"b": {"moonpool_prompt_tokens_total": 60.0}}, Gauges())  # b was restarted
    assert [point.computed_tokens_s for point in ring.since()] == [0, 20, 30]


def test_a_clock_that_was_set_back_adds_nothing() -> None:
    ring = HistoryRing()
    for at_s in (10.0, 12.0, 11.0, 12.0):
        ring.add(at_s, {}, Gauges())
    assert [point.at_s for point in ring.since()] == [12.0]


def test_quantiles_are_those_of_prometheus() -> None:
    registry = CollectorRegistry()
    times = Histogram("moonpool_ttft_seconds", "x", buckets=(0.1, 0.2, 0.4), registry=registry)
    for seconds in (0.15, 0.15, 0.3, 9.0):
        times.observe(seconds)
    counters = counters_of(snapshot(registry))
    name = "moonpool_ttft_seconds_bucket"
    assert quantile(counters, name, 0.25) == pytest.approx(0.15)
    assert quantile(counters, name, 0.5) == pytest.approx(0.2)
    assert quantile(counters, name, 0.75) == pytest.approx(0.4)
    assert quantile(counters, name, 0.99) == 0.4, "beyond the last bound nothing more is known"
    assert quantile({}, name, 0.5) is None


def test_a_point_has_a_value_for_each_field() -> None:
    ring = HistoryRing()
    ring.add(0.0, {}, Gauges())
    ring.add(2.0, {}, Gauges())
    assert len(HistoryPoint.__struct_fields__) == 15
    assert ring.since()[0].ttft_p50_s is None


def row(name: str) -> WorkerRow:
    return WorkerRow(name=name, role="decode", machine=THIS_MACHINE, is_up=True, num_running=4, num_pages=9)


def test_a_worker_that_is_gone_is_shown_as_gone() -> None:
    rows = WorkerRows(["prefill-0", "decode-0"])
    found = rows.update([row("decode-0"), row("by-hand"), row("drained")], (), 0.0)
    assert [(each.name, each.is_up) for each in found] == [
        ("prefill-0", False), ("by-hand", True), ("decode-0", True), ("drained", True),
    ]  # fmt: skip
    found = rows.update([], ("drained",), 1.0)
    assert [(each.name, each.is_up, each.num_running) for each in found] == [
        ("prefill-0", False, 0), ("by-hand", False, 0), ("decode-0", False, 0),
    ]  # fmt: skip
    found = rows.update([], (), FORGET_S + 2.0)
    assert [each.name for each in found] == ["prefill-0", "decode-0"], "nobody expects the other"


def stats(incarnation: int, nbytes: int) -> WorkerStats:
    return WorkerStats(
        name="w", role="prefill", incarnation=incarnation, pid=1, num_pages=1, free_pages=1, cached_pages=0,
        reserved_pages=0, num_waiting=0, num_running=0, pool_read_nbytes=nbytes, pool_written_nbytes=0,
        handoff_nbytes=0, pull_failures={},
    )  # fmt: skip


def test_bytes_per_second() -> None:
    rates = ByteRates()
    rates.update(0.0, {"w": stats(1, 1000)})
    assert rates.of(stats(1, 1000)) == (0.0, 0.0, 0.0)
    rates.update(2.0, {"w": stats(1, 5000)})
    assert rates.of(stats(1, 5000))[0] == 2000
    rates.update(4.0, {"w": stats(2, 100)})
    assert rates.of(stats(2, 100))[0] == 0, "another process counts from the beginning"


@pytest.mark.parametrize(
    ("addresses", "machine"),
    [
        (["unix:/run/w.sock"], THIS_MACHINE),
        (["shm:/run/n.sock", "tcp:10.0.0.2:7000"], "10.0.0.2"),
        (["tcp:127.0.0.1:7000"], THIS_MACHINE),
        (["tcp:[fd00::2]:7000"], "fd00::2"),
        ([], THIS_MACHINE),
    ],
)
def test_machines_by_their_addresses(addresses: list[str], machine: str) -> None:
    assert machine_of(addresses) == machine
