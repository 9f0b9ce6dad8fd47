"""Hot prefixes are replicated by requests that load diverts to another worker."""

from __future__ import annotations

import pytest

from moonpool.conductor.placement.leading import Leading
from moonpool.conductor.placement.pricing import PricedPlacement, Replicated, replicated


def plan(local: int, pulled: int) -> PricedPlacement:
    return PricedPlacement(local, pulled, 0, 0.0, 0.0, 0.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("local", "pulled", "expected"),
    [(12, 8, (0, 0)), (0, 20, (12, 0)), (0, 0, (0, 12)), (4, 3, (3, 5)), (4, 0, (0, 8))],
)
def test_what_another_worker_has_is_replicated(local: int, pulled: int, expected: tuple[int, int]) -> None:
    leading = Leading(20, (), ((0, 0b1), (4, 0b10), (12, 0b100)))
    assert replicated(leading, plan(local, pulled)) == Replicated(*expected)
