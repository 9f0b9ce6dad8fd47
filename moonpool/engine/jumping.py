"""A scheduler that can take many equal decode steps at once, for whoever has no need to compute them. Pure.

Between two changes of the batch every decode step does the same to every sequence, so a simulator asks how far that
goes and jumps there. What holds afterwards is what single steps would have led to, save for which page has which
number (a test compares them).
"""

from __future__ import annotations

from moonpool.base.errors import Internal
from moonpool.engine.scheduler import Scheduler
from moonpool.engine.sequence import pages_for
from moonpool.engine.step import StepResult, full_blocks


class JumpingScheduler(Scheduler):
    def steps_until_change(self) -> int | None:
        """How many steps will decode exactly the sequences now running, if no stop token comes and nobody
        calls: at least 1. None: nothing runs or waits.
        """
        if not self.has_work():
            return None
        running = self.roster.running
        someone_may_enter = self.roster.has_place and self.roster.num_waiting > 0
        if someone_may_enter or not running or any(s.num_uncomputed_tokens > 1 for s in running):
            return 1
        steps = min([self._limit(s) - len(s.tokens) for s in running])
        while steps > 1 and self._pages_wanted(steps) > self.pages.num_available:
            steps //= 2
        return max(1, steps)

    def advance(self, num_steps: int, token: int) -> StepResult:
        """As so many times schedule() and complete() with this token for everybody; it must end nobody.

        At least 1 and at most what `steps_until_change()` said when the first of them began; who came since waits.
        There is nothing but decodes in the batch, and there are pages for them all. Of the tokens accepted only the
        last one of each sequence is told.
        """
        running = list(self.roster.running)
        self._check_jump(num_steps)
        result = StepResult()
        for sequence in running:
            end = sequence.num_computed_tokens + num_steps
            missing = pages_for(end, self._block_tokens) - len(sequence.pages)
            if missing > 0:
                sequence.pages += self.pages.allocate(missing)
            if num_steps > 1:
                sequence.extend(token, num_steps - 1)
            sequence.num_computed_tokens = end
            if end // self._block_tokens > sequence.num_sealed_blocks:
                result.full_blocks.extend(full_blocks(sequence, self._seal(sequence)))
        # Those that end give their pages back after the others have theirs, as they would in the last step.
        result.accepted.extend([self._accept(sequence, token) for sequence in running])
        return result

    def _check_jump(self, num_steps: int) -> None:
        if self._step_is_open:
            raise Internal("the last step has not been completed")
        running = self.roster.running
        if not running or any(s.num_uncomputed_tokens != 1 for s in running) or num_steps < 1:
            raise Internal("only decodes can be jumped over")
        if any(len(s.tokens) + num_steps > self._limit(s) for s in running):
            raise Internal(f"somebody ends within {num_steps} steps")
        if self._pages_wanted(num_steps) > self.pages.num_available:
            raise Internal(f"there are no pages for {num_steps} steps")

    def _pages_wanted(self, num_steps: int) -> int:
        """Fresh pages that so many decode steps of the running sequences take."""
        return sum(
            max(0, pages_for(s.num_computed_tokens + num_steps, self._block_tokens) - len(s.pages))
            for s in self.roster.running
        )
