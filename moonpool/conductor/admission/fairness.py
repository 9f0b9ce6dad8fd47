"""Decides which tenant's turn it is: self-clocked fair queueing. Pure.

Each tenant with a waiting request has a tag: the tag at which its turn began + the work of its first request. The
tenant with the smallest tag is served next, and its tag becomes the clock. A tenant that begins to wait starts at the
clock, so idle time gives no claim, and a tenant alone gets everything. What other conductors serve of a tenant that
waits here moves its tag, too.

Bound: over any period in which two tenants both wait, the work served to each differs by at most the largest request of
the one plus that of the other, however much either has asked for. In plain start-time fair queueing the clock is the
tag at which the served turn began, and an endless stream of new tenants holds the clock and starves an old one. Here
each request that is served moves the clock.
"""

from __future__ import annotations

from collections.abc import Hashable
from heapq import heapify, heappop, heappush
from typing import Generic, NamedTuple, TypeVar

_FEW = 64

Tenant = TypeVar("Tenant", bound=Hashable)


class _Turn(NamedTuple):
    ends: float  # the tag
    sequence: int  # breaks ties: first come, first served
    begins: float


class FairTurns(Generic[Tenant]):
    """The order of tenants; the caller keeps each tenant's queue of requests. `work` is that of the tenant's first
    request. A call takes O(log tenants); tenants that do not wait take no memory."""

    __slots__ = ("_clock", "_heap", "_sequence", "_turns")

    def __init__(self) -> None:
        self._turns: dict[Tenant, _Turn] = {}
        self._heap: list[tuple[float, int, Tenant]] = []  # the same, by tag; some entries are stale
        self._clock = 0.0
        self._sequence = 0

    def __len__(self) -> int:
        return len(self._turns)

    def enter(self, tenant: Tenant, work: float) -> None:
        """Add a tenant, whose first request waits from now on."""
        assert tenant not in self._turns, "a tenant enters once"
        # Tenants that wait may all be ahead of the clock, by what was served of them elsewhere.
        begins = self._turns[self.first()].begins if self._turns else self._clock
        self._put(tenant, max(self._clock, begins), work)

    def change(self, tenant: Tenant, work: float) -> None:
        """Update a tenant whose first request is another one now."""
        self._put(tenant, self._turns[tenant].begins, work)

    def leave(self, tenant: Tenant) -> None:
        """Remove a tenant without waiting requests."""
        del self._turns[tenant]
        if not self._turns:
            self._heap.clear()
            self._clock = 0.0  # no tenant waits, so all are equal again and tags stay small

    def first(self) -> Tenant:
        """Return the tenant to serve next; at least one must wait."""
        while not self._is_current(self._heap[0]):
            heappop(self._heap)
        return self._heap[0][2]

    def serve(self, tenant: Tenant) -> None:
        """Count the tenant's first request as served; the caller calls `change` or `leave` next."""
        turn = self._turns[tenant]
        self._clock = turn.ends
        self._turns[tenant] = turn._replace(begins=turn.ends)

    def served_elsewhere(self, tenant: Tenant, work: float) -> None:
        """Count work of a tenant that others have served. It costs a tenant its turn that waits here meanwhile."""
        turn = self._turns.get(tenant)
        if turn is not None:
            self._put(tenant, turn.begins + work, turn.ends - turn.begins)

    def _put(self, tenant: Tenant, begins: float, work: float) -> None:
        self._sequence += 1
        turn = self._turns[tenant] = _Turn(begins + work, self._sequence, begins)
        heappush(self._heap, (turn.ends, turn.sequence, tenant))
        if len(self._heap) > 2 * len(self._turns) + _FEW:
            self._heap = [entry for entry in self._heap if self._is_current(entry)]
            heapify(self._heap)

    def _is_current(self, entry: tuple[float, int, Tenant]) -> bool:
        turn = self._turns.get(entry[2])
        return turn is not None and turn.sequence == entry[1]
