"""Joins scheduler, runner and sampler: one call of `step()` is one pass of the model. It starts no threads.

    engine = Engine(scheduler, runner)
    engine.add_request("r1", prompt, SamplingParams(max_tokens=16))
    while engine.has_work():
        for out in engine.step(): ...

A request that fails (its logits are NaN, or sampling raises) ends with its own error, and the rest of its batch goes
on. A pass that fails as a whole does not show which request caused it, so its requests are computed again, each in a
batch of one, and the request whose step fails ends with the error. If the model then cannot compute even one token that
belongs to no request, the engine itself is broken and step() raises.

On a GPU a decode step is launched and draws its tokens there, and before they are read the step after it is launched
(`Executor.launcher`). What that step computes for a sequence that has ended is dropped.

A worker that pulls KV from the pool and streams KV out passes a `StepLink`. It is called on the thread that calls
step(), and decides which pulled KV is verified; all other KV of an ended pull is computed again.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from moonpool.base.errors import Internal, MoonpoolError, NoSpace
from moonpool.engine.launched import LaunchedStep, StepLauncher
from moonpool.engine.sampler import HostAdjuster, LogitsAdjuster, SampledToken, SampleRow, sample, sampling_error
from moonpool.engine.scheduler import Scheduler
from moonpool.engine.sequence import AdmittedSequence, Chunk, FinishReason, FullBlock, SamplingParams
from moonpool.engine.sequence import Sequence as RequestSequence
from moonpool.engine.step_times import StepTime, StepTimes

if TYPE_CHECKING:
    import torch

    from moonpool.engine.runner import LayerHooks

_LOG = logging.getLogger(__name__)
# The root of the chain keys of an engine that does not share its KV.
LOCAL_ROOT = bytes(32)


class Executor(Protocol):
    """The interface of engine/runner.py that the engine uses."""

    @property
    def launcher(self) -> StepLauncher | None:
        """Launches decode steps without waiting for them; None on the CPU."""

    @property
    def times(self) -> StepTimes:
        """Measures the steps of the engine, by marks of the device."""

    def execute(self, chunks: Sequence[Chunk], hooks: LayerHooks | None) -> torch.Tensor:
        """Write the KV of all chunks; return logits [chunks that want them, vocab], in order."""


class StepLink(Protocol):
    """What a worker does around a step."""

    def begin_step(self, chunks: Sequence[Chunk], admitted: Sequence[AdmittedSequence]) -> LayerHooks | None:
        """Before the model runs; the hooks wait, layer by layer, for the pulls of `admitted` that are under way."""

    def end_step(self) -> Mapping[str, int]:
        """After the model ran: return how many leading tokens of each pulled request have verified KV. A request that
        is missing is put back, because its pull is not over; what was computed of it is dropped."""

    def completed(self, full_blocks: Sequence[FullBlock]) -> None:
        """After the step: its full blocks. To copy a block later, hold its page (PageManager.hold)."""

    def computed(self, time: StepTime) -> None:
        """How long a step took: this one if its tokens were read, on a GPU otherwise a later one's call."""


@dataclass(frozen=True, slots=True)
class StepOutput:
    request_id: str
    sampled: SampledToken
    finish_reason: FinishReason | None
    num_cached_tokens: int

    @property
    def token(self) -> int:
        return self.sampled.token


@dataclass(frozen=True, slots=True)
class StepFailure:
    """A request that ended with an error; the engine has removed it."""

    request_id: str
    error: MoonpoolError


@dataclass(slots=True)
class GenerationResult:
    """The whole answer to one prompt."""

    tokens: list[int] = field(default_factory=list)
    sampled: list[SampledToken] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    num_cached_tokens: int = 0


@dataclass(slots=True)
class _Computed:
    """One step's results: of a launched step, and logits of the chunks that were computed one by one."""

    launched: LaunchedStep | None = None
    chunks: Sequence[Chunk] = ()
    logits: torch.Tensor | None = None


@dataclass(slots=True)
class _AheadStep:
    """A step that was launched before the tokens of the step before it were read; `inputs` are those tokens."""

    step: LaunchedStep
    inputs: Mapping[str, int] = field(default_factory=dict)

    def holds(self, chunk: Chunk) -> bool:
        """Return whether the step computes exactly this chunk."""
        row = self.step.rows.get(chunk.request_id)
        if row is None:
            return False
        own = self.step.chunks[row]
        same_place = own.start == chunk.start and own.pages[: len(chunk.pages)] == chunk.pages
        return same_place and chunk.tokens == (self.inputs.get(chunk.request_id),)


class Engine:
    def __init__(self, scheduler: Scheduler, runner: Executor, link: StepLink | None = None) -> None:
        self.scheduler = scheduler
        self._runner = runner
        self._link = link
        self._times = runner.times
        limits, launcher = scheduler.config, runner.launcher
        self._adjuster: LogitsAdjuster = (
            HostAdjuster(limits.max_num_seqs, limits.max_seq_tokens) if launcher is None else launcher.adjuster
        )
        self._ahead: _AheadStep | None = None
        self.num_steps = 0  # passes of the model

    def add_request(
        self, request_id: str, prompt: Sequence[int], params: SamplingParams, root: bytes = LOCAL_ROOT
    ) -> None:
        """Queue a request; raise as Scheduler.add does. Sequences of other kinds are added to `scheduler` directly."""
        block_tokens = self.scheduler.pages.block_tokens
        self.scheduler.add(RequestSequence(request_id, prompt, params, root=root, block_tokens=block_tokens))

    def cancel(self, request_id: str) -> bool:
        return self.scheduler.cancel(request_id)

    def has_work(self) -> bool:
        return self.scheduler.has_work() or self._ahead is not None

    def step(self) -> list[StepOutput | StepFailure]:
        """Run one pass of the model. If nothing can be computed until pages are freed, return [] without a pass.

        Raise the runner's error if the model cannot compute anything at all; the step then counts as not computed, and
        no request has advanced.
        """
        chunks = self.scheduler.schedule()
        if not chunks:
            self._times.rest()
            self._drop_ahead()
            return []
        self.num_steps += 1
        try:
            self._times.begin(chunks, self._ahead.step.began if self._ahead is not None else None)
            computed = self._execute(chunks)
            outcomes = self._sample(computed)
            self._end_time(computed, outcomes.keys())
        except Exception as error:  # noqa: BLE001 - the next steps find the request that caused it
            self.scheduler.abandon_step()
            self._times.rest()
            self._drop_ahead()
            _LOG.warning("a step of %d requests failed", len(chunks), exc_info=error)
            return self._step_failed(chunks, error)
        except BaseException:
            self.scheduler.abandon_step()
            raise
        failures = [self._fail(name, error) for name, error in outcomes.items() if isinstance(error, MoonpoolError)]
        sampled = {name: token for name, token in outcomes.items() if isinstance(token, SampledToken)}
        result = self.scheduler.complete({name: token.token for name, token in sampled.items()})
        if self._link is not None:
            self._link.completed(result.full_blocks)
            for time in self._times.drain():
                self._link.computed(time)
        if not self.scheduler.has_work():
            self._times.rest()
        return failures + [
            StepOutput(a.request_id, sampled[a.request_id], a.finish_reason, a.num_cached_tokens)
            for a in result.accepted
        ]

    def _end_time(self, computed: _Computed, sampled: Set[str]) -> None:
        """The step ends where the GPU has its tokens if it was launched as a whole, otherwise now."""
        launched = computed.launched
        if launched is not None and computed.logits is None:
            self._times.end(launched.ended)
        else:
            is_read = any(chunk.wants_logits and chunk.request_id in sampled for chunk in computed.chunks)
            self._times.end(is_read=is_read)

    def _step_failed(self, chunks: Sequence[Chunk], error: Exception) -> list[StepOutput | StepFailure]:
        """Find the request that caused the failure: compute the requests of the step one by one, or end the only
        one."""
        if len(chunks) > 1:
            self.scheduler.queues.isolate(chunk.request_id for chunk in chunks)
            return []
        self._probe(error)
        # The text of a foreign exception goes to the log; a client sees its type.
        reason = error if isinstance(error, MoonpoolError) else Internal(f"computing it raised {type(error).__name__}")
        return [self._fail(chunks[0].request_id, reason)]

    def _probe(self, error: Exception) -> None:
        """Raise `error` if the model cannot compute one token of a sequence that belongs to no request."""
        pages = self.scheduler.pages
        if not pages.num_available:
            return
        page = pages.allocate(1)
        try:
            self._runner.execute([Chunk("probe", 0, (0,), tuple(page), True)], None)
        except Exception:  # noqa: BLE001 - after any error here the engine cannot compute
            raise error from None
        finally:
            pages.free(page)

    def _fail(self, request_id: str, error: MoonpoolError) -> StepOutput | StepFailure:
        self.scheduler.cancel(request_id)
        return StepFailure(request_id, error)

    def _execute(self, chunks: Sequence[Chunk]) -> _Computed:
        admitted = self.scheduler.drain_admitted()
        try:
            hooks = self._link.begin_step(chunks, admitted) if self._link is not None else None
            return self._run(chunks, hooks)
        finally:
            # After a failure too: what the pulls brought is used.
            verified = self._link.end_step() if self._link is not None else {}
            for pull in admitted:
                if pull.blocks:
                    self._settle_pull(pull, verified.get(pull.request_id))

    def _settle_pull(self, pull: AdmittedSequence, num_verified_tokens: int | None) -> None:
        if num_verified_tokens is None:
            self.scheduler.put_back(pull.request_id)
        elif num_verified_tokens >= (pull.blocks[-1] + 1) * self.scheduler.pages.block_tokens:
            self.scheduler.confirm_pulled(pull.request_id)
        else:
            self.scheduler.rewind(pull.request_id, num_verified_tokens)

    def _run(self, chunks: Sequence[Chunk], hooks: LayerHooks | None) -> _Computed:
        """Compute the step: what was launched ahead is used, the rest is computed now."""
        launcher, ahead = self._runner.launcher, self._ahead
        computed = _Computed()
        rest = chunks
        if ahead is not None:
            computed.launched = ahead.step
            rest = [chunk for chunk in chunks if not ahead.holds(chunk)]
        elif launcher is not None and hooks is None:
            rows = [self._row(chunk.request_id) for chunk in chunks]
            if launcher.fits(chunks, rows):
                computed.launched, rest = launcher.launch(chunks, rows), []
        if rest:
            computed.chunks, computed.logits = rest, self._runner.execute(rest, hooks)
        self._ahead = None
        if computed.launched is not None and not rest:
            self._launch_ahead(computed.launched)
        return computed

    def _launch_ahead(self, launched: LaunchedStep) -> None:
        """Launch the next step behind `launched`, which computes the whole step that is open."""
        launcher = self._runner.launcher
        assert launcher is not None, "a launcher has launched the step"
        self.scheduler.settle_ahead()
        following = self.scheduler.look_ahead()
        rows = [self._row(chunk.request_id, num_ahead=1) for chunk in following]
        if following and launcher.fits(following, rows):
            self._ahead = _AheadStep(launcher.launch(following, rows, after=launched))

    def _drop_ahead(self) -> None:
        """Wait for the step that was launched ahead, if there is one; nothing uses it."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            try:
                ahead.step.outcomes()
            except RuntimeError as error:  # the GPU failed: the next step shows whether it can compute at all
                _LOG.warning("a step that was launched ahead failed", exc_info=error)
        self.scheduler.settle_ahead()

    def _sample(self, computed: _Computed) -> dict[str, SampledToken | MoonpoolError]:
        outcomes: dict[str, SampledToken | MoonpoolError] = {}
        if computed.launched is not None:
            computed_now = {chunk.request_id for chunk in computed.chunks}
            outcomes |= self._read_launched(computed.launched, without=computed_now)
        if computed.logits is not None:
            wanting = [chunk.request_id for chunk in computed.chunks if chunk.wants_logits]
            outcomes |= self._sample_logits(wanting, computed.logits)
        return outcomes

    def _read_launched(self, launched: LaunchedStep, without: set[str]) -> dict[str, SampledToken | MoonpoolError]:
        """Return the tokens of a launched step. It may hold requests that have ended, and those in `without`: they were
        preempted meanwhile, and this step computes other chunks of them."""
        live = launched.rows.keys() - without
        rows = {name: launched.rows[name] for name in live if self.scheduler.is_in_flight(name)}
        outcomes = launched.outcomes()
        if self._ahead is not None:
            self._ahead.inputs = {name: outcomes[row].token for name, row in launched.rows.items()}
        else:
            self.scheduler.settle_ahead()
        return {
            name: outcomes[row] if outcomes[row].token >= 0 else sampling_error(outcomes[row].token, self._row(name))
            for name, row in rows.items()
        }

    def _sample_logits(self, wanting: Sequence[str], logits: torch.Tensor) -> dict[str, SampledToken | MoonpoolError]:
        # A request may have been cancelled or rewound while the model ran.
        live = [i for i, request_id in enumerate(wanting) if self.scheduler.is_in_flight(request_id)]
        if not live:
            return {}
        names = [wanting[i] for i in live]
        own = logits if len(live) == len(wanting) else logits[live]
        try:
            picked = sample(own, [self._row(name) for name in names], self._adjuster)
        except Exception as error:  # noqa: BLE001 - sampling one by one finds the request that caused it
            _LOG.warning("sampling for %d requests failed; now one by one", len(names), exc_info=error)
            picked = [self._sample_one(own[i : i + 1], name) for i, name in enumerate(names)]
        return dict(zip(names, picked, strict=True))

    def _sample_one(self, logits: torch.Tensor, request_id: str) -> SampledToken | MoonpoolError:
        try:
            return sample(logits, [self._row(request_id)], self._adjuster)[0]
        except Exception as error:  # noqa: BLE001 - the request ends with it
            return Internal(f"sampling its next token raised {type(error).__name__}")

    def _row(self, request_id: str, num_ahead: int = 0) -> SampleRow:
        sequence = self.scheduler.get(request_id)
        assert sequence is not None, "a request in flight is known"
        return SampleRow(
            params=sequence.params,
            tokens=sequence.tokens,
            num_prompt_tokens=sequence.num_prompt_tokens,
            barred=self.scheduler.barred_tokens(sequence, num_ahead),
            num_ahead=num_ahead,
        )

    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams | Sequence[SamplingParams]
    ) -> list[GenerationResult]:
        """Generate answers to all prompts, batched; return them in order. The engine must have no other work."""
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
        answers = {f"generate-{i}": GenerationResult() for i in range(len(prompts))}
        try:
            for request_id, prompt, own in zip(answers, prompts, each, strict=True):
                self.add_request(request_id, prompt, own)
            while self.has_work():
                self._gather(answers)
        finally:
            for request_id in answers:
                self.cancel(request_id)
        return list(answers.values())

    def _gather(self, answers: dict[str, GenerationResult]) -> None:
        num_steps = self.num_steps
        outputs = self.step()
        if self.num_steps == num_steps:
            raise NoSpace("pages held by others leave no room to go on")
        for out in outputs:
            if isinstance(out, StepFailure):
                raise out.error
            answer = answers[out.request_id]
            answer.tokens.append(out.token)
            answer.sampled.append(out.sampled)
            answer.finish_reason = out.finish_reason
            answer.num_cached_tokens = out.num_cached_tokens
