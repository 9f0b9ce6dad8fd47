"""One choice: its life across workers, and its text.

ChoiceRunner routes the request and makes attempts, each of which continues after the last accepted token. Whatever
happens, its caller sees each token once and in order, and then an end: a finish reason or an error. Sampling is a
function of (seed, position), so a replanned request continues with the same tokens it would have had. Choice turns
the tokens into text and passes each event on.

However a choice ends, also by cancellation, workers hold nothing for it afterwards.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import TypeAlias

from moonpool.base.clock import Deadline
from moonpool.base.errors import DeadlineExceeded, FatalRequest, MoonpoolError, Overloaded, Unavailable, Unreachable
from moonpool.base.keys import chain_keys
from moonpool.conductor.messages import BeforeDecode, Decision, PrefillEnded, PrefillParts, RequestEnded, Route
from moonpool.conductor.retries import Retries, RetryPolicy
from moonpool.engine.sequence import SamplingParams
from moonpool.frontend.attempt import LOST, Attempt, TokenBatch
from moonpool.frontend.metrics import FrontendMetrics
from moonpool.frontend.text import TextAssembler, TextDelta
from moonpool.frontend.tracing import ChoiceTrace
from moonpool.frontend.workers import Connections
from moonpool.worker.messages import PrefillReply, RequestSpec, TokenOut

_LOG = logging.getLogger(__name__)
_ASK_S = 5.0
_FEW_TOKENS = 1024  # whose keys are computed in about 0.1 ms


@dataclass(frozen=True)
class ChoiceRequest:
    """What the workers are to generate."""

    request_id: str
    prompt: list[int]
    root: bytes
    block_tokens: int
    params: SamplingParams
    timeout_s: float
    tenant: str = ""
    weight: float = 1.0  # of the tenant
    priority: int = 0  # among the tenant's own requests, the highest is served first


class ChoiceRunner:
    """Runs one ChoiceRequest. Its deadline starts when the runner is made."""

    def __init__(
        self,
        request: ChoiceRequest,
        connections: Connections,
        policy: RetryPolicy,
        trace: ChoiceTrace | None = None,
    ) -> None:
        self._request = request
        self._trace = trace
        self._connections = connections
        self._retries = Retries(policy)
        self._deadline = Deadline(request.timeout_s)
        self._output: list[int] = []
        self._first: PrefillReply | None = None
        self._attempt: Attempt | None = None  # the latest one, and the one that brought the first token
        self._first_attempt: Attempt | None = None
        self._outcome = "cancelled"  # until the choice is done or fails
        self.ttft_s: float | None = None
        self.queue_s: float | None = None  # waits before the prompt was computed: at the conductor, at the worker
        self._last_s = 0.0  # arrival of the newest token, in seconds since the start

    @property
    def num_prompt_tokens(self) -> int:
        return len(self._request.prompt)

    @property
    def last_token_s(self) -> float:
        """When the newest token came, in seconds since the start."""
        return self._last_s

    @property
    def num_attempts(self) -> int:
        return self._retries.num_attempts

    @property
    def num_moves(self) -> int:
        return self._retries.num_moves

    def mark_done(self) -> None:
        """Report this choice as done if the caller closes `batches` now; without this call it counts as cancelled."""
        self._outcome = "done"

    async def batches(self) -> AsyncGenerator[TokenBatch, None]:
        """Yield the tokens. Raise Overloaded, Unavailable, DeadlineExceeded, FatalRequest, or the error of a worker."""
        try:
            while True:
                attempt = await self._plan(is_moved=self._attempt is not None and self._attempt.is_moved)
                self._attempt = attempt
                try:
                    async with aclosing(attempt.batches()) as batches:
                        async for batch in batches:
                            await self._accept(batch, attempt)
                            if attempt.survived:
                                self._retries.survived()
                            yield batch
                    if not attempt.is_moved:
                        self.mark_done()
                        return
                    self._retries.moved(attempt.decision.decode.name)
                    self._trace_ended("moved")
                except LOST as error:
                    self._trace_ended(error.code)
                    await self._recover(attempt, error)
        except MoonpoolError as error:
            self._outcome = error.code
            raise
        finally:
            self._trace_ended(self._outcome)
            self._report_end()

    def _trace_ended(self, outcome: str) -> None:
        if self._trace is not None:
            self._trace.ended(outcome, None if self._attempt is None else self._attempt.handoff_s)

    async def _plan(self, is_moved: bool) -> Attempt:
        if not is_moved:
            self._retries.begin()
        if self._trace is not None:
            self._trace.began()
        request = self._request
        tokens = [*request.prompt, *self._output]
        keys = await self._keys(tokens)
        decision = await self._route(keys, len(tokens), is_moved)
        if self._trace is not None:
            self._trace.routed(decision)
        spec = RequestSpec(
            request_id=request.request_id,
            epoch=self._retries.epoch,
            tokens=tokens,
            num_prompt_tokens=len(request.prompt),
            root=request.root,
            params=request.params,
            timeout_s=self._deadline.remaining_s(),
            alone=self._retries.alone,
            tenant=request.tenant,
            weight=request.weight,
        )
        return Attempt(self._connections, decision, spec, self._deadline)

    async def _keys(self, tokens: list[int]) -> list[bytes]:
        """Hash the blocks; many of them in a thread, so that they do not delay other streams."""
        request = self._request
        if len(tokens) <= _FEW_TOKENS:
            return chain_keys(request.root, tokens, request.block_tokens)
        return await asyncio.to_thread(chain_keys, request.root, tokens, request.block_tokens)

    async def _route(self, keys: list[bytes], num_tokens: int, is_stored: bool) -> Decision:
        """Return the conductor's decision; wait for it while workers or the conductor are away. A request that already
        has tokens also waits while the cluster is overloaded."""
        while True:
            try:
                return await self._ask(keys, num_tokens, is_stored)
            except (Overloaded, Unavailable) as error:
                pause_s = self._retries.refused(
                    self._elapsed_s,
                    for_load=isinstance(error, Overloaded),
                    has_tokens=bool(self._output),
                    is_cut_off=isinstance(error, Unreachable),
                )
                if pause_s is None or self._connections.closed:
                    raise
            await self._pause(pause_s)

    async def _ask(self, keys: list[bytes], num_tokens: int, is_stored: bool) -> Decision:
        conductor = await self._connections.conductor()
        route = Route(
            request_id=self._request.request_id,
            keys=keys,
            num_tokens=num_tokens,
            max_tokens=self._request.params.max_tokens - len(self._output),
            exclude=tuple(sorted(self._retries.failed)),
            tenant=self._request.tenant,
            weight=self._request.weight,
            priority=self._request.priority,
            has_output=bool(self._output),
            is_stored=is_stored,
        )
        # No short timeout: the request may have to queue, and a conductor that hangs is noticed by its silence.
        return await conductor.call(route, timeout_s=self._deadline.remaining_s())

    async def _accept(self, batch: TokenBatch, attempt: Attempt) -> None:
        """Record the batch. Raise Overloaded, and record nothing, if the conductor refuses to decode it."""
        decision = attempt.decision
        if batch.prefill is not None:
            may_be_refused = decision.asks_before_decode and not self._output and batch.finish_reason is None
            await self._report_prefill_ended(may_be_refused)
        if self._trace is not None:
            self._trace.accepted(batch)
        self._output += [out.token for out in batch.tokens]
        self._last_s = self._elapsed_s
        if self._first is None and batch.prefill is not None:
            self._first, self._first_attempt = batch.prefill, attempt
            self.ttft_s = self._elapsed_s
            self.queue_s = decision.waited_s + batch.prefill.queue_s

    async def _report_prefill_ended(self, may_be_refused: bool) -> None:
        request_id = self._request.request_id
        if not may_be_refused:
            self._connections.notify_conductor(PrefillEnded(request_id=request_id))
            return
        try:
            conductor = await self._connections.conductor()
            await conductor.call(BeforeDecode(request_id=request_id), timeout_s=_ASK_S)
        except Unavailable as error:  # without a conductor no request is refused
            _LOG.debug("%s: the conductor was not asked before decoding: %s", request_id, error)

    async def _recover(self, attempt: Attempt, error: MoonpoolError) -> None:
        """Return when another attempt makes sense; otherwise raise the error that the client gets."""
        pause_s = self._retries.lost(attempt.failed, attempt.loss)
        if self._connections.closed:
            raise Unavailable("the front end is stopping") from error
        self._check_deadline()
        if self._retries.is_fatal:
            raise FatalRequest(
                "workers died while they computed this request, the last one with no other request in its batch; "
                "it is not tried again"
            ) from error
        if pause_s is None:
            raise Unavailable(f"gave up after {self.num_attempts} attempts: {error}") from error
        _LOG.warning(
            "%s: attempt %d failed after %d tokens (%s: %s)",
            self._request.request_id,
            self.num_attempts,
            len(self._output),
            error.code,
            error,
        )
        self._connections.notify_conductor(self._ended(error.code))
        await self._pause(pause_s)

    async def _pause(self, pause_s: float) -> None:
        await asyncio.sleep(min(pause_s, self._deadline.remaining_s()))
        self._check_deadline()

    @property
    def _elapsed_s(self) -> float:
        return self._request.timeout_s - self._deadline.remaining_s()

    def _check_deadline(self) -> None:
        if self._deadline.expired():
            raise DeadlineExceeded(f"the request was not finished within {self._request.timeout_s:g} s")

    def _report_end(self) -> None:
        self._connections.notify_conductor(self._ended(self._outcome))

    def _ended(self, outcome: str) -> RequestEnded:
        first = self._first
        return RequestEnded(
            request_id=self._request.request_id,
            ttft_s=self.ttft_s,
            cached_tokens=0 if first is None else first.local_tokens + first.pool_tokens,
            pool_tokens=0 if first is None else first.pool_tokens,
            output_tokens=len(self._output),
            outcome=outcome,
            tbt_s=self._tbt_s(),
            ssd_tokens=0 if first is None else first.ssd_tokens,
            remote_tokens=0 if first is None else first.remote_tokens,
            parts=self._parts(),
        )

    def _parts(self) -> PrefillParts | None:
        first, attempt = self._first, self._first_attempt
        if first is None or attempt is None:
            return None
        return PrefillParts(
            queue_s=first.queue_s,
            pull_s=first.pull_s,
            compute_s=first.compute_s,
            handoff_s=attempt.handoff_s,
            pull_layers_s=first.pull_layers_s,
        )

    def _tbt_s(self) -> float | None:
        """Return the mean time between tokens; None with fewer than two tokens."""
        gaps = len(self._output) - 1
        return None if self.ttft_s is None or gaps < 1 else (self._last_s - self.ttft_s) / gaps


@dataclass(frozen=True, slots=True)
class ChoiceEvent:
    """New tokens and the text that became visible with them; text is withheld while it could be a stop string."""

    index: int
    text: str
    tokens: tuple[TokenOut, ...]
    finish_reason: str | None
    prefill: PrefillReply | None  # with the first token only, from the attempt that produced it


Emit: TypeAlias = Callable[[ChoiceEvent], Awaitable[None]]


class Choice:
    """One choice of an answer. It starts after the prefill of `after`, a choice of the same prompt, to reuse its KV."""

    def __init__(
        self,
        index: int,
        runner: ChoiceRunner,
        assembler: TextAssembler,
        metrics: FrontendMetrics,
        after: Choice | None = None,
    ) -> None:
        self.index = index
        self._runner = runner
        self._assembler = assembler
        self._metrics = metrics
        self._after = after
        self._prefilled = asyncio.Event()

    async def run(self, emit: Emit) -> None:
        """Await `emit` with every event. The last one has a finish reason. Raise what ChoiceRunner.batches raises."""
        if self._after is not None:
            await self._after._prefilled.wait()
        last_s: float | None = None
        try:
            async with aclosing(self._runner.batches()) as batches:
                async for batch in batches:
                    event = self._assemble(batch)
                    now_s = time.monotonic()
                    self._observe(event, None if last_s is None else now_s - last_s)
                    last_s = now_s
                    if event.finish_reason is None:
                        await emit(event)
                        continue
                    self._runner.mark_done()
                    await emit(event)
                    return
        except FatalRequest:
            self._metrics.fatal_requests.inc()
            raise

    def _assemble(self, batch: TokenBatch) -> ChoiceEvent:
        """Return the batch as an event, without the tokens that follow a stop string."""
        prefill = None if self._prefilled.is_set() else batch.prefill
        if not self._assembler.has_stops:
            piece = self._assembler.push_all([out.token for out in batch.tokens], batch.finish_reason)
            return ChoiceEvent(self.index, piece.text, batch.tokens, piece.finish_reason, prefill)
        text, count = "", 0
        piece = TextDelta("", None)
        for count, out in enumerate(batch.tokens, start=1):
            is_last = count == len(batch.tokens)
            piece = self._assembler.push(out.token, batch.finish_reason if is_last else None)
            text += piece.text
            if piece.finish_reason is not None:
                break
        if not batch.tokens and batch.finish_reason is not None:
            piece = self._assembler.finish(batch.finish_reason)
            text = piece.text
        return ChoiceEvent(self.index, text, batch.tokens[:count], piece.finish_reason, prefill)

    def _observe(self, event: ChoiceEvent, since_last_s: float | None) -> None:
        self._metrics.output_tokens.inc(len(event.tokens))
        if event.prefill is not None:
            self._prefilled.set()
            runner = self._runner
            self._metrics.count_prefill(runner.num_prompt_tokens, event.prefill, runner.ttft_s, runner.queue_s)
        if event.finish_reason is not None:
            self._metrics.answer_time.observe(self._runner.last_token_s)
            if self._runner.num_attempts > 1:
                self._metrics.replans.inc(self._runner.num_attempts - 1)
            if self._runner.num_moves:
                self._metrics.moves.inc(self._runner.num_moves)
        if since_last_s is not None and event.tokens:
            self._metrics.tbt.observe(since_last_s / len(event.tokens))
