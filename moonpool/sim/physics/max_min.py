"""Links, flows over them, and their max-min fair shares, recomputed only where a change can be felt. Pure.

An allocation is max-min fair exactly when every flow has a bottleneck: a link on its route that is full and on which no
other flow gets more. After a change only the flows on the changed links get new shares and the others keep theirs. If
this takes the bottleneck from some flow, the flows on that link join and the shares are computed again. The result is
the one fair allocation of the whole network, although most of the network is never visited.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from heapq import heapify, heappop, heappush

import numpy as np
from numpy.typing import NDArray

_MAX_BUCKETS = 256  # of a meter; when time runs past them, pairs are merged and each is twice as wide
_FIRST_BUCKET_S = 1.0


class Meter:
    """Counts the bytes that cross a link over time, in at most 256 equal buckets."""

    __slots__ = ("_before_nbytes", "_bucket_end_s", "_bucket_s", "_closed", "_nbytes", "_since_s", "rate")

    def __init__(self) -> None:
        self.rate = 0.0
        self._since_s = 0.0
        self._nbytes = 0.0  # up to since_s
        self._bucket_s = _FIRST_BUCKET_S
        self._bucket_end_s = _FIRST_BUCKET_S  # end of the current bucket
        self._before_nbytes = 0.0  # bytes in all buckets before it
        self._closed: list[float] = []

    def set_rate(self, rate: float, now_s: float) -> None:
        """Set the rate from now on, in bytes per second."""
        if now_s >= self._bucket_end_s:
            self._close_until(now_s)
        if self.rate:
            self._nbytes += self.rate * (now_s - self._since_s)
        self._since_s = now_s
        self.rate = rate

    def over_time(self, now_s: float) -> tuple[float, NDArray[np.float64]]:
        """Return the seconds per bucket and the bytes in each, from time 0 until now; the last may be partial."""
        self.set_rate(self.rate, now_s)
        return self._bucket_s, np.array([*self._closed, self._nbytes - self._before_nbytes])

    def _close_until(self, now_s: float) -> None:
        while now_s >= self._bucket_s * _MAX_BUCKETS:
            self._merge_pairs()
        while now_s >= self._bucket_end_s:
            self._nbytes += self.rate * (self._bucket_end_s - self._since_s)
            self._since_s = self._bucket_end_s
            self._closed.append(self._nbytes - self._before_nbytes)
            self._before_nbytes = self._nbytes
            self._bucket_end_s += self._bucket_s

    def _merge_pairs(self) -> None:
        closed = self._closed
        if len(closed) % 2:
            self._before_nbytes -= closed.pop()  # now the first half of the current bucket
        self._closed = [one + other for one, other in zip(closed[::2], closed[1::2], strict=True)]
        self._bucket_s *= 2
        self._bucket_end_s = (len(self._closed) + 1) * self._bucket_s


_ROUNDING = 1e-12  # shares and free capacities that differ by less, relatively, are equal


class Link:
    """A shared resource with a capacity in bytes per second, and its flows in the order of their start."""

    __slots__ = ("capacity", "flows", "left", "meter", "name", "nominal", "num_open")

    def __init__(self, name: str, capacity: float, meter: Meter) -> None:
        self.name = name
        self.nominal = capacity  # capacity when it is neither slow nor failed
        self.capacity = capacity
        self.meter = meter
        self.flows: dict[Flow, None] = {}
        self.left = 0.0  # during allocation: capacity not allocated yet
        self.num_open = 0  # during allocation: flows without a share yet


class Flow:
    """A transfer over all links of a route at once. Read `tag`, `nbytes`, `rate`, `end_s`, `is_done`."""

    __slots__ = (
        "bottleneck",
        "end_s",
        "is_done",
        "left_nbytes",
        "nbytes",
        "rate",
        "route",
        "seq",
        "share",
        "since_s",
        "tag",
    )

    def __init__(self, route: tuple[Link, ...], nbytes: float, tag: object, seq: int, now_s: float) -> None:
        self.route = route
        self.nbytes = nbytes
        self.tag = tag
        self.seq = seq
        self.rate = 0.0
        self.left_nbytes = nbytes  # at since_s
        self.since_s = now_s
        self.end_s = math.inf  # expected end if nothing changes; the actual end once it is done
        self.is_done = False
        self.share = 0.0  # the new rate; equal to `rate` outside of allocation
        self.bottleneck: Link | None = None


def allocate_shares(changed: Sequence[Link]) -> tuple[Iterable[Flow], Iterable[Link]]:
    """Set `share` of every flow that a change of these links can affect.

    Return these flows and all links on their routes; `left` of these links is then their unused capacity.
    """
    members: dict[Flow, None] = {}
    links: list[Link] = []
    for hub in sorted(changed, key=_num_flows, reverse=True):
        if hub.flows and next(iter(hub.flows)) not in members:
            star = _share_star(hub)
            if star is None:
                break
            links += star
            members.update(hub.flows)
    else:
        return members, links
    for link in changed:
        members.update(link.flows)
    return members, _share_web(members)


def _num_flows(link: Link) -> int:
    return len(link.flows)


def _share_star(hub: Link) -> list[Link] | None:
    """Handle the common case fast: flows that share only one link, which is the bottleneck of all of them.

    Return the links on their routes; None if it is not this case.
    """
    flows = hub.flows
    share = hub.capacity / len(flows)
    links = [hub]
    for flow in flows:
        for link in flow.route:
            if link is not hub:
                if len(link.flows) > 1 or link.capacity < share:
                    return None
                links.append(link)
    for link in links:
        link.left = link.capacity - share
    hub.left = 0.0
    for flow in flows:
        flow.share = share
        flow.bottleneck = hub
    return links


def _share_web(members: dict[Flow, None]) -> dict[Link, None]:
    """Handle any case: allocate among the members, and add affected flows until none is left."""
    while True:
        links = dict.fromkeys([link for flow in members for link in flow.route])
        mixed = _reset_shares(members, links)
        _fill(links, len(members))
        num_before = len(members)
        for link in mixed:
            if _bottleneck_changed(link):
                members.update(link.flows)
        if len(members) == num_before:
            return links


def _reset_shares(members: dict[Flow, None], links: dict[Link, None]) -> list[Link]:
    """Reset the members' shares. Return the links that other flows use too."""
    for link in links:
        link.left = link.capacity
        link.num_open = 0
    for flow in members:
        flow.share = -1.0
        for link in flow.route:
            link.num_open += 1
    mixed = [link for link in links if link.num_open != len(link.flows)]
    for link in mixed:
        kept = sum([flow.share for flow in link.flows if flow.share > 0])
        link.left = max(0.0, link.capacity - kept)
    return mixed


def _fill(links: dict[Link, None], num_open: int) -> None:
    """Progressive filling: fix the flows of the link with the smallest share per open flow, until no flow is open.

    This only raises the shares of other links, so an outdated entry of the heap is a lower bound.
    """
    heap = [(link.left / link.num_open, order, link) for order, link in enumerate(links)]
    heapify(heap)
    while num_open:
        _, order, link = heappop(heap)
        if not link.num_open:
            continue
        share = link.left / link.num_open
        if heap and share > heap[0][0]:
            heappush(heap, (share, order, link))
            continue
        num_open -= link.num_open
        for flow in link.flows:
            if flow.share < 0:
                flow.share = share
                flow.bottleneck = link
                for each in flow.route:
                    each.left = left if (left := each.left - share) > 0 else 0.0
                    each.num_open -= 1


def _bottleneck_changed(link: Link) -> bool:
    """Return whether this link is no longer the bottleneck of a flow that is recorded so."""
    held = [flow.share for flow in link.flows if flow.bottleneck is link]
    if not held:
        return False
    if link.left > _ROUNDING * link.capacity:
        return True
    return min(held) < max([flow.share for flow in link.flows]) * (1 - _ROUNDING)
