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

_MAX_BUCKETS = 256
_FIRST_BUCKET_S = 1.0


class Meter:
    """Follows one rate, in bytes per second, that changes now and then."""

    __slots__ = ("_before_nbytes", "_bucket_end_s", "_bucket_s", "_closed", "_nbytes", "_since_s", "rate")

    def __init__(self) -> None:
        self.rate = 0.0
        self._since_s = 0.0
        self._nbytes = 0.0  # until since_s
        self._bucket_s = _FIRST_BUCKET_S
        self._bucket_end_s = _FIRST_BUCKET_S  # of the bucket that is filling
        self._before_nbytes = 0.0  # in all buckets before it
        self._closed: list[float] = []

    def set_rate(self, rate: float, now_s: float) -> None:
        """From now on that many bytes cross per second."""
        if now_s >= self._bucket_end_s:
            self._close_until(now_s)
        if self.rate:
            self._nbytes += self.rate * (now_s - self._since_s)
        self._since_s = now_s
        self.rate = rate

    def over_time(self, now_s: float) -> tuple[float, NDArray[np.float64]]:
        """(seconds per bucket, bytes in each) from time 0 until now; the last bucket may be part of one."""
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
            self._before_nbytes -= closed.pop()  # the first half of what is now the bucket that is filling
        self._closed = [one + other for one, other in zip(closed[::2], closed[1::2], strict=True)]
        self._bucket_s *= 2
        self._bucket_end_s = (len(self._closed) + 1) * self._bucket_s


_ROUNDING = 1e-12  # shares and free capacities that differ by less, relatively, are equal


class Link:
    """A resource with a capacity in bytes per second, and the flows over it in order of their start."""

    __slots__ = ("capacity", "flows", "left", "meter", "name", "nominal", "num_open")

    def __init__(self, name: str, capacity: float, meter: Meter) -> None:
        self.name = name
        self.nominal = capacity  # when it is neither slow nor failed
        self.capacity = capacity
        self.meter = meter
        self.flows: dict[Flow, None] = {}
        self.left = 0.0  # while sharing out: capacity not given away yet
        self.num_open = 0  # while sharing out: flows without a share yet


class Flow:
    """Bytes on their way over all links of a route at once. Read `tag`, `nbytes`, `rate`, `end_s`, `is_done`."""

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
        self.end_s = math.inf  # when it will end if nothing changes; when it did, once it is done
        self.is_done = False
        self.share = 0.0  # the rate to be; equal to `rate` outside of sharing out
        self.bottleneck: Link | None = None


def share_out(changed: Sequence[Link]) -> tuple[Iterable[Flow], Iterable[Link]]:
    """Sets `share` of every flow that the change of these links can concern; returns those flows and all links on
    their routes, whose `left` is then the capacity nobody uses."""
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
    """The usual case, cheaply: flows that meet at one link only, which is narrow enough to be what limits them all.
    Returns the links on their routes; None where it is not so."""
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
    """Any case: shares the members out among themselves, and lets those join who are concerned after all."""
    while True:
        links = dict.fromkeys([link for flow in members for link in flow.route])
        mixed = _open(members, links)
        _fill(links, len(members))
        num_before = len(members)
        for link in mixed:
            if _someone_lost_it(link):
                members.update(link.flows)
        if len(members) == num_before:
            return links


def _open(members: dict[Flow, None], links: dict[Link, None]) -> list[Link]:
    """Takes the members' shares back. Returns the links that others use too."""
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
    """Progressive filling: the link with the smallest share per open flow settles its flows, again and again. Shares
    of the other links only grow by that, so an entry of the heap that is out of date is a lower bound."""
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


def _someone_lost_it(link: Link) -> bool:
    """Whether this link is no bottleneck any more for a flow that takes it for one."""
    held = [flow.share for flow in link.flows if flow.bottleneck is link]
    if not held:
        return False
    if link.left > _ROUNDING * link.capacity:
        return True
    return min(held) < max([flow.share for flow in link.flows]) * (1 - _ROUNDING)
