"""Pulls for sequences that wait: their blocks come from the pool into pages while the engine computes others.

All pulls of prompts and answers begin here, at a boundary between steps or of layers (engine/pulls_ahead.py decides
which, and into which pages). A prompt enters the batch when its pull is over, or joins a step when its first layers are
in place and the others are expected in time. Answers wait until their pulls are over: they were preempted, or come from
another worker, and a step would delay every other answer if it waited. Of what exceeds the pages for pulls, blocks on
SSD come to the pool's memory meanwhile. A pull that takes too long is left behind, and the sequence computes what is
missing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from moonpool.base.clock import Clock
from moonpool.engine.pulls_ahead import LayersHere, PullAhead, join_in_s
from moonpool.engine.scheduler import Scheduler
from moonpool.engine.sequence import Sequence
from moonpool.worker.kv_link.pull import Puller
from moonpool.worker.kv_link.pull_job import PieceListener, PullJob, PullResult
from moonpool.worker.loop import EngineLoop
from moonpool.worker.metrics import Samples

_MAX_REMEMBERED = 1024  # requests whose promotion or result is remembered before those that are gone are dropped


@dataclass(slots=True)
class _Running:
    sequence: Sequence
    num_layers: int
    compute_s: float  # of the sequence's first step
    began_s: float
    give_up_at_s: float
    here: LayersHere  # the puller's thread replaces it
    is_told: bool = False  # the engine's thread was woken because the sequence may join


class EndedPull(NamedTuple):
    """The pulls of a sequence that waited."""

    result: PullResult
    began_s: float
    boundary: int  # the first one at which the sequence could enter the batch with all blocks


class AheadPuller:
    """`limit_s` returns how long a pull of a number of tokens may take, `compute_s` how long computing them takes.
    Every call is on the engine's thread."""

    def __init__(
        self,
        scheduler: Scheduler,
        puller: Puller,
        samples: Samples,
        limit_s: Callable[[int], float],
        compute_s: Callable[[int], float],
        clock: Clock,
    ) -> None:
        self._scheduler, self._puller, self._samples = scheduler, puller, samples
        self._limit_s, self._compute_s, self._clock = limit_s, compute_s, clock
        self._running: dict[PullAhead, _Running] = {}
        self._jobs: dict[PullAhead, PullJob] = {}  # of those that run
        self._num_boundaries = 0
        self._over: dict[str, EndedPull] = {}  # by requests that wait
        self._promoted: set[str] = set()  # prompts whose blocks on SSD the pool was asked for
        self.loop: EngineLoop | None = None  # set once, before the loop starts

    def at_boundary(self) -> None:
        """Leave late pulls behind, begin those for which there are pages, and let prompts join whose first layers are
        here."""
        self._num_boundaries += 1
        self._leave_late()
        self.begin()
        now_s = self._clock.now_s()
        for pull, running in self._running.items():
            pull.may_join = pull.may_join or self._joins(pull, running, now_s)

    def begin(self) -> None:
        """Begin the pulls of sequences that wait, for which there are pages."""
        ahead, queues = self._scheduler.ahead, self._scheduler.queues
        if self._puller.is_resting:
            ahead.forget_lacking()
        elif queues.waiting:
            ahead.begin_waiting(queues, self._begun)
            if self._puller.promotes:
                self._promote_waiting()

    def join(self, request_id: str, listener: PieceListener) -> PullJob:
        """The sequence has joined a step. Return its pull, which tells `listener` of all pieces, those that are in
        place included."""
        pull = self._scheduler.ahead.get(request_id)
        assert pull is not None, "it has joined"
        job = self._jobs[pull]
        job.listen(listener)
        return job

    def take_over(self, request_id: str) -> tuple[PullResult | None, float | None]:
        """A sequence enters the batch: return, once, the outcome of the pulls that ended while it waited. And when they
        began if it enters as soon as they have ended; None if it waited for its turn after that."""
        over = self._over.pop(request_id, None)
        if over is None:
            return None, None
        return over.result, over.began_s if over.boundary == self._num_boundaries else None

    # -- beginning ---------------------------------------------------------------------------------------------

    def _begun(self, sequence: Sequence, pull: PullAhead) -> None:
        num_tokens = [len(each.wanted.blocks) * sequence.block_tokens for each in (pull, *self._running)]
        now_s, wanted = self._clock.now_s(), pull.wanted
        first_step = sequence.num_tokens - (wanted.num_local_blocks + len(wanted.blocks)) * sequence.block_tokens
        compute_s = self._compute_s(min(first_step, self._scheduler.config.max_batch_tokens))
        # A pull waits for those before it, so it may take as long as all of them.
        give_up_at_s = now_s + self._limit_s(sum(num_tokens))
        here = LayersHere(0, now_s, now_s, now_s)
        running = _Running(sequence, self._puller.num_layers, compute_s, now_s, give_up_at_s, here)
        self._running[pull] = running
        queues = self._scheduler.queues
        is_next = queues.waiting[0] is sequence and not queues.num_running
        self._jobs[pull] = self._puller.start(
            wanted,
            on_end=lambda: self._post_end(pull),
            compute_s=compute_s if is_next else 0.0,  # others are computed beside the pull, not this one
            on_layers=lambda number: self._layers_came(pull, running, number),
            is_answer=not sequence.prefill_only,
        )

    def _joins(self, pull: PullAhead, running: _Running, now_s: float) -> bool:
        if pull.was_late or not running.sequence.prefill_only:
            return False
        return join_in_s(running.here, running.num_layers, now_s, running.compute_s) == 0.0

    def _layers_came(self, pull: PullAhead, running: _Running, number: int) -> None:
        """On the puller's thread: wake the engine's thread, which may have nothing to compute, when the prompt may
        join."""
        running.here = running.here.after(number, self._clock.now_s())
        if not running.is_told and self._joins(pull, running, running.here.last_s):
            running.is_told = True
            assert self.loop is not None
            self.loop.post(lambda: None)

    def _promote_waiting(self) -> None:
        """Once per prompt, have blocks that are on SSD and cannot be pulled yet brought to the pool's memory."""
        if len(self._promoted) > _MAX_REMEMBERED:
            self._promoted &= self._scheduler.queues.sequences.keys()
        for sequence in self._scheduler.queues.waiting:
            name, end = sequence.request_id, sequence.num_pool_blocks if sequence.prefill_only else 0
            if not end or name in self._promoted:
                continue
            self._promoted.add(name)
            here = max(self._scheduler.ahead.end_of(name), self._scheduler.pages.count_local(sequence.keys[:end]))
            if here < end:
                self._puller.promote(sequence.keys[here:end])

    # -- ending ------------------------------------------------------------------------------------------------

    def _post_end(self, pull: PullAhead) -> None:
        assert self.loop is not None
        self.loop.post(lambda: self._ended(pull))

    def _ended(self, pull: PullAhead) -> None:
        running, job = self._running.pop(pull), self._jobs.pop(pull)
        result = job.result
        assert result is not None, "the job has ended"
        self._scheduler.ahead.end(pull, result.num_good)
        if not job.left_behind:
            self._samples.add_pull(result, self._clock.now_s())
        if pull.is_given_up:
            return
        self._remember(pull.request_id, result, running.began_s)
        if result.num_good < len(pull.wanted.blocks):
            _limit(running.sequence, pull.wanted.num_local_blocks + result.num_good)

    def _remember(self, request_id: str, result: PullResult, began_s: float) -> None:
        if len(self._over) > _MAX_REMEMBERED:
            waiting = self._scheduler.queues.sequences
            self._over = {name: each for name, each in self._over.items() if name in waiting}
        before = self._over.get(request_id)
        if before is not None:
            result, began_s = result.behind(before.result), before.began_s
        self._over[request_id] = EndedPull(result, began_s, self._num_boundaries + 1)

    def _leave_late(self) -> None:
        """Stop pulls that take too long, and those whose sequence has left."""
        now_s = self._clock.now_s()
        for pull, running in self._running.items():
            job = self._jobs[pull]
            if not job.left_behind and (pull.is_given_up or now_s >= running.give_up_at_s):
                self._leave(pull, running, job, now_s)

    def _leave(self, pull: PullAhead, running: _Running, job: PullJob, now_s: float) -> None:
        result = job.wait_end(0.0)
        if job.left_behind and not pull.is_given_up:
            self._samples.add_pull(result, now_s)
            self._samples.add_late_pull(job, self._puller.piece_nbytes, now_s - running.began_s, now_s)
            self._puller.rest()
            self._scheduler.ahead.give_back(pull.request_id)
            _limit(running.sequence, pull.wanted.num_local_blocks)


def _limit(sequence: Sequence, num_blocks: int) -> None:
    """Pull no more than these blocks for the sequence: the pool does not have more, or is too slow."""
    sequence.ahead_limit = num_blocks
    sequence.num_pool_blocks = min(sequence.num_pool_blocks, num_blocks)
