"""A scheduler that can take many equal decode steps at once, for whoever has no need to compute them. Pure.

Between two changes of the batch every decode step does the same to every sequence, so a simulator asks how far that
goes and jumps there. What holds afterwards is what single steps would have led to, save for which page has which
number (a test compares them). Nobody here wants the blocks that became full, so they are not told.
"""

from __future__ import annotations

from moonpool.base.errors import Internal
from moonpool.engine.scheduler import Scheduler
from moonpool.engine.sequence import Sequence, pages_for
from moonpool.engine.step import Accepted, StepResult


class JumpingScheduler(Scheduler):
    def steps_until_change(self) -> int | None:
        """How many steps will decode exactly the sequences then running, if no stop token comes and nobody
        calls: at least 1. None: nothing runs or waits. Those adopted enter, as they would with the next step.
        """
        roster = self.roster
        if not self.has_work():
            return None
        running = roster.running
        if roster.alone:
            return 1
        if roster.adopted and not roster.waiting and not self.config.prefill_first:
            self._enter_adopted()
        if not running or (roster.num_waiting > 0 and roster.has_place):
            return 1
        steps = self._steps_left(running)
        while steps > 1 and self.lacks_pages(steps):
            steps //= 2
        return max(1, steps)

    def _enter_adopted(self) -> None:
        """If there is a page for the next token of everybody: then in single steps, too, nobody gives way to them."""
        roster = self.roster
        if len(roster.running) + len(roster.adopted) <= self.pages.num_available:
            while roster.adopted and roster.has_place:
                roster.enter(roster.adopted[0])

    def advance(self, num_steps: int, token: int) -> StepResult:
        """As so many times schedule() and complete() with this token for everybody; it must end nobody.

        At least 1 and at most what `steps_until_change()` said when the first of them began; who came since waits.
        There is nothing but decodes in the batch, and there are pages for them all. Of the tokens accepted only
        those are told that were a sequence's last.
        """
        running, block_tokens = self.roster.running, self._block_tokens
        self._check_jump(num_steps)
        ended = []
        for sequence in running:
            end = sequence.num_computed_tokens + num_steps
            missing = -(-end // block_tokens) - len(sequence.pages)
            if missing > 0:
                sequence.pages += self.pages.allocate(missing)
            sequence.extend(token, num_steps)
            sequence.num_computed_tokens = end
            if end // block_tokens > sequence.num_sealed_blocks:
                self._seal(sequence)
            if sequence.num_tokens >= sequence.limit:
                ended.append(sequence)
        # They give their pages back after the others have theirs, as they would in the last step.
        for sequence in ended:
            self._finish(sequence)
        return StepResult([Accepted(one.request_id, token, "length", one.num_cached_tokens) for one in ended])

    def _check_jump(self, num_steps: int) -> None:
        if self._step_is_open:
            raise Internal("the last step has not been completed")
        running = self.roster.running
        is_prefilling = any(s.num_tokens - s.num_computed_tokens != 1 for s in running)
        if self.roster.alone or not running or num_steps < 1 or is_prefilling:
            raise Internal("only decodes can be jumped over")
        if self._steps_left(running) < num_steps:
            raise Internal(f"somebody ends within {num_steps} steps")
        if self.lacks_pages(num_steps):
            raise Internal(f"there are no pages for {num_steps} steps")

    def _steps_left(self, running: list[Sequence]) -> int:
        """Until one of them ends; 1 when somebody does not decode yet."""
        if max([s.num_tokens - s.num_computed_tokens for s in running]) > 1:
            return 1
        return min([s.limit - s.num_tokens for s in running])

    def lacks_pages(self, num_steps: int) -> bool:
        """Whether so many decode steps of the running sequences take more fresh pages than there are."""
        running, available, block_tokens = self.roster.running, self.pages.num_available, self._block_tokens
        if len(running) * pages_for(num_steps, block_tokens) <= available:  # no need to look closer
            return False
        ends = [(s.num_computed_tokens + num_steps, len(s.pages)) for s in running]
        return sum([max(0, pages_for(end, block_tokens) - have) for end, have in ends]) > available

    def _note_full(self, result: StepResult, sequence: Sequence, indices: range) -> None:
        pass
