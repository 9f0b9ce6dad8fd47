"""Requests that do not fit now wait here for their turn, by priority and in fair turns of their tenants. Pure.

A request is sent on at once when nobody waits, admission lets it in, and some prefill worker has little before it: at
most a quarter of the TTFT target (any amount without one). So workers always have something to do, and what waits does
so here, where order can still change, rather than at a worker. It waits also when too many answers are being written:
their ends make room. It is refused at once when it would come too late even so: when the prompts before it here and
at its worker, or its own, take longer than its target.

A request waits until its TTFT target can no longer be met, or for `queue_timeout_s` where it has none. Nothing is
polled: `settle` is to be called after every change of the state and at `next_event_s`. What load alone keeps waiting
always has others on their way before it, and each end of one is a change.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass
from typing import NamedTuple

from moonpool.base.errors import MoonpoolError, Overloaded, Unavailable
from moonpool.base.metrics import TimeHistogram
from moonpool.conductor.admission.forms import Cause, RefusedRequest
from moonpool.conductor.admission.queue import AdmissionQueue, QueueConfig, QueueRefusal, WaitingRequest
from moonpool.conductor.messages import Decision, Route
from moonpool.conductor.placement.policy import PolicyConfig
from moonpool.conductor.state import ConductorState, WeighedRequest

_BACKLOG_SHARE = 0.25  # of the TTFT target: fills a worker's batches, and leaves most of the order to be decided here


class QueueAnswer(NamedTuple):
    """To a request that had to wait."""

    request_id: str
    outcome: Decision | MoonpoolError


@dataclass(slots=True, eq=False)
class _Waiting:
    call: Route
    owner: Hashable
    since_s: float


class RequestQueue:
    """In front of ConductorState.route. Each request that waits gets exactly one Answer, unless it is cancelled."""

    def __init__(self, state: ConductorState, config: PolicyConfig) -> None:
        self._state = state
        self._config = config
        self._queue = AdmissionQueue(QueueConfig(capacity=config.room_to_wait)) if config.room_to_wait else None
        self._max_backlog_s = math.inf if config.ttft_slo_s is None else _BACKLOG_SHARE * config.ttft_slo_s
        self._waiting: dict[str, _Waiting] = {}
        self._turned_away: list[QueueAnswer] = []  # not handed out yet
        self.wait_times = TimeHistogram()  # of all that have left

    def __len__(self) -> int:
        return len(self._waiting)

    def ask(self, call: Route, owner: Hashable, now_s: float, wall_s: float) -> Decision | None:
        """None: it waits, and `settle` answers. Raises as ConductorState.route does."""
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
                raise self._state.refuse(call.request_id, verdict.error(), verdict.cause)
        elif not self._waiting and self._has_room(now_s):
            return self._state.send(call, owner, weighed, now_s)
        self._enter(self._queue, call, owner, weighed, now_s)
        return None

    def settle(self, now_s: float) -> list[QueueAnswer]:
        """Sends on whom there is room for, and answers those whose time is over."""
        answers, self._turned_away = self._turned_away, []
        if self._queue is None or not self._waiting:
            return answers
        answers += [self._refused(turned, now_s) for turned in self._queue.expire(now_s)]

        def fits(request: WaitingRequest) -> bool:
            decision = self._try_to_send(self._waiting[request.request_id], now_s)
            if decision is not None:
                answers.append(QueueAnswer(request.request_id, decision))
            return decision is not None

        for request in self._queue.pop_ready(now_s, fits):
            self._forget(request.request_id, now_s)
        return answers

    def cancel(self, request_id: str, now_s: float) -> bool:
        """Whether it was waiting."""
        if not self._leave(request_id, now_s):
            return False
        self._state.abandon(request_id)
        return True

    def owner_gone(self, owner: Hashable, now_s: float) -> None:
        for request_id in [key for key, one in self._waiting.items() if one.owner == owner]:
            self.cancel(request_id, now_s)

    def next_event_s(self) -> float | None:
        """When settle has something to do even if nothing changes; None: never."""
        return None if self._queue is None or not self._waiting else self._queue.next_event_s()

    def _has_room(self, now_s: float) -> bool:
        return self._state.least_backlog_s(now_s) <= self._max_backlog_s

    def _ahead_s(self, priority: int) -> float:
        """What is predicted to be sent before a newcomer, spread over all prefill workers."""
        if self._queue is None or not self._waiting:
            return 0.0
        return self._queue.waiting_s(priority) / max(1, len(self._state.prefills.names))

    def _enter(
        self, queue: AdmissionQueue, call: Route, owner: Hashable, weighed: WeighedRequest, now_s: float
    ) -> None:
        """Overloaded when the queue has no room for it."""
        work_s, target_s = weighed.choice.prefill.service_s, self._config.ttft_slo_s
        wait_s = self._config.queue_timeout_s if target_s is None else target_s - work_s
        request = WaitingRequest(call.request_id, call.tenant, work_s, call.priority, now_s + wait_s)
        turned = queue.offer(request, now_s)
        if turned is not None and turned.request is request:
            raise self._state.refuse(call.request_id, _error(turned), turned.cause)
        if turned is not None:
            self._turned_away.append(self._refused(turned, now_s))
        self._waiting[call.request_id] = _Waiting(call, owner, now_s)
        self._state.counters["queued"] += 1

    def _try_to_send(self, waiting: _Waiting, now_s: float) -> Decision | None:
        if not self._has_room(now_s):
            return None
        waited_s = now_s - waiting.since_s
        try:
            weighed = self._state.weigh(waiting.call, now_s, waited_s)
        except Unavailable:
            return None  # workers may come back before its time is over
        if isinstance(weighed.verdict, RefusedRequest):
            return None
        return self._state.send(waiting.call, waiting.owner, weighed, now_s, waited_s)

    def _refused(self, turned: QueueRefusal, now_s: float) -> QueueAnswer:
        waited_s = self._forget(turned.request.request_id, now_s)
        error = self._state.refuse(turned.request.request_id, _error(turned), turned.cause, waited_s)
        return QueueAnswer(turned.request.request_id, error)

    def _leave(self, request_id: str, now_s: float) -> bool:
        if self._queue is None or request_id not in self._waiting:
            return False
        self._queue.cancel(request_id)
        self._forget(request_id, now_s)
        return True

    def _forget(self, request_id: str, now_s: float) -> float:
        """How long it has waited."""
        waited_s = now_s - self._waiting.pop(request_id).since_s
        self.wait_times.observe(waited_s)
        return waited_s


def _error(turned: QueueRefusal) -> Overloaded:
    return Overloaded(turned.reason, retry_after_s=turned.retry_after_s)
