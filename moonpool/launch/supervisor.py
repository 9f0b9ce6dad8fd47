"""Decides what a launcher does next: which child to start, restart, stop or kill. Pure.

    handle(event, now_s) -> actions        and next_wake_s(): when to send the next Tick

A child starts when the children it needs are ready. A child that ends unasked is restarted after a pause, which doubles
with every crash up to BACKOFF_MAX_S, and is short again after the child has stayed ready for STAYS_S. However often one
child crashes, the others go on. Only before the service was complete for the first time can a child stop everything: by
reporting a reason (a bad model, a port that is taken), or by ending MAX_EARLY_CRASHES times.

A child may be added at any time, and retired: its end, however it comes, is then its last. So is the end of a child
that says it was drained. A stop terminates children before those they use, and kills the rest when time is up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

from moonpool.base.backoff import backoff_s

BACKOFF_FIRST_S = 0.2
BACKOFF_MAX_S = 30.0
STAYS_S = 30.0
MAX_EARLY_CRASHES = 5
STOP_ALL_AFTER_S = 2.0
KILL_AFTER_S = 3.5


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """`after`: children that must be ready before every start; `first_after`: only before the first start.

    At a stop this child ends before all of these, and before those in `uses`, without which it can start.
    """

    name: str
    after: tuple[str, ...] = ()
    first_after: tuple[str, ...] = ()
    uses: tuple[str, ...] = ()
    start_timeout_s: float = 60.0

    @property
    def stops_before(self) -> tuple[str, ...]:
        return self.after + self.first_after + self.uses


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed. The first tick starts the service."""


@dataclass(frozen=True, slots=True)
class Ready:
    name: str


@dataclass(frozen=True, slots=True)
class Exited:
    """`reason` is the child's own report, `status` how the process ended; with `left` it was drained."""

    name: str
    status: str
    reason: str | None = None
    left: bool = False


@dataclass(frozen=True, slots=True)
class Added:
    """A new child, which needs none that come later. Its name is free."""

    spec: ChildSpec


@dataclass(frozen=True, slots=True)
class Retired:
    """The child is not started again after its end. With `at_once` it is told to end; otherwise it has been told."""

    name: str
    at_once: bool = False


@dataclass(frozen=True, slots=True)
class StopRequested:
    """The second one kills all children at once."""


Event = Tick | Ready | Exited | StopRequested | Added | Retired


@dataclass(frozen=True, slots=True)
class Start:
    name: str


@dataclass(frozen=True, slots=True)
class Terminate:
    name: str


@dataclass(frozen=True, slots=True)
class Kill:
    name: str


@dataclass(frozen=True, slots=True)
class Complete:
    """Every child is ready for the first time."""


@dataclass(frozen=True, slots=True)
class Restarting:
    """For the log: a child ended and will be started again."""

    name: str
    why: str
    delay_s: float


@dataclass(frozen=True, slots=True)
class Finish:
    """No child is left. `failure` is None after a requested stop."""

    failure: str | None = None


Action = Start | Terminate | Kill | Complete | Restarting | Finish


class State(Enum):
    WAITING = auto()  # not running; starts when its needs are ready and its pause is over
    STARTING = auto()
    READY = auto()
    TERMINATING = auto()
    KILLED = auto()
    GONE = auto()  # not running, and never started again


_ALIVE = frozenset({State.STARTING, State.READY, State.TERMINATING, State.KILLED})


@dataclass(slots=True)
class _Child:
    spec: ChildSpec
    state: State = State.WAITING
    was_ready: bool = False
    not_before_s: float = 0.0
    started_s: float = 0.0
    ready_s: float = 0.0
    killed_for: str | None = None  # the supervisor's reason, if it killed the child
    retired: bool = False
    last_end: str = ""  # why its process ended last
    num_crashes: int = 0  # since it last stayed ready for STAYS_S

    @property
    def alive(self) -> bool:
        return self.state in _ALIVE

    @property
    def needs(self) -> tuple[str, ...]:
        return self.spec.after if self.was_ready else self.spec.after + self.spec.first_after


class Supervisor:
    """Takes events in the order they happen; the caller carries out the actions in the order given."""

    def __init__(self, specs: Sequence[ChildSpec]) -> None:
        self._children = {spec.name: _Child(spec) for spec in specs}
        self._complete = False
        self._stop_since_s: float | None = None
        self._failure: str | None = None
        self._finished = False
        self._check_order()

    @property
    def stopping(self) -> bool:
        return self._stop_since_s is not None

    @property
    def complete(self) -> bool:
        """Whether all children have been ready at the same time."""
        return self._complete

    def state_of(self, name: str) -> State:
        """Return the state; GONE for a child that is not there, or not any more."""
        return self._children[name].state if name in self._children else State.GONE

    def is_retired(self, name: str) -> bool:
        return name not in self._children or self._children[name].retired

    def last_end_of(self, name: str) -> str:
        """Return why the child's process ended last; empty if it never did."""
        return self._children[name].last_end if name in self._children else ""

    def handle(self, event: Event, now_s: float) -> list[Action]:
        """Return the actions to carry out now. There are none after Finish."""
        actions: list[Action] = []
        match event:
            case Ready(name):
                self._on_ready(self._children[name], now_s)
            case Added(spec):
                assert spec.name not in self._children, f"there is a {spec.name} already"
                if not self.stopping:
                    self._children[spec.name] = _Child(spec)
            case Retired(name, at_once):
                actions += self._on_retired(self._children.get(name), at_once)
            case Exited():
                actions += self._on_exit(self._children[event.name], event, now_s)
            case StopRequested() if self.stopping:
                actions += self._kill_all()
            case StopRequested():
                self._begin_stop(now_s, None)
            case Tick():
                pass
        actions += self._stop_step(now_s) if self.stopping else self._run_step(now_s)
        return actions

    def next_wake_s(self) -> float | None:
        """Return when the next Tick is due; None if only another event can change anything."""
        if self._stop_since_s is not None:
            return self._next_stop_wake_s(self._stop_since_s)
        due = [child.started_s + child.spec.start_timeout_s for child in self._in(State.STARTING)]
        due += [child.not_before_s for child in self._in(State.WAITING) if self._needs_met(child)]
        return min(due, default=None)

    # events

    def _on_ready(self, child: _Child, now_s: float) -> None:
        if child.state is State.STARTING:
            child.state, child.ready_s = State.READY, now_s
            child.was_ready = True

    def _on_exit(self, child: _Child, event: Exited, now_s: float) -> list[Action]:
        if self.stopping:
            child.state = State.GONE
            return []
        why = child.last_end = event.reason or child.killed_for or event.status
        if event.left or child.retired:
            del self._children[child.spec.name]
            return []
        if event.reason is not None and not self._complete:
            child.state = State.GONE
            self._begin_stop(now_s, f"{child.spec.name}: {why}")
            return []
        return self._on_crash(child, why, now_s)

    def _on_retired(self, child: _Child | None, at_once: bool) -> list[Action]:
        if child is None or self.stopping:
            return []
        child.retired = True
        if child.state is State.WAITING:
            del self._children[child.spec.name]
        elif child.state is State.STARTING or (at_once and child.state is State.READY):
            child.state = State.TERMINATING
            return [Terminate(child.spec.name)]
        return []

    def _on_crash(self, child: _Child, why: str, now_s: float) -> list[Action]:
        if child.state is State.READY and now_s >= child.ready_s + STAYS_S:
            child.num_crashes = 0
        child.num_crashes += 1
        if not self._complete and child.num_crashes >= MAX_EARLY_CRASHES:
            child.state = State.GONE
            times = f"{child.num_crashes} times before the service was complete"
            self._begin_stop(now_s, f"{child.spec.name} ended {times}, the last time: {why}")
            return []
        delay_s = backoff_s(child.num_crashes - 1, BACKOFF_FIRST_S, BACKOFF_MAX_S)
        child.state, child.not_before_s = State.WAITING, now_s + delay_s
        return [Restarting(child.spec.name, why, delay_s)]

    # running

    def _run_step(self, now_s: float) -> list[Action]:
        actions: list[Action] = []
        for child in self._in(State.WAITING):
            if now_s >= child.not_before_s and self._needs_met(child):
                child.state, child.started_s, child.killed_for = State.STARTING, now_s, None
                actions.append(Start(child.spec.name))
        for child in self._in(State.STARTING):
            if now_s >= child.started_s + child.spec.start_timeout_s:
                # Its exit then counts as a crash.
                child.state = State.KILLED
                child.killed_for = f"not ready within {child.spec.start_timeout_s:g} s"
                actions.append(Kill(child.spec.name))
        if not self._complete and all(child.state is State.READY for child in self._children.values()):
            self._complete = True
            actions.append(Complete())
        return actions

    def _needs_met(self, child: _Child) -> bool:
        """A retired role delays no role that needs it."""
        needs = [self._children[name] for name in child.needs if name in self._children]
        return all(need.state is State.READY for need in needs)

    # stopping

    def _begin_stop(self, now_s: float, failure: str | None) -> None:
        self._stop_since_s, self._failure = now_s, failure
        for child in self._in(State.WAITING):
            child.state = State.GONE

    def _stop_step(self, now_s: float) -> list[Action]:
        assert self._stop_since_s is not None
        # The same sums as in next_wake_s(): with other rounding a Tick could come too early for what is due.
        if now_s >= self._stop_since_s + KILL_AFTER_S:
            actions = self._kill_all()
        else:
            actions = self._terminate(everyone=now_s >= self._stop_since_s + STOP_ALL_AFTER_S)
        if not self._finished and not any(child.alive for child in self._children.values()):
            self._finished = True
            actions.append(Finish(self._failure))
        return actions

    def _terminate(self, *, everyone: bool) -> list[Action]:
        actions: list[Action] = []
        for child in self._in(State.STARTING, State.READY):
            if everyone or not self._is_used(child.spec.name):
                actions.append(Terminate(child.spec.name))
        for action in actions:
            assert isinstance(action, Terminate)
            self._children[action.name].state = State.TERMINATING
        return actions

    def _is_used(self, name: str) -> bool:
        return any(child.alive and name in child.spec.stops_before for child in self._children.values())

    def _kill_all(self) -> list[Action]:
        actions: list[Action] = []
        for child in self._children.values():
            if child.alive and child.state is not State.KILLED:
                child.state = State.KILLED
                actions.append(Kill(child.spec.name))
        return actions

    def _next_stop_wake_s(self, since_s: float) -> float | None:
        if self._in(State.STARTING, State.READY):
            return since_s + STOP_ALL_AFTER_S
        return since_s + KILL_AFTER_S if self._in(State.TERMINATING) else None

    def _in(self, *states: State) -> list[_Child]:
        return [child for child in self._children.values() if child.state in states]

    def _check_order(self) -> None:
        """Assert that children need earlier ones only, so that one can always start."""
        seen: set[str] = set()
        for child in self._children.values():
            missing = set(child.spec.stops_before) - seen
            assert not missing, f"{child.spec.name} needs {sorted(missing)}, which come later or never"
            seen.add(child.spec.name)
