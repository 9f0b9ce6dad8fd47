"""The bounded queue of waiting requests, with priorities, fair turns of tenants, and deadlines. Pure.

Order. The highest waiting priority is served first, except that a priority that was passed over rises by one for every
`ageing_s` since it was served last (or since it began to wait). Once it has risen to the highest priority, at most one
request of each other priority comes before it, so none starves. Within a priority tenants take fair turns by predicted
prefill seconds (fairness.py); within a tenant, first come is first served. Priorities age, not requests: otherwise the
long queue of a tenant that floods would rise above the new requests of all others.

Bound. When `capacity` requests wait, the newest request of the lowest priority is refused in favour of one with a
higher priority. Between equal priorities, the newest request of the tenant with the most waiting work is refused in
favour of a tenant that has less work, the new request included. So a tenant that floods pushes out its own requests.

Deadline. `expire` returns the requests that would miss their TTFT target even if they started now, with the reason.
Each request that was accepted leaves exactly once: by `pop_ready`, `expire`, `cancel` or as the refusal of an `offer`.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from moonpool.base.errors import AlreadyExists, ConfigError
from moonpool.conductor.admission.fairness import FairTurns
from moonpool.conductor.admission.forms import MIN_RETRY_S, Cause

_INITIAL_S = 2.0
_FADE_S = 60.0


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
    capacity: int = 1024
    ageing_s: float = 10.0

    def __post_init__(self) -> None:
        if self.capacity < 1:
            raise ConfigError("the queue must have room for a request", param="capacity")
        if not self.ageing_s > 0:
            raise ConfigError("ageing_s must be above 0", param="ageing_s")


class WaitingRequest(NamedTuple):
    """`start_by_s` is the last moment at which a start still meets the TTFT target; None: no deadline."""

    request_id: str
    tenant: str
    prefill_s: float
    priority: int = 0
    start_by_s: float | None = None


class QueueRefusal(NamedTuple):
    request: WaitingRequest
    reason: str
    retry_after_s: float
    cause: Cause


class _Entry(NamedTuple):
    request: WaitingRequest
    offered_s: float


class _Level:
    """The waiting requests of one priority."""

    __slots__ = ("_tenants", "_turns", "num_waiting", "served_s", "work_s")

    def __init__(self, now_s: float) -> None:
        self._turns: FairTurns[str] = FairTurns()
        self._tenants: dict[str, OrderedDict[str, _Entry]] = {}
        self.served_s = now_s
        self.work_s: dict[str, float] = {}  # per tenant that waits
        self.num_waiting = 0

    def add(self, entry: _Entry) -> None:
        request = entry.request
        waiting = self._tenants.setdefault(request.tenant, OrderedDict())
        waiting[request.request_id] = entry
        self.work_s[request.tenant] = self.work_s.get(request.tenant, 0.0) + request.prefill_s
        self.num_waiting += 1
        if len(waiting) == 1:
            self._turns.enter(request.tenant, request.prefill_s)

    def remove(self, request: WaitingRequest) -> None:
        waiting = self._tenants[request.tenant]
        was_first = next(iter(waiting)) == request.request_id
        del waiting[request.request_id]
        self.work_s[request.tenant] -= request.prefill_s
        self.num_waiting -= 1
        if not waiting:
            del self._tenants[request.tenant], self.work_s[request.tenant]
            self._turns.leave(request.tenant)
        elif was_first:
            self._turns.change(request.tenant, next(iter(waiting.values())).request.prefill_s)

    def first(self) -> WaitingRequest:
        return next(iter(self._tenants[self._turns.first()].values())).request

    def serve_first(self, now_s: float) -> None:
        """Count the first request as served; the caller removes it next."""
        self.served_s = now_s
        self._turns.serve(self._turns.first())

    def newest(self, tenant: str) -> WaitingRequest:
        return next(reversed(self._tenants[tenant].values())).request


class AdmissionQueue:
    """`now_s` must not decrease from call to call."""

    def __init__(self, config: QueueConfig) -> None:
        self._config = config
        self._levels: dict[int, _Level] = {}  # by priority; only those where something waits
        self._entries: dict[str, _Entry] = {}
        self._deadlines: list[tuple[float, str]] = []  # heap; some entries no longer count
        self._late: list[_Entry] = []  # found too late while popping, not yet handed out by expire
        self._rate = DrainRate()

    def __len__(self) -> int:
        return len(self._entries)

    def offer(self, request: WaitingRequest, now_s: float) -> QueueRefusal | None:
        """Accept a request. Return None, or the refusal of this request or of another one that it displaced. Raise
        AlreadyExists if its id is waiting."""
        if request.request_id in self._entries:
            raise AlreadyExists(f"request {request.request_id} is waiting already")
        if request.start_by_s is not None and request.start_by_s <= now_s:
            return self._refuse(_Entry(request, now_s), self._too_late(request, 0.0), Cause.TOO_LATE)
        self._collect_late(now_s)
        refusal = None
        if len(self._entries) >= self._config.capacity:
            victim = self._victim(request)
            if victim is None:
                return self._refuse(_Entry(request, now_s), self._full(), Cause.QUEUE_FULL)
            why = self._gave_way(victim, request)
            refusal = self._refuse(self._remove(victim.request_id), why, Cause.GAVE_WAY)
        self._add(_Entry(request, now_s))
        return refusal

    def pop_ready(self, now_s: float, fits: Callable[[WaitingRequest], bool]) -> list[WaitingRequest]:
        """Remove and return the requests that may start now, in order. The first one that does not fit ends the round,
        so that small requests do not overtake a large one for ever. `fits` is called once per request, right before
        the request is removed."""
        self._collect_late(now_s)
        ready: list[_Entry] = []
        while self._entries:
            level = self._next_level(now_s)
            request = level.first()
            if not fits(request):
                break
            level.serve_first(now_s)
            ready.append(self._remove(request.request_id))
        # A request that did not wait says nothing about how fast the queue empties.
        waited_s = sum(one.request.prefill_s for one in ready if one.offered_s < now_s)
        self._rate.drained(waited_s, now_s, still_waiting=bool(self._entries))
        return [one.request for one in ready]

    def expire(self, now_s: float) -> list[QueueRefusal]:
        """Remove and return the requests that can no longer start in time, earliest deadline first."""
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

    def waiting_s(self, min_priority: float = -math.inf) -> float:
        """Return the predicted prefill seconds of all waiting requests with that priority or a higher one."""
        levels = (level for priority, level in self._levels.items() if priority >= min_priority)
        return sum(sum(level.work_s.values()) for level in levels)

    # order

    def _next_level(self, now_s: float) -> _Level:
        """Return the priority level to serve: by priority and age; of equals the one served longest ago, then the
        higher priority."""

        def rank(item: tuple[int, _Level]) -> tuple[float, float, int]:
            priority, level = item
            aged_s = now_s - level.served_s
            return priority + aged_s / self._config.ageing_s, aged_s, priority

        return max(self._levels.items(), key=rank)[1] if len(self._levels) > 1 else next(iter(self._levels.values()))

    def _victim(self, request: WaitingRequest) -> WaitingRequest | None:
        """Return the waiting request to refuse in favour of this one; None: no such request."""
        lowest = min(self._levels)
        if lowest > request.priority:
            return None
        level = self._levels[lowest]
        tenant = max(level.work_s, key=lambda one: (level.work_s[one], one))
        if lowest == request.priority:
            own_s = level.work_s.get(request.tenant, 0.0) + request.prefill_s
            if tenant == request.tenant or level.work_s[tenant] <= own_s:
                return None
        return level.newest(tenant)

    # entering and leaving

    def _add(self, entry: _Entry) -> None:
        request = entry.request
        level = self._levels.get(request.priority)
        if level is None:
            level = self._levels[request.priority] = _Level(entry.offered_s)
        if not self._entries:
            self._rate.start(entry.offered_s)
        level.add(entry)
        self._entries[request.request_id] = entry
        if request.start_by_s is not None:
            heappush(self._deadlines, (request.start_by_s, request.request_id))
            self._tidy_deadlines()

    def _remove(self, request_id: str) -> _Entry:
        entry = self._entries.pop(request_id)
        level = self._levels[entry.request.priority]
        level.remove(entry.request)
        if not level.num_waiting:
            del self._levels[entry.request.priority]
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
        if len(self._deadlines) > 2 * len(self._entries) + 64:
            self._deadlines = [one for one in set(self._deadlines) if self._is_current(one)]
            heapify(self._deadlines)

    # refusals

    def _refuse(self, entry: _Entry, reason: str, cause: Cause) -> QueueRefusal:
        work_s = entry.request.prefill_s + self.waiting_s()
        return QueueRefusal(entry.request, reason, max(MIN_RETRY_S, self._rate.seconds_for(work_s)), cause)

    def _too_late(self, request: WaitingRequest, waited_s: float) -> str:
        return (
            f"it waited {waited_s:.2f} s for a free worker, and with {request.prefill_s:.2f} s for its prompt "
            "the first token can no longer come in time"
        )

    def _full(self) -> str:
        return f"{len(self._entries)} requests are waiting already, the most that may wait"

    def _gave_way(self, victim: WaitingRequest, request: WaitingRequest) -> str:
        other = "one of higher priority" if request.priority > victim.priority else "one of a tenant with fewer"
        return f"{self._config.capacity} requests were waiting, the most that may wait; the newest gave way to {other}"
