"""The bounded queue of waiting requests: fair turns of the tenants, priorities within a tenant, and deadlines. Pure.

Order. Tenants take fair turns by predicted prefill seconds over their weights (fairness.py). Within a tenant, the
request with the smallest arrival time minus `ageing_s` per level of priority is served first: a higher priority comes
before a lower one that arrived up to `ageing_s` per level earlier, and equals are served first come, first served. So a
priority never takes time from another tenant, and none of a tenant's own requests starves.

Bound. When `capacity` requests wait, the tenant with the most waiting work over its weight, the new request included,
loses its last request in that order, which may be the new one. So a tenant that floods pushes out its own requests.

Deadline. `expire` returns the requests that would miss their TTFT target even if they started now, with the reason.
Each request that was accepted leaves exactly once: by `pop_ready`, `expire`, `cancel` or as the refusal of an `offer`.

All but the choice of a request to refuse and `ahead_s` take O(log n). A request that has left takes no memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from moonpool.base.errors import AlreadyExists, ConfigError
from moonpool.conductor.admission.fairness import FairTurns
from moonpool.conductor.admission.forms import MIN_RETRY_S, Cause

_INITIAL_S = 2.0
_FADE_S = 60.0
_FEW = 64  # stale entries of a heap that may stay in any case


class DrainRate:
    """How fast the queue empties: seconds of predicted work that leave it per second.

    It starts at 1, the rate of one prefill worker that is never idle, with the weight of `_INITIAL_S` measured seconds;
    measurements fade with a time constant of `_FADE_S`. Time in which nothing waits does not count, because then the
    rate shows how much work arrived and not how much could leave.
    """

    __slots__ = ("_seconds", "_since_s", "_work_s")

    def __init__(self) -> None:
        self._work_s = self._seconds = _INITIAL_S
        self._since_s: float | None = None  # None: nothing waits

    @property
    def rate(self) -> float:
        return self._work_s / self._seconds

    def seconds_for(self, work_s: float) -> float:
        return work_s / self.rate

    def start(self, now_s: float) -> None:
        """Begin to measure: a request waits from now on."""
        self._since_s = now_s

    def drained(self, work_s: float, now_s: float, *, still_waiting: bool) -> None:
        """Count the work that left since the last call, 0 included."""
        if self._since_s is None:
            return
        passed_s = now_s - self._since_s
        keep = math.exp(-passed_s / _FADE_S)
        self._seconds = max(self._seconds * keep + passed_s, 1e-3)
        # Never 0: a queue that does not move gives a long Retry-After, not an infinite one.
        self._work_s = max(self._work_s * keep + work_s, 1e-3 * self._seconds)
        self._since_s = now_s if still_waiting else None


@dataclass(frozen=True, slots=True)
class QueueConfig:
    capacity: int | None = None  # None: no limit
    ageing_s: float = 10.0  # that one level of priority is worth

    def __post_init__(self) -> None:
        if self.capacity is not None and self.capacity < 1:
            raise ConfigError("the queue must have room for a request", param="capacity")
        if not self.ageing_s > 0:
            raise ConfigError("ageing_s must be above 0", param="ageing_s")


class WaitingRequest(NamedTuple):
    """`start_by_s` is the last moment at which a start still meets the TTFT target; None: no deadline. `weight` is the
    tenant's share relative to those of others."""

    request_id: str
    tenant: str
    prefill_s: float
    priority: int = 0
    start_by_s: float | None = None
    weight: float = 1.0

    @property
    def turn(self) -> float:
        """How much of the tenant's share the request takes."""
        return self.prefill_s / self.weight


class QueueRefusal(NamedTuple):
    request: WaitingRequest
    reason: str
    retry_after_s: float
    cause: Cause


class _Entry(NamedTuple):
    request: WaitingRequest
    offered_s: float
    order: tuple[float, int]  # the tenant's request with the smallest one is served first


class _TenantQueue:
    """The waiting requests of one tenant, in the order in which they are served."""

    __slots__ = ("_entries", "_heap", "work_s")

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}
        self._heap: list[tuple[tuple[float, int], str]] = []  # by order; some entries are stale
        self.work_s = 0.0

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, entry: _Entry) -> None:
        request_id = entry.request.request_id
        self._entries[request_id] = entry
        self.work_s += entry.request.prefill_s
        heappush(self._heap, (entry.order, request_id))

    def remove(self, request_id: str) -> None:
        self.work_s -= self._entries.pop(request_id).request.prefill_s
        if len(self._heap) > 2 * len(self._entries) + _FEW:
            self._heap = [one for one in self._heap if self._is_current(one)]
            heapify(self._heap)

    def first(self) -> WaitingRequest:
        while not self._is_current(self._heap[0]):
            heappop(self._heap)
        return self._entries[self._heap[0][1]].request

    def last(self) -> _Entry:
        return max(self._entries.values(), key=lambda each: each.order)

    def before_s(self, order: tuple[float, int]) -> float:
        """Return the predicted seconds of the requests that are served before that order."""
        return sum([each.request.prefill_s for each in self._entries.values() if each.order < order])

    def _is_current(self, one: tuple[tuple[float, int], str]) -> bool:
        entry = self._entries.get(one[1])
        return entry is not None and entry.order == one[0]


class AdmissionQueue:
    """`now_s` must not decrease from call to call."""

    def __init__(self, config: QueueConfig) -> None:
        self._config = config
        self._tenants: dict[str, _TenantQueue] = {}  # only those that wait
        self._turns: FairTurns[str] = FairTurns()
        self._entries: dict[str, _Entry] = {}
        self._deadlines: list[tuple[float, str]] = []  # heap; some entries no longer count
        self._late: list[_Entry] = []  # found too late while popping, not yet handed out by expire
        self._rate = DrainRate()
        self._sequence = 0

    def __len__(self) -> int:
        return len(self._entries)

    def offer(self, request: WaitingRequest, now_s: float) -> QueueRefusal | None:
        """Accept a request. Return None, or the refusal of this request or of another one that it displaced. Raise
        AlreadyExists if its id is waiting."""
        if request.request_id in self._entries:
            raise AlreadyExists(f"request {request.request_id} is waiting already")
        entry = _Entry(request, now_s, self._order(request.priority, now_s))
        if request.start_by_s is not None and request.start_by_s <= now_s:
            return self._refuse(entry, self._too_late(request, 0.0), Cause.TOO_LATE)
        self._collect_late(now_s)
        self._add(entry)
        if self._config.capacity is None or len(self._entries) <= self._config.capacity:
            return None
        victim = self._remove(self._victim(request).request_id)
        if victim is entry:
            return self._refuse(entry, self._full(), Cause.QUEUE_FULL)
        return self._refuse(victim, self._gave_way(victim.request, request), Cause.GAVE_WAY)

    def pop_ready(self, now_s: float, fits: Callable[[WaitingRequest], bool]) -> list[WaitingRequest]:
        """Remove and return the requests that may start now, in order. The first one that does not fit ends the round,
        so that small requests do not overtake a large one for ever. `fits` is called once per request, right before
        the request is removed."""
        self._collect_late(now_s)
        ready: list[_Entry] = []
        while self._entries:
            tenant = self._turns.first()
            request = self._tenants[tenant].first()
            if not fits(request):
                break
            self._turns.serve(tenant)
            ready.append(self._remove(request.request_id))
        # A request that did not wait says nothing about how fast the queue empties.
        waited_s = sum(one.request.prefill_s for one in ready if one.offered_s < now_s)
        self._rate.drained(waited_s, now_s, still_waiting=bool(self._entries))
        return [one.request for one in ready]

    def expire(self, now_s: float) -> list[QueueRefusal]:
        """Remove the requests whose deadline has passed and return their refusals, earliest deadline first."""
        self._collect_late(now_s)
        late, self._late = self._late, []
        return [self._refuse(one, self._too_late(one.request, now_s - one.offered_s), Cause.TOO_LATE) for one in late]

    def cancel(self, request_id: str) -> bool:
        """Remove a request, also a late one that `expire` has not returned yet. Return whether it was waiting."""
        if request_id in self._entries:
            self._remove(request_id)
            return True
        kept = [one for one in self._late if one.request.request_id != request_id]
        found, self._late = len(kept) < len(self._late), kept
        return found

    def next_event_s(self) -> float | None:
        """Return when `expire` next has something to return, if nothing changes before; None: never."""
        self._drop_stale_deadlines()
        moments = [one.request.start_by_s for one in self._late[:1]] + [at for at, _ in self._deadlines[:1]]
        return min((at for at in moments if at is not None), default=None)

    def served_elsewhere(self, turns: Mapping[str, float]) -> None:
        """Count what other conductors have sent, in predicted seconds over the weights of the tenants."""
        for tenant, turn in turns.items():
            self._turns.served_elsewhere(tenant, turn)

    def firsts(self) -> list[WaitingRequest]:
        """Return the first request of each tenant that waits."""
        return [queue.first() for queue in self._tenants.values()]

    def ahead_s(self, tenant: str, priority: int, weight: float, now_s: float) -> float:
        """Return the predicted prefill seconds that are served before a new request of this tenant: those of its own
        requests that come first, and of each other tenant at most what is its share meanwhile, and one request more."""
        own = self._tenants.get(tenant)
        own_s = 0.0 if own is None else own.before_s(self._order(priority, now_s))
        total_s = own_s
        for name, other in self._tenants.items():
            if name != tenant:
                first = other.first()
                total_s += min(other.work_s, own_s / weight * first.weight + first.prefill_s)
        return total_s

    def _order(self, priority: int, now_s: float) -> tuple[float, int]:
        self._sequence += 1
        return now_s - priority * self._config.ageing_s, self._sequence

    def _victim(self, request: WaitingRequest) -> WaitingRequest:
        """Return the waiting request to refuse; of equal tenants that of the new request's."""

        def share(name: str) -> tuple[float, bool, str]:
            queue = self._tenants[name]
            return queue.work_s / queue.first().weight, name == request.tenant, name

        return self._tenants[max(self._tenants, key=share)].last().request

    # entering and leaving

    def _add(self, entry: _Entry) -> None:
        request = entry.request
        if not self._entries:
            self._rate.start(entry.offered_s)
        self._entries[request.request_id] = entry
        queue = self._tenants.get(request.tenant)
        if queue is None:
            queue = self._tenants[request.tenant] = _TenantQueue()
            queue.add(entry)
            self._turns.enter(request.tenant, request.turn)
        else:
            queue.add(entry)
            if queue.first() is request:
                self._turns.change(request.tenant, request.turn)
        if request.start_by_s is not None:
            heappush(self._deadlines, (request.start_by_s, request.request_id))

    def _remove(self, request_id: str) -> _Entry:
        entry = self._entries.pop(request_id)
        tenant = entry.request.tenant
        queue = self._tenants[tenant]
        was_first = queue.first() is entry.request
        queue.remove(request_id)
        if not queue:
            del self._tenants[tenant]
            self._turns.leave(tenant)
        elif was_first:
            self._turns.change(tenant, queue.first().turn)
        self._tidy_deadlines()
        return entry

    def _collect_late(self, now_s: float) -> None:
        while self._deadlines and self._deadlines[0][0] <= now_s:
            deadline = heappop(self._deadlines)
            if self._is_current(deadline):
                self._late.append(self._remove(deadline[1]))

    def _is_current(self, deadline: tuple[float, str]) -> bool:
        at_s, request_id = deadline
        entry = self._entries.get(request_id)
        return entry is not None and entry.request.start_by_s == at_s

    def _drop_stale_deadlines(self) -> None:
        while self._deadlines and not self._is_current(self._deadlines[0]):
            heappop(self._deadlines)

    def _tidy_deadlines(self) -> None:
        if len(self._deadlines) > 2 * len(self._entries) + _FEW:
            self._deadlines = [one for one in set(self._deadlines) if self._is_current(one)]
            heapify(self._deadlines)

    # refusals

    def _refuse(self, entry: _Entry, reason: str, cause: Cause) -> QueueRefusal:
        waiting_s = sum(queue.work_s for queue in self._tenants.values())
        retry_s = self._rate.seconds_for(entry.request.prefill_s + waiting_s)
        return QueueRefusal(entry.request, reason, max(MIN_RETRY_S, retry_s), cause)

    def _too_late(self, request: WaitingRequest, waited_s: float) -> str:
        return (
            f"it waited {waited_s:.2f} s for a free worker, and with {request.prefill_s:.2f} s for its prompt "
            "the first token can no longer come in time"
        )

    def _full(self) -> str:
        return f"{len(self._entries)} requests are waiting already, the most that may wait"

    def _gave_way(self, victim: WaitingRequest, request: WaitingRequest) -> str:
        is_own = request.tenant == victim.tenant
        other = "one of higher priority" if is_own else "one of a tenant with less work waiting"
        return f"{self._config.capacity} requests were waiting, the most that may wait; this one gave way to {other}"
