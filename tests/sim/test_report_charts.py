"""Charts, scales and the page: well-formed, escaped, nothing from outside, the same bytes every time."""

from __future__ import annotations

import math
import re
from xml.etree import ElementTree

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec import structs
from world_cases import chat

from moonpool.sim.fleet import make_fleet
from moonpool.sim.outcome import Outcome, encode, replay
from moonpool.sim.report.chart import (
    Bar,
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
from moonpool.sim.report.labels import format_value, headline, label, system_numbers
from moonpool.sim.report.page import page
from moonpool.sim.report.style import NUM_COLORS, Hue, fill, stroke
from moonpool.sim.systems import Goals, system, without

MADE_BY = {"command": "moonpool replay trace.jsonl", "version": "moonpool 9.9", "seed": "7"}
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
    root = parsed(line_chart([Series("a", [0, 5, 10], [0, 50, 100], Hue(0))], x_name="time", y_name="share"))
    (line,) = [each for each in root if each.tag == "polyline"]
    assert line.attrib["points"].split() == ["46.0,212.0", "258.0,111.0", "470.0,10.0"]


def test_areas_stand_on_each_other() -> None:
    series = [Series("a", [0, 1], [1, 1], Hue(0)), Series("b", [0, 1], [3, 3], Hue(0, 1))]
    polygons = [each.attrib["points"].split() for each in parsed(area_chart(series, x_name="x", y_name="y"))
                if each.tag == "polygon"]  # fmt: skip
    assert polygons[0][:2] == polygons[1][:1:-1], "the second begins where the first ends"
    assert polygons[1][0].endswith(",10.0"), "4 of 4 is at the top"


def test_hovering_tells_all_series_at_that_place() -> None:
    series = [Series("a", [0, 10], [1, 2], Hue(0)), Series("b", [0, 10], [3, 4], Hue(1))]
    titles = [each.text for each in parsed(line_chart(series, x_name="time, s", y_name="things")).iter("title")]
    assert titles == ["time, s 0; things\na: 1\nb: 3", "time, s 10; things\na: 2\nb: 4"]


def test_targets_are_marked() -> None:
    series = [Series("a", [0.1, 5], [0, 1], Hue(0))]
    svg = line_chart(series, x_name="x", y_name="y", log_x=True, marks=[Mark(30, "target")])
    assert [each.text for each in parsed(svg).iter("text")].count("target") == 1


def test_whatever_it_is_called_is_escaped() -> None:
    series = [Series(NASTY, [0, 1], [0, 1], Hue(0))]
    texts = [
        line_chart(series, x_name=NASTY, y_name=NASTY, marks=[Mark(1, NASTY)]),
        area_chart(series, x_name=NASTY, y_name=NASTY),
        bar_chart([Bar(NASTY, [0.5], 0)], [NASTY]),
        legend([(NASTY, Hue(0))]),
        table([NASTY], [[NASTY]], kind=NASTY),
        series_table(series, NASTY),
    ]
    for text in texts:
        parsed(text)
        assert "<script" not in text


@pytest.mark.parametrize("series", [[], [Series("a", [], [], Hue(0))], [Series("a", [3.0], [0.0], Hue(0))]])
def test_nothing_and_almost_nothing_can_be_drawn(series: list[Series]) -> None:
    for svg in (line_chart(series, x_name="x", y_name="y", log_x=True), area_chart(series, x_name="x", y_name="y")):
        assert not re.search(r"\bnan\b|\binf\b", svg)
        parsed(svg)
    parsed(bar_chart([], []))
    parsed(bar_chart([Bar("a", [0.0], 0)], ["b"]))


def test_bars_are_as_long_as_their_shares() -> None:
    chart = parsed(bar_chart([Bar("a", [0.5, 0.25], 0)], ["x", "y"], most=1.0))
    widths = [float(each.attrib["width"]) for each in chart if each.tag == "rect"]
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
    text = page(outcomes, MADE_BY)
    assert not re.search(r"https?:|<script|<link|<img|@import|url\(|\bsrc=|\bhref=", text)
    body = text[text.index("<body>") : text.index("</html>")]
    parsed(body)  # every tag is closed, every & escaped
    assert "prefers-color-scheme:dark" in text
    for said in ("Assumptions", "fitted to the paper", "moonpool without ssd", "target"):
        assert said in text


def test_a_trace_with_a_nasty_name(outcomes: list[Outcome]) -> None:
    text = page([structs.replace(outcomes[0], trace=NASTY, system=NASTY)], {"command": NASTY})
    assert "<script" not in text
    parsed(text[text.index("<body>") : text.index("</html>")])


def with_share(outcome: Outcome, name: str, share: float) -> Outcome:
    return structs.replace(outcome, system=name, numbers={**outcome.numbers, "effective_share": share})


def test_the_headline_answers_if_the_machines_are_enough(outcomes: list[Outcome]) -> None:
    ours = with_share(outcomes[0], "moonpool", 0.95)
    assert headline([ours]) == "4 nodes are enough: moonpool serves 95.0% of the requests in time"
    worse = with_share(outcomes[1], "vllm", 0.4)
    assert headline([worse, ours]).endswith("moonpool serves 95.0% of the requests in time, vllm 40.0%")
    third = with_share(outcomes[2], "none", 0.2)
    assert headline([third, worse]) == "4 nodes are not enough: vllm serves 40.0% of the requests in time, none 20.0%"
    assert headline([third, ours, worse]).endswith(", next vllm 40.0%")


def test_a_colour_is_one_system(outcomes: list[Outcome]) -> None:
    assert system_numbers(outcomes) == [0, 2, 3]
    assert system_numbers([structs.replace(outcomes[1], system="vllm-v1"), outcomes[0]]) == [1, 0]
    body = page(outcomes, MADE_BY).partition("<body>")[2]
    per_system = re.split(r"<h2>(?=<ul)", body)[1:]
    assert len(per_system) == 3
    for number, section in zip((0, 2, 3), per_system, strict=True):
        assert set(re.findall(r"--c(\d+)", section)) == {str(number)}, "in its section a system has its colour only"
    numbers = [Hue(system, part) for system in range(NUM_COLORS) for part in range(4)]
    assert len({fill(each) for each in numbers}) == len({stroke(each) for each in numbers}) == len(numbers)


def test_every_number_has_its_unit(outcomes: list[Outcome]) -> None:
    assert (label("tbt_s_p90"), format_value("tbt_s_p90", 0.0123)) == ("TBT p90, ms", "12.3")
    assert label("ttft_s_p99") == "TTFT p99, s"
    for name in outcomes[0].numbers:
        says_unit = label(name).endswith((", s", ", ms", "requests/s")) or "%" in format_value(name, 0.5)
        assert says_unit or name.startswith("num_"), name


def test_the_page_ends_with_how_to_make_it_again(outcomes: list[Outcome]) -> None:
    end = page(outcomes, MADE_BY).rpartition("<h2>")[2]
    for name, value in MADE_BY.items():
        assert f"<td>{name}</td><td>{value}</td>" in end


def test_the_same_bytes_twice(outcomes: list[Outcome]) -> None:
    again = replay(
        system("moonpool"),
        chat(60, seed=4),
        make_fleet(num_nodes=4, ssd_nbytes=1e12, dram_nbytes=2e10),
        Goals(ttft_s=4.0),
    )
    assert encode(again) == encode(outcomes[0])
    assert page([again], MADE_BY) == page(outcomes[:1], MADE_BY)
