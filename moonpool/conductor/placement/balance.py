"""How hot prefixes spread over workers, and how that is seen. Pure.

Nothing is predicted and nothing is ordered. By the paper's rule a request that load sends to another worker than the
one with the longest prefix makes the new replica itself: it pulls what is missing, or computes it again where that is
faster, and the worker keeps it like any other block. A replica that has become cold goes by the worker's own eviction.
Replicas of objects inside the pool are the store's affair (master/state/hot_keys.py counts look-ups and copies; its
eviction drops): two minds about the same copies would fight.

What is left to do here is to count: how many blocks were replicated and how, and which prefixes are hot. Counts fade,
so that a prefix nobody asks for leaves the list; the list is bounded.
"""

from __future__ import annotations

import heapq
from typing import NamedTuple

from moonpool.conductor.placement.leading import Leading
from moonpool.conductor.placement.pricing import PricedPlacement

HALF_LIFE_S = 300.0
_MIN_COUNT = 0.5  # colder ones leave the list when it is full


class Replicated(NamedTuple):
    """Blocks that a request copies to its worker although another worker has them."""

    pulled: int
    computed: int


def replicated(leading: Leading, plan: PricedPlacement) -> Replicated:
    """`leading` knows the runs of all workers that were asked about."""
    longest = leading.groups[-1][0]  # groups ascend
    missing = max(0, longest - plan.local)
    pulled = min(missing, plan.pulled)
    return Replicated(pulled, missing - pulled)


class HotPrefix(NamedTuple):
    """`print_` is the fingerprint of the prefix's last block; of its requests, older ones count less."""

    print_: int
    num_blocks: int
    requests: float


class HotPrefixes:
    """Remembers at most `capacity` prefixes. When it is full, the colder half makes room, however warm."""

    def __init__(self, capacity: int = 4096) -> None:
        assert capacity >= 2
        self._capacity = capacity
        self._counts: dict[int, tuple[int, float, float]] = {}  # print: blocks, count, when it was so

    def __len__(self) -> int:
        return len(self._counts)

    def note(self, prints: list[int], num_blocks: int, now_s: float) -> None:
        """A request reused that many leading blocks; none says nothing."""
        if not num_blocks:
            return
        key = prints[num_blocks - 1]
        _, count, at_s = self._counts.get(key, (0, 0.0, now_s))
        self._counts[key] = num_blocks, _faded(count, at_s, now_s) + 1.0, now_s
        if len(self._counts) > self._capacity:
            self._make_room(now_s)

    def hottest(self, limit: int, now_s: float) -> list[HotPrefix]:
        found = (
            HotPrefix(key, blocks, _faded(count, at_s, now_s)) for key, (blocks, count, at_s) in self._counts.items()
        )
        return heapq.nlargest(limit, found, key=lambda one: (one.requests, one.print_))

    def _make_room(self, now_s: float) -> None:
        keep = self.hottest(self._capacity // 2, now_s)
        self._counts = {one.print_: (one.num_blocks, one.requests, now_s) for one in keep if one.requests >= _MIN_COUNT}


def _faded(count: float, at_s: float, now_s: float) -> float:
    return float(count * 0.5 ** ((now_s - at_s) / HALF_LIFE_S))
