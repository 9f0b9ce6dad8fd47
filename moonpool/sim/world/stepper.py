"""Runs a scheduler's steps on the simulated clock, and logs the time between tokens.

Equal decode steps run as one event. When a request joins or something has to happen between steps, the steps that have
ended are applied, the step under way is the last one, and the batch continues with the new request, as a real engine
does.
"""

from __future__ import annotations

from collections.abc import Callable

from moonpool.engine.jumping import JumpingScheduler
from moonpool.engine.sequence import Chunk, Sequence, SequenceStatus, StepResult
from moonpool.sim.physics.cost import EngineCost
from moonpool.sim.world.clock import Handle, SimClock
from moonpool.sim.world.sequence import TOKEN
from moonpool.sim.world.turns import EngineTurns

_LONGEST_PART = 10  # the longest tenth of the gaps counts


class StepLog:
    """How far apart tokens came: one entry per group of equal decode steps of a worker, whatever was in the batch.

    Entries never change; a job remembers its first entry.
    """

    def __init__(self) -> None:
        self._counts: list[int] = []
        self._gaps_s: list[float] = []

    def __len__(self) -> int:
        return len(self._counts)

    def add(self, num_steps: int, seconds: float) -> None:
        """Log `num_steps` equal steps that took `seconds` together."""
        self._counts.append(num_steps)
        self._gaps_s.append(seconds / num_steps)

    def gaps(self, first_entry: int, first_gap_s: float | None = None) -> list[tuple[float, int]]:
        """Return (seconds, how many) of the gaps from `first_entry` on, and of the gap before them, if given."""
        gaps = list(zip(self._gaps_s[first_entry:], self._counts[first_entry:], strict=True))
        if first_gap_s is not None:
            gaps.append((first_gap_s, 1))
        return gaps

    def long_gaps_s(self, first_entry: int, first_gap_s: float | None = None) -> float:
        return mean_of_longest_s(self.gaps(first_entry, first_gap_s))


def mean_of_longest_s(gaps: list[tuple[float, int]]) -> float:
    """Return the mean of the longest tenth of the gaps, at least one gap. Sorts `gaps`."""
    gaps.sort(reverse=True)
    wanted = left = max(1, sum([count for _, count in gaps]) // _LONGEST_PART)
    total_s = 0.0
    for gap_s, count in gaps:
        taken = min(count, left)
        total_s += taken * gap_s
        left -= taken
        if not left:
            break
    return total_s / wanted


class Stepper:
    """Calls `on_steps` with the result of the steps that ended, their number and the seconds that they took. Without
    `turns` it has the engine alone."""

    def __init__(
        self,
        clock: SimClock,
        scheduler: JumpingScheduler,
        cost: EngineCost,
        on_steps: Callable[[StepResult, int, float], None],
        turns: EngineTurns | None = None,
    ) -> None:
        self._clock, self._scheduler, self._cost, self._on_steps = clock, scheduler, cost, on_steps
        self._turns = turns or EngineTurns()
        self._end: Handle | None = None
        self._num_steps = 0  # of the group of equal steps under way
        self._open_chunks: list[Chunk] = []  # chunks of the single step under way; empty for a group of equal steps
        self._began_s = 0.0
        self._callbacks: list[Callable[[], None]] = []  # to call when the step under way has ended
        self._is_between_steps = False
        self.log = StepLog()
        self.shape = (0, 0)  # decoding sequences and their KV tokens when the steps began
        self.joined: list[Sequence] = []  # adopted sequences whose first step is the first of these steps
        self.first_end_s = 0.0  # end of that first step
        self.joined_entry = 0  # log entry from which on their later steps are logged
        self.busy_s = 0.0

    def busy_until_s(self, now_s: float) -> float:
        """Return the seconds spent in steps so far, the steps under way included."""
        return self.busy_s + (now_s - self._began_s if self._end is not None else 0.0)

    def request_joined(self) -> None:
        """Let a request that was added to the scheduler join the batch after the step under way."""
        if self._is_between_steps:
            return
        if self._end is None:
            self._begin()
        elif not self._open_chunks:
            self._shorten()

    def call_between_steps(self, callback: Callable[[], None]) -> None:
        """Call `callback` between the step under way, of either role, and the next; at once if none is under way."""
        if self._end is None and not self._is_between_steps:
            if self._turns.is_free(self):
                callback()
            else:
                self._callbacks.append(callback)
                self._turns.begin(self)
            return
        self._callbacks.append(callback)
        if not self._open_chunks and not self._is_between_steps:
            self._shorten()

    def resume_steps(self) -> None:
        """Have the turn that the other role has just ended."""
        self._run_waiting()

    def yield_soon(self) -> None:
        if not self._open_chunks:
            self._shorten()

    def shorten_for_pages(self) -> bool:
        """Do fewer of the equal steps under way if they lack pages that were given away.

        Return False if even the current step lacks pages: then the caller has to give the pages back.
        """
        if self._end is None or self._open_chunks:
            return True
        if not self._scheduler.lacks_pages(self._num_steps):
            return True
        self._shorten()
        return not self._scheduler.lacks_pages(self._num_steps)

    def stop(self) -> float:
        """Stop at once. Steps that have ended count, the step under way does not. Return the end of the last step."""
        self._callbacks = []
        if self._end is None:
            return self._began_s
        self._clock.cancel(self._end)
        self._end = None
        self.busy_s += self._clock.now_s - self._began_s
        steps, took_s = 0, 0.0
        if not self._open_chunks:
            within = self._cost.steps_within(*self.shape, self._clock.now_s - self._began_s)
            steps = min(self._num_steps - 1, within)  # a sequence can finish in the last of the equal steps only
        if steps:
            took_s = self._cost.decode_steps_s(*self.shape, steps)
            self._write_log(steps, took_s)
            self._on_steps(self._scheduler.advance(steps, TOKEN), steps, took_s)
        return self._began_s + took_s

    def restart(self, scheduler: JumpingScheduler) -> None:
        """Continue after `stop` with an empty batch. The log is kept."""
        self._scheduler, self._open_chunks = scheduler, []

    def _shorten(self) -> None:
        """Make the current step the last one of the group."""
        ended = self._cost.steps_within(*self.shape, self._clock.now_s - self._began_s)
        if ended + 1 < self._num_steps:
            assert self._end is not None
            self._clock.cancel(self._end)
            self._num_steps = ended + 1
            end_s = self._began_s + self._cost.decode_steps_s(*self.shape, self._num_steps)
            self._end = self._clock.call_at(end_s, self._ended)

    def _begin(self) -> None:
        scheduler, cost = self._scheduler, self._cost
        adopted = list(scheduler.queues.adopted)
        steps = scheduler.steps_until_change()
        self._end = None
        if steps is None or not self._turns.begin(self):
            return
        if steps == 1 or self._callbacks or self._turns.is_wanted:
            steps = 1
            self._open_chunks = scheduler.schedule()
            if not self._open_chunks:
                self._turns.end(self)
                return
            lasts_s = self._step_s(self._open_chunks)
        else:
            running = scheduler.queues.running
            self.shape = len(running), sum([each.num_computed_tokens for each in running])
            lasts_s = cost.decode_steps_s(*self.shape, steps)
        self.joined = [each for each in adopted if each.status is SequenceStatus.RUNNING]
        self._num_steps, self._began_s = steps, self._clock.now_s
        self._end = self._clock.call_at(self._began_s + lasts_s, self._ended)

    def _step_s(self, chunks: list[Chunk]) -> float:
        decodes = [chunk.start for chunk in chunks if len(chunk.tokens) == 1]
        self.shape = len(decodes), sum(decodes)
        prompts = [(chunk.end, chunk.start) for chunk in chunks if len(chunk.tokens) > 1]
        return self._cost.step_s(prompts, *self.shape)

    def _ended(self) -> None:
        took_s, steps, opened = self._clock.now_s - self._began_s, self._num_steps, self._open_chunks
        self.busy_s += took_s
        self._open_chunks = []
        if opened:
            for entry in self._scheduler.drain_admitted():
                self._scheduler.confirm_pulled(entry.request_id)
            result = self._scheduler.complete({chunk.request_id: TOKEN for chunk in opened if chunk.wants_logits})
        else:
            result = self._scheduler.advance(steps, TOKEN)
        self._write_log(steps, took_s)
        self._on_steps(result, steps, took_s)
        self._end = None
        self._turns.end(self)
        if self._turns.is_free(self):
            self._run_waiting()
        else:
            self._turns.begin(self)

    def _run_waiting(self) -> None:
        """Run what waits for the end of a step, and begin the next step."""
        if self._callbacks:
            self._run_callbacks()
        self._begin()
        while self._end is None and self._callbacks and self._turns.is_free(self):
            self._run_callbacks()  # no step began, so the callbacks need not wait
            self._begin()

    def _run_callbacks(self) -> None:
        """Run the waiting callbacks. Requests that join now are in the next step; callbacks added now run after it."""
        callbacks, self._callbacks = self._callbacks, []
        self._is_between_steps = True
        for callback in callbacks:
            callback()
        self._is_between_steps = False

    def _write_log(self, steps: int, took_s: float) -> None:
        """Log the steps. The first step of joined sequences has its own entry: their gap began on another worker."""
        if self.joined:
            first_s = took_s if steps == 1 else self._cost.decode_step_s(*self.shape)
            self.log.add(1, first_s)
            self.first_end_s, self.joined_entry = self._began_s + first_s, len(self.log)
            steps, took_s = steps - 1, took_s - first_s
        if steps:
            self.log.add(steps, took_s)
