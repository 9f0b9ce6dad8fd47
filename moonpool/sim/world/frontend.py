"""Where simulated requests arrive: production's waiting room in front of the conductor's state, with one timer."""

from __future__ import annotations

from collections.abc import Callable

from moonpool.base.errors import MoonpoolError, Overloaded, Unavailable
from moonpool.conductor.messages import Decision, Route
from moonpool.conductor.placement.policy import PolicyConfig
from moonpool.conductor.request_queue import RequestQueue
from moonpool.conductor.state import ConductorState
from moonpool.sim.physics.events import Handle
from moonpool.sim.world.job import Job
from moonpool.sim.world.timers import SimTimers

_OWNER = "trace"


class SimFrontend:
    """Every job that is asked for is sent or refused, now or later, once."""

    def __init__(
        self,
        clock: SimTimers,
        conductor: ConductorState,
        policy: PolicyConfig,
        asked_tokens: int,
        on_sent: Callable[[Job, Decision], None],
        on_refused: Callable[[Job, MoonpoolError], None],
    ) -> None:
        self._clock, self._on_sent, self._on_refused = clock, on_sent, on_refused
        self._room = RequestQueue(conductor, policy)
        self._asked_tokens = asked_tokens
        self._jobs: dict[str, Job] = {}  # that wait
        self._timer: Handle | None = None

    def ask(self, job: Job, tenant: str, priority: int, exclude: tuple[str, ...] = (), num_written: int = 0) -> None:
        """Not from the workers in `exclude`; so many of its tokens the client has already."""
        call = Route(
            request_id=job.request_id,
            keys=job.keys,
            num_tokens=job.num_input,
            max_tokens=max(job.num_output, self._asked_tokens - num_written),
            exclude=exclude,
            tenant=tenant,
            priority=priority,
        )
        now_s = self._clock.now_s
        try:
            decision = self._room.ask(call, _OWNER, now_s, now_s)
        except (Overloaded, Unavailable) as error:
            self._on_refused(job, error)
            return
        if decision is not None:
            self._on_sent(job, decision)
        else:
            self._jobs[job.request_id] = job
            self._settle()  # another may have had to give way

    def changed(self) -> None:
        """Somebody may fit now: a request has ended, or a worker has come."""
        if self._jobs:
            self._settle()

    def _settle(self) -> None:
        if self._timer is not None:
            self._clock.cancel(self._timer)
            self._timer = None
        for request_id, outcome in self._room.settle(self._clock.now_s):
            job = self._jobs.pop(request_id)
            if isinstance(outcome, Decision):
                self._on_sent(job, outcome)
            else:
                self._on_refused(job, outcome)
        at_s = self._room.next_event_s()
        if at_s is not None:
            self._timer = self._clock.at(at_s, self._settle)
