"""The prefill role: compute a prompt's KV and its first token, reuse blocks of the pool, hand all KV over.

Blocks of the pool come while a prompt waits (kv_link/pull_ahead.py). A prompt may join a step while its later layers
are still on their way: before layer j reads old KV, the pieces of layer j have come. A step waits little for them: when
that is not enough, it goes on without the prompt, which is computed when its pull is over. When layer j is computed,
its pieces go to the decode worker and to the pool while layer j+1 is computed.
"""

from __future__ import annotations

import asyncio
import logging
import math
import sys
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

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
from moonpool.worker.kv_link.pieces import ReadyPoint
from moonpool.worker.kv_link.pull import Puller
from moonpool.worker.kv_link.pull_ahead import AheadPuller
from moonpool.worker.kv_link.pull_job import PullJob, PullResult
from moonpool.worker.kv_link.push import Push
from moonpool.worker.loop import EngineLoop
from moonpool.worker.messages import Prefill, PrefillItem, PrefillReply, RequestSpec, Ticket, TokenOut
from moonpool.worker.metrics import Samples

T = TypeVar("T")
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
    pulled_ahead: PullResult | None = None  # while it waited
    pulled: PullResult | None = None  # beside computing


# A pull is given up when it takes this many times as long as computing the same tokens.
_MAX_PULL_RATIO = 2.0
_STALL_SHARE = 0.1  # of the grace for a pull: a step may wait so long for layers, or as long as it computes
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
        self.ahead = AheadPuller(scheduler, puller, samples, self.pull_limit_s, self._compute_s, clock)
        self._make_push = make_push
        self._samples = samples
        self._pull_timeout_s, self._pull_grace_s = pull_timeout_s, pull_grace_s
        self._clock, self._times = clock, times
        self._token_s: float | None = None  # to compute one token; None: unknown
        self._prompts: dict[str, Prompt] = {}
        self._chunks: Sequence[Chunk] = ()
        self._jobs: list[PullJob] = []  # of prompts that joined the current step while their pulls are under way
        self._late: set[str] = set()  # of these prompts, those without which the step goes on
        self._stalled_s = self._max_stall_s = 0.0  # waits of the current step for its pulls, and how long they may be
        self.loop: EngineLoop | None = None  # set once, before the loop starts

    def calibrate(self, sample: PrefillSample) -> None:
        """Take the time to compute a token from this sample, until a step shows it. Before the loop starts."""
        self._token_s = sample.seconds / (sample.num_tokens - sample.prefix_tokens)

    # -- RPC handlers, on the event loop ---------------------------------------------------------------------

    async def prefill(self, call: Prefill) -> AsyncGenerator[PrefillItem, None]:
        spec, name = call.spec, engine_name(call.spec)
        events, deadline = asyncio.get_running_loop(), Deadline(call.spec.timeout_s)
        sequence = self.sequence(spec)
        sequence.expected_tokens = call.reused_tokens
        sequence.num_pool_blocks = await count_pool_blocks(self._puller, sequence, call.max_pool_blocks)
        items: asyncio.Queue[PrefillItem | MoonpoolError] = asyncio.Queue()

        def send(item: PrefillItem | MoonpoolError) -> None:
            events.call_soon_threadsafe(items.put_nowait, item)

        prompt = Prompt(spec, self._make_push(call.ticket, sequence.keys), send, self._clock.now_s())
        assert self.loop is not None
        try:
            await self.loop.answered(self.loop.call_inside(lambda: self._add(name, sequence, prompt)))
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
            tenant=spec.tenant,
            weight=spec.weight,
        )

    # -- between steps, and _add() inside them, on the engine's thread ---------------------------------------

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
        pulls = [each for each in (prompt.pulled_ahead, prompt.pulled) if each is not None]
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
            ssd_tokens=sum(each.num_ssd for each in pulls) * self._block_tokens,
            remote_tokens=sum(each.num_remote for each in pulls) * self._block_tokens,
            pull_s=0.0 if prompt.pulled is None else prompt.pulled.seconds,
            pull_layers_s=() if prompt.pulled is None else thinned(prompt.pulled.layers_s),
        )

    # -- around and inside a step (roles.py and LayerHooks), on the engine's thread -----------------------------

    def begin_step(self, chunks: Sequence[Chunk], admitted: Sequence[AdmittedSequence]) -> LayerHooks:
        self._chunks, self._jobs, self._late, self._stalled_s = chunks, [], set(), 0.0
        self._max_stall_s = self._stall_limit_s(sum(len(chunk.tokens) for chunk in chunks))
        for entry in admitted:
            prompt, sequence = self._prompts[entry.request_id], self._scheduler.get(entry.request_id)
            assert sequence is not None
            prompt.started_s, prompt.alone_s = self._clock.now_s(), 0.0
            prompt.local_tokens = (entry.num_local_blocks - entry.num_ahead_blocks) * self._block_tokens
            prompt.ahead_tokens = prompt.pool_tokens = entry.num_ahead_blocks * self._block_tokens
            prompt.ahead_nbytes = prompt.pool_nbytes = entry.num_ahead_blocks * self._puller.page_nbytes
            self._take_pulled(entry, prompt)
            prompt.push.begin(sequence.pages, entry.num_local_blocks, len(entry.blocks))
            if entry.blocks:
                self._join(entry, prompt)
        return self

    def _take_pulled(self, entry: AdmittedSequence, prompt: Prompt) -> None:
        """Note what was pulled while the prompt waited. If it waited for nothing else, pulling and computing are one
        time, as if it had joined."""
        prompt.pulled_ahead, prompt.pulled = None, None
        result, began_s = self.ahead.take_over(entry.request_id)
        if began_s is None or entry.blocks:
            prompt.pulled_ahead = result
        else:
            prompt.pulled, prompt.started_s = result, min(prompt.started_s, began_s)

    def _compute_s(self, num_tokens: int) -> float:
        """Return how long computing these tokens takes; infinite if it is not known."""
        return math.inf if self._token_s is None else self._token_s * num_tokens

    def pull_limit_s(self, num_tokens: int) -> float:
        """Return how long to wait for pulls of `num_tokens`: twice the time to compute them, and at least the grace.
        The conductor expected the pool to be faster than computing; a pool that is not is given up.
        """
        return min(self._pull_timeout_s, max(self._pull_grace_s, _MAX_PULL_RATIO * self._compute_s(num_tokens)))

    def _stall_limit_s(self, num_tokens: int) -> float:
        """Return how long a step of `num_tokens` waits for pulls at most: as long as it computes, and at least a part
        of the grace. A prompt that joined was expected to be in time, so that this seldom counts.
        """
        return min(self._pull_timeout_s, max(_STALL_SHARE * self._pull_grace_s, self._compute_s(num_tokens)))

    def _join(self, entry: AdmittedSequence, prompt: Prompt) -> None:
        """The prompt's later layers are under way: hand over what is in place, and the rest as it comes."""

        def on_pieces(layers: range, some: range, ready: ReadyPoint | None) -> None:
            prompt.push.layers_ready(layers, entry.blocks[some.start : some.stop], ready)

        job = self.ahead.join(entry.request_id, on_pieces)
        if job.began_s is not None:
            prompt.started_s = min(prompt.started_s, job.began_s)  # computing and pulling are one time
        self._jobs.append(job)

    def before_layer(self, layer: int) -> None:
        assert self.loop is not None
        if self.loop.run_inside():  # prompts have come: their pulls need not wait for the end of a long step
            self.ahead.begin()
        if not self._jobs:
            return
        with self._times.waiting():
            for job in self._jobs:
                if job.admitted.request_id not in self._late and not self._stall(partial(job.wait_layer, layer)):
                    self._late.add(job.admitted.request_id)

    def _stall(self, wait: Callable[[float], T]) -> T:
        """Return what `wait` returns, which may take what is left of the step's time to wait."""
        began_s = self._clock.now_s()
        try:
            return wait(max(0.0, self._max_stall_s - self._stalled_s))
        finally:
            self._stalled_s += self._clock.now_s() - began_s

    @property
    def waits_at_most_s(self) -> float:
        """How long the current step may still wait for its pulls."""
        return max(0.0, self._max_stall_s - self._stalled_s) if self._jobs else 0.0

    def after_layer(self, layer: int) -> None:
        assert self.loop is not None
        self.loop.progress.went_on()
        for chunk in self._chunks:
            prompt = self._prompts.get(chunk.request_id)
            if prompt is not None and chunk.request_id not in self._late:
                prompt.push.layer_ready(layer, completed_blocks(chunk, self._block_tokens, is_end=chunk.wants_logits))

    def end_step(self) -> Mapping[str, int]:
        if not self._jobs:
            return {}
        with self._times.waiting():
            settled = {job.admitted.request_id: self._settle_pull(job) for job in self._jobs}
        return {name: num_tokens for name, num_tokens in settled.items() if num_tokens is not None}

    def _settle_pull(self, job: PullJob) -> int | None:
        """Return the number of leading tokens of the request whose KV is verified; None if its pull is not over."""
        name = job.admitted.request_id
        result, prompt = None, self._prompts[name]
        if name not in self._late:
            result = self._stall(job.wait_result)
        if result is None:
            job.listen(None)
            return None
        prompt.pool_tokens = prompt.ahead_tokens + result.num_good * self._block_tokens
        prompt.pool_nbytes, prompt.pulled = prompt.ahead_nbytes + result.nbytes, result
        return prompt.local_tokens + prompt.pool_tokens


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
