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
from moonpool.sim.world.clock import Handle, SimTimers
from moonpool.sim.world.sequence import TOKEN

_LONGEST_PART = 10  # one in so many gaps counts: the longest


class StepLog:
    """Entries are never changed; a request remembers where its own begin."""

    def __init__(self) -> None:
        self._counts: list[int] = []
        self._gaps_s: list[float] = []

    def __len__(self) -> int:
        return len(self._counts)

    def add(self, num_steps: int, seconds: float) -> None:
        """So many steps that took so long together."""
        self._counts.append(num_steps)
        self._gaps_s.append(seconds / num_steps)

    def gaps(self, first_entry: int, first_gap_s: float | None = None) -> list[tuple[float, int]]:
        """Seconds and how many since then; `first_gap_s` came before them."""
        gaps = list(zip(self._gaps_s[first_entry:], self._counts[first_entry:], strict=True))
        if first_gap_s is not None:
            gaps.append((first_gap_s, 1))
        return gaps

    def long_gaps_s(self, first_entry: int, first_gap_s: float | None = None) -> float:
        return mean_of_longest_s(self.gaps(first_entry, first_gap_s))


def mean_of_longest_s(gaps: list[tuple[float, int]]) -> float:
    """The mean of the longest tenth of the gaps, at least one."""
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
    """`on_steps` hears of what came out of how many steps that began then with so many sequences and tokens of KV."""

    def __init__(
        self,
        clock: SimTimers,
        scheduler: JumpingScheduler,
        cost: EngineCost,
        on_steps: Callable[[StepResult, int, float], None],
    ) -> None:
        self._clock, self._scheduler, self._cost, self._on_steps = clock, scheduler, cost, on_steps
        self._end: Handle | None = None
        self._num_steps = 0  # under way
        self._opened: list[Chunk] = []  # what the open step computes; empty when equal steps are under way
        self._began_s = 0.0
        self._acts: list[Callable[[], None]] = []  # that wait for the end of a step
        self._is_between = False
        self.log = StepLog()
        self.shape = (0, 0)  # sequences that decode, and tokens of their KV when the steps began
        self.joined: list[Sequence] = []  # adopted ones whose first step was the first of these
        self.first_end_s = 0.0  # when that one ended
        self.joined_entry = 0  # what is logged from here on are their later steps
        self.busy_s = 0.0

    def busy_until_s(self, now_s: float) -> float:
        """Return the seconds spent in steps so far, the steps under way included."""
        return self.busy_s + (now_s - self._began_s if self._end is not None else 0.0)

    def somebody_came(self) -> None:
        """The batch is to change as soon as it can."""
        if self._is_between:
            return
        if self._end is None:
            self._begin()
        elif not self._opened:
            self._cut()

    def between_steps(self, act: Callable[[], None]) -> None:
        """When the step under way has ended and the next has not begun; now, if there is none."""
        if self._end is None and not self._is_between:
            act()
            return
        self._acts.append(act)
        if not self._opened and not self._is_between:
            self._cut()

    def makes_do(self) -> bool:
        """Somebody else has taken pages: equal steps under way become fewer where they would lack some. False: even
        the one under way would, and the pages are to be given back."""
        if self._end is None or self._opened:
            return True
        if not self._scheduler.lacks_pages(self._num_steps):
            return True
        self._cut()
        return not self._scheduler.lacks_pages(self._num_steps)

    def stop(self) -> float:
        """At once: steps that have ended count, the one under way does not. When the last of them ended."""
        self._acts = []
        if self._end is None:
            return self._began_s
        self._clock.cancel(self._end)
        self._end = None
        self.busy_s += self._clock.now_s - self._began_s
        steps, took_s = 0, 0.0
        if not self._opened:
            within = self._cost.steps_within(*self.shape, self._clock.now_s - self._began_s)
            steps = min(self._num_steps - 1, within)  # only the last of equal steps ends somebody
        if steps:
            took_s = self._cost.decode_steps_s(*self.shape, steps)
            self._write_log(steps, took_s)
            self._on_steps(self._scheduler.advance(steps, TOKEN), steps, took_s)
        return self._began_s + took_s

    def restart(self, scheduler: JumpingScheduler) -> None:
        """After `stop`: with nobody in the batch. The log goes on."""
        self._scheduler, self._opened = scheduler, []

    def _cut(self) -> None:
        """The step under way is the last before the newcomer joins."""
        ended = self._cost.steps_within(*self.shape, self._clock.now_s - self._began_s)
        if ended + 1 < self._num_steps:
            assert self._end is not None
            self._clock.cancel(self._end)
            self._num_steps = ended + 1
            end_s = self._began_s + self._cost.decode_steps_s(*self.shape, self._num_steps)
            self._end = self._clock.at(end_s, self._ended)

    def _begin(self) -> None:
        scheduler, cost = self._scheduler, self._cost
        adopted = list(scheduler.queues.adopted)
        steps = scheduler.steps_until_change()
        self._end = None
        if steps is None:
            return
        if steps == 1 or self._acts:
            steps = 1
            self._opened = scheduler.schedule()
            if not self._opened:
                return
            lasts_s = self._step_s(self._opened)
        else:
            running = scheduler.queues.running
            self.shape = len(running), sum([each.num_computed_tokens for each in running])
            lasts_s = cost.decode_steps_s(*self.shape, steps)
        self.joined = [each for each in adopted if each.status is SequenceStatus.RUNNING]
        self._num_steps, self._began_s = steps, self._clock.now_s
        self._end = self._clock.at(self._began_s + lasts_s, self._ended)

    def _step_s(self, chunks: list[Chunk]) -> float:
        decodes = [chunk.start for chunk in chunks if len(chunk.tokens) == 1]
        self.shape = len(decodes), sum(decodes)
        prompts = [(chunk.end, chunk.start) for chunk in chunks if len(chunk.tokens) > 1]
        return self._cost.step_s(prompts, *self.shape)

    def _ended(self) -> None:
        took_s, steps, opened = self._clock.now_s - self._began_s, self._num_steps, self._opened
        self.busy_s += took_s
        self._opened = []
        if opened:
            for entry in self._scheduler.drain_admitted():
                self._scheduler.confirm_pulled(entry.request_id)
            result = self._scheduler.complete({chunk.request_id: TOKEN for chunk in opened if chunk.wants_logits})
        else:
            result = self._scheduler.advance(steps, TOKEN)
        self._write_log(steps, took_s)
        self._on_steps(result, steps, took_s)
        if self._acts:
            self._act()
        self._begin()
        while self._end is None and self._acts:  # nothing is left to wait for
            self._act()
            self._begin()

    def _act(self) -> None:
        """Whoever comes now is in the next step; who asks again waits for its end."""
        acts, self._acts = self._acts, []
        self._is_between = True
        for act in acts:
            act()
        self._is_between = False

    def _write_log(self, steps: int, took_s: float) -> None:
        """The first step of those that joined apart: the token before it came from elsewhere."""
        if self.joined:
            first_s = took_s if steps == 1 else self._cost.decode_step_s(*self.shape)
            self.log.add(1, first_s)
            self.first_end_s, self.joined_entry = self._began_s + first_s, len(self.log)
            steps, took_s = steps - 1, took_s - first_s
        if steps:
            self.log.add(steps, took_s)
