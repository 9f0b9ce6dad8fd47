"""The mounted segments: their capacity, how much of it is used, and where a new replica goes. Pure.

A DRAM segment takes part in allocation only after its node's first heartbeat: by then the node has fenced off every
generation granted before the mount, so that a writer of an earlier incarnation cannot write into the new one. After a
restart of the master the segment waits for the node's Recount too. An SSD segment is a log that its node writes: the
master counts its bytes and never chooses an offset in it. When its node leaves, the SSD segment is `away`, not gone,
because the node may come back with all records.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from moonpool.base.descriptor import SegmentDescriptor
from moonpool.base.errors import AlreadyExists, InvalidInput
from moonpool.master.state.allocator import OffsetAllocator
from moonpool.master.state.ramp import PlacementRamp
from moonpool.store.messages import GRANULE_NBYTES, SegmentInfo, SegmentStats, Tier, num_granules

# Missed heartbeats after which another process may mount the name, even if the old connection is still open.
_TAKEOVER_HEARTBEATS = 3
MAX_SEGMENT_NBYTES = {
    Tier.DRAM: 1 << 52,
    Tier.SSD: 1 << 63,
}  # offsets in an SSD log only grow
MAX_CAPACITY_NBYTES = 1 << 52  # of an SSD: sums over all of them can still be told

Place = tuple[int, int]  # (number of the segment, offset)


class MountedSegment:
    """One incarnation of a segment. Columns and journals name it by `number`."""

    __slots__ = (
        "acknowledged",
        "allocator",
        "capacity_nbytes",
        "descriptor",
        "draining",
        "emptied",
        "floor",
        "gone_since_s",
        "heard_s",
        "is_away",
        "is_behind",
        "node",
        "num_replicas",
        "number",
        "recount_above",
        "registry_address",
        "ssd_used_nbytes",
        "tier",
    )

    def __init__(
        self,
        number: int,
        node: str,
        descriptor: SegmentDescriptor,
        tier: Tier,
        registry_address: str | None,
        capacity_nbytes: int,
    ) -> None:
        self.number = number
        self.node = node
        self.descriptor = descriptor
        self.tier = tier
        self.registry_address = registry_address
        self.allocator: OffsetAllocator | None = OffsetAllocator(descriptor.nbytes) if tier is Tier.DRAM else None
        self.capacity_nbytes = capacity_nbytes if self.allocator is None else self.allocator.capacity_nbytes
        self.ssd_used_nbytes = 0
        self.num_replicas = 0
        self.floor = 0
        self.heard_s = 0.0
        self.acknowledged = False
        self.recount_above: int | None = None
        self.draining = False
        self.emptied = False  # its drain has ended well
        self.is_away = False
        self.is_behind = False  # its node would still refuse writes of the generations issued now
        self.gone_since_s: float | None = None  # its node's connection has ended

    @property
    def name(self) -> str:
        return self.descriptor.name

    @property
    def incarnation(self) -> int:
        return self.descriptor.incarnation

    @property
    def used_nbytes(self) -> int:
        return self.ssd_used_nbytes if self.allocator is None else self.allocator.used_nbytes

    @property
    def has_reported(self) -> bool:
        """Whether the node of this SSD has listed its records, and need not list them again."""
        return self.acknowledged and self.recount_above is None and not self.is_away

    @property
    def takes_new(self) -> bool:
        return self.acknowledged and not self.draining and not self.is_away

    @property
    def is_recounted(self) -> bool:
        """Whether this memory will take new objects after its node has answered a Recount, or has learned the new limit
        of generations.
        """
        waits = (self.recount_above is not None or self.is_behind) and not self.acknowledged
        return waits and self.tier is Tier.DRAM and not self.draining

    @property
    def status(self) -> str:
        if self.is_away:
            return "away"
        if not self.acknowledged:
            return "waiting"
        if self.draining:
            return "drained" if self.emptied else "draining"
        return "ok"

    def info(self) -> SegmentInfo:
        return SegmentInfo(self.descriptor, self.node, self.tier, self.registry_address)

    def stats(self, num_others: int = 0) -> SegmentStats:
        """Return what is in use, and the objects: `num_others` of the spans in use belong to none."""
        return SegmentStats(
            name=self.name,
            node=self.node,
            capacity_nbytes=self.capacity_nbytes,
            used_nbytes=self.used_nbytes,
            num_objects=self.num_replicas - num_others,
            tier=self.tier,
            status=self.status,
        )


class SegmentTable:
    def __init__(self) -> None:
        self.by_number: dict[int, MountedSegment] = {}
        self._by_name: dict[str, MountedSegment] = {}
        self.last_number = 0  # never reused, so the number of an ended segment stays invalid
        # Totals over all DRAM, read at every step of an eviction.
        self.capacity_nbytes = 0
        self.used_nbytes = 0
        self.num_dram_nodes = 0
        self._ssd_of_node: dict[str, MountedSegment] = {}
        self.ramp = PlacementRamp()

    def get(self, name: str) -> MountedSegment | None:
        return self._by_name.get(name)

    def find(self, name: str, incarnation: int) -> MountedSegment | None:
        segment = self._by_name.get(name)
        return segment if segment is not None and segment.incarnation == incarnation else None

    def is_live(self, number: int) -> bool:
        segment = self.by_number.get(number)
        return segment is not None and not segment.is_away

    def all(self) -> list[MountedSegment]:
        """Return the segments that are mounted or away, each name once."""
        return list(self._by_name.values())

    def of_tier(self, tier: Tier) -> Iterator[MountedSegment]:
        return (each for each in self._by_name.values() if each.tier is tier)

    def ssd_of(self, node: str) -> MountedSegment | None:
        return self._ssd_of_node.get(node)

    def count_totals(self) -> None:
        """Recompute the totals. Call this after a segment is added or removed, or an allocator is replaced."""
        dram = list(self.of_tier(Tier.DRAM))
        self.capacity_nbytes = sum(each.capacity_nbytes for each in dram)
        self.used_nbytes = sum(each.used_nbytes for each in dram)
        self.num_dram_nodes = len({each.node for each in dram})
        self._ssd_of_node = {each.node: each for each in self.of_tier(Tier.SSD)}

    # coming and going

    def check_mount(self, descriptor: SegmentDescriptor, tier: Tier, heartbeat_s: float, now_s: float) -> None:
        if tier is Tier.DRAM and (descriptor.granule_nbytes != GRANULE_NBYTES or descriptor.nbytes < GRANULE_NBYTES):
            raise InvalidInput(f"segment {descriptor.name!r} must be fenced in granules of {GRANULE_NBYTES} bytes")
        if tier not in MAX_SEGMENT_NBYTES:
            raise InvalidInput(f"a segment is in one tier, not {int(tier)}", param="tier")
        if not 0 < descriptor.nbytes <= MAX_SEGMENT_NBYTES[tier]:
            raise InvalidInput(
                f"segment {descriptor.name!r} must have 1 to {MAX_SEGMENT_NBYTES[tier]} bytes", param="nbytes"
            )
        known = self._by_name.get(descriptor.name)
        if known is None or known.is_away or known.gone_since_s is not None:
            return
        if now_s < known.heard_s + _TAKEOVER_HEARTBEATS * heartbeat_s:
            raise AlreadyExists(f"segment {descriptor.name!r} is mounted by another node that is alive; choose a name")

    def mount(
        self,
        node: str,
        descriptor: SegmentDescriptor,
        tier: Tier,
        registry_address: str | None,
        capacity_nbytes: int,
        number: int | None = None,
    ) -> MountedSegment:
        """Add a segment under its name. The segment that had the name keeps its number; the caller ends it."""
        number = self.last_number + 1 if number is None else number
        self.last_number = max(self.last_number, number)
        made = MountedSegment(number, node, descriptor, tier, registry_address, capacity_nbytes)
        self.by_number[number] = self._by_name[descriptor.name] = made
        if tier is Tier.DRAM:
            self.ramp.mounted(number)
        self.count_totals()
        return made

    def end(self, segment: MountedSegment) -> None:
        """Remove the segment for good."""
        self.by_number.pop(segment.number, None)
        self.ramp.ended(segment.number)
        if self._by_name.get(segment.name) is segment:
            del self._by_name[segment.name]
        self.count_totals()

    # space

    def could_hold(self, nbytes: int, num_replicas: int = 1) -> bool:
        """Return whether an empty pool would have places for that many bytes."""
        dram = (each for each in self.of_tier(Tier.DRAM) if each.takes_new)
        return sum(nbytes <= each.capacity_nbytes for each in dram) >= num_replicas

    def is_recounting(self, nbytes: int) -> bool:
        """Return whether memory whose node has not answered yet may soon have a place for that many bytes."""
        return any(each.is_recounted and nbytes <= each.capacity_nbytes for each in self.of_tier(Tier.DRAM))

    def place_one(self, nbytes: int, preferred: Sequence[str] = ()) -> Place | None:
        """Allocate space for one replica of one object; None if there is none. As place_many, but faster."""
        for segment in self._in_turn(preferred, set()):
            assert segment.allocator is not None, "ranked segments are in DRAM"
            offset = segment.allocator.allocate(nbytes)
            if offset is not None:
                self.used_nbytes += num_granules(nbytes) * GRANULE_NBYTES
                segment.num_replicas += 1
                return segment.number, offset
        return None

    def place_many(
        self,
        sizes: Sequence[int],
        num_replicas: int = 1,
        preferred: Sequence[str] = (),
        avoid_nodes: Iterable[str] = (),
    ) -> list[list[Place]]:
        """Allocate for each size space on up to `num_replicas` distinct segments, if possible on distinct nodes. A list
        is empty where there is no space.

        Preferred segments come first, then those with the most free bytes. A batch is placed contiguously as far as
        possible.
        """
        avoided = set(avoid_nodes)
        if num_replicas == 1 and sizes:
            first = next(self._in_turn(preferred, avoided), None)
            together = None if first is None else self._place_together(first, sizes)
            if together is not None:
                return together
        ranked = list(self._in_turn(preferred, avoided))
        places: list[list[Place]] = [[] for _ in sizes]
        nodes: list[set[str]] | None = [set() for _ in sizes] if num_replicas > 1 else None
        missing, smallest = list(range(len(sizes))), min(sizes, default=0)
        for share_node in (False, True) if num_replicas > 1 else (True,):
            for segment in ranked:
                if not missing:
                    return places
                assert segment.allocator is not None, "ranked segments are in DRAM"
                if segment.allocator.largest_free_nbytes() < smallest:
                    continue
                self._fill(segment, missing, sizes, places, nodes, share_node)
                missing = [at for at in missing if len(places[at]) < num_replicas]
        return places

    def _place_together(self, segment: MountedSegment, sizes: Sequence[int]) -> list[list[Place]] | None:
        """Allocate one replica each in one range of this segment. Return None and allocate nothing if no range is large
        enough.
        """
        number, allocator = segment.number, segment.allocator
        assert allocator is not None, "ranked segments are in DRAM"
        if sum(sizes) + len(sizes) * GRANULE_NBYTES > allocator.largest_free_nbytes():
            return None
        free_before = allocator.free_nbytes
        places: list[list[Place]] = [
            [(number, offset)] for offset in allocator.allocate_many(sizes) if offset is not None
        ]
        assert len(places) == len(sizes), "one range holds all of them"
        self.used_nbytes += free_before - allocator.free_nbytes
        segment.num_replicas += len(sizes)
        return places

    def _fill(
        self,
        segment: MountedSegment,
        missing: list[int],
        sizes: Sequence[int],
        places: list[list[Place]],
        nodes: list[set[str]] | None,
        share_node: bool,
    ) -> None:
        number, node = segment.number, segment.node
        if nodes is not None:
            missing = [
                at
                for at in missing
                if (share_node or node not in nodes[at]) and all(number != taken for taken, _ in places[at])
            ]
        assert segment.allocator is not None, "ranked segments are in DRAM"
        free_before = segment.allocator.free_nbytes
        offsets = segment.allocator.allocate_many([sizes[at] for at in missing])
        self.used_nbytes += free_before - segment.allocator.free_nbytes
        for at, offset in zip(missing, offsets, strict=True):
            if offset is not None:
                places[at].append((number, offset))
                segment.num_replicas += 1
                if nodes is not None:
                    nodes[at].add(node)

    def release(self, number: int, offset: int, nbytes: int) -> None:
        """Free DRAM space. Do nothing if its segment has ended."""
        segment = self.by_number.get(number)
        if segment is not None and segment.allocator is not None:
            segment.allocator.free(offset, nbytes)
            self.used_nbytes -= num_granules(nbytes) * GRANULE_NBYTES
            segment.num_replicas -= 1

    def count_ssd(self, number: int, nbytes: int, sign: int) -> None:
        """Count one more (+1) or one less (-1) record on an SSD segment."""
        segment = self.by_number.get(number)
        if segment is not None:
            segment.ssd_used_nbytes += sign * num_granules(nbytes) * GRANULE_NBYTES
            segment.num_replicas += sign

    def _in_turn(self, preferred: Sequence[str], avoid_nodes: set[str]) -> Iterator[MountedSegment]:
        """Yield the preferred segments, then the emptiest, then the rest. The rest is sorted only if the caller gets
        that far: there may be thousands of segments, and mostly the first one is enough.
        """
        asked = []
        for name in dict.fromkeys(preferred):
            segment = self._by_name.get(name)
            if segment is not None and self._is_usable(segment, avoid_nodes):
                asked.append(segment)
                yield segment
        others = [each for each in self._by_name.values() if self._is_usable(each, avoid_nodes) and each not in asked]
        if self.ramp:
            yield from self._ramped(others)
        elif others:
            emptiest = min(others, key=_emptiness)
            yield emptiest
            others.remove(emptiest)
            yield from sorted(others, key=_emptiness)

    def _ramped(self, segments: Sequence[MountedSegment]) -> Iterator[MountedSegment]:
        """Yield the emptiest segments first, and at the end those that have joined lately and had their share."""
        held = self.ramp.held_back([each.number for each in segments])
        for segment in sorted(segments, key=lambda each: (each.number in held, _emptiness(each))):
            if segment.number not in held:
                self.ramp.placed(segment.number)
            yield segment

    def _is_usable(self, segment: MountedSegment, avoid_nodes: set[str]) -> bool:
        return segment.tier is Tier.DRAM and segment.takes_new and segment.node not in avoid_nodes


def _emptiness(segment: MountedSegment) -> int:
    """Return a sort key: the emptiest segment first."""
    return segment.used_nbytes - segment.capacity_nbytes
