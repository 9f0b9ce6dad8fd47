"""Whose turn it is: fair queueing of tenants by weight, self-clocked. Pure.

Every tenant with something waiting has a tag: the tag at which its turn began + its first request's work / its weight.
The smallest tag is served next and becomes the clock; what comes then begins at the clock, so that nobody has a claim
on time when he asked for nothing, and a tenant alone gets everything.

Bound: over any time in which two tenants both wait, the work served to each divided by its weight differs by at most
(largest request / weight) of the one plus that of the other. It does not matter how much either has asked for. In plain
start-time fair queueing the clock is the tag at which the served turn began; there an endless stream of new tenants
holds the clock and starves an old one. Here each request that is served moves the clock on.
"""

from __future__ import annotations

from collections.abc import Hashable
from heapq import heapify, heappop, heappush
from typing import Generic, NamedTuple, TypeVar

_FEW = 64

Tenant = TypeVar("Tenant", bound=Hashable)


class _Turn(NamedTuple):
    ends: float  # the tag
    sequence: int  # ties: who came first
    begins: float


class FairTurns(Generic[Tenant]):
    """Of tenants, not of requests: the caller keeps each tenant's own queue. `share` is work / weight of the tenant's
    first request. O(log tenants) a call; tenants that do not wait take no memory."""

    __slots__ = ("_clock", "_heap", "_sequence", "_turns")

    def __init__(self) -> None:
        self._turns: dict[Tenant, _Turn] = {}
        self._heap: list[tuple[float, int, Tenant]] = []  # the same in order; some entries no longer count
        self._clock = 0.0
        self._sequence = 0

    def __len__(self) -> int:
        return len(self._turns)

    def enter(self, tenant: Tenant, share: float) -> None:
        """The tenant has something waiting from now on."""
        assert tenant not in self._turns, "a tenant enters once"
        self._put(tenant, self._clock, share)

    def change(self, tenant: Tenant, share: float) -> None:
        """Its first request went without being served; another is the first now."""
        self._put(tenant, self._turns[tenant].begins, share)

    def leave(self, tenant: Tenant) -> None:
        """It has nothing waiting any more."""
        del self._turns[tenant]
        if not self._turns:
            self._heap.clear()
            self._clock = 0.0  # nobody waits, all are equal: tags stay small

    def first(self) -> Tenant:
        """Whose turn it is; there must be one."""
        while not self._counts(self._heap[0]):
            heappop(self._heap)
        return self._heap[0][2]

    def serve(self, tenant: Tenant) -> None:
        """Its first request is served; `change` or `leave` must follow."""
        turn = self._turns[tenant]
        self._clock = turn.ends
        self._turns[tenant] = turn._replace(begins=turn.ends)

    def _put(self, tenant: Tenant, begins: float, share: float) -> None:
        self._sequence += 1
        turn = self._turns[tenant] = _Turn(begins + share, self._sequence, begins)
        heappush(self._heap, (turn.ends, turn.sequence, tenant))
        if len(self._heap) > 2 * len(self._turns) + _FEW:
            self._heap = [entry for entry in self._heap if self._counts(entry)]
            heapify(self._heap)

    def _counts(self, entry: tuple[float, int, Tenant]) -> bool:
        turn = self._turns.get(entry[2])
        return turn is not None and turn.sequence == entry[1]
