"""A simulated decode worker: reserves pages for prompts that prefill workers compute, and decodes them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from moonpool.base.cluster import DecodeSample, ReportedRequest
from moonpool.base.errors import NoSpace
from moonpool.engine.blocks import PageGrant
from moonpool.engine.jumping import JumpingScheduler
from moonpool.engine.sequence import StepResult, pages_for
from moonpool.sim.physics.cost import EngineCost
from moonpool.sim.world.clock import SimClock
from moonpool.sim.world.job import Job
from moonpool.sim.world.reporter import SimReporter
from moonpool.sim.world.sequence import SimSequence
from moonpool.sim.world.stepper import Stepper
from moonpool.sim.world.turns import EngineTurns


class AttemptOutput(NamedTuple):
    """The tokens of one attempt at a request, and the gaps between those that a decode worker wrote."""

    num_tokens: int
    last_s: float
    gaps: list[tuple[float, int]]


class DecodeWorker:
    """Calls `on_done` with every job that has all its tokens."""

    def __init__(
        self,
        clock: SimClock,
        node: str,
        scheduler: JumpingScheduler,
        cost: EngineCost,
        reporter: SimReporter,
        on_done: Callable[[Job], None],
        turns: EngineTurns | None = None,
    ) -> None:
        self._clock, self.node, self.scheduler = clock, node, scheduler
        self._on_done = on_done
        self._block_tokens = scheduler.pages.block_tokens
        self._stepper = Stepper(clock, scheduler, cost, self._stepped, turns)
        self._jobs: dict[str, Job] = {}
        self._coming: dict[str, Job] = {}  # jobs whose prompts are not here yet
        self._waiting: deque[tuple[Job, Callable[[int], None]]] = deque()  # jobs that wait for pages
        self._last_s = 0.0  # time of its last token, once it has stopped
        self._attach(reporter)

    def _attach(self, reporter: SimReporter) -> None:
        self._reporter = reporter
        reporter.unreserved_pages, reporter.answers = self._unreserved_pages, self._answers

    @property
    def num_waiting(self) -> int:
        """Requests that wait for pages."""
        return len(self._waiting)

    def busy_until_s(self, now_s: float) -> float:
        return self._stepper.busy_until_s(now_s)

    def call_between_steps(self, callback: Callable[[], None]) -> None:
        self._stepper.call_between_steps(callback)

    # --- pages for prompts ---

    def reserve(self, job: Job, on_reserved: Callable[[int], None]) -> None:
        """Reserve pages for the prompt, now or when pages become free. Then call `on_reserved` with the
        number of tokens whose KV is here already."""
        self._coming[job.request_id] = job
        self._waiting.append((job, on_reserved))
        self._reporter.arrived.append(job.request_id)
        self._reporter.request_came()
        self.grant_waiting()

    def _unreserved_pages(self) -> int:
        return sum([pages_for(job.num_input + 1, self._block_tokens) for job, _ in self._waiting])

    def _answers(self) -> list[ReportedRequest]:
        coming = [ReportedRequest(job.request_id, job.num_input, 0, job.asked_tokens) for job in self._coming.values()]
        return coming + [
            ReportedRequest(job.request_id, 0, job.num_input, job.asked_tokens) for job in self._jobs.values()
        ]

    def grant_waiting(self) -> None:
        """Give free pages to waiting jobs, in their order."""
        while self._waiting:
            job, on_reserved = self._waiting[0]
            try:
                grant = self._grant(job)
            except NoSpace:
                return
            self._waiting.popleft()
            on_reserved(grant.num_present_blocks * self._block_tokens)

    def _grant(self, job: Job) -> PageGrant:
        num_pages = pages_for(job.num_input + 1, self._block_tokens)
        grant = self.scheduler.pages.reserve(job.request_id, num_pages, job.keys)
        if not self._stepper.shorten_for_pages():
            self.scheduler.pages.release(job.request_id)
            raise NoSpace("the step under way needs the last pages")
        return grant

    def release(self, job: Job) -> None:
        """Free the pages of a request that ends without decoding."""
        self._coming.pop(job.request_id, None)
        self._reporter.request_came()
        self.scheduler.pages.release(job.request_id)
        self.grant_waiting()

    def cancel(self, job: Job) -> None:
        """Free the pages of a job whose prompt will not arrive. The caller has to call `grant_waiting` afterwards."""
        self._coming.pop(job.request_id, None)
        waiting = [each for each in self._waiting if each[0] is not job]
        if len(waiting) == len(self._waiting):
            self.scheduler.pages.release(job.request_id)
        self._waiting = deque(waiting)

    # --- crash and restart ---

    def stop(self) -> None:
        """Crash. `output_of` still returns what was written, until `restart`."""
        self._waiting.clear()
        self._coming.clear()
        self._last_s = self._stepper.stop()

    def output_of(self, job: Job) -> AttemptOutput:
        """Return what the current attempt has written, when one of the job's workers has stopped."""
        sequence = self.scheduler.get(job.request_id) if job.request_id in self._jobs else None
        if sequence is None:
            return AttemptOutput(0 if job.ttft_s is None else 1, job.first_token_s, [])
        last_s = self._last_s if job.first_entry else job.first_token_s
        return AttemptOutput(sequence.num_output_tokens, last_s, self.gaps(job))

    def gaps(self, job: Job) -> list[tuple[float, int]]:
        """Return (seconds, how many) of the gaps between the tokens written here, and of the gap before the first."""
        return self._stepper.log.gaps(job.first_entry, job.first_gap_s) if job.first_entry else []

    def restart(self, scheduler: JumpingScheduler, reporter: SimReporter) -> None:
        """Start again after `stop`, as a new process without state."""
        self.scheduler = scheduler
        self._attach(reporter)
        self._stepper.restart(scheduler)
        self._jobs = {}

    # --- decoding ---

    def start_decoding(self, job: Job) -> None:
        """Add a job to the batch: all KV of its prompt is here, and its first token."""
        sequence = SimSequence(
            job.request_id, job.number, job.num_input, job.num_output, job.keys, self._block_tokens, num_output=1
        )
        sequence.pages = self.scheduler.pages.detach(job.request_id)
        sequence.num_computed_tokens = job.num_input
        self._coming.pop(job.request_id, None)
        self._jobs[job.request_id] = job
        self._reporter.request_came()
        self.scheduler.adopt(sequence)
        self._stepper.request_joined()

    def _stepped(self, result: StepResult, num_steps: int, took_s: float) -> None:
        now_s, log = self._clock.now_s, self._stepper.log
        num_seqs, kv_tokens = self._stepper.shape
        if num_seqs:
            self._reporter.decodes[:] = [DecodeSample(num_seqs, kv_tokens, took_s / num_steps)]
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
        self.grant_waiting()
