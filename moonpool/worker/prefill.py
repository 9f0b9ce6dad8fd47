"""The prefill role: compute a prompt's KV and its first token, reuse blocks of the pool, hand all KV over.

This happens layer by layer. Before layer j reads old KV, the pieces of layer j have come from the pool. When layer j is
computed, its pieces go to the decode worker and to the pool while layer j+1 is computed.
"""

from __future__ import annotations

import asyncio
import logging
import math
import sys
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass

from moonpool.base.clock import Clock, Deadline
from moonpool.base.cluster import PrefillSample
from moonpool.base.errors import Cancelled, DeadlineExceeded, Internal, MoonpoolError
from moonpool.engine.engine import StepFailure, StepOutput
from moonpool.engine.runner import LayerHooks
from moonpool.engine.sampler import SampledToken
from moonpool.engine.scheduler import Scheduler
from moonpool.engine.sequence import AdmittedSequence, Chunk
from moonpool.engine.sequence import Sequence as RequestSequence
from moonpool.engine.step_times import StepTime, StepTimes
from moonpool.worker.kv_link.pull import Puller
from moonpool.worker.kv_link.pull_job import PullJob, PullResult
from moonpool.worker.kv_link.push import Push
from moonpool.worker.loop import EngineLoop
from moonpool.worker.messages import Prefill, PrefillItem, PrefillReply, RequestSpec, Ticket, TokenOut
from moonpool.worker.metrics import Samples

_LOG = logging.getLogger(__name__)


@dataclass(slots=True)
class Prompt:
    """One prefill in progress. Only the engine's thread changes it."""

    spec: RequestSpec
    push: Push
    send: Callable[[PrefillItem | MoonpoolError], None]  # to the front end
    arrived_s: float
    started_s: float = 0.0
    alone_s: float = 0.0  # its share of the steps that computed it, without waits for pulls
    local_tokens: int = 0
    ahead_tokens: int = 0  # of the pool's, those that came while the prompt waited
    ahead_nbytes: int = 0
    pool_tokens: int = 0
    pool_nbytes: int = 0
    pulled: PullResult | None = None


# A pull is given up when it takes this many times as long as computing the same tokens.
_MAX_PULL_RATIO = 2.0
_MOST_TIMES = 32  # of the layers of one pull


class PrefillRole:
    """`make_push` makes the Push of one request from its ticket and the keys of its full blocks."""

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        puller: Puller,
        make_push: Callable[[Ticket, Sequence[bytes]], Push],
        samples: Samples,
        pull_timeout_s: float,
        clock: Clock,
        times: StepTimes,
        pull_grace_s: float = 1.0,
    ) -> None:
        self._scheduler = scheduler
        self._block_tokens = scheduler.pages.block_tokens
        self._puller = puller
        self._make_push = make_push
        self._samples = samples
        self._pull_timeout_s, self._pull_grace_s = pull_timeout_s, pull_grace_s
        self._clock, self._times = clock, times
        self._token_s: float | None = None  # to compute one token; None: unknown
        self._prompts: dict[str, Prompt] = {}
        self._chunks: Sequence[Chunk] = ()
        self._jobs: list[PullJob] = []
        self._step_began_s = 0.0
        self._pull_deadline = Deadline(0, clock)  # one for all pulls of a step: each delays the whole step
        self.loop: EngineLoop | None = None  # set once, before the loop starts

    def calibrate(self, sample: PrefillSample) -> None:
        """Take the time to compute a token from this sample, until a step shows it. Before the loop starts."""
        self._token_s = sample.seconds / (sample.num_tokens - sample.prefix_tokens)

    # -- RPC handlers, on the event loop ---------------------------------------------------------------------

    async def prefill(self, call: Prefill) -> AsyncGenerator[PrefillItem, None]:
        spec, name = call.spec, engine_name(call.spec)
        events, deadline = asyncio.get_running_loop(), Deadline(call.spec.timeout_s)
        sequence = self.sequence(spec)
        sequence.num_pool_blocks = await count_pool_blocks(self._puller, sequence, call.max_pool_blocks)
        items: asyncio.Queue[PrefillItem | MoonpoolError] = asyncio.Queue()

        def send(item: PrefillItem | MoonpoolError) -> None:
            events.call_soon_threadsafe(items.put_nowait, item)

        prompt = Prompt(spec, self._make_push(call.ticket, sequence.keys), send, self._clock.now_s())
        assert self.loop is not None
        try:
            await self.loop.ask(lambda: self._add(name, sequence, prompt))
            item = await _next(items, deadline)
            yield item
            if item.reply is not None and item.reply.finish_reason is None:
                yield await _next(items, deadline)
        finally:
            # Ended, cancelled or timed out: release what the prompt still holds. No effect when it has ended.
            self.loop.post(lambda: self._drop(name, prompt))

    def sequence(self, spec: RequestSpec) -> RequestSequence:
        """Return the sequence of a prompt, whose KV is handed over."""
        return RequestSequence(
            engine_name(spec),
            spec.tokens[: spec.num_prompt_tokens],
            spec.params,
            root=spec.root,
            block_tokens=self._block_tokens,
            output=spec.tokens[spec.num_prompt_tokens :],
            prefill_only=True,
            hold_pages=True,
            num_alone_steps=sys.maxsize if spec.alone else 0,
        )

    # -- between steps, on the engine's thread ---------------------------------------------------------------

    def _add(self, name: str, sequence: RequestSequence, prompt: Prompt) -> None:
        self._scheduler.add(sequence)
        self._prompts[name] = prompt

    def _drop(self, name: str, prompt: Prompt) -> None:
        if self._prompts.get(name) is prompt:
            del self._prompts[name]
            self._end(name, prompt, Cancelled("the request was given up"))

    def _end(self, name: str, prompt: Prompt, error: MoonpoolError) -> None:
        """Release what the prompt holds, and answer with `error` unless the caller has an answer already."""
        self._scheduler.cancel(name)
        prompt.push.abort()
        prompt.push.finish_puts(complete=False, on_done=lambda: None)
        prompt.send(error)

    @property
    def num_prompts(self) -> int:
        return len(self._prompts)

    def has(self, name: str) -> bool:
        """Return whether this engine request is a prompt of this role."""
        return name in self._prompts

    def on_step(self, outputs: Sequence[StepOutput | StepFailure]) -> None:
        for out in outputs:
            prompt = self._prompts.pop(out.request_id, None)
            if prompt is None:
                continue
            if isinstance(out, StepFailure):
                self._samples.failed_requests += 1
                self._end(out.request_id, prompt, out.error)
                continue
            try:
                self._finish(out, prompt)
            except Exception as error:  # noqa: BLE001 - it concerns this request alone
                _LOG.exception("handing over %s failed", out.request_id)
                self._end(out.request_id, prompt, Internal(f"handing it over raised {type(error).__name__}"))

    def computed(self, time: StepTime) -> None:
        """Divide the step's time among its prompts by their tokens. If each prompt reported the whole step, the
        conductor would predict longer queues the larger the batches are. Waits for the pool are reported as pulls.
        """
        num_tokens = sum(len(chunk.tokens) for chunk in time.chunks)
        if not time.has_waited:  # threads that pull take the interpreter from a step
            self._token_s = time.seconds / num_tokens
        for chunk in time.chunks:
            prompt = self._prompts.get(chunk.request_id)
            if prompt is not None:
                prompt.alone_s += time.seconds * len(chunk.tokens) / num_tokens

    def _finish(self, out: StepOutput, prompt: Prompt) -> None:
        first = token_out(out.sampled)
        ended = None if out.finish_reason == "handoff" else out.finish_reason
        prompt.send(PrefillItem(reply=self._reply(prompt, first, ended)))
        if ended is None:
            began_s = self._clock.now_s()
            prompt.push.commit(first, len(prompt.spec.tokens), lambda error: self._handed_off(prompt, error, began_s))
        else:
            prompt.push.abort()
        prompt.push.finish_puts(complete=True, on_done=lambda: self._released(out.request_id, prompt.push))

    def _handed_off(self, prompt: Prompt, error: MoonpoolError | None, began_s: float) -> None:
        if error is not None:
            prompt.send(error)
            return
        handoff_s = self._clock.now_s() - began_s
        self._samples.times.handoff.observe(handoff_s)
        prompt.send(PrefillItem(handoff_s=handoff_s))

    def _released(self, name: str, push: Push) -> None:
        """Release the pages: nothing reads them any more."""
        self._samples.handoff_nbytes += push.sent_nbytes
        assert self.loop is not None
        self.loop.post(lambda: self._scheduler.release(name))

    def _reply(self, prompt: Prompt, first: TokenOut, ended: str | None) -> PrefillReply:
        compute_s = self._clock.now_s() - prompt.started_s
        reused, times = prompt.local_tokens + prompt.pool_tokens, self._samples.times
        times.queue.observe(prompt.started_s - prompt.arrived_s)
        times.prefill.observe(compute_s)
        self._samples.prefills.append(PrefillSample(len(prompt.spec.tokens), reused, prompt.alone_s))
        return PrefillReply(
            first=first,
            finish_reason=ended,
            local_tokens=prompt.local_tokens,
            pool_tokens=prompt.pool_tokens,
            pool_nbytes=prompt.pool_nbytes,
            queue_s=prompt.started_s - prompt.arrived_s,
            compute_s=compute_s,
            ssd_tokens=0 if prompt.pulled is None else prompt.pulled.num_ssd * self._block_tokens,
            remote_tokens=0 if prompt.pulled is None else prompt.pulled.num_remote * self._block_tokens,
            pull_s=0.0 if prompt.pulled is None else prompt.pulled.seconds,
            pull_layers_s=() if prompt.pulled is None else thinned(prompt.pulled.layers_s),
        )

    # -- around and inside a step (roles.py and LayerHooks), on the engine's thread -----------------------------

    def begin_step(self, chunks: Sequence[Chunk], admitted: Sequence[AdmittedSequence]) -> LayerHooks:
        self._chunks, self._jobs = chunks, []
        self._step_began_s = self._clock.now_s()
        num_pulled = sum(len(entry.blocks) for entry in admitted)
        self._pull_deadline = Deadline(self.pull_limit_s(num_pulled * self._block_tokens), self._clock)
        compute_s = (self._token_s or math.inf) * sum(len(chunk.tokens) for chunk in chunks)
        for entry in admitted:
            prompt, sequence = self._prompts[entry.request_id], self._scheduler.get(entry.request_id)
            assert sequence is not None
            prompt.started_s, prompt.alone_s = self._clock.now_s(), 0.0
            prompt.local_tokens = (entry.num_local_blocks - entry.num_ahead_blocks) * self._block_tokens
            prompt.ahead_tokens = prompt.pool_tokens = entry.num_ahead_blocks * self._block_tokens
            prompt.ahead_nbytes = prompt.pool_nbytes = entry.num_ahead_blocks * self._puller.page_nbytes
            prompt.pulled = None
            prompt.push.begin(sequence.pages, entry.num_local_blocks, len(entry.blocks))
            if entry.blocks:
                self._start_pull(entry, prompt.push, compute_s)
        return self

    def pull_limit_s(self, num_tokens: int) -> float:
        """Return how long to wait for pulls of `num_tokens`: twice the time to compute them, and at least the grace.
        The conductor expected the pool to be faster than computing; a pool that is not is given up.
        """
        if self._token_s is None:
            return self._pull_timeout_s
        return min(self._pull_timeout_s, max(self._pull_grace_s, _MAX_PULL_RATIO * self._token_s * num_tokens))

    def _start_pull(self, entry: AdmittedSequence, push: Push, compute_s: float) -> None:
        # Even if the request ends, these pages are not reused while the puller may write to them.
        owner = f"pull:{entry.request_id}"
        self._scheduler.pages.hold(owner, entry.pages)
        self._jobs.append(
            self._puller.start(
                entry,
                on_pieces=lambda layers, some, ready: push.layers_ready(
                    layers, entry.blocks[some.start : some.stop], ready
                ),
                on_end=lambda: self._release_pages(owner),
                compute_s=compute_s,
            )
        )

    def _release_pages(self, owner: str) -> None:
        assert self.loop is not None
        self.loop.post(lambda: self._scheduler.pages.release(owner))

    def before_layer(self, layer: int) -> None:
        if not self._jobs:
            return
        with self._times.waiting():
            for job in self._jobs:
                job.wait_layer(layer, self._pull_deadline.remaining_s())

    @property
    def waits_at_most_s(self) -> float:
        """How long the current step may still wait for its pulls."""
        return self._pull_deadline.remaining_s() if self._jobs else 0.0

    def after_layer(self, layer: int) -> None:
        assert self.loop is not None
        self.loop.progress.went_on()
        for chunk in self._chunks:
            prompt = self._prompts.get(chunk.request_id)
            if prompt is not None:
                prompt.push.layer_ready(layer, completed_blocks(chunk, self._block_tokens, is_end=chunk.wants_logits))

    def end_step(self) -> Mapping[str, int]:
        if not self._jobs:
            return {}
        with self._times.waiting():
            return {job.admitted.request_id: self._settle_pull(job) for job in self._jobs}

    def _settle_pull(self, job: PullJob) -> int:
        """Return the number of leading tokens of the request whose KV is verified."""
        name = job.admitted.request_id
        result, prompt = job.wait_end(self._pull_deadline.remaining_s()), self._prompts[name]
        prompt.pool_tokens = prompt.ahead_tokens + result.num_good * self._block_tokens
        prompt.pool_nbytes, prompt.pulled = prompt.ahead_nbytes + result.nbytes, result
        self._samples.add_pull(result, self._clock.now_s())
        if job.left_behind:
            now_s = self._clock.now_s()
            self._samples.add_late_pull(job, self._puller.piece_nbytes, now_s - self._step_began_s, now_s)
            self._puller.rest()
            self._start_over(name, prompt)
        return prompt.local_tokens + prompt.pool_tokens

    def _start_over(self, name: str, prompt: Prompt) -> None:
        """Compute the prompt in other pages and without the pool: the puller may still write to its current pages."""
        self._scheduler.cancel(name)
        self._scheduler.add(self.sequence(prompt.spec))


def thinned(layers_s: tuple[float, ...]) -> tuple[float, ...]:
    """Return the times at which equal parts of the layers were in place, at most _MOST_TIMES: records are kept, and
    models may have many layers."""
    parts = min(len(layers_s), _MOST_TIMES)
    return tuple(layers_s[(part + 1) * len(layers_s) // parts - 1] for part in range(parts))


async def count_pool_blocks(puller: Puller, sequence: RequestSequence, limit: int | None) -> int:
    """Return how many leading blocks of the prompt the pool holds now, of those that may be reused; `limit` at most."""
    reusable = sequence.keys[: sequence.num_reusable_blocks][:limit]
    return await asyncio.to_thread(puller.count_stored, reusable) if reusable else 0


def engine_name(spec: RequestSpec) -> str:
    """Return the name of one attempt at the request, as the engine knows it."""
    return f"{spec.request_id}/{spec.epoch}"


def token_out(sampled: SampledToken) -> TokenOut:
    """Return the token as the front end gets it."""
    return TokenOut(sampled.token, sampled.logprob, sampled.top_logprobs)


def completed_blocks(chunk: Chunk, block_tokens: int, *, is_end: bool) -> range:
    """Return the blocks whose KV is final after this chunk: full ones, and at the prompt's end the partial last one."""
    end = chunk.end // block_tokens
    if is_end and chunk.end % block_tokens:
        end += 1
    return range(chunk.start // block_tokens, end)


async def _next(items: asyncio.Queue[PrefillItem | MoonpoolError], deadline: Deadline) -> PrefillItem:
    """Return the next item; raise it if it is an error."""
    try:
        async with asyncio.timeout(deadline.remaining_s()):
            item = await items.get()
    except TimeoutError as error:
        raise DeadlineExceeded("the prompt was not computed and handed over in time") from error
    if isinstance(item, MoonpoolError):
        raise item
    return item
