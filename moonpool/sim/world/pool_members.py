"""Nodes of a simulated pool that go, with all they held, and come back empty. What becomes of the blocks, and of what
nodes were ordered to do, is up to PoolState."""

from __future__ import annotations

from moonpool.base.descriptor import SegmentDescriptor
from moonpool.master.state.segments import MountedSegment
from moonpool.sim.world.pool import SimPool
from moonpool.sim.world.timers import SimTimers
from moonpool.store.messages import Tier


class PoolMembers:
    def __init__(self, clock: SimTimers, pool: SimPool) -> None:
        self._clock, self._pool = clock, pool
        self._away: dict[str, list[tuple[SegmentDescriptor, Tier]]] = {}

    def gone(self, node: str) -> None:
        """Its memory is lost; its disks are away, and are to come back with nothing on them."""
        state, now_s = self._pool.state, self._clock.now_s
        mine = [each for each in state.table_of_segments.all() if each.node == node and not each.is_away]
        self._away[node] = [_entry(each) for each in mine]
        for descriptor, _ in self._away[node]:
            state.unmount(descriptor.name, descriptor.incarnation, now_s)
        self._settle()

    def back(self, node: str) -> None:
        state, now_s = self._pool.state, self._clock.now_s
        for before, tier in self._away.pop(node):
            descriptor = _later(before)
            capacity_nbytes = descriptor.nbytes if tier is Tier.SSD else None
            state.mount(node, descriptor, now_s, tier=tier, capacity_nbytes=capacity_nbytes)
            state.heartbeat(descriptor.name, descriptor.incarnation, now_s)
            if tier is Tier.SSD:
                state.members.inventory(descriptor.name, descriptor.incarnation, [], True, now_s)
        self._settle()

    def _settle(self) -> None:
        """As a master does within its next ticks."""
        while self._pool.state.tick(self._clock.now_s):
            pass
        self._pool.follow_up()


def _entry(segment: MountedSegment) -> tuple[SegmentDescriptor, Tier]:
    return segment.descriptor, segment.tier


def _later(descriptor: SegmentDescriptor) -> SegmentDescriptor:
    return SegmentDescriptor(
        name=descriptor.name,
        host=descriptor.host,
        incarnation=descriptor.incarnation + 1,
        nbytes=descriptor.nbytes,
        granule_nbytes=descriptor.granule_nbytes,
        endpoints=(),
    )
