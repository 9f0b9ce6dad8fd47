"""Charts, scales and the page: well-formed, escaped, nothing from outside, the same bytes every time."""

from __future__ import annotations

import math
import re
from xml.etree import ElementTree

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from world_cases import chat

from moonpool.sim.fleet import make_fleet
from moonpool.sim.outcome import Outcome, encode, replay
from moonpool.sim.report.chart import (
    Mark,
    Series,
    area_chart,
    bar_chart,
    legend,
    line_chart,
    linear,
    logarithmic,
    series_table,
    short,
    table,
    thinned,
)
from moonpool.sim.report.page import page
from moonpool.sim.systems import Goals, system, without

COMMAND = "moonpool replay trace.jsonl"
NASTY = "<script>alert('x')</script> & \"quoted\""
numbers = st.floats(0, 1e15, allow_nan=False)


def parsed(svg: str) -> ElementTree.Element:
    return ElementTree.fromstring(svg)


@given(st.lists(numbers, max_size=20))
@example([5e-324])
def test_every_number_has_its_place_on_a_linear_scale(values: list[float]) -> None:
    scale = linear(values, 10, 110)
    places = [scale.at(value) for value in sorted(values)]
    assert places == sorted(places)
    assert all(10 <= place <= 110 for place in places)
    ticks = scale.ticks()
    assert 2 <= len(ticks) <= 12
    assert ticks[0] == 0
    assert ticks[-1] <= scale.high * 1.000001


@given(st.lists(st.floats(1e-6, 1e9), max_size=20))
def test_every_number_has_its_place_on_a_logarithmic_scale(values: list[float]) -> None:
    scale = logarithmic(values, 0, 100)
    assert all(-1e-9 <= scale.at(value) <= 100 + 1e-9 for value in values)
    assert scale.high >= 10 * scale.low * 0.999
    assert scale.ticks()


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (0.125, "0.125"), (999.9, "1k"), (1500, "1.5k"), (2.5e12, "2.5T"), (12.0, "12")]
)
def test_short_numbers(value: float, text: str) -> None:
    assert short(value) == text


def test_a_line_goes_through_its_points() -> None:
    root = parsed(line_chart([Series("a", [0, 5, 10], [0, 50, 100], 0)], x_name="time", y_name="share"))
    (line,) = [each for each in root if each.tag == "polyline"]
    assert line.attrib["points"].split() == ["46.0,212.0", "258.0,111.0", "470.0,10.0"]


def test_areas_stand_on_each_other() -> None:
    series = [Series("a", [0, 1], [1, 1], 0), Series("b", [0, 1], [3, 3], 1)]
    polygons = [each.attrib["points"].split() for each in parsed(area_chart(series, x_name="x", y_name="y"))
                if each.tag == "polygon"]  # fmt: skip
    assert polygons[0][:2] == polygons[1][:1:-1], "the second begins where the first ends"
    assert polygons[1][0].endswith(",10.0"), "4 of 4 is at the top"


def test_hovering_tells_all_series_at_that_place() -> None:
    series = [Series("a", [0, 10], [1, 2], 0), Series("b", [0, 10], [3, 4], 1)]
    titles = [each.text for each in parsed(line_chart(series, x_name="time, s", y_name="things")).iter("title")]
    assert titles == ["time, s 0; things\na: 1\nb: 3", "time, s 10; things\na: 2\nb: 4"]


def test_targets_are_marked() -> None:
    svg = line_chart([Series("a", [0.1, 5], [0, 1], 0)], x_name="x", y_name="y", log_x=True, marks=[Mark(30, "target")])
    assert [each.text for each in parsed(svg).iter("text")].count("target") == 1


def test_whatever_it_is_called_is_escaped() -> None:
    series = [Series(NASTY, [0, 1], [0, 1], 0)]
    texts = [
        line_chart(series, x_name=NASTY, y_name=NASTY, marks=[Mark(1, NASTY)]),
        area_chart(series, x_name=NASTY, y_name=NASTY),
        bar_chart({NASTY: [0.5]}, [NASTY]),
        legend([(NASTY, 0)]),
        table([NASTY], [[NASTY]], kind=NASTY),
        series_table(series, NASTY),
    ]
    for text in texts:
        parsed(text)
        assert "<script" not in text


@pytest.mark.parametrize("series", [[], [Series("a", [], [], 0)], [Series("a", [3.0], [0.0], 0)]])
def test_nothing_and_almost_nothing_can_be_drawn(series: list[Series]) -> None:
    for svg in (line_chart(series, x_name="x", y_name="y", log_x=True), area_chart(series, x_name="x", y_name="y")):
        assert not re.search(r"\bnan\b|\binf\b", svg)
        parsed(svg)
    parsed(bar_chart({}, []))
    parsed(bar_chart({"a": [0.0]}, ["b"]))


def test_bars_are_as_long_as_their_shares() -> None:
    widths = [float(each.attrib["width"]) for each in parsed(bar_chart({"a": [0.5, 0.25]}, ["x", "y"], most=1.0))
              if each.tag == "rect"]  # fmt: skip
    assert widths[0] == pytest.approx(2 * widths[1])


def test_thinning_keeps_both_ends() -> None:
    assert thinned(3, 5) == [0, 1, 2]
    assert thinned(100, 3) == [0, 50, 99]


@pytest.fixture(scope="module")
def outcomes() -> list[Outcome]:
    fleet = make_fleet(num_nodes=4, ssd_nbytes=1e12, dram_nbytes=2e10)
    goals = Goals(ttft_s=4.0)
    trace = chat(60, seed=4)
    return [replay(each, trace, fleet, goals) for each in (system("moonpool"), system("vllm"), without("ssd"))]


def test_an_outcome_has_everything(outcomes: list[Outcome]) -> None:
    ours, coupled, _ = outcomes
    for each in outcomes:
        figures = each.numbers
        assert figures["num_done"] + figures["num_refused"] == figures["num_requests"] == 60
        assert figures["num_unfinished"] == 0
        assert sum(each.refusals.values()) == figures["num_refused"]
        assert len(each.quantiles["ttft_s"]) == 101
        assert all(math.isfinite(value) for value in figures.values())
    assert ours.numbers["saved_gpu_s"] > 0 == coupled.numbers["saved_gpu_s"]
    assert not any(letter.isdigit() for reason in ours.refusals for letter in reason)
    assert 0 < ours.links["nic_out"].mean_share <= ours.links["nic_out"].peak_share <= 1
    assert not coupled.links


def test_the_page_opens_offline(outcomes: list[Outcome]) -> None:
    text = page(outcomes, COMMAND)
    assert not re.search(r"https?:|<script|<link|<img|@import|url\(|\bsrc=|\bhref=", text)
    body = text[text.index("<body>") : text.index("</html>")]
    parsed(body)  # every tag is closed, every & escaped
    assert "prefers-color-scheme:dark" in text
    for said in ("Assumptions", "fitted to the paper", "moonpool without ssd", "target"):
        assert said in text


def test_a_trace_with_a_nasty_name(outcomes: list[Outcome]) -> None:
    import msgspec

    text = page([msgspec.structs.replace(outcomes[0], trace=NASTY, system=NASTY)], NASTY)
    assert "<script" not in text
    parsed(text[text.index("<body>") : text.index("</html>")])


def test_the_same_bytes_twice(outcomes: list[Outcome]) -> None:
    again = replay(
        system("moonpool"),
        chat(60, seed=4),
        make_fleet(num_nodes=4, ssd_nbytes=1e12, dram_nbytes=2e10),
        Goals(ttft_s=4.0),
    )
    assert encode(again) == encode(outcomes[0])
    assert page([again], COMMAND) == page(outcomes[:1], COMMAND)
