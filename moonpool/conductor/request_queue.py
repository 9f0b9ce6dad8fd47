"""Requests that do not fit now wait here, by priority and in fair turns of their tenants. Pure.

A request is sent at once when no request waits, admission accepts it, and some prefill worker has little work ahead: at
most a quarter of the TTFT target (any amount without a target). So workers always have work, and the rest waits here,
where the order can still change. A request also waits when too many answers are being decoded: it is sent when some of
them end. A request is refused at once if it would be late anyway: if the prompts ahead of it, here and at its worker,
or its own prompt take longer than its target.

A request waits until its TTFT target can no longer be met, or for `queue_timeout_s` if there is no target. Nothing is
polled: the caller calls `dispatch` after every change of the state and at `next_event_s`. When load alone makes a
request wait, other requests are under way, and the end of each is a change.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import NamedTuple

from moonpool.base.cluster import WorkerRole
from moonpool.base.errors import MoonpoolError, Overloaded, Unavailable
from moonpool.base.metrics import TimeHistogram
from moonpool.conductor.admission.forms import Cause, RefusedRequest, Verdict
from moonpool.conductor.admission.queue import AdmissionQueue, QueueConfig, QueueRefusal, WaitingRequest
from moonpool.conductor.demand import UnmetWork
from moonpool.conductor.messages import Decision, Route
from moonpool.conductor.placement.policy import PolicyConfig
from moonpool.conductor.registration import WeighedRequest
from moonpool.conductor.state import ConductorState

_BACKLOG_SHARE = 0.25  # of the TTFT target: enough to fill a worker's batches; most of the order is decided here


class QueueAnswer(NamedTuple):
    """The answer to a request that had to wait."""

    request_id: str
    outcome: Decision | MoonpoolError


@dataclass(slots=True, eq=False)
class _Waiting:
    call: Route
    owner: Hashable
    since_s: float
    work: UnmetWork


class RequestQueue:
    """The queue in front of ConductorState.route. Each request that waits gets exactly one answer, unless it is
    cancelled."""

    def __init__(
        self, state: ConductorState, config: PolicyConfig, promote: Callable[[list[bytes]], None] | None = None
    ) -> None:
        """`promote` is called with the chain keys of blocks that a request which waits will pull from SSD."""
        self._state, self._promote = state, promote
        self._config = config
        self._queue = AdmissionQueue(QueueConfig(capacity=config.max_waiting)) if config.max_waiting else None
        self._max_backlog_s = math.inf if config.ttft_slo_s is None else _BACKLOG_SHARE * config.ttft_slo_s
        self._waiting: dict[str, _Waiting] = {}
        self._displaced: list[QueueAnswer] = []  # refused in favour of others; not returned yet
        self.wait_times = TimeHistogram()  # of all requests that have left

    def __len__(self) -> int:
        return len(self._waiting)

    def submit(self, call: Route, owner: Hashable, now_s: float, wall_s: float) -> Decision | None:
        """Return the decision, or None if the request waits; `dispatch` returns its answer later. Raise as
        ConductorState.route does."""
        if self._queue is None:
            return self._state.route(call, owner, now_s, wall_s)
        self._leave(call.request_id, now_s)
        self._state.begin(call, now_s, wall_s)
        try:
            weighed = self._state.weigh(call, now_s, self._ahead_s(call.priority))
        except MoonpoolError as error:
            raise self._state.refuse(call.request_id, error) from None
        verdict = weighed.verdict
        if isinstance(verdict, RefusedRequest):
            if verdict.cause is not Cause.TBT:
                self._state.unmet.refused(verdict.cause, weighed.work, now_s)
                raise self._state.refuse(call.request_id, verdict.error(), verdict.cause)
        elif weighed.resumes or (not self._waiting and self._has_room(now_s)):
            return self._state.send(call, owner, weighed, now_s)
        if not self._waiting:
            self._state.unmet.short_of = _short_of(verdict)
        self._enqueue(self._queue, call, owner, weighed, now_s)
        return None

    def dispatch(self, now_s: float) -> list[QueueAnswer]:
        """Send the waiting requests that fit now and refuse those whose deadline has passed. Return all answers."""
        answers, self._displaced = self._displaced, []
        if self._queue is None or not self._waiting:
            return answers
        answers += [self._refused(refusal, now_s) for refusal in self._queue.expire(now_s)]

        def fits(request: WaitingRequest) -> bool:
            decision = self._try_to_send(self._waiting[request.request_id], now_s)
            if decision is not None:
                answers.append(QueueAnswer(request.request_id, decision))
            return decision is not None

        for request in self._queue.pop_ready(now_s, fits):
            self._pop(request.request_id, now_s)
        return answers

    def cancel(self, request_id: str, now_s: float) -> bool:
        """Remove a request. Return whether it was waiting."""
        if not self._leave(request_id, now_s):
            return False
        self._state.abandon(request_id, now_s)
        return True

    def owner_gone(self, owner: Hashable, now_s: float) -> None:
        for request_id in [key for key, one in self._waiting.items() if one.owner == owner]:
            self.cancel(request_id, now_s)

    def next_event_s(self) -> float | None:
        """Return when `dispatch` has something to do even if nothing changes; None: never."""
        return None if self._queue is None or not self._waiting else self._queue.next_event_s()

    def _has_room(self, now_s: float) -> bool:
        return self._state.least_backlog_s(now_s) <= self._max_backlog_s

    def _ahead_s(self, priority: int) -> float:
        """Return the predicted work that is sent before a new request, divided by the number of prefill workers."""
        if self._queue is None or not self._waiting:
            return 0.0
        return self._queue.waiting_s(priority) / max(1, len(self._state.prefills.names))

    def _enqueue(
        self, queue: AdmissionQueue, call: Route, owner: Hashable, weighed: WeighedRequest, now_s: float
    ) -> None:
        """Put the request into the queue. Raise Overloaded if the queue refuses it."""
        work_s, target_s = weighed.choice.prefill.service_s, self._config.ttft_slo_s
        wait_s = self._config.queue_timeout_s if target_s is None else target_s - work_s
        request = WaitingRequest(call.request_id, call.tenant, work_s, call.priority, now_s + wait_s)
        refusal = queue.offer(request, now_s)
        if refusal is not None and refusal.request is request:
            self._state.unmet.refused(refusal.cause, weighed.work, now_s)
            raise self._state.refuse(call.request_id, _error(refusal), refusal.cause)
        if refusal is not None:
            self._displaced.append(self._refused(refusal, now_s))
        self._waiting[call.request_id] = _Waiting(call, owner, now_s, weighed.work)
        self._state.unmet.waits(call.request_id, weighed.work)
        self._state.counters["queued"] += 1
        if self._promote is not None and weighed.inputs.leading.on_ssd and self._state.pulls:
            wanted = weighed.on_ssd(call.keys)
            if wanted:
                self._promote(wanted)

    def _try_to_send(self, waiting: _Waiting, now_s: float) -> Decision | None:
        unmet = self._state.unmet
        if not self._has_room(now_s):
            unmet.short_of = WorkerRole.PREFILL
            return None
        waited_s = now_s - waiting.since_s
        try:
            weighed = self._state.weigh(waiting.call, now_s, waited_s)
        except Unavailable:
            return None  # workers may come back before the deadline
        if isinstance(weighed.verdict, RefusedRequest):
            unmet.short_of = _short_of(weighed.verdict)
            return None
        return self._state.send(waiting.call, waiting.owner, weighed, now_s, waited_s)

    def _refused(self, refusal: QueueRefusal, now_s: float) -> QueueAnswer:
        self._state.unmet.refused(refusal.cause, self._waiting[refusal.request.request_id].work, now_s)
        waited_s = self._pop(refusal.request.request_id, now_s)
        error = self._state.refuse(refusal.request.request_id, _error(refusal), refusal.cause, waited_s)
        return QueueAnswer(refusal.request.request_id, error)

    def _leave(self, request_id: str, now_s: float) -> bool:
        if self._queue is None or request_id not in self._waiting:
            return False
        self._queue.cancel(request_id)
        self._pop(request_id, now_s)
        return True

    def _pop(self, request_id: str, now_s: float) -> float:
        """Remove a request that has left the queue. Return how long it has waited."""
        self._state.unmet.left(request_id)
        waited_s = now_s - self._waiting.pop(request_id).since_s
        self.wait_times.observe(waited_s)
        return waited_s


def _short_of(verdict: Verdict) -> WorkerRole:
    """Return the role that a request lacks which is not sent."""
    is_of_decode = isinstance(verdict, RefusedRequest) and verdict.cause.is_of_decode
    return WorkerRole.DECODE if is_of_decode else WorkerRole.PREFILL


def _error(refusal: QueueRefusal) -> Overloaded:
    return Overloaded(refusal.reason, retry_after_s=refusal.retry_after_s)
