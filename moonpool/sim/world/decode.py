"""A simulated decode worker: it gives places to prompts that are computed elsewhere, and decodes those that came."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from moonpool.base.cluster import DecodeSample
from moonpool.base.errors import NoSpace
from moonpool.engine.blocks import PageGrant
from moonpool.engine.jumping import JumpingScheduler
from moonpool.engine.sequence import StepResult, pages_for
from moonpool.sim.physics.cost import EngineCost
from moonpool.sim.world.clock import SimTimers
from moonpool.sim.world.job import Job
from moonpool.sim.world.reporter import SimReporter
from moonpool.sim.world.sequence import PaperSequence
from moonpool.sim.world.stepper import Stepper


class Written(NamedTuple):
    """Tokens of one attempt at a request, and the gaps between those that a decode worker wrote."""

    num_tokens: int
    last_s: float
    gaps: list[tuple[float, int]]


class DecodeWorker:
    """`on_done` hears of every request that has all its tokens."""

    def __init__(
        self,
        clock: SimTimers,
        node: str,
        scheduler: JumpingScheduler,
        cost: EngineCost,
        reporter: SimReporter,
        on_done: Callable[[Job], None],
    ) -> None:
        self._clock, self.node, self.scheduler = clock, node, scheduler
        self._reporter, self._on_done = reporter, on_done
        self._block_tokens = scheduler.pages.block_tokens
        self._stepper = Stepper(clock, scheduler, cost, self._stepped)
        self._jobs: dict[str, Job] = {}
        self._waiting: deque[tuple[Job, Callable[[int], None]]] = deque()  # for pages
        self._last_s = 0.0  # when its last token came, once it has stopped

    @property
    def num_waiting(self) -> int:
        """Requests that wait for pages."""
        return len(self._waiting)

    def busy_until_s(self, now_s: float) -> float:
        return self._stepper.busy_until_s(now_s)

    def between_steps(self, act: Callable[[], None]) -> None:
        """When the step under way has ended, or now."""
        self._stepper.between_steps(act)

    # places

    def reserve(self, job: Job, act: Callable[[int], None]) -> None:
        """Pages for the prompt, now or when there are some; `act` hears how many tokens' KV is here already."""
        self._waiting.append((job, act))
        self.give_places()

    def give_places(self) -> None:
        """To those that wait, as far as there are pages."""
        while self._waiting:
            job, act = self._waiting[0]
            try:
                grant = self._grant(job)
            except NoSpace:
                return
            self._waiting.popleft()
            act(grant.num_present_blocks * self._block_tokens)

    def _grant(self, job: Job) -> PageGrant:
        num_pages = pages_for(job.num_input + 1, self._block_tokens)
        grant = self.scheduler.pages.reserve(job.request_id, num_pages, job.keys)
        if not self._stepper.makes_do():
            self.scheduler.pages.release(job.request_id)
            raise NoSpace("the step under way needs the last pages")
        return grant

    def drop(self, job: Job) -> None:
        """The request ends without decoding."""
        self.scheduler.pages.release(job.request_id)
        self.give_places()

    def cancel(self, job: Job) -> None:
        """Its prompt will not come. Whoever calls gives its place to others then."""
        waiting = [each for each in self._waiting if each[0] is not job]
        if len(waiting) == len(self._waiting):
            self.scheduler.pages.release(job.request_id)
        self._waiting = deque(waiting)

    # its end, and another beginning

    def stop(self) -> None:
        """It crashes. What it has written so far, `written` tells until it begins anew."""
        self._waiting.clear()
        self._last_s = self._stepper.stop()

    def written(self, job: Job) -> Written:
        """What there is of an answer when a worker on its way has stopped."""
        sequence = self.scheduler.get(job.request_id) if job.request_id in self._jobs else None
        if sequence is None:
            return Written(0 if job.ttft_s is None else 1, job.first_token_s, [])
        last_s = self._last_s if job.first_entry else job.first_token_s
        return Written(sequence.num_output_tokens, last_s, self.gaps(job))

    def gaps(self, job: Job) -> list[tuple[float, int]]:
        """Between the tokens that it wrote of an answer, and before the first of them; seconds and how many."""
        return self._stepper.log.gaps(job.first_entry, job.first_gap_s) if job.first_entry else []

    def restart(self, scheduler: JumpingScheduler, reporter: SimReporter) -> None:
        """After `stop`, as a new process: with nothing of what it had."""
        self.scheduler, self._reporter = scheduler, reporter
        self._stepper.restart(scheduler)
        self._jobs = {}

    # decoding

    def join(self, job: Job) -> None:
        """All KV of the prompt is here, and the first token."""
        sequence = PaperSequence(
            job.request_id, job.number, job.num_input, job.num_output, job.keys, self._block_tokens, num_output=1
        )
        sequence.pages = self.scheduler.pages.detach(job.request_id)
        sequence.num_computed_tokens = job.num_input
        self._jobs[job.request_id] = job
        self.scheduler.adopt(sequence)
        self._stepper.somebody_came()

    def _stepped(self, result: StepResult, num_steps: int, took_s: float) -> None:
        now_s, log = self._clock.now_s, self._stepper.log
        num_seqs, kv_tokens = self._stepper.shape
        if num_seqs:
            self._reporter.decodes[:] = [DecodeSample(num_seqs, kv_tokens, took_s / num_steps)]  # one a report will do
        for sequence in self._stepper.joined:
            job = self._jobs[sequence.request_id]
            job.first_entry = self._stepper.joined_entry
            job.first_gap_s = self._stepper.first_end_s - job.first_token_s
        for accepted in result.accepted:
            if accepted.finish_reason is not None:
                job = self._jobs.pop(accepted.request_id)
                job.tbt_s, job.end_s = log.long_gaps_s(job.first_entry, job.first_gap_s), now_s
                self._on_done(job)
        self._reporter.after_step(now_s)
        self.give_places()
