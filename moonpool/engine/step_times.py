"""How long steps compute: marks before and after each step, read when the device has passed them.

On the CPU a mark is the time. On a GPU it is a CUDA event in the stream that computes the steps: the host only enqueues
a step, and its clock would show how long that takes. No step waits for a mark, so times are known one or more steps
later, in order. A step whose tokens the host has read is known at once, and so are all steps before it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from moonpool.base.clock import Clock, SystemClock
from moonpool.engine.sequence import Chunk

if TYPE_CHECKING:
    import torch

Mark = Any  # a float on the CPU, a torch.cuda.Event on a GPU
_MAX_STEPS = 64  # whose times are not read yet; the oldest are dropped


class Marks(Protocol):
    """Points in the work of a device."""

    def mark(self) -> Mark:
        """Return the point behind all steps that were enqueued so far."""

    def settle(self, mark: Mark) -> None:
        """Wait until the device has reached the mark. For a device that is known to be idle: it takes microseconds."""

    def seconds(self, begin: Mark, end: Mark) -> float | None:
        """Return the time from one mark to a later one; None if the device has not reached it yet."""


class ClockMarks:
    """The marks of a CPU: when the host goes on, the step is computed."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def mark(self) -> float:
        return self._clock.now_s()

    def settle(self, mark: float) -> None:
        pass

    def seconds(self, begin: float, end: float) -> float:
        return end - begin


class EventMarks:
    """The marks of a GPU's stream."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream

    def mark(self) -> torch.cuda.Event:
        return timed_event(self._stream)

    def settle(self, mark: torch.cuda.Event) -> None:
        mark.synchronize()

    def seconds(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float | None:
        reached: bool = end.query()  # type: ignore[no-untyped-call]
        return float(begin.elapsed_time(end)) * 1e-3 if reached else None


def timed_event(stream: torch.cuda.Stream) -> torch.cuda.Event:
    """Record an event in the stream, of those between which time can be measured."""
    import torch

    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(stream)
    return event


@dataclass(frozen=True, slots=True)
class StepTime:
    """How long a step took.

    `seconds` is from its begin, or the end of what the device computed before, to its end, without its waits.
    `period_s` is from the end of the step before to its end: the time between two tokens. If the step did not follow
    another one at once, it is the time from its begin.
    """

    chunks: Sequence[Chunk]
    seconds: float
    period_s: float
    has_waited: bool = False  # for pulls from the pool


@dataclass(slots=True)
class _Step:
    chunks: Sequence[Chunk]
    began: Mark
    before: Mark | None  # the end of the step before, if this one follows it at once
    waits: list[tuple[Mark, Mark]] = field(default_factory=list)
    ended: Mark = None


class StepTimes:
    """The times of one engine's steps; for the engine's thread only."""

    def __init__(self, marks: Marks | None = None) -> None:
        """Without `marks`: those of the CPU, by the machine's clock."""
        self._marks = marks or ClockMarks(SystemClock())
        self._open: _Step | None = None
        self._last: Mark | None = None
        self._ended: deque[_Step] = deque(maxlen=_MAX_STEPS)

    def begin(self, chunks: Sequence[Chunk], began: Mark | None = None) -> None:
        """A step begins now, or at the mark `began` if it was launched before."""
        self._open = _Step(chunks, self._marks.mark() if began is None else began, self._last)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """In this context the step waits for something other than its own computing."""
        step, began = self._open, self._marks.mark()
        try:
            yield
        finally:
            if step is not None:
                step.waits.append((began, self._marks.mark()))

    def end(self, ended: Mark | None = None, *, is_read: bool = False) -> None:
        """The open step ends now, or at the mark `ended` if it was launched. `is_read`: the host has read its tokens,
        and nothing was launched behind it."""
        step, self._open = self._open, None
        assert step is not None, "a step that ends has begun"
        step.ended = self._marks.mark() if ended is None else ended
        if is_read and ended is None:
            self._marks.settle(step.ended)
        self._last = step.ended
        self._ended.append(step)

    def rest(self) -> None:
        """No step follows at once, or the open one failed: nothing is known of its time."""
        self._open = self._last = None

    def drain(self) -> list[StepTime]:
        """Return the times of the steps that the device has computed since the last call, in order."""
        found = []
        while self._ended and (time := self._time(self._ended[0])) is not None:
            self._ended.popleft()
            found.append(time)
        return found

    def _time(self, step: _Step) -> StepTime | None:
        whole_s = self._marks.seconds(step.began, step.ended)
        if whole_s is None:
            return None
        waits = [self._marks.seconds(*wait) or 0.0 for wait in step.waits]
        period_s = whole_s if step.before is None else self._marks.seconds(step.before, step.ended) or 0.0
        return StepTime(step.chunks, max(0.0, whole_s - sum(waits)), max(0.0, period_s), bool(waits))
