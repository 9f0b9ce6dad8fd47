"""Failures as they happen: links fail or slow down, memory is lost, workers stop and come back empty.

PoolState decides what happens to the blocks of a lost node and to the orders that the node had.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import prod

from moonpool.base.descriptor import SegmentDescriptor
from moonpool.sim.physics.hardware import NodeSpec
from moonpool.sim.world.clock import SimClock
from moonpool.sim.world.components import ClusterComponents
from moonpool.sim.world.config import Failure
from moonpool.sim.world.pool import SimPool
from moonpool.store.messages import Tier


class PoolMembers:
    """The nodes of a simulated pool: a lost node loses all that it held, and comes back empty."""

    def __init__(self, clock: SimClock, pool: SimPool) -> None:
        self._clock, self._pool = clock, pool
        self._away: dict[str, list[tuple[SegmentDescriptor, Tier]]] = {}

    def node_lost(self, node: str) -> None:
        """Unmount the segments of a node: its memory is lost, its disks will come back empty."""
        state, now_s = self._pool.state, self._clock.now_s
        segments = [each for each in state.table_of_segments.all() if each.node == node and not each.is_away]
        self._away[node] = [(each.descriptor, each.tier) for each in segments]
        for descriptor, _ in self._away[node]:
            state.unmount(descriptor.name, descriptor.incarnation, now_s)
        self._settle()

    def node_back(self, node: str) -> None:
        state, now_s = self._pool.state, self._clock.now_s
        for before, tier in self._away.pop(node):
            descriptor = _next_incarnation(before)
            capacity_nbytes = descriptor.nbytes if tier is Tier.SSD else None
            state.mount(node, descriptor, now_s, tier=tier, capacity_nbytes=capacity_nbytes)
            state.heartbeat(descriptor.name, descriptor.incarnation, now_s)
            if tier is Tier.SSD:
                state.members.inventory(descriptor.name, descriptor.incarnation, [], True, now_s)
        self._settle()

    def _settle(self) -> None:
        """Run the ticks that a real master would run soon."""
        while self._pool.state.tick(self._clock.now_s):
            pass
        self._pool.process_changes()


def _next_incarnation(descriptor: SegmentDescriptor) -> SegmentDescriptor:
    return SegmentDescriptor(
        name=descriptor.name,
        host=descriptor.host,
        incarnation=descriptor.incarnation + 1,
        nbytes=descriptor.nbytes,
        granule_nbytes=descriptor.granule_nbytes,
        endpoints=(),
    )


class Outages:
    """Calls `on_lost` with a worker that has stopped, after its links have failed; `on_back` with one that is back.

    A worker of several nodes is down as long as any of them is.
    """

    def __init__(
        self,
        components: ClusterComponents,
        spec: NodeSpec,
        members: PoolMembers | None,
        on_lost: Callable[[str], None],
        on_back: Callable[[str], None],
    ) -> None:
        self._components, self._clock, self._spec, self._members = components, components.clock, spec, members
        self._on_lost, self._on_back = on_lost, on_back
        self._down: set[str] = set()
        self._slow: dict[str, list[float]] = {}  # node -> shares of its bandwidth, one per active failure

    def schedule(self, failures: tuple[Failure, ...]) -> None:
        for failure in sorted(failures, key=lambda each: each.at_s):
            if failure.kind == "crash":
                begin, end = partial(self._crash, failure.node), partial(self._recover, failure.node)
            else:
                share = 0.0 if failure.kind == "frozen" else 1 / failure.factor
                begin, end = partial(self._slow_down, failure.node, share), partial(self._speed_up, failure.node, share)
            self._clock.call_at(failure.at_s, begin)
            if failure.lasts_s is not None:
                self._clock.call_at(failure.end_s, end)

    def _crash(self, node: str) -> None:
        worker = self._components.worker_of[node]
        was_up = not self._is_down(worker)
        self._down.add(node)
        self._clock.fail_links(list(self._spec.link_capacities(node)))
        if self._members is not None:
            self._members.node_lost(node)
        if was_up:
            self._on_lost(worker)

    def _recover(self, node: str) -> None:
        self._down.remove(node)
        self._clock.restore_links(list(self._spec.link_capacities(node)))
        self._set_bandwidth(node)
        if self._members is not None:
            self._members.node_back(node)
        worker = self._components.worker_of[node]
        if not self._is_down(worker):
            self._on_back(worker)

    def _is_down(self, worker: str) -> bool:
        return any(self._components.worker_of[node] == worker for node in self._down)

    def _slow_down(self, node: str, share: float) -> None:
        self._slow.setdefault(node, []).append(share)
        self._set_bandwidth(node)

    def _speed_up(self, node: str, share: float) -> None:
        self._slow[node].remove(share)
        self._set_bandwidth(node)

    def _set_bandwidth(self, node: str) -> None:
        if node not in self._down:
            for link in (f"{node}/nic_out", f"{node}/nic_in"):
                self._clock.network.slow(self._clock.now_s, link, prod(self._slow.get(node, [])))
