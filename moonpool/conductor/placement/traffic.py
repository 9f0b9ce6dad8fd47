"""The pulls believed to be under way, and how they slow down another one. Pure.

A pull counts from its predicted start to its predicted end, or until its prefill has ended, whichever is first.
Flows that meet at a link share it equally, so a pull of x bytes that meets n others with R bytes together ends when
x + min(R, n x) bytes have passed (exactly so when theirs are all longer, or all shorter, than x). It meets them at
its worker, and a share of all flows at the pool's S sources; the worse of the two counts:

    transfer_s(x) = latency + (x + min(R, n x)) / bandwidth
    R = max(R_worker, R_all / S),  n = max(n_worker, n_all / S)

Latency and bandwidth are learnt per tier (estimate.py). The bytes of a flow count whole until it ends: what is left of
them is not known.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass


@dataclass(slots=True)
class _Load:
    num_flows: int = 0
    nbytes: int = 0


@dataclass(slots=True)
class _Flow:
    request_id: str
    slot: int
    nbytes: int
    is_active: bool = False


class Traffic:
    """`slot` is the prefill worker that the bytes go to."""

    def __init__(self) -> None:
        self.num_sources = 1
        self.num_flows = 0
        self._flows: dict[str, _Flow] = {}
        self._to: dict[int, _Load] = {}
        self._all = _Load()
        self._turns: list[tuple[float, int, _Flow, bool]] = []  # (when, order, flow, whether it starts)
        self._order = 0

    @property
    def busy_slots(self) -> dict[int, _Load]:
        """Workers that something is on its way to."""
        return self._to

    @property
    def nbytes(self) -> int:
        return self._all.nbytes

    def expect(self, request_id: str, slot: int, nbytes: int, start_s: float, end_s: float) -> None:
        """A pull that will begin and end about then, in place of an earlier one of that request."""
        self.end(request_id)
        flow = self._flows[request_id] = _Flow(request_id, slot, nbytes)
        for when_s, starts in ((start_s, True), (end_s, False)):
            self._order += 1
            heapq.heappush(self._turns, (when_s, self._order, flow, starts))

    def end(self, request_id: str) -> None:
        """Unknown requests are ignored."""
        flow = self._flows.pop(request_id, None)
        if flow is not None and flow.is_active:
            self._count(flow, -1)

    def advance(self, now_s: float) -> None:
        """Lets flows start and end up to now."""
        turns = self._turns
        while turns and turns[0][0] <= now_s:
            _, _, flow, starts = heapq.heappop(turns)
            if self._flows.get(flow.request_id) is not flow:
                continue  # it has ended already, and another may have taken its place
            if starts:
                flow.is_active = True
                self._count(flow, 1)
            else:
                self.end(flow.request_id)

    def others(self, slot: int | None) -> tuple[float, float]:
        """(R, n) for a pull to that worker; None: to one that nothing goes to."""
        if not self.num_flows:
            return 0.0, 0.0
        nbytes, num_flows = self._all.nbytes / self.num_sources, self.num_flows / self.num_sources
        load = None if slot is None else self._to.get(slot)
        if load is None:
            return nbytes, num_flows
        return max(nbytes, load.nbytes), max(num_flows, load.num_flows)

    def _count(self, flow: _Flow, sign: int) -> None:
        load = self._to.setdefault(flow.slot, _Load())
        for each in (load, self._all):
            each.num_flows += sign
            each.nbytes += sign * flow.nbytes
        self.num_flows = self._all.num_flows
        if not load.num_flows:
            del self._to[flow.slot]
