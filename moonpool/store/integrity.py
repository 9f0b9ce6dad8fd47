"""Do the parts of the pool's state agree? For tests and for idle moments; costs time in proportion to its size."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from moonpool.store.allocator import GRANULE_NBYTES, num_granules
from moonpool.store.index import ObjectIndex
from moonpool.store.messages import Placement
from moonpool.store.objects import PendingPut
from moonpool.store.segments import MountedSegment, SegmentTable
from moonpool.store.space import SpaceReturns


def check_pool(
    segments: SegmentTable, index: ObjectIndex, puts: Mapping[bytes, PendingPut], space: SpaceReturns
) -> None:
    """Raises AssertionError naming what disagrees."""
    spans: dict[str, list[tuple[int, int]]] = {each.descriptor.name: [] for each in segments.all()}
    for placement, nbytes in _all_spans(index, puts, space):
        if segments.is_alive(placement):
            end = placement.offset + num_granules(nbytes) * GRANULE_NBYTES
            spans[placement.segment].append((placement.offset, end))
    for segment in segments.all():
        _check_segment(segment, spans[segment.descriptor.name])
    _check_index(index, puts)


def _all_spans(
    index: ObjectIndex, puts: Mapping[bytes, PendingPut], space: SpaceReturns
) -> Iterator[tuple[Placement, int]]:
    for entry in index.entries():
        for placement in entry.placements:
            yield placement, entry.nbytes
    for put in puts.values():
        for placement in put.placements:
            yield placement, put.nbytes
    yield from space.spans()


def _check_segment(segment: MountedSegment, taken: list[tuple[int, int]]) -> None:
    """Taken spans and free ranges tile the segment without gap or overlap."""
    segment.allocator.check_integrity()
    name = segment.descriptor.name
    assert len(taken) == segment.num_replicas, f"{name}: replicas are counted"
    free = [(offset, offset + nbytes) for offset, nbytes in segment.allocator.free_ranges()]
    at = 0
    for start, end in sorted(taken + free):
        assert start == at, f"{name}: space at {at} is owned by nobody or by two"
        at = end
    assert at == segment.allocator.capacity_nbytes, f"{name}: space at the end is lost"


def _check_index(index: ObjectIndex, puts: Mapping[bytes, PendingPut]) -> None:
    entries = list(index.entries())
    assert len(entries) == len(index), "objects are counted"
    assert all(entry.placements for entry in entries), "an object has a replica"
    assert not puts.keys() & {entry.key for entry in entries}, "a key is stored or being written, not both"
    index.policy.check_integrity()
    ordered = {id(entry) for entry in index.policy.victims()}
    assert ordered == {id(entry) for entry in entries if entry.evictable}, "the policy orders what may be evicted"
    pins = Counter(map(id, index.pins.entries()))
    assert all(pins[id(entry)] == entry.num_pins for entry in entries), "pins are counted"
