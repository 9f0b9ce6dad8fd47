"""Shared links on simulated time: NICs, PCIe, disks. Pure.

A flow uses all links of its route at once and gets its max-min fair share. Shares change when a flow starts or ends and
when a link slows, fails or is restored; nothing is computed between such calls. Flows that end at the same time are
returned in the order of their starts. Times must not decrease, and `advance` must have been called up to each of them.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from heapq import heapify, heappop, heappush

import numpy as np
from numpy.typing import NDArray

from moonpool.base.errors import InvalidInput
from moonpool.sim.physics.max_min import Flow, Link, Meter, allocate_shares

__all__ = ["Flow", "Network"]

_MAX_KNOWN_ROUTES = 65_536
_ABSENT = object()
_ROUNDING = 1e-10  # of a flow: what is left by arithmetic alone


class Network:
    """All links of the simulated cluster and their flows."""

    def __init__(self, capacities: Mapping[str, float] | None = None) -> None:
        self._links: dict[str, Link] = {}
        self._ends: list[tuple[float, int, int, Flow]] = []  # end, order of start, order of entry; some are outdated
        self._num_active = 0
        self._num_flows = 0
        self._num_entries = 0
        self._now_s = 0.0
        self._routes: dict[tuple[str, ...], tuple[Link, ...]] = {}  # cache of routes by link names
        for name, capacity in (capacities or {}).items():
            self.add(name, capacity)

    # --- flows ---

    def start(self, now_s: float, route: tuple[str, ...], nbytes: float, tag: object = None) -> Flow:
        """Start a flow over all links of the route. A flow of 0 bytes ends at once; over a failed link it waits."""
        self._move_to(now_s)
        links = self._routes.get(route) or self._find_route(route)
        if not 0 <= nbytes < math.inf:
            raise InvalidInput(f"a flow of {nbytes} bytes")
        self._num_flows += 1
        self._num_active += 1
        flow = Flow(links, nbytes, tag, self._num_flows, now_s)
        if not nbytes:
            self._schedule(flow, now_s)
            return flow
        is_alone = True
        for link in links:
            if link.flows:
                is_alone = False
            link.flows[flow] = None
        if is_alone:
            self._run_alone(flow, now_s)
        else:
            self._reshare(links, now_s)
        return flow

    def next_end(self) -> tuple[float, Flow] | None:
        """Return the time and the flow of the next end, if nothing changes before; None without flows."""
        ends = self._ends
        while ends:
            end_s, _, _, flow = ends[0]
            if flow.end_s == end_s and not flow.is_done:
                return end_s, flow
            heappop(ends)
        return None

    def advance(self, now_s: float) -> list[Flow]:
        """Move the time to `now_s`. Return the flows that ended by then, in the order of their ends."""
        finished: list[Flow] = []
        ends = self._ends
        while ends and ends[0][0] <= now_s:
            finished += self._end_all_at(ends[0][0])
            ends = self._ends
        self._move_to(now_s)
        return finished

    def left_nbytes(self, flow: Flow) -> float:
        """Return the bytes that a flow has still to move."""
        if flow.is_done:
            return flow.left_nbytes
        return max(0.0, flow.left_nbytes - flow.rate * (self._now_s - flow.since_s))

    # --- links ---

    @property
    def link_names(self) -> Collection[str]:
        return self._links.keys()

    def add(self, name: str, capacity: float) -> None:
        """Add a link with a capacity in bytes per second."""
        if name in self._links:
            raise InvalidInput(f"there is a link {name!r} already")
        if not 0 <= capacity < math.inf:
            raise InvalidInput(f"link {name!r} with {capacity} bytes per second")
        self._links[name] = Link(name, capacity, Meter())

    def slow(self, now_s: float, name: str, share: float) -> None:
        """Set the link's capacity to a share of its nominal one; with 0 its flows wait."""
        if not 0 <= share <= 1:
            raise InvalidInput(f"a link cannot have {share} of its capacity")
        self._move_to(now_s)
        link = self._link(name)
        link.capacity = link.nominal * share
        self._reshare((link,), now_s)

    def restore(self, now_s: float, name: str) -> None:
        """Give the link its whole capacity again."""
        self.slow(now_s, name, 1.0)

    def fail(self, now_s: float, name: str) -> list[Flow]:
        """Fail the link. Return its flows, which are dropped; new flows wait for `restore`."""
        self._move_to(now_s)
        link = self._link(name)
        link.capacity = 0.0
        cut = list(link.flows)
        self._drop(cut, now_s)
        return cut

    def nbytes_over_time(self, name: str) -> tuple[float, NDArray[np.float64]]:
        """Return the seconds per bucket and the bytes that crossed the link in each, from time 0 until now."""
        return self._link(name).meter.over_time(self._now_s)

    # --- internals ---

    def _link(self, name: str) -> Link:
        try:
            return self._links[name]
        except KeyError:
            raise InvalidInput(f"no link {name!r}") from None

    def _find_route(self, route: tuple[str, ...]) -> tuple[Link, ...]:
        if not route or len(set(route)) != len(route):
            raise InvalidInput(f"a route needs at least one link, each once, not {list(route)}")
        if len(self._routes) >= _MAX_KNOWN_ROUTES:
            self._routes.clear()
        self._routes[route] = links = tuple(self._link(name) for name in route)
        return links

    def _move_to(self, now_s: float) -> None:
        if now_s < self._now_s:
            raise InvalidInput(f"time goes back from {self._now_s} to {now_s} s")
        if self._ends and self._ends[0][0] < now_s and (upcoming := self.next_end()) and upcoming[0] < now_s:
            raise InvalidInput(f"a flow ends at {upcoming[0]} s: call advance() before a call at {now_s} s")
        self._now_s = now_s

    def _run_alone(self, flow: Flow, now_s: float) -> None:
        """Set the rate of a flow that shares no link: that of its narrowest link."""
        route = flow.route
        narrowest = route[0]
        for link in route:
            if link.capacity < narrowest.capacity:
                narrowest = link
        flow.bottleneck = narrowest
        flow.rate = flow.share = rate = narrowest.capacity
        for link in route:
            link.meter.set_rate(rate, now_s)
        if rate:
            self._schedule(flow, now_s + flow.nbytes / rate)

    def _schedule(self, flow: Flow, end_s: float) -> None:
        flow.end_s = end_s
        if end_s < math.inf:
            self._num_entries += 1
            heappush(self._ends, (end_s, flow.seq, self._num_entries, flow))
            if len(self._ends) > 4 * self._num_active + 64:
                self._ends = [entry for entry in self._ends if entry[3].end_s == entry[0] and not entry[3].is_done]
                heapify(self._ends)

    def _end_all_at(self, end_s: float) -> list[Flow]:
        """End the flows due at that time, then allocate their capacity to the others once."""
        ended: list[Flow] = []
        ends = self._ends
        while ends and ends[0][0] == end_s:
            flow = heappop(ends)[3]
            if flow.end_s == end_s and not flow.is_done:
                flow.left_nbytes = 0.0
                flow.is_done = True
                ended.append(flow)
        if ended:
            self._now_s = end_s
            self._leave(ended, end_s)
        return ended

    def _drop(self, flows: Iterable[Flow], now_s: float) -> None:
        dropped = list(flows)
        for flow in dropped:
            flow.left_nbytes = self.left_nbytes(flow)
            flow.is_done = True
            flow.end_s = now_s
        self._leave(dropped, now_s)

    def _leave(self, flows: list[Flow], now_s: float) -> None:
        self._num_active -= len(flows)
        shared: dict[Link, None] = {}
        for flow in flows:
            for link in flow.route:
                if link.flows.pop(flow, _ABSENT) is _ABSENT:
                    continue  # a flow of 0 bytes
                if link.flows:
                    shared[link] = None
                else:
                    shared.pop(link, None)
                    link.meter.set_rate(0.0, now_s)
        if shared:
            self._reshare(tuple(shared), now_s)

    def _reshare(self, changed: Sequence[Link], now_s: float) -> None:
        flows, links = allocate_shares(changed)
        for link in links:
            link.meter.set_rate(link.capacity - link.left, now_s)
        for flow in flows:
            share = flow.share
            if share != flow.rate:
                left = flow.left_nbytes - flow.rate * (now_s - flow.since_s)
                if left <= _ROUNDING * flow.nbytes:
                    left = 0.0  # it has arrived, even if its links fail now
                flow.left_nbytes = left
                flow.since_s = now_s
                flow.rate = share
                self._schedule(flow, now_s + left / share if share else math.inf if left else now_s)
