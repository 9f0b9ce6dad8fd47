"""Hot prefixes: replicated by requests that load diverts, counted, forgotten when cold, bounded."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool.conductor.placement.balance import HALF_LIFE_S, HotPrefixes, Replicated, replicated
from moonpool.conductor.placement.leading import Leading
from moonpool.conductor.placement.pricing import PricedPlacement


def plan(local: int, pulled: int) -> PricedPlacement:
    return PricedPlacement(local, pulled, 0, 0.0, 0.0, 0.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("local", "pulled", "expected"),
    [(12, 8, (0, 0)), (0, 20, (12, 0)), (0, 0, (0, 12)), (4, 3, (3, 5)), (4, 0, (0, 8))],
)
def test_what_another_worker_has_is_replicated(local: int, pulled: int, expected: tuple[int, int]) -> None:
    leading = Leading(20, (), ((0, 0b1), (4, 0b10), (12, 0b100)))
    assert replicated(leading, plan(local, pulled)) == Replicated(*expected)


def test_counts_fade_and_the_hottest_come_first() -> None:
    hot = HotPrefixes()
    for _ in range(8):
        hot.note([1, 2, 3], 2, 0.0)
    for _ in range(5):
        hot.note([1, 2, 3], 3, 2 * HALF_LIFE_S)
    hot.note([9], 0, 0.0)
    found = hot.hottest(9, 2 * HALF_LIFE_S)
    assert [(one.print_, one.num_blocks, one.requests) for one in found] == [(3, 3, 5.0), (2, 2, 2.0)]


def test_a_million_prefixes_do_not_grow_it_and_do_not_hide_the_hot_ones() -> None:
    hot, rng = HotPrefixes(capacity=1000), random.Random(2)
    for number in range(100_000):
        hot.note([rng.getrandbits(60)], 1, number / 100)
        if number % 50 == 0:
            hot.note([7, 8], 2, number / 100)
        assert len(hot) <= 1000
    assert hot.hottest(1, 1000.0)[0].print_ == 8


@given(st.lists(st.tuples(st.integers(0, 30), st.floats(0, 100)), max_size=80))
def test_below_its_bound_it_counts_exactly(notes) -> None:
    hot, now_s = HotPrefixes(), 0.0
    plain: dict[int, float] = {}
    for key, step_s in notes:
        now_s += step_s
        plain = {one: count * 0.5 ** (step_s / HALF_LIFE_S) for one, count in plain.items()}
        hot.note([key], 1, now_s)
        plain[key] = plain.get(key, 0.0) + 1
    assert {one.print_: pytest.approx(one.requests) for one in hot.hottest(99, now_s)} == plain
