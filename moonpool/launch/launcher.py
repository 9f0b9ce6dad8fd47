"""Starts roles as processes, watches them, starts again what dies, and stops them all.

The launcher decides nothing itself: events go into launch/supervisor.py, and this file does what comes out. However
it ends, no process stays behind: a stop is over within KILL_AFTER_S, and children of a killed launcher end by
themselves (base/process.py).
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

from moonpool.base.clock import AttendedClock
from moonpool.base.process import Lifeline
from moonpool.launch.child import Child
from moonpool.launch.plan import Role
from moonpool.launch.progress import Progress, say
from moonpool.launch.supervisor import (
    Action,
    ChildSpec,
    Complete,
    Event,
    Exited,
    Finish,
    Kill,
    Ready,
    Restarting,
    Start,
    StopRequested,
    Supervisor,
    Terminate,
    Tick,
)

_LOG = logging.getLogger(__name__)
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_LOOK_EVERY_S = 1.0  # how often the time is looked at when nothing happens


class Launcher:
    """Runs `roles` until it is told to stop or has to give up. `on_complete` is called once, when all are ready."""

    def __init__(
        self,
        roles: Sequence[Role],
        lifeline: Lifeline,
        on_complete: Callable[[float], None],
        log_dir: Path | None = None,
    ) -> None:
        self._roles = {role.name: role for role in roles}
        self._lifeline = lifeline
        self._on_complete = on_complete
        self._log_dir = log_dir
        self._supervisor = Supervisor(
            [ChildSpec(r.name, r.after, r.first_after, r.uses, r.start_timeout_s) for r in roles]
        )
        # A child is not late because this process stood still and did not hear that it is ready.
        self._clock = AttendedClock(2 * _LOOK_EVERY_S)
        self._progress = Progress(self._clock)
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._children: dict[str, Child] = {}
        self._watchers: set[asyncio.Task[None]] = set()

    async def run(self) -> str | None:
        """Returns when no child is left: None when asked to stop, else why it gave up."""
        loop = asyncio.get_running_loop()
        # nohup ignores SIGHUP on purpose; that is the user's word and stays.
        signals = [each for each in _STOP_SIGNALS if each != signal.SIGHUP or signal.getsignal(each) != signal.SIG_IGN]
        for signum in signals:
            loop.add_signal_handler(signum, self._events.put_nowait, StopRequested())
        alive = asyncio.create_task(self._progress.keep_alive())
        try:
            return await self._run_until_finished()
        finally:
            alive.cancel()
            for signum in signals:
                loop.remove_signal_handler(signum)

    async def _run_until_finished(self) -> str | None:
        event: Event = Tick()
        while True:
            was_stopping = self._supervisor.stopping
            for action in self._supervisor.handle(event, self._clock.now_s()):
                if isinstance(action, Finish):
                    await asyncio.gather(*self._watchers)
                    return action.failure
                await self._do(action)
            if self._supervisor.stopping and not was_stopping:
                say("stopping")
            event = await self._next_event()

    async def _next_event(self) -> Event:
        wake_s = self._supervisor.next_wake_s()
        delay_s = _LOOK_EVERY_S if wake_s is None else min(_LOOK_EVERY_S, max(0.0, wake_s - self._clock.now_s()))
        try:
            async with asyncio.timeout(delay_s):
                return await self._events.get()
        except TimeoutError:
            return Tick()

    async def _do(self, action: Action) -> None:
        match action:
            case Start(name):
                await self._start(self._roles[name])
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

    async def _start(self, role: Role) -> None:
        log_path = self._log_dir / f"{role.name}.log" if self._log_dir else None
        self._progress.starting(role.name)
        try:
            child = await Child.start(role.command, role.options, self._lifeline, log_path)
        except OSError as error:
            self._events.put_nowait(Exited(role.name, f"it could not be started: {error}"))
            return
        self._children[role.name] = child
        watcher = asyncio.create_task(self._watch(role.name, child))
        self._watchers.add(watcher)
        watcher.add_done_callback(self._watchers.discard)

    async def _watch(self, name: str, child: Child) -> None:
        """Turns one child's life into events: perhaps Ready, certainly Exited."""
        report = await child.report()
        if report is not None and report.ready is not None:
            self._progress.ready(name)
            self._events.put_nowait(Ready(name))
        status = await child.wait()
        self._progress.ended(name)
        _LOG.debug("%s: %s", name, status)
        self._events.put_nowait(Exited(name, status, report.error if report is not None else None))
