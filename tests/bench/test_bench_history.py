"""Which figures of a history became worse by a fifth."""

from __future__ import annotations

from typing import Any

import pytest

from moonpool.bench.history import Better, CaseChange, HistoryLine, better_of, compare


def line(commit: str, value: float, *, case: str = "case", unit: str = "GB/s", **other: Any) -> HistoryLine:
    facts: dict[str, Any] = {"date": "2026-11-19T10:00:00+00:00", "cpu": "cpu", "cores": 2, "speed": 10.0, **other}
    return HistoryLine(commit=commit, bench="bench", case=case, value=value, unit=unit, better=better_of(unit), **facts)


def only(*lines: HistoryLine) -> CaseChange:
    (change,) = compare(lines)
    return change


@pytest.mark.parametrize(
    ("unit", "better"),
    [
        ("GB/s", "larger"), ("transfers/s", "larger"), ("1/s", "larger"), ("per s", "larger"), ("hit rate", "larger"),
        ("s", "smaller"), ("ms", "smaller"), ("us", "smaller"), ("s of a core", "smaller"), ("s/GiB", "smaller"),
        ("GB", "smaller"), ("", None), ("tokens", None), ("cores", None), ("share", None), ("1 = yes", None),
    ],
)  # fmt: skip
def test_the_unit_says_which_figures_are_better(unit: str, better: Better | None) -> None:
    assert better_of(unit) == better


def test_nothing_is_compared_without_an_earlier_commit() -> None:
    assert compare([]) == []
    change = only(line("new", 1.0), line("new", 2.0))
    assert (change.value, change.before, change.kept, change.lost, change.num_earlier) == (2.0, None, None, False, 0)


@pytest.mark.parametrize(("value", "lost"), [(8.0, True), (8.1, False), (20.0, False)])
def test_a_rate_that_fell_by_a_fifth_is_lost(value: float, lost: bool) -> None:
    change = only(line("old", 10.0), line("new", value))
    assert change.lost == lost
    assert change.kept == pytest.approx(value / 10.0)
    assert (change.commit, change.before, change.num_earlier) == ("new", 10.0, 1)


@pytest.mark.parametrize(("value", "lost"), [(12.5, True), (12.4, False), (5.0, False)])
def test_a_time_is_lost_when_the_speed_fell_by_a_fifth(value: float, lost: bool) -> None:
    assert only(line("old", 10.0, unit="ms"), line("new", value, unit="ms")).lost == lost


def test_a_commit_counts_by_its_best_run() -> None:
    history = [line("old", 10.0), line("old", 6.0), line("new", 5.0), line("new", 9.0), line("new", 4.0)]
    assert only(*history).kept == pytest.approx(0.9)
    assert only(*[line(each.commit, 1 / each.value, unit="s") for each in history]).kept == pytest.approx(0.9)


def test_neither_one_lucky_nor_one_disturbed_commit_decides() -> None:
    history = [line("a", 10.0), line("lucky", 20.0), line("disturbed", 4.0), line("b", 10.0)]
    assert not only(*history, line("new", 9.0)).lost
    assert only(*history, line("new", 7.0)).lost


def test_runs_of_two_commits_may_alternate() -> None:
    history = [line("old", 10.0), line("new", 6.0), line("old", 9.0), line("new", 7.0, case="other"), line("new", 7.0)]
    change, other = compare(history)
    assert (change.case, change.value, change.before, change.lost) == ("case", 7.0, 10.0, True)
    assert (other.case, other.value, other.before) == ("other", 7.0, None)
    found = compare([*history[:-2], line("new", 1.0, case="last")])
    assert [(each.case, each.value) for each in found] == [("case", 6.0), ("last", 1.0)]


def test_a_loss_is_still_named_at_the_next_commits() -> None:
    history = [line(f"good{number}", 10.0) for number in range(5)]
    for number in range(3):
        history.append(line(f"bad{number}", 5.0))
        assert only(*history).lost


def test_only_the_last_five_commits_before_count() -> None:
    history = [line("slow", 1.0), *[line(f"c{number}", 10.0) for number in range(5)]]
    assert only(*history, line("new", 10.0)).num_earlier == 5
    assert only(*history, line("new", 10.0)).before == 10.0
    history.append(line("slow", 1.0))  # measured again, so it is the last one
    assert only(*history[-2:], line("new", 10.0)).before == 5.5


def test_a_machine_that_is_slower_now_is_allowed_for() -> None:
    slower = only(line("old", 10.0), line("new", 7.0, speed=7.5))
    assert slower.kept == pytest.approx(0.7 / 0.75)
    assert not slower.lost
    assert only(line("old", 10.0), line("new", 5.0, speed=7.5)).lost
    assert not only(line("old", 10.0, unit="s"), line("new", 13.0, unit="s", speed=7.5)).lost
    assert only(line("old", 10.0), line("new", 8.5, speed=12.0)).kept == pytest.approx(0.85)
    assert only(line("old", 10.0, unit="GB"), line("new", 13.0, unit="GB", speed=7.5)).lost


def test_other_machines_cases_and_figures_without_a_direction_are_left_out() -> None:
    history = [
        line("old", 10.0),
        line("old", 99.0, cpu="other"),
        line("old", 99.0, cores=64),
        line("old", 10.0, case="gone"),
        line("old", 1.0, unit="tokens"),
        line("new", 0.5, unit="tokens"),
        line("new", 9.0, case="first"),
        line("new", 9.0),
    ]
    found = {change.case: (change.before, change.lost) for change in compare(history)}
    assert found == {"case": (10.0, False), "first": (None, False)}


def test_zero_is_divided_by_nothing() -> None:
    assert only(line("old", 0.0), line("new", 1.0)).kept is None
    assert only(line("old", 1.0), line("new", 0.0)).lost
    assert only(line("old", 1.0, unit="s"), line("new", 0.0, unit="s")).kept is None
