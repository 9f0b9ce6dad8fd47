"""A node that comes back empty gets its share of new objects slowly (Mooncake #3688)."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool.base.descriptor import SegmentDescriptor
from moonpool.master.state.ramp import RAMP_S, PlacementRamp
from moonpool.master.state.segments import SegmentTable
from moonpool.store.messages import GRANULE_NBYTES, Tier

NBYTES = 4 * GRANULE_NBYTES
PUTS_PER_S = 100


def joined(table: SegmentTable, name: str, num_objects: int, now_s: float) -> int:
    """Mounts memory for that many objects; returns its number."""
    table.ramp.advance(now_s)
    nbytes = num_objects * NBYTES
    descriptor = SegmentDescriptor(
        name=name,
        nbytes=nbytes,
        incarnation=int(now_s) + 1,
        host="here",
        endpoints=(),
        granule_nbytes=GRANULE_NBYTES,
    )
    made = table.mount(name, descriptor, Tier.DRAM, None, 0)
    made.acknowledged = True
    return made.number


def put(table: SegmentTable) -> int:
    place = table.place_one(NBYTES)
    assert place is not None
    return place[0]


@given(st.lists(st.tuples(st.floats(0.0, 5.0), st.integers(1, 40)), min_size=1, max_size=30))
def test_it_never_takes_more_than_its_share(steps: list[tuple[float, int]]) -> None:
    """Whatever the times of the placements, and with at most one more than the sum of its shares."""
    ramp, now_s, allowed, taken = PlacementRamp(), 0.0, 0.0, 0
    ramp.advance(0.0)
    ramp.mounted(1)
    ramp.advance(100.0)
    ramp.mounted(2)
    for pause_s, count in steps:
        now_s += pause_s
        ramp.advance(100.0 + now_s)
        for _ in range(count):
            allowed += ramp.share(2)
            if 2 not in ramp.held_back([1, 2]):
                ramp.placed(2)
                taken += 1
        assert 1 not in ramp.held_back([1]), "an old one is never held back"
    assert ramp.share(2) == pytest.approx(min(1.0, now_s / RAMP_S))
    assert taken <= allowed + 1


def test_nodes_that_start_together_have_no_ramp() -> None:
    table = SegmentTable()
    first, second = joined(table, "a", 1000, 0.0), joined(table, "b", 2000, 3.0)
    assert {put(table) for _ in range(10)} == {second}, "the emptiest one"
    assert first != second


def test_what_finds_no_other_room_goes_to_the_new_node_at_once() -> None:
    table = SegmentTable()
    old = joined(table, "a", 10, 0.0)
    new = joined(table, "b", 10, 50.0)
    found = [put(table) for _ in range(19)]
    assert found.count(new) >= 9
    assert old in found


def test_a_node_that_comes_back_empty_does_not_draw_all_puts() -> None:
    """Four nodes, half full; one comes back empty. Its puts rise evenly over a minute, and never jump."""
    table = SegmentTable()
    numbers = [joined(table, name, 40_000, 0.0) for name in "abcd"]
    while table.used_nbytes < 0.5 * table.capacity_nbytes:
        put(table)
    lost = table.by_number[numbers[3]]
    table.end(lost)
    back = joined(table, "d", 40_000, 1000.0)
    shares = []
    for second in range(int(RAMP_S)):
        table.ramp.advance(1000.0 + second)
        shares.append(sum(put(table) == back for _ in range(PUTS_PER_S)) / PUTS_PER_S)
    assert shares[0] == 0.0
    assert all(abs(share - second / RAMP_S) <= 0.02 for second, share in enumerate(shares)), shares
    jumps = [after - before for before, after in itertools.pairwise(shares)]
    assert max(jumps) <= 0.05, "neighbours see no jump"
    table.ramp.advance(1000.0 + RAMP_S)
    assert put(table) == back, "then it is the emptiest one as before"
    assert not table.ramp
