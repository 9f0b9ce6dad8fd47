"""The transfers predicted to be under way, and how they slow down another pull. Pure.

A pull (a flow) counts from its predicted start to its predicted end, or to the end of its prefill if that comes first.
Flows share a link equally, so a pull of x bytes that shares a link with n others of R bytes in total ends when
x + min(R, n x) bytes have passed (exact if all others are longer, or all shorter, than x). A pull shares its worker's
link with the flows to that worker, and the links of the pool's S sources with all flows; the slower of the two counts:

    transfer_s(x) = latency + (x + min(R, n x)) / bandwidth
    R = max(R_worker, R_all / S),  n = max(n_worker, n_all / S)

Latency and bandwidth are learnt per tier (costs.py). All bytes of a flow count until it ends, because the conductor
does not know how many are left.

Hand-offs leave a machine over the link on which others pull from its node. They are as fast as their prompts are
computed, so they slow a pull down, and it them, only as far as the link is full (`crowding`).
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass

_MIN_S = 1e-6
_CROWDED = 0.1  # of a link
_MANY = 64  # machines; not all of them are looked at


@dataclass(slots=True)
class _Load:
    num_flows: int = 0
    nbytes: int = 0


@dataclass(slots=True)
class Handoffs:
    """The hand-offs that leave one machine now."""

    num_flows: int = 0
    nbytes_per_s: float = 0.0


@dataclass(slots=True)
class _Flow:
    request_id: str
    slot: int  # below 0: a hand-off, which leaves `machine`
    nbytes: int
    machine: str = ""
    nbytes_per_s: float = 0.0
    is_active: bool = False


class Traffic:
    """`slot` is the prefill worker that the bytes go to."""

    def __init__(self) -> None:
        self.num_sources = 1
        self.num_flows = 0
        self.busy_mask = 0  # of `busy_slots`
        self.leaving: dict[str, Handoffs] = {}  # by machine
        self._flows: dict[str, _Flow] = {}
        self._handoffs: dict[str, _Flow] = {}
        self._to: dict[int, _Load] = {}
        self._all = _Load()
        self._events: list[tuple[float, int, _Flow, bool]] = []  # a heap of (when, order, flow, whether it starts)
        self._order = 0

    @property
    def busy_slots(self) -> dict[int, _Load]:
        """The workers that receive pulls now."""
        return self._to

    @property
    def nbytes(self) -> int:
        return self._all.nbytes

    def expect(self, request_id: str, slot: int, nbytes: int, start_s: float, end_s: float) -> None:
        """Add a pull with its predicted start and end; it replaces an earlier pull of the same request."""
        self.end(request_id)
        flow = self._flows[request_id] = _Flow(request_id, slot, nbytes)
        self._schedule(flow, start_s, end_s)

    def end(self, request_id: str) -> None:
        """Ignore a request without a pull."""
        flow = self._flows.pop(request_id, None)
        if flow is not None and flow.is_active:
            self._count(flow, -1)

    def expect_handoff(self, request_id: str, machine: str, nbytes: int, start_s: float, end_s: float) -> None:
        """Add a hand-off that leaves the machine, with its predicted start and end; it replaces an earlier one of the
        same request."""
        self.end_handoff(request_id)
        rate = nbytes / max(end_s - start_s, _MIN_S)
        flow = self._handoffs[request_id] = _Flow(request_id, -1, nbytes, machine, rate)
        self._schedule(flow, start_s, end_s)

    def end_handoff(self, request_id: str) -> None:
        """Ignore a request without a hand-off."""
        flow = self._handoffs.pop(request_id, None) if self._handoffs else None
        if flow is not None and flow.is_active:
            self._count_handoff(flow, -1)

    def _schedule(self, flow: _Flow, start_s: float, end_s: float) -> None:
        for when_s, starts in ((start_s, True), (end_s, False)):
            self._order += 1
            heapq.heappush(self._events, (when_s, self._order, flow, starts))

    def advance(self, now_s: float) -> None:
        """Start and end the flows that are due by now."""
        events = self._events
        while events and events[0][0] <= now_s:
            _, _, flow, starts = heapq.heappop(events)
            is_handoff = flow.slot < 0
            if (self._handoffs if is_handoff else self._flows).get(flow.request_id) is not flow:
                continue  # it has ended, and another may have replaced it
            if starts:
                flow.is_active = True
                (self._count_handoff if is_handoff else self._count)(flow, 1)
            else:
                (self.end_handoff if is_handoff else self.end)(flow.request_id)

    def is_crowded(self, per_byte_s: float) -> bool:
        """Return whether hand-offs may take a good part of a link that moves a byte in `per_byte_s`."""
        leaving, limit = self.leaving, _CROWDED / per_byte_s if per_byte_s else math.inf
        return len(leaving) > _MANY or any(each.nbytes_per_s > limit for each in leaving.values())

    def others(self, slot: int | None) -> tuple[float, float]:
        """Return (R, n) for a pull to that worker; None: to a worker that receives no pulls now."""
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
        self.busy_mask |= 1 << flow.slot
        if not load.num_flows:
            del self._to[flow.slot]
            self.busy_mask ^= 1 << flow.slot

    def _count_handoff(self, flow: _Flow, sign: int) -> None:
        handoffs = self.leaving.setdefault(flow.machine, Handoffs())
        handoffs.num_flows += sign
        handoffs.nbytes_per_s += sign * flow.nbytes_per_s
        if not handoffs.num_flows:
            del self.leaving[flow.machine]


def crowding(num_flows: int, used: float) -> float:
    """Return how many times as long a pull counts on a link of which `num_flows` hand-offs want the part `used`.

    The pull gets what they leave, or a fair share if that is more. In the second case the link is full, and what the
    hand-offs lose meanwhile counts as time of the pull.
    """
    fair = 1 / (num_flows + 1)
    return (1 + max(0.0, used - (1 - fair))) / max(1 - used, fair)
