"""Checks that the parts of the pool's state agree. For tests: the time is proportional to the number of objects."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from moonpool.master.state.index import ObjectIndex
from moonpool.master.state.segments import MountedSegment, Place, SegmentTable
from moonpool.master.state.table import KEPT, Flag, ObjectTable
from moonpool.store.messages import GRANULE_NBYTES, Tier, num_granules


def check_pool(segments: SegmentTable, index: ObjectIndex, spans: Iterable[tuple[Place, int]]) -> None:
    """Raise AssertionError with what disagrees. `spans` is all space in use, that of objects included."""
    taken: dict[int, list[tuple[int, int]]] = {number: [] for number in segments.by_number}
    for (number, offset), nbytes in spans:
        if number in taken:
            taken[number].append((offset, offset + num_granules(nbytes) * GRANULE_NBYTES))
    for number, segment in segments.by_number.items():
        if segment.tier is Tier.DRAM:
            _check_dram(segment, taken[number])
        else:
            _check_ssd(segment, index.table)
    dram = [each for each in segments.all() if each.tier is Tier.DRAM]
    assert segments.used_nbytes == sum(each.used_nbytes for each in dram), "used bytes are counted"
    assert segments.capacity_nbytes == sum(each.capacity_nbytes for each in dram), "the pool knows its size"
    _check_table(index.table)
    _check_order(index)
    _check_readable(index)


def object_spans(table: ObjectTable) -> Iterable[tuple[Place, int]]:
    for slot in table.slots():
        for replica in table.dram_replicas(slot):
            yield (replica.segment, replica.offset), table.nbytes[slot]


def _check_dram(segment: MountedSegment, taken: list[tuple[int, int]]) -> None:
    """Check that used spans and free ranges cover the segment without gap or overlap."""
    assert segment.allocator is not None
    segment.allocator.check_integrity()
    name = segment.name
    assert len(taken) == segment.num_replicas, f"{name}: {segment.num_replicas} replicas counted, {len(taken)} found"
    free = [(offset, offset + nbytes) for offset, nbytes in segment.allocator.free_ranges()]
    at = 0
    for start, end in sorted(taken + free):
        assert start == at, f"{name}: space at {at} has no owner or two"
        at = end
    assert at == segment.allocator.capacity_nbytes, f"{name}: space at the end is lost"


def _check_ssd(segment: MountedSegment, table: ObjectTable) -> None:
    sizes = [table.nbytes[slot] for slot in table.slots() if table.ssd_segment[slot] == segment.number]
    assert len(sizes) == segment.num_replicas, f"{segment.name}: records are counted"
    used = sum(num_granules(nbytes) * GRANULE_NBYTES for nbytes in sizes)
    assert used == segment.ssd_used_nbytes, f"{segment.name}: bytes are counted"


def _check_table(table: ObjectTable) -> None:
    slots = list(table.slots())
    assert len(slots) == len(table), "objects are counted"
    found = {slot: key for key, slot in table.slots_of.items()}
    assert found == {slot: table.keys[slot] for slot in slots}, "every key finds its slot"
    for slot in slots:
        assert table.dram_segment[slot] or table.ssd_segment[slot], "an object has a replica"
    dormant = [slot for slot in slots if table.flags[slot] & Flag.DORMANT]
    assert len(dormant) == table.num_dormant, "dormant objects are counted"
    assert set(table.extras) == {slot for slot in slots if table.flags[slot] & Flag.EXTRA}, "extra replicas are marked"
    hot_nbytes = 0
    for slot, mark in table.hot.items():
        assert mark.generations <= {each.generation for each in table.extras[slot]}, "replicas for readers are extra"
        hot_nbytes += len(mark.generations) * num_granules(table.nbytes[slot]) * GRANULE_NBYTES
    assert table.hot_nbytes == hot_nbytes, "replicas for readers are counted"
    assert set(table.group_of) == {slot for slot in slots if table.flags[slot] & Flag.GROUPED}, "groups are marked"
    members = {slot for group in table.groups.values() for slot in group}
    assert members == set(table.group_of), "groups know their members"


def _check_order(index: ObjectIndex) -> None:
    table = index.table
    index.policy.check_integrity()
    expected = {slot for slot in table.slots() if table.dram_segment[slot] and not table.flags[slot] & KEPT}
    assert len(index.policy) == len(expected), "the policy orders what may be evicted"
    pinned = {slot for slot in table.slots() if table.flags[slot] & Flag.PINNED}
    counts: Counter[int] = index.pins.counts()
    assert set(counts) == pinned, "pinned objects are marked"


def _check_readable(index: ObjectIndex) -> None:
    """Check that objects are dormant if and only if no replica can be read; during a sweep of
    losses they may differ.
    """
    table = index.table
    for slot in table.slots():
        dormant = bool(table.flags[slot] & Flag.DORMANT)
        assert dormant is not bool(index.placements(slot)) or index.losses.pending, "dormant objects cannot be read"
