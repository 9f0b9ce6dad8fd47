"""The forecast says in O(log n) what a scan of all open requests would; decode times and lengths are learnt."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moonpool.base.errors import ConfigError
from moonpool.conductor.admission.forecast import DecodeLoad, ExpectedDecode, RequestForecast, SystemForecast
from moonpool.conductor.admission.output_lengths import LengthHistogram, OutputLengths
from moonpool.conductor.admission.time_sums import TICKS_PER_S, TimeSums, tick_of

MOMENTS = st.floats(0, 5000, allow_nan=False)


@given(st.lists(st.tuples(MOMENTS, st.integers(1, 1 << 60))), st.lists(MOMENTS, min_size=1), st.randoms())
def test_sums_are_those_of_a_scan_after_any_adding_and_taking_away(entries, asked, draw) -> None:
    sums, kept = TimeSums(), []
    for at_s, weight in entries:
        sums.add(at_s, weight)
        kept.append((at_s, weight))
        if draw.random() < 0.4:
            gone_s, gone = kept.pop(draw.randrange(len(kept)))
            sums.add(gone_s, -gone)
    assert sums.total == sum(weight for _, weight in kept)
    for now_s in [*asked, -1.0, 1e9]:
        assert sums.until(now_s) == sum(weight for at_s, weight in kept if tick_of(at_s) <= tick_of(now_s))
    for at_s, weight in kept:
        sums.add(at_s, -weight)
    assert sums.total == 0
    assert not sums._nodes  # nothing stays behind


def test_memory_of_the_sums_follows_what_is_there_and_not_the_time() -> None:
    sums, draw = TimeSums(), random.Random(1)
    for second in range(20_000):
        sums.add(second * 1000.0, 1)
        sums.add(second * 1000.0 + draw.random(), 1)
        if second >= 10:
            sums.add((second - 10) * 1000.0, -1)
    assert sums.until(1e12) == sums.total
    assert tick_of(1.0) == TICKS_PER_S


class NaiveForecast:
    """The paper's sentence, request by request."""

    def __init__(self) -> None:
        self.pending: dict[str, tuple[float, int]] = {}
        self.decoding: dict[str, tuple[float, int]] = {}

    def at(self, at_s: float, now_s: float, decode_s: float) -> DecodeLoad:
        gone = at_s - decode_s
        there = [kv for start, kv in self.decoding.values() if tick_of(start) > tick_of(gone)]
        for start, kv in self.pending.values():
            late = gone < now_s  # it starts now at the earliest
            if tick_of(start) <= tick_of(at_s) and (late or tick_of(start) > tick_of(gone)):
                there.append(kv)
        return DecodeLoad(len(there), sum(there))


STEPS = st.lists(
    st.tuples(st.sampled_from("ejjx?"), st.floats(0, 9), st.floats(0, 40), st.integers(0, 200_000)), max_size=60
)


@given(STEPS, st.randoms())
def test_the_papers_forecast_is_that_of_a_scan(steps, draw) -> None:
    fast, slow, now_s = SystemForecast(initial_decode_s=7.0), NaiveForecast(), 0.0
    for number, (kind, passed_s, ahead_s, kv) in enumerate(steps):
        now_s += passed_s
        if kind == "e":
            fast.expect(ExpectedDecode(f"r{number}", now_s + ahead_s, kv), now_s)
            slow.pending[f"r{number}"] = (now_s + ahead_s, kv)
        elif kind == "j" and slow.pending:
            name = draw.choice(sorted(slow.pending))
            fast.join(name, now_s)
            slow.decoding[name] = (now_s, slow.pending.pop(name)[1])
        elif kind == "x" and (slow.pending or slow.decoding):
            name = draw.choice(sorted(slow.pending) + sorted(slow.decoding))
            fast.end(name, now_s, output_tokens=draw.choice([0, 5]))
            slow.pending.pop(name, None)
            slow.decoding.pop(name, None)
        assert fast.at(now_s + ahead_s, now_s) == slow.at(now_s + ahead_s, now_s, fast.decode_s)
    assert fast.at(fast.over_by_s(now_s), now_s) == DecodeLoad(0, 0)


def test_the_decode_time_starts_as_told_and_follows_what_is_measured() -> None:
    forecast = SystemForecast(initial_decode_s=20.0)
    assert forecast.decode_s == 20.0
    for number in range(300):
        forecast.expect(ExpectedDecode("a", number * 10.0, 100), number * 10.0)
        forecast.join("a", number * 10.0)
        forecast.end("a", number * 10.0 + 4.0, output_tokens=10)
        if number == 0:
            assert forecast.decode_s == pytest.approx((20 * 8 * 0.98 + 4) / (8 * 0.98 + 1))
    assert forecast.decode_s == pytest.approx(4.0, rel=0.01)
    forecast.expect(ExpectedDecode("b", 5000.0, 100), 5000.0)
    forecast.end("b", 5001.0, output_tokens=3)  # never decoded: says nothing
    forecast.join("nobody", 1.0)
    assert forecast.decode_s == pytest.approx(4.0, rel=0.01)
    with pytest.raises(ConfigError):
        SystemForecast(0.0)
    with pytest.raises(ConfigError):
        RequestForecast(0.0)


@settings(max_examples=50)
@given(st.lists(st.tuples(st.floats(0, 2), st.floats(0, 5), st.integers(0, 9000), st.integers(1, 3000)), max_size=60))
def test_the_forecast_by_request_counts_each_from_its_start_to_its_end(steps) -> None:
    forecast, now_s = RequestForecast(0.05), 0.0
    for number, (passed_s, ahead_s, kv, max_tokens) in enumerate(steps):
        now_s += passed_s
        forecast.expect(ExpectedDecode(f"r{number}", now_s + ahead_s, kv, max_tokens, "t"), now_s)
        if number % 3:
            forecast.join(f"r{number // 2}", now_s)
        if number % 5 == 0:
            forecast.end(f"r{number // 4}", now_s, output_tokens=number)
        load = forecast.at(now_s, now_s)
        decoding = [one for one in forecast._open.values() if one.joined]
        assert load.num_seqs == len(decoding)  # nobody who is there is forgotten, however late
        assert load.kv_tokens == sum(one.request.kv_tokens for one in decoding)
        later_s = now_s + ahead_s
        there = [one for one in forecast._open.values() if tick_of(one.starts_s) <= tick_of(later_s)]
        there = [one for one in there if tick_of(one.ends_s) > tick_of(later_s)]
        assert forecast.at(later_s, now_s) == DecodeLoad(len(there), sum(one.request.kv_tokens for one in there))
        assert len(forecast._due) <= 2 * len(forecast._open) + 64
    assert forecast.at(forecast.over_by_s(now_s), now_s) == DecodeLoad(0, 0)


def test_a_request_that_outlives_its_end_is_looked_at_few_times() -> None:
    forecast = RequestForecast(0.05)
    forecast.expect(ExpectedDecode("long", 0.0, 10, 100, "t"), 0.0)
    forecast.join("long", 0.0)
    moved = 0
    for tenth in range(1, 36_000):
        before = forecast._open["long"].ends_s
        assert forecast.at(tenth / 10, tenth / 10).num_seqs == 1
        moved += forecast._open["long"].ends_s != before
    assert moved < 40


def test_lengths_per_tenant_up_to_the_callers_limit() -> None:
    lengths = OutputLengths(max_tenants=2)
    assert lengths.expected("a", 100) == 50
    assert lengths.quantile("a", 0.5) is None
    for _ in range(300):
        lengths.learn("short", 10)
        lengths.learn("long", 1000)
    assert lengths.expected("short", 4000) < 110
    assert lengths.expected("long", 4000) > 900
    assert lengths.expected("long", 200) <= 200
    assert lengths.expected("short", 4000, done_tokens=100) == pytest.approx(1000, rel=0.01)  # only long ones go on
    assert lengths.expected("short", 4000, done_tokens=3000) >= 3000
    assert lengths.quantile("short", 0.9) == 10
    assert lengths.quantile("new", 0.9) == 1000
    lengths.learn("third", 5)
    assert len(lengths._tenants) == 2


@settings(max_examples=60)
@given(st.lists(st.integers(1, 100_000), min_size=1, max_size=200), st.floats(0.01, 1))
def test_quantiles_are_right_to_a_bucket(values: list[int], share: float) -> None:
    histogram = LengthHistogram()
    for value in values:
        histogram.add(value)
    assert histogram.weight <= len(values) + 1e-6
    got = histogram.quantile(share)
    assert got is not None
    # Newer ones weigh up to 1.5 times more among 200, so compare with the range of nearby shares.
    ordered = sorted(values)
    low = ordered[max(0, int(len(values) * (share - 0.15)) - 1)]
    high = ordered[min(len(values) - 1, int(len(values) * (share + 0.15)) + 1)]
    assert low / 1.3 - 1 <= got <= high * 1.3 + 1


def test_old_lengths_fade_and_the_numbers_stay_finite() -> None:
    histogram = LengthHistogram()
    for _ in range(20_000):
        histogram.add(10)
    for _ in range(3_000):
        histogram.add(500)
    assert histogram.quantile(0.5) == 500
    assert histogram.weight == pytest.approx(500, rel=0.01)
