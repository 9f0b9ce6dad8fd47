"""Requests that lost a worker: what their clients have so far, and when they are tried again.

The real retry rule decides (conductor/retries.py). A request continues after its last token: its prompt grows by the
tokens written so far, and fewer tokens are left to write. When it has ended, the job gets its original sizes back, and
its gaps are those of all attempts.
"""

from __future__ import annotations

from moonpool.base.errors import MoonpoolError, Overloaded
from moonpool.conductor.retries import Loss, Retries, RetryPolicy
from moonpool.sim.world.decode import AttemptOutput
from moonpool.sim.world.job import Job
from moonpool.sim.world.sequence import SimSequence
from moonpool.sim.world.stepper import mean_of_longest_s
from moonpool.worker.messages import ALONE_STEPS

_HITS = ("local_tokens", "dram_tokens", "remote_tokens", "ssd_tokens")


class _RequestAttempts:
    def __init__(self, job: Job, policy: RetryPolicy) -> None:
        self.num_input, self.num_output, self.keys = job.num_input, job.num_output, job.keys
        self.retries = Retries(policy)
        self.retries.begin()
        self.num_written = 0
        self.ttft_s: float | None = None
        self.first_token_s = self.last_token_s = 0.0
        self.gaps: list[tuple[float, int]] = []
        self.hits: list[int] = []  # reused tokens in the attempt that produced the first token

    def add(self, job: Job, output: AttemptOutput) -> None:
        if not output.num_tokens:
            return
        if self.num_written:
            self.gaps.append((job.first_token_s - self.last_token_s, 1))
        else:
            self.ttft_s, self.first_token_s = job.ttft_s, job.first_token_s
            self.hits = [getattr(job, name) for name in _HITS]
        self.gaps += output.gaps
        self.num_written += output.num_tokens
        self.last_token_s = output.last_s

    def prepare(self, job: Job, block_tokens: int) -> None:
        """Reset the job for another attempt."""
        whole = SimSequence(
            job.request_id,
            job.number,
            self.num_input,
            self.num_output,
            self.keys,
            block_tokens,
            num_output=self.num_written,
        )
        job.keys = whole.keys
        job.num_input, job.num_output = self.num_input + self.num_written, self.num_output - self.num_written
        job.attempt += 1
        job.prefill = job.decode = ""
        job.num_flows = job.num_runs_passed = job.first_entry = 0
        job.first_gap_s = job.first_token_s = job.prefill_start_s = 0.0
        job.ttft_s = None
        for name in _HITS:
            setattr(job, name, 0)

    def restore(self, job: Job) -> None:
        """Give the job its original sizes back, and the first token of the first attempt that had one."""
        job.num_input, job.num_output, job.keys = self.num_input, self.num_output, self.keys
        if self.num_written:
            job.ttft_s, job.first_token_s = self.ttft_s, self.first_token_s
            for name, count in zip(_HITS, self.hits, strict=True):
                setattr(job, name, count)


class RequestRetries:
    """`lost` and `refused` return the seconds to wait before the request is routed again; None: give up."""

    def __init__(self, policy: RetryPolicy, block_tokens: int) -> None:
        self._policy, self._block_tokens = policy, block_tokens
        self._attempts: dict[int, _RequestAttempts] = {}

    def lost(self, job: Job, worker: str, output: AttemptOutput) -> float | None:
        attempts = self._attempts_of(job)
        is_computing = worker == job.prefill or output.num_tokens > 0
        if output.num_tokens > ALONE_STEPS:
            attempts.retries.survived()
        attempts.add(job, output)
        attempts.prepare(job, self._block_tokens)
        return attempts.retries.lost([worker], Loss.DIED if is_computing else Loss.ABSENT)

    def refused(self, job: Job, error: MoonpoolError, now_s: float) -> float | None:
        attempts = self._attempts_of(job)
        return attempts.retries.refused(
            now_s, for_load=isinstance(error, Overloaded), has_tokens=attempts.num_written > 0
        )

    def start_attempt(self, job: Job) -> None:
        """Count another attempt, after a worker was lost."""
        job.num_retries += 1
        self._attempts_of(job).retries.begin()

    def excluded(self, job: Job) -> tuple[str, ...]:
        attempts = self._attempts.get(job.number)
        return () if attempts is None else tuple(sorted(attempts.retries.failed))

    def num_written(self, job: Job) -> int:
        """Return the number of tokens that the client has from earlier attempts."""
        attempts = self._attempts.get(job.number)
        return 0 if attempts is None else attempts.num_written

    def ended(self, job: Job, gaps: list[tuple[float, int]]) -> None:
        """Finish a job that has all its tokens; `gaps` are those of the last attempt."""
        attempts = self._attempts.pop(job.number, None)
        if attempts is None:
            return
        if attempts.num_written:
            resumed = (job.first_token_s - attempts.last_token_s, 1)
            job.tbt_s = mean_of_longest_s([*attempts.gaps, resumed, *gaps])
        attempts.restore(job)

    def give_up(self, job: Job) -> None:
        attempts = self._attempts.pop(job.number, None)
        if attempts is not None:
            attempts.restore(job)

    def _attempts_of(self, job: Job) -> _RequestAttempts:
        attempts = self._attempts.get(job.number)
        if attempts is None:
            attempts = self._attempts[job.number] = _RequestAttempts(job, self._policy)
        return attempts
