"""Requests that do not fit now wait here, in fair turns of their tenants. Pure.

A request is sent at once when no request waits, admission accepts it, and some prefill worker has little work ahead: at
most `worker_backlog_s`, and at most a quarter of the TTFT target; each worker of a pipeline may have as many prompts as
there are stages. So workers always have work, and the rest waits here, where the order can still change
(admission/queue.py). While requests wait for pages at every decode worker, what is sent stands still and so does the
backlog: then a tenant that has less at the workers than another one, by their weights, may send more whatever the
backlog is, and the decode workers make the other one give way (engine/tenant_shares.py).

An answer that has lost its worker goes on at once, whatever waits: its client reads it already.

With a TTFT target a request also waits when too many answers are being decoded: it is sent when some of them end. A
request is refused at once if it would be late anyway: if the prompts ahead of it, here and at its worker, or its own
prompt take longer than its target.

A request waits until its TTFT target can no longer be met. Without that target it waits until its front end gives it
up, and for answers to end only if a capacity of the queue is set, `queue_timeout_s` at most. While there are no
workers, a request that has no deadline here does not wait: its front end knows how long to ask again (retries.py).

Several conductors have a queue each. The workers' reports name the prompts that others have sent, with their tenants,
and these count as turns that their tenants have had here.

Nothing is polled: the caller calls `dispatch` after every change of the state and at `next_event_s`.
"""

from __future__ import annotations

import math
from collections import deque
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

_BACKLOG_SHARE = 0.25  # of the TTFT target: most of the order is decided here
_ROUNDING_S = 1e-6  # by which a backlog may be larger than allowed: times are added to it and subtracted again


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
        self._config, self._has_target = config, config.targets.has_target
        self._queue = None if config.max_waiting == 0 else AdmissionQueue(QueueConfig(capacity=config.max_waiting))
        slo_s = math.inf if config.ttft_slo_s is None else config.ttft_slo_s
        self._max_backlog_s = min(config.worker_backlog_s, _BACKLOG_SHARE * slo_s)
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
            weighed = self._state.weigh(call, now_s, self._ahead_s(call, now_s))
        except MoonpoolError as error:
            raise self._state.refuse(call.request_id, error) from None
        verdict = weighed.verdict
        if isinstance(verdict, RefusedRequest):
            if verdict.cause is not Cause.TBT or not self._config.waits_for_decode:
                self._state.unmet.refused(verdict.cause, weighed.work, now_s)
                raise self._state.refuse(call.request_id, verdict.error(), verdict.cause)
        elif weighed.resumes or call.has_output or (not self._waiting and self._has_room(now_s)):
            return self._state.send(call, owner, weighed, now_s)
        if not self._waiting:
            self._state.take_served_by_others()  # while no request waits, no tenant owes another one
            self._state.unmet.short_of = _short_of(verdict)
        self._enqueue(self._queue, call, owner, weighed, now_s)
        return None

    def dispatch(self, now_s: float) -> list[QueueAnswer]:
        """Send the waiting requests that fit now and refuse those whose deadline has passed. Return all answers."""
        answers, self._displaced = self._displaced, []
        if self._queue is None or not self._waiting:
            return answers
        self._queue.served_elsewhere(self._state.take_served_by_others())
        answers += [self._refused(refusal, now_s) for refusal in self._queue.expire(now_s)]

        def fits(request: WaitingRequest) -> bool:
            outcome = self._try_to_send(self._waiting[request.request_id], request.start_by_s is None, now_s)
            if outcome is not None:
                answers.append(QueueAnswer(request.request_id, outcome))
            return outcome is not None

        for request in self._queue.pop_ready(now_s, fits):
            self._pop(request.request_id, now_s)
        return answers + self._pass_by(self._queue, now_s)

    def _pass_by(self, queue: AdmissionQueue, now_s: float) -> list[QueueAnswer]:
        """Send requests of tenants that have less at the workers than others, while requests wait there for pages."""
        answers: list[QueueAnswer] = []
        able = deque(queue.firsts() if not self._has_room(now_s) and self._state.lacks_pages else ())
        while able:
            request = able.popleft()
            waiting = self._waiting[request.request_id]
            if not self._state.has_smaller_share(waiting.call):
                continue
            outcome = self._send_waiting(waiting, request.start_by_s is None, now_s)
            if outcome is not None:
                queue.cancel(request.request_id)
                self._pop(request.request_id, now_s)
                answers.append(QueueAnswer(request.request_id, outcome))
                able.extend(each for each in queue.firsts() if each.tenant == request.tenant)
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

    def next_event_s(self, now_s: float) -> float | None:
        """Return when `dispatch` has something to do even if nothing changes; None: never."""
        if self._queue is None or not self._waiting:
            return None
        room_s = math.inf if self._has_room(now_s) else self._state.prefills.room_at_s(self._most_ahead_s)
        late_s = self._queue.next_event_s()
        at_s = min(room_s, math.inf if late_s is None else late_s)
        return at_s if math.isfinite(at_s) else None

    def _has_room(self, now_s: float) -> bool:
        """Return whether some worker has so little to do that a request is sent."""
        return self._state.has_room(self._most_ahead_s + _ROUNDING_S, now_s)

    @property
    def _most_ahead_s(self) -> float:
        """Return the most predicted work of a worker that a request is sent to: less if prompts lately took longer
        than predicted, so that it is this long by the clock."""
        return self._max_backlog_s / max(1.0, self._state.pace)

    def _ahead_s(self, call: Route, now_s: float) -> float:
        """Return the predicted work that is sent before a new request, divided by the number of prefill workers; 0
        where no target depends on it."""
        if self._queue is None or not self._waiting or not self._has_target:
            return 0.0
        ahead_s = self._queue.ahead_s(call.tenant, call.priority, call.weight, now_s)
        return ahead_s / max(1, len(self._state.prefills.names))

    def _enqueue(
        self, queue: AdmissionQueue, call: Route, owner: Hashable, weighed: WeighedRequest, now_s: float
    ) -> None:
        """Put the request into the queue. Raise Overloaded if the queue refuses it."""
        work_s = weighed.choice.prefill.service_s
        wait_s = self._config.max_wait_s(work_s)
        start_by_s = None if wait_s is None else now_s + wait_s
        request = WaitingRequest(call.request_id, call.tenant, work_s, call.priority, start_by_s, call.weight)
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

    def _try_to_send(self, waiting: _Waiting, has_no_deadline: bool, now_s: float) -> Decision | MoonpoolError | None:
        """Return the decision, or the refusal of a request that must not wait; None: it waits on."""
        has_workers = bool(self._state.prefills.names)
        if has_workers and not self._has_room(now_s):
            self._state.unmet.short_of = WorkerRole.PREFILL
            return None
        return self._send_waiting(waiting, has_no_deadline, now_s)

    def _send_waiting(self, waiting: _Waiting, has_no_deadline: bool, now_s: float) -> Decision | MoonpoolError | None:
        waited_s = now_s - waiting.since_s
        try:
            weighed = self._state.weigh(waiting.call, now_s, waited_s)
        except Unavailable as error:  # with a deadline: workers may come back before it
            return self._state.refuse(waiting.call.request_id, error, None, waited_s) if has_no_deadline else None
        verdict = weighed.verdict
        if isinstance(verdict, RefusedRequest):
            if not self._config.waits_for_decode:
                self._state.unmet.refused(verdict.cause, weighed.work, now_s)
                return self._state.refuse(waiting.call.request_id, verdict.error(), verdict.cause, waited_s)
            self._state.unmet.short_of = _short_of(verdict)
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
