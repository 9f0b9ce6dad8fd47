"""Notices an engine's thread that hangs: a GPU that stops answering, a deadlock.

The engine's thread says in an EngineProgress what it begins and what that should take. A thread of its own, which runs
while the engine's thread or the event loop stands, compares this with the clock:

    overdue     the task has taken half of its limit: the log says what it is and where; the conductors hear of it, and
                calls that wait for the engine's thread fail, so that their requests go on elsewhere
    it hangs    the limit is over: the process ends with EXIT_HANGS, and its launcher starts it again

The limit is `step_limit_s` or, if that is more, some times what the step is expected to take; waits for pulls, which
end by themselves, are added. A step counts from its last computed layer on, so one that is slow is not ended. A first
step, and one that prepares kernels, has `prepare_limit_s`. Time in which the whole process stood still does not count.
"""

from __future__ import annotations

import logging
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from moonpool.base.clock import AttendedClock, Clock
from moonpool.base.errors import ConfigError

if TYPE_CHECKING:
    from moonpool.engine.sequence import Chunk

LOOK_S = 0.25  # between two looks
_STANDSTILL_S = 2 * LOOK_S  # more than this between two looks: the process stood still
_TIMES_EXPECTED = 5.0
_SAY_S = 1.0  # for the last lines of the log; the thread that hangs may hold a lock of it
# Attention over this many tokens costs about as much as all else of a token, in small models; more in large ones.
_CONTEXT_TOKENS = 4096
_FORGET = 0.9  # of the longest time, with each step of about that size
_NAMED = 3  # requests
_LOG = logging.getLogger(__name__)


class EngineTask(NamedTuple):
    """What the engine's thread does, and with which chunks. With `expected_s` None it cannot be said how long that
    takes. `waits_s` is for what ends by itself within that time."""

    what: str
    expected_s: float | None = 0.0
    waits_s: float = 0.0
    chunks: Sequence[Chunk] = ()

    def describe(self) -> str:
        """Return what to call it in the log."""
        if not self.chunks:
            return self.what
        names = [chunk.request_id for chunk in self.chunks[:_NAMED]]
        names += ["..."] if len(self.chunks) > _NAMED else []
        return f"{self.what} of {sum(len(chunk.tokens) for chunk in self.chunks)} tokens for {', '.join(names)}"


@dataclass(frozen=True, slots=True)
class TaskLimits:
    step_limit_s: float
    prepare_limit_s: float

    def __post_init__(self) -> None:
        for name in ("step_limit_s", "prepare_limit_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be above 0", param=name)

    def limit_s(self, task: EngineTask) -> float:
        """Return after how long the task counts as hanging."""
        if task.expected_s is None:
            return max(self.step_limit_s, self.prepare_limit_s) + task.waits_s
        return max(self.step_limit_s, _TIMES_EXPECTED * task.expected_s) + task.waits_s

    def due_s(self, task: EngineTask) -> float:
        """Return after how long the task is overdue."""
        return (self.limit_s(task) - task.waits_s) / 2 + task.waits_s


class WatchedTask(NamedTuple):
    """The task under way as the watchdog saw it last. `seconds`: without standstills of the process."""

    task: EngineTask
    seconds: float
    due_s: float
    limit_s: float

    @property
    def is_overdue(self) -> bool:
        return self.seconds >= self.due_s

    @property
    def hangs(self) -> bool:
        return self.seconds >= self.limit_s


class TaskWatch:
    """How long the task under way has taken. Pure. A task counts from the look that first saw it: never too long, and
    too short by the time between two looks."""

    def __init__(self, limits: TaskLimits) -> None:
        self._limits = limits
        self._task: EngineTask | None = None
        self._seen_s = 0.0

    def look(self, task: EngineTask | None, now_s: float) -> WatchedTask | None:
        """`now_s` comes from a clock that stands still while the process does. Tasks are told apart by identity."""
        if task is not self._task:
            self._task, self._seen_s = task, now_s
        if task is None:
            return None
        return WatchedTask(task, now_s - self._seen_s, self._limits.due_s(task), self._limits.limit_s(task))


def work_of(num_tokens: int, start: float) -> float:
    """Return the work of `num_tokens` from token `start` on, in tokens without context."""
    return num_tokens * (1 + start / _CONTEXT_TOKENS)


def work_of_step(chunks: Sequence[Chunk]) -> float:
    """Return the work of all chunks. Called for each step, and fast for many chunks."""
    return sum([len(chunk.tokens) * (_CONTEXT_TOKENS + chunk.start) for chunk in chunks]) / _CONTEXT_TOKENS


class StepCosts:
    """What steps took lately, by the size of their work in powers of 2. Pure.

    A step of less work takes no longer than one that was measured, and one of more work at most proportionally longer.
    """

    def __init__(self) -> None:
        self._measured: dict[int, tuple[float, float]] = {}  # work and seconds

    def learn(self, work: float, seconds: float) -> None:
        size = int(work).bit_length()
        _, longest_s = self._measured.get(size, (0.0, 0.0))
        self._measured[size] = work, max(seconds, _FORGET * longest_s)

    def expected_s(self, work: float) -> float | None:
        """Return None if nothing was measured."""
        return min((seconds * max(1.0, work / size) for size, seconds in self._measured.values()), default=None)


class EngineProgress:
    """What the engine's thread does. That thread calls the methods and sets `task`; the watchdog sets `watched`.

    Other threads read both without a lock: each is replaced as a whole. With `launches`, a step may be computed after
    it ended, so its work counts until a step's results have been read.
    """

    def __init__(self, clock: Clock, *, launches: bool) -> None:
        self.task: EngineTask | None = None
        self.watched: WatchedTask | None = None
        self.costs = StepCosts()
        self.thread_id: int | None = None
        self._clock, self._launches = clock, launches
        self._has_stepped = False
        self._work = self._since_s = 0.0  # of the steps whose results were not read

    @property
    def is_overdue(self) -> bool:
        watched = self.watched
        return watched is not None and watched.is_overdue

    def rest(self) -> None:
        """There is nothing to do."""
        self.task = None

    def begin(self, what: str) -> None:
        """Something begins that should take no time worth mentioning."""
        self.task = EngineTask(what)

    def begin_step(self, what: str, work: float, waits_s: float = 0.0, chunks: Sequence[Chunk] = ()) -> None:
        if not self._work:
            self._since_s = self._clock.now_s()
        self._work += work
        self.task = EngineTask(what, self.costs.expected_s(self._work) if self._has_stepped else None, waits_s, chunks)

    def went_on(self) -> None:
        """Part of the task is done, and no other part takes longer than all of it should."""
        if self.task is not None:
            self.task = EngineTask(*self.task)  # another one for the watchdog

    def prepare(self, what: str) -> None:
        """Something begins that takes long and happens once, such as compiling. Nothing is learnt from its step."""
        self._work = 0.0
        self.task = EngineTask(what, None, 0.0 if self.task is None else self.task.waits_s)

    def end_step(self, *, is_read: bool) -> None:
        """The step has ended. `is_read`: its results were waited for."""
        if self._work and (is_read or not self._launches):
            if self._has_stepped:  # the first step prepares what no later one does
                self.costs.learn(self._work, self._clock.now_s() - self._since_s)
            self._work, self._has_stepped = 0.0, True


class Watchdog:
    """The thread that looks. `on_hang` is called on it, once, and ends the process."""

    def __init__(self, progress: EngineProgress, limits: TaskLimits, on_hang: Callable[[], None]) -> None:
        self._progress, self._watch, self._on_hang = progress, TaskWatch(limits), on_hang
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Idempotent."""
        self._closed.set()

    def _run(self) -> None:
        clock, said = AttendedClock(_STANDSTILL_S), None
        while not self._closed.wait(LOOK_S):
            before = self._progress.watched
            watched = self._progress.watched = self._watch.look(self._progress.task, clock.now_s())
            if said is not None and (watched is None or watched.task is not said):
                _say(logging.WARNING, f"the engine's thread goes on: {said.describe()} took {_seconds(before)}")
                said = None
            if watched is not None and watched.is_overdue and said is None:
                said = watched.task
                _say(logging.WARNING, f"the engine's thread is late: {self._describe(watched)}")
            if watched is not None and watched.hangs:
                text = f"the engine's thread hangs, so this process ends: {self._describe(watched)}"
                _say(logging.CRITICAL, text).join(_SAY_S)
                self._on_hang()
                return

    def _describe(self, watched: WatchedTask) -> str:
        frame = sys._current_frames().get(self._progress.thread_id or 0)
        stack = "".join(traceback.format_stack(frame)) if frame is not None else "  (the thread has ended)\n"
        taken = f"{_seconds(watched)} (limit {watched.limit_s:.1f} s)"
        return f"{watched.task.describe()} has taken {taken}, and is at\n{stack}"


def _seconds(watched: WatchedTask | None) -> str:
    return "a moment" if watched is None else f"{watched.seconds:.1f} s"


def _say(level: int, text: str) -> threading.Thread:
    """Log from another thread: the watchdog must not wait for a lock of the log."""
    thread = threading.Thread(target=_LOG.log, args=(level, "%s", text), name="watchdog log", daemon=True)
    thread.start()
    return thread
