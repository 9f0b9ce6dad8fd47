"""Starts roles as processes, watches them, restarts those that die, and stops them all.

launch/supervisor.py makes all decisions: the launcher passes it events and carries out the actions it returns. However
the launcher ends, no process stays behind: a stop takes at most KILL_AFTER_S, and children of a killed launcher end
by themselves (base/process.py).
"""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from moonpool.base.clock import AttendedClock, Clock
from moonpool.base.process import Lifeline
from moonpool.launch.child import Child
from moonpool.launch.plan import Role
from moonpool.launch.supervisor import (
    Action,
    Added,
    Complete,
    Event,
    Exited,
    Finish,
    Kill,
    Ready,
    Restarting,
    Retired,
    Start,
    State,
    StopRequested,
    Supervisor,
    Terminate,
    Tick,
)
from moonpool.launch.template import Template

_LOG = logging.getLogger(__name__)
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_TICK_S = 1.0  # between ticks when no event comes
_ALIVE_EVERY_S = 2.0


class StartProgress:
    """Reports on standard error how the start goes: one line per role, and a line every two seconds while roles start.

    The lines are coloured on a terminal.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._begin_s = self._clock.now_s()
        self._since_s: dict[str, float] = {}  # roles that are starting now

    @property
    def elapsed_s(self) -> float:
        return self._clock.now_s() - self._begin_s

    def starting(self, name: str) -> None:
        self._since_s[name] = self._clock.now_s()

    def ready(self, name: str) -> None:
        since_s = self._since_s.pop(name, None)
        if since_s is not None:
            say(f"{name} is ready ({self._clock.now_s() - since_s:.1f} s)", "green")

    def ended(self, name: str) -> None:
        self._since_s.pop(name, None)

    async def keep_alive(self) -> None:
        """Print the roles that are still starting, until cancelled."""
        while True:
            await asyncio.sleep(_ALIVE_EVERY_S)
            if self._since_s:
                longest_s = self._clock.now_s() - min(self._since_s.values())
                say(f"starting {', '.join(self._since_s)} ... {longest_s:.0f} s")


def say(text: str, colour: str | None = None) -> None:
    """Print one line on standard error."""
    if sys.stderr.isatty():
        from rich.console import Console  # here: only a terminal needs it

        Console(stderr=True, highlight=False).print(f"moonpool: {text}", style=colour, markup=False)
    else:
        print(f"moonpool: {text}", file=sys.stderr, flush=True)


class Launcher:
    """Runs `roles` until a stop signal or a failure. Calls `on_complete` once, when all roles are ready."""

    def __init__(
        self,
        roles: Sequence[Role],
        lifeline: Lifeline,
        on_complete: Callable[[float], None],
        log_dir: Path | None = None,
        before_start: Callable[[], object] = lambda: None,
    ) -> None:
        """`before_start` is called before each start of a child; the child is not started if it raises OSError."""
        self._roles = {role.name: role for role in roles}
        self._lifeline = lifeline
        self._on_complete = on_complete
        self._log_dir = log_dir
        self._before_start = before_start
        self._supervisor = Supervisor(roles)
        # Time in which this process was suspended, and could not read a child's report, does not make the child late.
        self._clock = AttendedClock(2 * _TICK_S)
        self._progress = StartProgress(self._clock)
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._children: dict[str, Child] = {}
        self._worker_template, self._template = Template(), Template()
        self._tasks: set[asyncio.Task[None]] = set()
        self._changes: dict[str, bool] = {}  # added (True) and retired roles of which the supervisor hears next
        self.retirement = asyncio.Event()  # set, and replaced by another one, when retired() has changed

    @property
    def is_serving(self) -> bool:
        """Whether the service was complete once and is not being stopped."""
        return self._supervisor.complete and not self._supervisor.stopping

    def known(self, command: str) -> list[str]:
        """Return the names of all roles of that command that run or have run."""
        return [name for name, role in self._roles.items() if role.command == command]

    def roles(self, command: str) -> list[Role]:
        """Return the roles of that command that are meant to run."""
        return [role for role in self._roles.values() if role.command == command and self._is_meant(role.name)]

    def retired(self, command: str) -> tuple[str, ...]:
        """Return the roles of that command that have run and are not started again after their end."""
        return tuple(name for name in self.known(command) if not self._is_meant(name))

    def _is_meant(self, name: str) -> bool:
        return self._changes.get(name, not self._supervisor.is_retired(name))

    def state_of(self, name: str) -> State:
        return State.WAITING if self._changes.get(name) else self._supervisor.state_of(name)

    def last_end_of(self, name: str) -> str:
        """Return why the role's process ended last; empty if it never did."""
        return self._supervisor.last_end_of(name)

    def add(self, role: Role) -> None:
        """Start one more role, soon. No role of its name may run."""
        assert self.state_of(role.name) is State.GONE, f"{role.name} runs"
        self._roles[role.name] = role
        self._change(role.name, Added(role), True)

    def retire(self, name: str, *, at_once: bool) -> None:
        """Do not start the role again after its end. With `at_once` it ends now; otherwise it was told to drain."""
        self._change(name, Retired(name, at_once), False)

    def _change(self, name: str, event: Event, is_meant: bool) -> None:
        self._changes[name] = is_meant
        self._events.put_nowait(event)
        self._say_retired()

    def _say_retired(self) -> None:
        self.retirement.set()
        self.retirement = asyncio.Event()

    def kill(self, name: str) -> None:
        """Kill the role's process as a crash would; it is started again."""
        self._children[name].kill()

    def change_options(self, command: str, **options: object) -> None:
        """Give these options to the roles of that command when they are started again."""
        for role in self.roles(command):
            self._roles[role.name] = replace(role, options={**role.options, **options})

    async def run(self) -> str | None:
        """Return when no child is left: None after a stop signal, otherwise the reason of the failure."""
        loop = asyncio.get_running_loop()
        # nohup ignores SIGHUP on purpose; then it stays ignored.
        signals = [each for each in _STOP_SIGNALS if each != signal.SIGHUP or signal.getsignal(each) != signal.SIG_IGN]
        for signum in signals:
            loop.add_signal_handler(signum, self._events.put_nowait, StopRequested())
        alive = asyncio.create_task(self._progress.keep_alive())
        if self.roles("worker"):  # they start when others are ready; importing what they need takes longer than that
            self._spawn(self._worker_template.load("worker"))
        try:
            return await self._run_until_finished()
        finally:
            alive.cancel()
            self._worker_template.close()
            self._template.close()
            for signum in signals:
                loop.remove_signal_handler(signum)

    async def _run_until_finished(self) -> str | None:
        event: Event = Tick()
        while True:
            was_stopping = self._supervisor.stopping
            if isinstance(event, Added):
                self._changes.pop(event.spec.name, None)
            elif isinstance(event, Retired):
                self._changes.pop(event.name, None)
            for action in self._supervisor.handle(event, self._clock.now_s()):
                if isinstance(action, Finish):
                    await asyncio.gather(*self._tasks)
                    return action.failure
                self._do(action)
            if self._supervisor.stopping and not was_stopping:
                say("stopping")
            if isinstance(event, Exited) and event.left:
                self._say_retired()
            event = await self._next_event()

    async def _next_event(self) -> Event:
        wake_s = self._supervisor.next_wake_s()
        delay_s = _TICK_S if wake_s is None else min(_TICK_S, max(0.0, wake_s - self._clock.now_s()))
        try:
            async with asyncio.timeout(delay_s):
                return await self._events.get()
        except TimeoutError:
            return Tick()

    def _do(self, action: Action) -> None:
        match action:
            case Start(name):
                self._start(self._roles[name])
            case Terminate(name):
                _LOG.debug("%s: SIGTERM", name)
                self._children[name].terminate()
            case Kill(name):
                _LOG.debug("%s: SIGKILL", name)
                self._children[name].kill()
            case Restarting(name, why, delay_s):
                say(f"{name} ended ({why}); starting it again in {delay_s:.1f} s", "yellow")
            case Complete():
                self._on_complete(self._progress.elapsed_s)

    def _start(self, role: Role) -> None:
        self._progress.starting(role.name)
        child = self._children[role.name] = Child()
        self._spawn(self._watch(role, child))

    async def _watch(self, role: Role, child: Child) -> None:
        """Start one child and queue its events: Ready, if it becomes ready, and Exited."""
        name, log_path = role.name, self._log_dir / f"{role.name}.log" if self._log_dir else None
        try:
            self._before_start()
            await child.start(self._template_of(role), role.command, role.options, self._lifeline, log_path)
        except OSError as error:
            self._progress.ended(name)
            self._events.put_nowait(Exited(name, f"it could not be started: {error}"))
            return
        report = await child.report()
        if report is not None and report.ready is not None:
            self._progress.ready(name)
            self._events.put_nowait(Ready(name))
        status = await child.wait()
        self._progress.ended(name)
        _LOG.debug("%s: %s", name, status)
        if child.has_left:
            say(f"{name} was drained and has ended")
        self._events.put_nowait(Exited(name, status, report.error if report is not None else None, child.has_left))

    def _template_of(self, role: Role) -> Template:
        return self._worker_template if role.command == "worker" else self._template

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
