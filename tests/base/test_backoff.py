"""Pauses between attempts, in virtual time."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool.base.backoff import Backoff, backoff_s
from moonpool.base.clock import VirtualClock
from moonpool.base.errors import ConfigError


def attempts_s(backoff: Backoff, until_s: float) -> list[float]:
    """When a loop that fails every time makes its attempts."""
    clock, made_s = VirtualClock(), list[float]()
    while clock.now_s() <= until_s:
        made_s.append(clock.now_s())
        clock.advance(backoff.next_s())
    return made_s


def test_pauses_double_up_to_the_longest() -> None:
    assert attempts_s(Backoff(1.0, 5.0), 20.0) == [0.0, 1.0, 3.0, 7.0, 12.0, 17.0]
    assert attempts_s(Backoff(0.5, 0.5), 2.0) == [0.0, 0.5, 1.0, 1.5, 2.0]


def test_the_first_retry_may_follow_at_once() -> None:
    assert attempts_s(Backoff(1.0, 2.0, immediate=True), 5.0) == [0.0, 0.0, 1.0, 3.0, 5.0]


def test_the_pauses_of_a_client_that_waits_for_its_master() -> None:
    backoff = Backoff(0.02, 0.5, immediate=True)
    assert [backoff.next_s() for _ in range(9)] == [0.0, 0.02, 0.04, 0.08, 0.16, 0.32, 0.5, 0.5, 0.5]


@pytest.mark.parametrize("immediate", [False, True])
def test_a_reset_begins_again(immediate: bool) -> None:
    backoff = Backoff(0.02, 0.5, immediate=immediate)
    first = [backoff.next_s() for _ in range(10)]
    backoff.reset()
    assert [backoff.next_s() for _ in range(10)] == first


@given(st.integers(0, 10**9), st.floats(1e-6, 10.0), st.floats(1.0, 1e3))
def test_a_pause_never_shrinks_nor_exceeds_the_longest(num_pauses: int, first_s: float, factor: float) -> None:
    longest_s = first_s * factor
    pauses_s = [backoff_s(each, first_s, longest_s) for each in (num_pauses, num_pauses + 1)]
    assert first_s <= pauses_s[0] <= pauses_s[1] <= longest_s


def test_an_outage_of_years_costs_few_attempts() -> None:
    backoff = Backoff(0.05, 2.0)
    total_s = sum(itertools.islice(iter(backoff.next_s, None), 10_000))
    assert total_s > 0.99 * 2.0 * 9_990


@pytest.mark.parametrize(("first_s", "longest_s"), [(0.0, 1.0), (-1.0, 1.0), (2.0, 1.0)])
def test_pauses_that_make_no_sense_are_refused(first_s: float, longest_s: float) -> None:
    with pytest.raises(ConfigError):
        Backoff(first_s, longest_s)
