"""The forecast says in O(log n) what a scan of all open requests would; decode times and lengths are learnt."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moonpool.base.errors import ConfigError
from moonpool.conductor.admission.controller import SafetyMargin
from moonpool.conductor.admission.forecast import (
    TICKS_PER_S,
    DecodeLoad,
    ExpectedDecode,
    SystemForecast,
    TimeSums,
    tick_of,
)
from moonpool.conductor.admission.request_forecast import (
    NUM_STEPS,
    STEP_S,
    LengthHistogram,
    OutputLengths,
    RequestForecast,
    step_of,
)

MOMENTS = st.floats(0, 5000, allow_nan=False)


@given(st.lists(st.tuples(MOMENTS, st.integers(1, 1 << 60))), st.lists(MOMENTS, min_size=1), st.randoms())
def test_sums_are_those_of_a_scan_after_any_adding_and_taking_away(
    entries: list[tuple[float, int]], asked: list[float], draw: random.Random
) -> None:
    sums = TimeSums()
    kept: list[tuple[float, int]] = []
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
def test_the_papers_forecast_is_that_of_a_scan(steps: list[tuple[str, float, float, int]], draw: random.Random) -> None:
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
        RequestForecast(OutputLengths(), 0.0)


@settings(max_examples=50)
@given(
    st.lists(st.tuples(st.floats(0, 300), st.floats(0, 300), st.integers(0, 9000), st.integers(1, 3000)), max_size=60)
)
def test_who_decodes_now_is_counted_now_and_fewer_of_them_later(steps: list[tuple[float, float, int, int]]) -> None:
    forecast, now_s = RequestForecast(OutputLengths(), 0.05), 0.0
    still_open = forecast._open
    for number, (passed_s, ahead_s, kv, max_tokens) in enumerate(steps):
        now_s += passed_s
        forecast.expect(ExpectedDecode(f"r{number}", now_s + ahead_s, kv, max_tokens, "t"), now_s)
        if number % 3:
            forecast.join(f"r{number // 2}", now_s)
        if number % 5 == 0:
            forecast.end(f"r{number // 4}", now_s, output_tokens=number)
        decoding = [one.request.kv_tokens for one in still_open.values() if one.joined]
        assert forecast.at(now_s, now_s) == DecodeLoad(len(decoding), sum(decoding))  # however long they take
        expected = sum(
            1 for one in still_open.values() if one.joined or step_of(one.starts_s) <= step_of(now_s + ahead_s)
        )
        late = len(still_open) - len(decoding)
        assert 0 <= forecast.at(now_s + ahead_s, now_s).num_seqs <= expected + late
    for request_id in list(still_open):
        forecast.end(request_id, now_s)
    assert forecast.at(now_s + 10, now_s) == DecodeLoad(0, 0)
    assert all(not group._coming.any() and not group._decoding.any() for group in forecast._groups.values())


def population(forecast: RequestForecast, lengths: OutputLengths, seed: int, until_s: float) -> dict[str, float]:
    """Answers of very different lengths at a steady rate; what is open at the end and when it will be over."""
    draw, now_s, number = random.Random(seed), 0.0, 0
    ends: dict[str, tuple[float, int]] = {}
    while now_s < until_s:
        now_s += draw.expovariate(10.0)
        for name in [name for name, (at_s, _) in ends.items() if at_s <= now_s]:
            at_s, tokens = ends.pop(name)
            forecast.end(name, at_s, output_tokens=tokens)
            lengths.learn("t", tokens)
        tokens = min(2000, 1 + int(draw.lognormvariate(4.5, 1.2)))
        number += 1
        name = f"r{number}"
        forecast.expect(ExpectedDecode(name, now_s, 1000, 2000, draw.choice("abc")), now_s)
        forecast.join(name, now_s)
        ends[name] = (now_s + tokens * 0.05, tokens)
    return {name: at_s for name, (at_s, _) in ends.items()}


def test_long_answers_are_not_thought_gone() -> None:
    """An end for each at the mean length saw about half of those that are still there."""
    predicted, actual = dict.fromkeys((2.0, 5.0, 15.0), 0.0), dict.fromkeys((2.0, 5.0, 15.0), 0.0)
    for seed in range(6):
        lengths = OutputLengths()
        forecast = RequestForecast(lengths, 0.05)
        ends = population(forecast, lengths, seed, 240.0)
        for ahead_s in predicted:
            predicted[ahead_s] += forecast.at(240.0 + ahead_s, 240.0).num_seqs
            actual[ahead_s] += sum(at_s > 240.0 + ahead_s for at_s in ends.values())
    assert predicted == pytest.approx(actual, rel=0.15)


def test_those_who_come_are_counted_from_then_on() -> None:
    lengths = OutputLengths()
    for _ in range(99):
        lengths.learn("t", 2000)
    forecast = RequestForecast(lengths, 0.05)
    forecast.expect(ExpectedDecode("a", 10.0, 700, 4000, "t"), 0.0)
    assert forecast.at(9.5, 0.0) == DecodeLoad(0, 0)
    assert forecast.at(10.0, 0.0) == DecodeLoad(1, 700)
    assert 0.9 < forecast.at(12.0, 0.0).num_seqs < 1
    assert forecast.at(20.0, 20.0) == DecodeLoad(0, 0)  # late: it has not come
    assert forecast.at(20.0 + STEP_S, 20.0) == DecodeLoad(1, 700)  # and is expected any moment
    assert forecast.at(forecast.over_by_s(20.0), 20.0).num_seqs < 0.25
    forecast.expect(ExpectedDecode("far", 10.0 * NUM_STEPS * STEP_S, 50, 4000, "t"), 20.0)
    forecast.end("far", 21.0)
    forecast.end("a", 21.0)
    assert forecast.at(21.0 + NUM_STEPS, 21.0) == DecodeLoad(0, 0)


def test_a_forecast_takes_no_longer_with_many_requests() -> None:
    forecast = RequestForecast(OutputLengths(), 0.05)
    for number in range(20_000):
        forecast.expect(ExpectedDecode(f"r{number}", number * 0.005, 100, 2000, f"t{number % 500}"), number * 0.005)
        forecast.join(f"r{number}", number * 0.005)
    assert forecast.at(100.0, 100.0).num_seqs == 20_000
    assert len(forecast._groups) <= 12


def test_caution_is_what_nine_of_ten_outcomes_are_within() -> None:
    caution, draw = SafetyMargin(), random.Random(1)
    for _ in range(5000):
        caution.learn(10.0, 10.0 * draw.uniform(0.8, 1.1))  # 0.07 is the ninth tenth
    assert caution.value == pytest.approx(0.07, abs=0.02)
    for _ in range(5000):
        caution.learn(10.0, 8.0)
    assert caution.value == 0.0


def test_lengths_per_tenant_up_to_the_callers_limit() -> None:
    lengths = OutputLengths(max_tenants=2)
    assert [lengths.expected("a", max_tokens) for max_tokens in (100, 4000, 100_000)] == [100, 128, 128]
    for _ in range(300):
        lengths.learn("short", 10)
        lengths.learn("long", 1000)
    assert lengths.expected("short", 4000) < 110
    assert lengths.expected("long", 4000) > 900
    assert lengths.expected("long", 200) <= 200
    assert lengths.expected("new", 4000) == pytest.approx(505, rel=0.02)
    lengths.learn("third", 5)
    assert len(lengths._tenants) == 2


@settings(max_examples=60)
@given(st.lists(st.integers(1, 100_000), min_size=1, max_size=200), st.floats(0, 120_000))
def test_the_share_of_longer_answers_is_right_to_a_bucket(values: list[int], than: float) -> None:
    histogram = LengthHistogram()
    for value in values:
        histogram.add(value)
    assert histogram.weight <= len(values) + 1e-6
    (got,) = histogram.longer_than(np.array([than]))
    # Newer ones weigh up to 1.5 times more among 200.
    most = sum(1 for value in values if value > than / 1.3 - 1) / len(values)
    least = sum(1 for value in values if value > than * 1.3 + 1) / len(values)
    assert least / 1.5 - 1e-9 <= got <= most * 1.5 + 1e-9


def test_old_lengths_fade_and_the_numbers_stay_finite() -> None:
    histogram = LengthHistogram()
    assert not histogram.longer_than(np.array([0.0, 10.0])).any()
    for _ in range(20_000):
        histogram.add(10)
    for _ in range(3_000):
        histogram.add(500)
    assert histogram.longer_than(np.array([100.0])) == pytest.approx(0.9975, abs=0.002)
    assert histogram.weight == pytest.approx(500, rel=0.01)
