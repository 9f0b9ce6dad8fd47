"""The mounted segments: who offers space, how much of it is used, and where a new replica goes. Pure.

A segment takes part in allocation only after its node's first heartbeat: by then the node has fenced off every
generation granted before the mount, so that a writer of an earlier life cannot write into a new one.
"""

from __future__ import annotations

from moonpool.base.errors import InvalidInput
from moonpool.store.allocator import GRANULE_NBYTES, OffsetAllocator
from moonpool.store.messages import Placement, SegmentStats
from moonpool.transfer.descriptor import SegmentDescriptor


class MountedSegment:
    """One segment in its current incarnation."""

    __slots__ = ("acknowledged", "allocator", "descriptor", "floor", "heard_s", "node", "num_replicas")

    def __init__(self, node: str, descriptor: SegmentDescriptor, floor: int, now_s: float) -> None:
        self.node = node
        self.descriptor = descriptor
        self.floor = floor
        self.heard_s = now_s
        self.acknowledged = False
        self.allocator = OffsetAllocator(descriptor.nbytes)
        self.num_replicas = 0

    def stats(self) -> SegmentStats:
        return SegmentStats(
            name=self.descriptor.name,
            node=self.node,
            capacity_nbytes=self.allocator.capacity_nbytes,
            used_nbytes=self.allocator.used_nbytes,
            num_objects=self.num_replicas,
        )


class SegmentTable:
    def __init__(self) -> None:
        self._mounted: dict[str, MountedSegment] = {}

    def get(self, name: str) -> MountedSegment | None:
        return self._mounted.get(name)

    def all(self) -> list[MountedSegment]:
        return list(self._mounted.values())

    @property
    def capacity_nbytes(self) -> int:
        return sum(each.allocator.capacity_nbytes for each in self._mounted.values())

    @property
    def used_nbytes(self) -> int:
        return sum(each.allocator.used_nbytes for each in self._mounted.values())

    def mount(self, node: str, descriptor: SegmentDescriptor, floor: int, now_s: float) -> MountedSegment:
        """Voids an earlier incarnation. Grants on the new one have generations above `floor`."""
        if descriptor.granule_nbytes != GRANULE_NBYTES or descriptor.nbytes < GRANULE_NBYTES:
            raise InvalidInput(f"segment {descriptor.name!r} must be fenced in granules of {GRANULE_NBYTES} bytes")
        mounted = self._mounted[descriptor.name] = MountedSegment(node, descriptor, floor, now_s)
        return mounted

    def heartbeat(self, name: str, incarnation: int, now_s: float) -> bool:
        """False when this incarnation is not mounted."""
        segment = self._of(name, incarnation)
        if segment is None:
            return False
        segment.heard_s = now_s
        segment.acknowledged = True
        return True

    def unmount(self, name: str, incarnation: int) -> bool:
        """True when it was mounted."""
        if self._of(name, incarnation) is None:
            return False
        del self._mounted[name]
        return True

    def expire(self, silent_since_s: float) -> list[str]:
        """Drops the segments not heard of since then; their names."""
        silent = [name for name, each in self._mounted.items() if each.heard_s <= silent_since_s]
        for name in silent:
            del self._mounted[name]
        return silent

    def is_alive(self, placement: Placement) -> bool:
        return self._of(placement.segment, placement.incarnation) is not None

    def could_hold(self, nbytes: int) -> bool:
        """Whether an empty pool would have a place for that much."""
        return any(nbytes <= each.allocator.capacity_nbytes for each in self._mounted.values() if each.acknowledged)

    def place(self, nbytes: int, num_replicas: int, preferred: str | None) -> tuple[Placement, ...]:
        """Space on up to `num_replicas` distinct segments, on distinct nodes first; empty when there is none.

        The preferred segment comes first, then those with the most free bytes.
        """
        ranked = self._ranked(preferred)
        chosen: dict[str, Placement] = {}
        nodes: set[str] = set()
        for share_node in (False, True):
            for segment in ranked:
                name = segment.descriptor.name
                if len(chosen) == num_replicas:
                    break
                if name in chosen or (segment.node in nodes and not share_node):
                    continue
                offset = segment.allocator.allocate(nbytes)
                if offset is not None:
                    segment.num_replicas += 1
                    nodes.add(segment.node)
                    chosen[name] = Placement(name, offset, segment.descriptor.incarnation)
        return tuple(chosen.values())

    def release(self, placement: Placement, nbytes: int) -> None:
        """Gives space back; that of a lost incarnation went with it."""
        segment = self._of(placement.segment, placement.incarnation)
        if segment is not None:
            segment.allocator.free(placement.offset, nbytes)
            segment.num_replicas -= 1

    def _ranked(self, preferred: str | None) -> list[MountedSegment]:
        usable = [each for each in self._mounted.values() if each.acknowledged]
        if len(usable) > 1:
            usable.sort(key=lambda each: (each.descriptor.name != preferred, -each.allocator.free_nbytes))
        return usable

    def _of(self, name: str, incarnation: int) -> MountedSegment | None:
        segment = self._mounted.get(name)
        return segment if segment is not None and segment.descriptor.incarnation == incarnation else None
