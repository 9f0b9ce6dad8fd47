"""The offset allocator: no overlap, no loss, merged free ranges, and the bound its docstring states."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moonpool.store.allocator import GRANULE_NBYTES, OffsetAllocator, num_granules

KIB4 = GRANULE_NBYTES


def test_rounds_to_granules_and_fills_to_the_last_byte() -> None:
    allocator = OffsetAllocator(4 * KIB4 + 100)
    assert allocator.capacity_nbytes == 4 * KIB4
    assert [allocator.allocate(1), allocator.allocate(KIB4 + 1), allocator.allocate(KIB4)] == [0, KIB4, 3 * KIB4]
    assert allocator.allocate(1) is None
    assert allocator.free_nbytes == 0


def test_takes_the_lowest_fitting_hole_before_fresh_space() -> None:
    allocator = OffsetAllocator(64 * KIB4)
    offsets = [allocator.allocate(9 * KIB4) for _ in range(4)]
    assert offsets[1] is not None
    allocator.free(offsets[1], 9 * KIB4)
    assert allocator.allocate(9 * KIB4) == offsets[1]


def test_merges_with_both_neighbours() -> None:
    allocator = OffsetAllocator(3 * KIB4)
    for _ in range(3):
        allocator.allocate(KIB4)
    allocator.free(0, KIB4)
    allocator.free(2 * KIB4, KIB4)
    assert allocator.num_free_ranges == 2
    allocator.free(KIB4, KIB4)
    assert allocator.free_ranges() == [(0, 3 * KIB4)]


def test_too_large_and_empty_spans() -> None:
    assert OffsetAllocator(KIB4).allocate(KIB4 + 1) is None
    assert OffsetAllocator(100).allocate(1) is None
    assert OffsetAllocator(KIB4).allocate(1 << 60) is None


def test_double_free_is_an_error() -> None:
    allocator = OffsetAllocator(8 * KIB4)
    offset = allocator.allocate(KIB4)
    assert offset == 0
    allocator.free(offset, KIB4)
    with pytest.raises(AssertionError):
        allocator.free(offset, KIB4)


def test_stale_bin_entries_do_not_pile_up() -> None:
    allocator = OffsetAllocator(1024 * KIB4)
    held = allocator.allocate(KIB4)
    assert held == 0
    for _ in range(2000):  # the hole comes and goes in one bin
        offset = allocator.allocate(3 * KIB4)
        assert offset is not None
        allocator.free(offset, 3 * KIB4)
    assert sum(len(each.heap) for each in allocator._bins) < 200
    allocator.check_integrity()


@settings(max_examples=150, deadline=None)
@given(
    capacity=st.integers(1, 300),
    steps=st.lists(st.tuples(st.booleans(), st.integers(1, 40 * KIB4), st.integers(0, 1 << 30)), max_size=80),
)
def test_any_history(capacity: int, steps: list[tuple[bool, int, int]]) -> None:
    allocator = OffsetAllocator(capacity * KIB4)
    held: list[tuple[int, int]] = []
    for allocate, nbytes, choice in steps:
        if allocate or not held:
            largest = allocator.largest_free_nbytes()
            offset = allocator.allocate(nbytes)
            if offset is None:
                granules = num_granules(nbytes)
                assert largest < (granules + granules / 8) * KIB4, "the stated bound on fragmentation"
            else:
                held.append((offset, nbytes))
        else:
            allocator.free(*held.pop(choice % len(held)))
        allocator.check_integrity()
        taken = sorted((offset, offset + num_granules(nbytes) * KIB4) for offset, nbytes in held)
        free = [(offset, offset + nbytes) for offset, nbytes in allocator.free_ranges()]
        tiles = sorted(taken + free)
        assert all(end == start for (_, end), (start, _) in itertools.pairwise(tiles)), "no gap, no overlap"
        assert tiles[0][0] == 0
        assert tiles[-1][1] == capacity * KIB4
    for offset, nbytes in held:
        allocator.free(offset, nbytes)
    assert allocator.free_ranges() == [(0, capacity * KIB4)]
