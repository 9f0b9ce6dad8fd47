"""Requests that lost a worker on their way: what their clients have so far, and when they are asked for again.

Production's rule of retrying decides (conductor/retries.py). A request goes on from its last token: its prompt has
grown by what was written, and less is left to write. When it has ended it is again what it was, with all its gaps.
"""

from __future__ import annotations

from moonpool.base.errors import MoonpoolError, Overloaded
from moonpool.conductor.retries import Loss, Retries, RetryPolicy
from moonpool.sim.world.decode import Written
from moonpool.sim.world.job import Job
from moonpool.sim.world.sequence import PaperSequence
from moonpool.sim.world.stepper import mean_of_longest_s
from moonpool.worker.messages import ALONE_STEPS

_HITS = ("local_tokens", "dram_tokens", "remote_tokens", "ssd_tokens")


class _Life:
    def __init__(self, job: Job, policy: RetryPolicy) -> None:
        self.num_input, self.num_output, self.keys = job.num_input, job.num_output, job.keys
        self.retries = Retries(policy)
        self.retries.begin()
        self.num_written = 0
        self.ttft_s: float | None = None
        self.first_token_s = self.last_token_s = 0.0
        self.gaps: list[tuple[float, int]] = []
        self.hits: list[int] = []  # of the attempt that brought the first token

    def add(self, job: Job, written: Written) -> None:
        if not written.num_tokens:
            return
        if self.num_written:
            self.gaps.append((job.first_token_s - self.last_token_s, 1))
        else:
            self.ttft_s, self.first_token_s = job.ttft_s, job.first_token_s
            self.hits = [getattr(job, name) for name in _HITS]
        self.gaps += written.gaps
        self.num_written += written.num_tokens
        self.last_token_s = written.last_s

    def prepare(self, job: Job, block_tokens: int) -> None:
        """For another attempt."""
        whole = PaperSequence(
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
        job.num_input, job.num_output, job.keys = self.num_input, self.num_output, self.keys
        if self.num_written:
            job.ttft_s, job.first_token_s = self.ttft_s, self.first_token_s
            for name, count in zip(_HITS, self.hits, strict=True):
                setattr(job, name, count)


class Lives:
    """The answers of `lost` and `refused` are how long to pause before the request is asked for; None: no more."""

    def __init__(self, policy: RetryPolicy, block_tokens: int) -> None:
        self._policy, self._block_tokens = policy, block_tokens
        self._lives: dict[int, _Life] = {}

    def lost(self, job: Job, worker: str, written: Written) -> float | None:
        life = self._life(job)
        is_computing = worker == job.prefill or written.num_tokens > 0
        if written.num_tokens > ALONE_STEPS:
            life.retries.survived()
        life.add(job, written)
        life.prepare(job, self._block_tokens)
        return life.retries.lost([worker], Loss.DIED if is_computing else Loss.ABSENT)

    def refused(self, job: Job, error: MoonpoolError, now_s: float) -> float | None:
        life = self._life(job)
        return life.retries.refused(now_s, for_load=isinstance(error, Overloaded), has_tokens=life.num_written > 0)

    def begin(self, job: Job) -> None:
        """Another attempt, after a worker was lost."""
        job.num_retries += 1
        self._life(job).retries.begin()

    def excluded(self, job: Job) -> tuple[str, ...]:
        life = self._lives.get(job.number)
        return () if life is None else tuple(sorted(life.retries.failed))

    def num_written(self, job: Job) -> int:
        """Tokens that the client has from earlier attempts."""
        life = self._lives.get(job.number)
        return 0 if life is None else life.num_written

    def ended(self, job: Job, gaps: list[tuple[float, int]]) -> None:
        """It has all its tokens, the last ones with these gaps."""
        life = self._lives.pop(job.number, None)
        if life is None:
            return
        if life.num_written:
            resumed = (job.first_token_s - life.last_token_s, 1)
            job.tbt_s = mean_of_longest_s([*life.gaps, resumed, *gaps])
        life.restore(job)

    def given_up(self, job: Job) -> None:
        life = self._lives.pop(job.number, None)
        if life is not None:
            life.restore(job)

    def _life(self, job: Job) -> _Life:
        life = self._lives.get(job.number)
        if life is None:
            life = self._lives[job.number] = _Life(job, self._policy)
        return life
