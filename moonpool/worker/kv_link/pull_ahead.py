"""Pulls for sequences that wait: their blocks come from the pool into pages while the engine computes others.

Answers that wait were preempted, or come from another worker. Their blocks were put when they were computed, so all of
them are pulled before the answer enters the batch: a step would delay every other answer if it waited for a pull.
Prompts that wait behind a step are pulled within a budget of pages; of what exceeds it, blocks that are on SSD come to
the pool's memory while the prompt waits. A prompt that does not have to wait pulls in its step, layer by layer
(prefill.py). A pull that takes too long is left behind, and the sequence computes what is missing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from moonpool.base.clock import Clock
from moonpool.engine.pulls_ahead import PullAhead, prompts_that_wait
from moonpool.engine.scheduler import Scheduler
from moonpool.engine.sequence import Sequence
from moonpool.worker.kv_link.pull import Puller
from moonpool.worker.kv_link.pull_job import PullJob
from moonpool.worker.loop import EngineLoop
from moonpool.worker.metrics import Samples

_MAX_PROMOTED = 1024  # names that are remembered before those of prompts that have begun are dropped


@dataclass(slots=True)
class _Running:
    sequence: Sequence
    job: PullJob
    give_up_at_s: float


class AheadPuller:
    """`limit_s` returns how long a pull of a number of tokens may take. Every call is on the engine's thread."""

    def __init__(
        self, scheduler: Scheduler, puller: Puller, samples: Samples, limit_s: Callable[[int], float], clock: Clock
    ) -> None:
        self._scheduler, self._puller, self._samples = scheduler, puller, samples
        self._limit_s, self._clock = limit_s, clock
        self._running: dict[PullAhead, _Running] = {}
        self._promoted: set[str] = set()  # prompts whose blocks on SSD the pool was asked for
        self.loop: EngineLoop | None = None  # set once, before the loop starts

    def at_boundary(self) -> None:
        """Leave late pulls behind, and start those of answers, in order of arrival, for which there are pages."""
        self._leave_late()
        for sequence in self._scheduler.queues.waiting:
            if sequence.prefill_only:
                continue
            if not self._scheduler.has_room(sequence):
                return
            self._start(sequence, sequence.num_reusable_blocks, self._scheduler.pages.num_pages)

    def after_schedule(self) -> None:
        """Start pulls for prompts that are not in the step that begins now, in order of arrival and within the budget.
        A page per running sequence stays free. Blocks beyond the budget come to the pool's memory meanwhile."""
        scheduler = self._scheduler
        for sequence, max_pages in prompts_that_wait(scheduler.pages, scheduler.ahead, scheduler.queues):
            if max_pages:
                self._start(sequence, sequence.num_pool_blocks, max_pages)
            elif not self._puller.promotes:
                return
            self._promote_rest(sequence)

    def _promote_rest(self, sequence: Sequence) -> None:
        """Once per prompt, have the blocks that are on SSD and are not pulled yet brought to the pool's memory."""
        name, end = sequence.request_id, sequence.num_pool_blocks
        if name in self._promoted or not self._puller.promotes:
            return
        if len(self._promoted) > _MAX_PROMOTED:
            self._promoted &= {each.request_id for each in self._scheduler.queues.waiting}
        self._promoted.add(name)
        here = max(self._scheduler.ahead.end_of(name), self._scheduler.pages.count_local(sequence.keys[:end]))
        if here < end:
            self._puller.promote(sequence.keys[here:end])

    def _start(self, sequence: Sequence, end: int, max_pages: int) -> None:
        if self._puller.is_resting:
            return
        pull = self._scheduler.ahead.begin(sequence, end, max_pages)
        if pull is None:
            return
        job = self._puller.start(
            pull.wanted, on_pieces=lambda *_: None, on_end=lambda: self._post_end(pull), compute_s=0.0, ahead=True
        )
        limit_s = self._limit_s(len(pull.wanted.blocks) * sequence.block_tokens)
        self._running[pull] = _Running(sequence, job, self._clock.now_s() + limit_s)

    def _post_end(self, pull: PullAhead) -> None:
        assert self.loop is not None
        self.loop.post(lambda: self._ended(pull))

    def _ended(self, pull: PullAhead) -> None:
        running = self._running.pop(pull)
        result = running.job.result
        assert result is not None, "the job has ended"
        self._scheduler.ahead.end(pull, result.num_good)
        self._samples.add_pull(result, self._clock.now_s())
        if result.num_good < len(pull.wanted.blocks) and not pull.is_given_up:
            _limit(running.sequence, pull.wanted.num_local_blocks + result.num_good)

    def _leave_late(self) -> None:
        """Stop pulls that take too long, and those whose sequence has left."""
        now_s = self._clock.now_s()
        for pull, running in self._running.items():
            if not running.job.left_behind and (pull.is_given_up or now_s >= running.give_up_at_s):
                self._leave(pull, running)

    def _leave(self, pull: PullAhead, running: _Running) -> None:
        running.job.wait_end(0.0)
        if running.job.left_behind and not pull.is_given_up:
            self._puller.rest()
            self._scheduler.ahead.give_back(pull.request_id)
            _limit(running.sequence, pull.wanted.num_local_blocks)


def _limit(sequence: Sequence, num_blocks: int) -> None:
    """Pull no more than these blocks for the sequence: the pool does not have more, or is too slow."""
    sequence.ahead_limit = num_blocks
    sequence.num_pool_blocks = min(sequence.num_pool_blocks, num_blocks)
