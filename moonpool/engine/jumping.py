"""A scheduler that can do many equal decode steps at once, for a simulator, which does not compute them. Pure.

Between two changes of the batch every decode step does the same to every sequence, so the simulator asks how many steps
are equal and does them in one call. The state afterwards is that of single steps, except for the numbers of pages and
for which of two equal blocks stays in the cache (a test compares them). Full blocks are not reported, because the
simulator does not use them.
"""

from __future__ import annotations

from moonpool.base.errors import Internal
from moonpool.engine.scheduler import Scheduler
from moonpool.engine.sequence import Accepted, Sequence, StepResult, pages_for


class JumpingScheduler(Scheduler):
    def steps_until_change(self) -> int | None:
        """Return how many steps will decode exactly the sequences that run then, if no stop token comes and the caller
        changes nothing: at least 1; None if nothing runs or waits. Adopted sequences start, as in the next step.
        """
        queues = self.queues
        if not self.has_work():
            return None
        running = queues.running
        if queues.alone:
            return 1
        if queues.adopted and not queues.waiting and not self.config.prefill_first:
            self._start_adopted_early()
        if not running or (queues.num_waiting > 0 and queues.has_place):
            return 1
        steps = self._steps_left(running)
        while steps > 1 and self.lacks_pages(steps):
            steps //= 2
        return max(1, steps)

    def _start_adopted_early(self) -> None:
        """Start the adopted sequences if there is a page for the next token of every sequence: then single steps would
        not preempt any sequence for them either."""
        queues = self.queues
        if len(queues.running) + len(queues.adopted) <= self.pages.num_available:
            while queues.has_place and (sequence := self._next_adopted()) is not None:
                queues.start(sequence)

    def advance(self, num_steps: int, token: int) -> StepResult:
        """Do the work of `num_steps` calls of schedule() and complete(), each producing `token` for every sequence.
        Return only the tokens that were a sequence's last.

        `token` must not be a stop token. `num_steps` is at least 1 and at most what `steps_until_change()` returned
        before the first of them; sequences added since then wait. The batch holds decodes only, and there are pages
        for all of them.
        """
        running, block_tokens = self.queues.running, self._block_tokens
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
        # Finished sequences free their pages after the others have allocated theirs, as in the last single step.
        for sequence in ended:
            self._finish(sequence)
        return StepResult([Accepted(one.request_id, token, "length", one.num_cached_tokens) for one in ended])

    def _check_jump(self, num_steps: int) -> None:
        if self._step_is_open:
            raise Internal("the last step has not been completed")
        running = self.queues.running
        is_prefilling = any(s.num_tokens - s.num_computed_tokens != 1 for s in running)
        if self.queues.alone or not running or num_steps < 1 or is_prefilling:
            raise Internal("only decodes can be jumped over")
        if self._steps_left(running) < num_steps:
            raise Internal(f"a sequence ends within {num_steps} steps")
        if self.lacks_pages(num_steps):
            raise Internal(f"there are no pages for {num_steps} steps")

    def _steps_left(self, running: list[Sequence]) -> int:
        """Return the steps until one of the sequences ends; 1 if one of them does not decode yet."""
        if max([s.num_tokens - s.num_computed_tokens for s in running]) > 1:
            return 1
        return min([s.limit - s.num_tokens for s in running])

    def lacks_pages(self, num_steps: int) -> bool:
        """Return whether `num_steps` decode steps of the running sequences need more new pages than there are."""
        running, available, block_tokens = self.queues.running, self.pages.num_available, self._block_tokens
        if len(running) * pages_for(num_steps, block_tokens) <= available:  # an upper bound, cheap to compute
            return False
        ends = [(s.num_computed_tokens + num_steps, len(s.pages)) for s in running]
        return sum([max(0, pages_for(end, block_tokens) - have) for end, have in ends]) > available

    def _add_full_blocks(self, result: StepResult, sequence: Sequence, indices: range) -> None:
        pass
