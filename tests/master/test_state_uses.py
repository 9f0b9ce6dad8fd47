"""Uses are counted per window, in one column; what is pending is counted in its own window."""

from __future__ import annotations

import random

import numpy as np
import pytest

from moonpool.master.rules import PoolRules
from moonpool.master.state.table import ObjectTable
from moonpool.master.state.uses import UseCounts


def made() -> UseCounts:
    return UseCounts(PoolRules(hot_window_s=10.0), ObjectTable(64))


def use(uses: UseCounts, slot: int, times: int, now_s: float) -> None:
    uses.add([slot] * times, now_s)
    uses.count()


def test_uses_are_counted_per_window() -> None:
    uses = made()
    use(uses, 3, 5, 0.0)
    use(uses, 3, 2, 9.9)
    assert (uses.in_window(3, 9.9), uses.lately(3, 9.9)) == (7, 7)
    assert (uses.in_window(3, 10.0), uses.lately(3, 10.0)) == (0, 7), "the last whole window"
    use(uses, 3, 1, 15.0)
    assert (uses.in_window(3, 15.0), uses.lately(3, 15.0)) == (1, 7)
    assert (uses.in_window(3, 20.0), uses.lately(3, 20.0)) == (0, 1)
    assert (uses.in_window(3, 30.0), uses.lately(3, 30.0)) == (0, 0)
    use(uses, 3, 1, 30.0)
    assert uses.lately(3, 30.0) == 1, "the window before had none"


def test_a_rate_falls_with_the_time_since_the_last_use() -> None:
    uses = made()
    use(uses, 3, 8, 0.0)
    use(uses, 3, 4, 10.0)
    assert [uses.rate(3, now_s) for now_s in (10.0, 20.0, 100.0)] == [12 / 20, 12 / 30, 12 / 110]
    assert uses.rate(4, 100.0) == 0.0


def test_what_is_pending_counts_when_it_was_used() -> None:
    uses = made()
    uses.add([3], 9.0)
    uses.add([3], 9.5)
    uses.count()
    assert uses.in_window(3, 9.9) == 2
    assert uses.in_window(3, 10.0) == 0


def test_counts_are_those_of_a_counter() -> None:
    """Against a plain count by window, in batches in which slots come often."""
    uses, rng = made(), random.Random(4)
    counted: dict[tuple[int, int], int] = {}
    now_s = 0.0
    for _ in range(200):
        now_s += rng.expovariate(1.0)
        batch = [rng.randrange(8) for _ in range(rng.randrange(1, 40))]
        window = int(now_s // 10)
        before = [counted.get((slot, window), 0) for slot in batch]
        for slot in batch:
            counted[slot, window] = counted.get((slot, window), 0) + 1
        uses.add(batch, now_s)
        ((slots, found_before, found),) = uses.count()
        assert slots.tolist() == batch
        assert found_before.tolist() == before
        assert found.tolist() == [counted[slot, window] for slot in batch]
        for slot in range(8):
            assert uses.in_window(slot, now_s) == counted.get((slot, window), 0)


@pytest.mark.parametrize("size", [1000, 20_000, 80_000])
def test_a_count_that_is_full_stays_in_its_bits(size: int) -> None:
    uses = made()
    for _ in range(160_000 // size):
        uses.add([3] * size, 0.0)
        uses.count()
    assert 50_000 <= uses.in_window(3, 0.0) <= np.iinfo(np.uint16).max
    use(uses, 3, 1, 10.0)
    assert uses.in_window(3, 10.0) == 1
    assert 50_000 <= uses.lately(3, 10.0) <= np.iinfo(np.uint16).max
