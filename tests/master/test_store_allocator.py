"""The offset allocator: best fit, no overlap, no loss, merged free ranges, batches that stay together, rebuilding."""

from __future__ import annotations

import numpy as np
import pytest

from moonpool.base.errors import InvalidInput
from moonpool.master.state.allocator import OffsetAllocator
from moonpool.store.messages import GRANULE_NBYTES

G = GRANULE_NBYTES


def rebuilt(num_granules: int, *spans: tuple[int, int]) -> OffsetAllocator:
    """With the spans (start and length in granules) taken."""
    offsets, sizes = ([span[at] * G for span in spans] for at in (0, 1))
    return OffsetAllocator.rebuilt(num_granules * G, np.array(offsets, np.int64), np.array(sizes, np.int64))


def test_rounds_to_granules_and_fills_to_the_last_byte() -> None:
    allocator = OffsetAllocator(4 * G + 100)
    assert allocator.capacity_nbytes == 4 * G
    assert [allocator.allocate(1), allocator.allocate(G + 1), allocator.allocate(G)] == [0, G, 3 * G]
    assert allocator.allocate(1) is None
    assert allocator.free_nbytes == 0
    assert allocator.used_nbytes == 4 * G
    assert allocator.largest_free_nbytes() == 0


def test_takes_the_best_fit_and_of_equal_ones_the_lowest() -> None:
    allocator = rebuilt(40, (5, 1), (9, 1), (13, 1))  # free: 5, 3, 3 and 26 granules
    assert [allocator.allocate(n * G) for n in (3, 3, 4, 6, 1)] == [6 * G, 10 * G, 0, 14 * G, 4 * G]


def test_merges_with_both_neighbours() -> None:
    allocator = OffsetAllocator(3 * G)
    for _ in range(3):
        allocator.allocate(G)
    allocator.free(0, G)
    allocator.free(2 * G, G)
    assert len(allocator.free_ranges()) == 2
    allocator.free(G, G)
    assert allocator.free_ranges() == [(0, 3 * G)]


def test_too_large_and_empty_spans() -> None:
    assert OffsetAllocator(G).allocate(G + 1) is None
    assert OffsetAllocator(100).allocate(1) is None
    assert OffsetAllocator(G).allocate(1 << 60) is None
    assert OffsetAllocator(0).allocate_many([1, 2]) == [None, None]


@pytest.mark.parametrize("span", [(0, 1), (0, 3), (1, 1), (3, 2), (4, 1), (7, 1), (7, 2), (-1, 1), (2, 0)])
def test_what_is_free_or_outside_cannot_be_freed(span: tuple[int, int]) -> None:
    allocator = rebuilt(8, (2, 2), (5, 2))  # free: 0 to 2, 4, 7
    with pytest.raises(AssertionError):
        allocator.free(span[0] * G, span[1] * G)


def test_a_batch_that_one_range_holds_lies_there_in_its_order() -> None:
    allocator = rebuilt(400, (50, 1), (200, 1))  # free: 50, 149 and 199 granules
    sizes = [3 * G, 1, 96 * G, 10 * G - 5]
    assert allocator.allocate_many(sizes) == [51 * G, 54 * G, 55 * G, 151 * G]
    assert allocator.allocate_many([G, G, G]) == [161 * G, 162 * G, 163 * G]
    assert allocator.allocate_many([]) == []
    allocator.check_integrity()


def test_a_batch_too_large_for_one_range_stays_together_in_parts_of_256_kib() -> None:
    allocator = rebuilt(1000, (300, 1), (600, 1))  # free: 300, 299 and 399 granules
    offsets = [offset for offset in allocator.allocate_many([16 * G] * 40) if offset is not None]
    assert len(offsets) == 40
    assert all(offsets[at + step] == offsets[at] + step * 16 * G for at in range(0, 36, 4) for step in range(4)), (
        "four objects make a part"
    )


def test_long_ranges_are_cut_a_sixteenth_at_a_time() -> None:
    allocator = rebuilt(40_001, (20_000, 1))
    offsets = allocator.allocate_many([1024 * G] * 30)
    assert offsets[0] == 0
    assert None not in offsets
    assert len(set(offsets)) == 30


def test_places_in_a_batch_are_positional() -> None:
    allocator = rebuilt(10, (3, 1), (6, 1))  # free: 3, 2 and 3 granules
    assert allocator.allocate_many([4 * G, 3 * G, 5 * G, 3 * G, 2 * G, G]) == [None, 0, None, 7 * G, 4 * G, None]


def test_a_batch_uses_no_long_range_where_a_short_one_does() -> None:
    allocator = rebuilt(202, (1, 1))  # free: 1 and 200 granules
    assert allocator.allocate_many([G, 200 * G]) == [0, 2 * G]


def test_rebuilding_takes_exactly_the_spans_in_any_order() -> None:
    allocator = rebuilt(10, (7, 3), (0, 2), (2, 1), (5, 1))
    assert allocator.free_ranges() == [(3 * G, 2 * G), (6 * G, G)]
    assert allocator.used_nbytes == 7 * G
    allocator.check_integrity()
    assert rebuilt(10).free_ranges() == OffsetAllocator(10 * G).free_ranges()


@pytest.mark.parametrize(
    "spans", [[(0, 2), (1, 1)], [(3, 1), (3, 1)], [(9, 2)], [(-1, 1)], [(2, 0)], [(1 << 40, 1)], [(0, 1 << 40)]]
)
def test_spans_that_cannot_be_are_refused(spans: list[tuple[int, int]]) -> None:
    with pytest.raises(InvalidInput):
        rebuilt(10, *spans)


def test_a_span_between_granules_is_refused() -> None:
    with pytest.raises(InvalidInput):
        OffsetAllocator.rebuilt(10 * G, np.array([100]), np.array([G]))
    with pytest.raises(InvalidInput):  # it ends in the part of a granule that the segment leaves over
        OffsetAllocator.rebuilt(10 * G + 100, np.array([10 * G]), np.array([50]))


def test_many_ranges_cost_little_memory() -> None:
    allocator = OffsetAllocator(100_000 * G)
    allocator.allocate_many([G] * 100_000)
    for step in range(50_000):  # every second granule, far from the last
        allocator.free(2 * (step * 7919 % 50_000) * G, G)
    allocator.check_integrity()
    assert len(allocator.free_ranges()) == 50_000
    nbytes = sum(chunk.__sizeof__() for order in (allocator._by_address, allocator._by_size) for chunk in order._chunks)
    assert nbytes / 50_000 < 50
